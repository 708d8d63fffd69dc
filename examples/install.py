"""Installs packages into the environment of the Python that runs it:  python examples/install.py ARGUMENT...

The arguments are those of ``pip install``, as far as uv has them, too. uv installs them, which takes a quarter of the
time that pip takes for torch and TensorFlow. pip does it where uv cannot be had, or fails, or where pip's configuration
has a setting that uv would not follow.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence

FOLLOWED = {"index-url": "UV_DEFAULT_INDEX", "cert": "SSL_CERT_FILE"}
"""What uv follows by a variable."""
HARMLESS = {"cache-dir", "default-timeout", "disable-pip-version-check", "no-cache-dir", "no-input", "progress-bar"}
HARMLESS |= {"require-virtualenv", "retries", "root-user-action", "timeout"}
"""What does not change which packages are installed."""


def settings_for_uv(configuration: str) -> dict[str, str] | None:
    """What ``pip config list`` says as variables of uv, or None if uv cannot follow it."""
    variables = {}
    for setting in filter(None, configuration.splitlines()):
        name, _, value = setting.partition("=")
        # global.index-url, install.no-deps, :env:.index-url
        name = name.rpartition(".")[2]
        if name in FOLLOWED:
            variables[FOLLOWED[name]] = " ".join(shlex.split(value))
        elif name not in HARMLESS:
            return None
    return variables


def run(command: Sequence[str], **variables: str) -> bool:
    """Runs a Python module with arguments, and returns whether it succeeded."""
    return (
        subprocess.run([sys.executable, "-m", *command], env={**os.environ, **variables}, check=False).returncode == 0
    )


def by_uv(arguments: Sequence[str]) -> bool:
    """Installs with uv, if it can."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False
    )
    variables = settings_for_uv(listed.stdout) if listed.returncode == 0 else None
    if variables is None or not run(["pip", "install", "-q", "--disable-pip-version-check", "uv"]):
        return False
    return run(["uv", "pip", "install", "--python", sys.executable, *arguments], **variables)


def main() -> int:
    """The command line."""
    arguments = sys.argv[1:]
    if by_uv(arguments):
        return 0
    # Most modules are never imported: Python compiles those that are, the first time.
    pip = ["pip", "install", "--no-compile", "--disable-pip-version-check", *arguments]
    if run(pip):
        return 0
    # A broken download ends pip, which does not go on with it.
    print("dl_comm: trying again:", shlex.join(pip), file=sys.stderr, flush=True)
    return 0 if run(pip) else 1


if __name__ == "__main__":
    sys.exit(main())
