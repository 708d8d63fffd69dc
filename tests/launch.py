"""Starts a program on several ranks, and kills all its processes at the timeout.

As a script: ``python tests/launch.py RANKS SECONDS COMMAND...``. ``MPIEXEC`` names another launcher than the one next
to the interpreter, ``MPIEXEC_ARGS`` its options.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_MARK = "DL_COMM_TEST_LAUNCH"
_WHOLE_LINES = str(Path(__file__).resolve().with_name("whole_lines"))
QUIET = {"DL_COMM_DUMP_DIR": os.environ.get("DL_COMM_DUMP_DIR", "none")}
"""Many tests cause failures: no dumps by default."""


@dataclass(frozen=True)
class Finished:
    """The result of a launch: the launcher's exit status (-9 if killed at the timeout) and the output.

    ``left``: command lines of the processes that still ran some seconds after the launcher's exit.
    """

    returncode: int
    output: str
    timed_out: bool
    left: tuple[str, ...] = ()


def mpiexec() -> list[str]:
    """The launcher and its options."""
    local = Path(sys.executable).parent / "mpiexec"
    found = os.environ.get("MPIEXEC") or (str(local) if local.exists() else shutil.which("mpiexec"))
    if not found:
        raise FileNotFoundError("no mpiexec; 'pip install mpich' brings one")
    return [found, *shlex.split(os.environ.get("MPIEXEC_ARGS", ""))]


def launch(
    ranks: int, command: Sequence[str], timeout: float = 120, env: Mapping[str, str] | None = None, echo: bool = False
) -> Finished:
    """Runs ``command`` on ``ranks`` ranks.

    The launch is a process group of its own. At the timeout the group is killed, and with it every process that the
    launch has started, wherever it put itself. ``echo`` shows the output as it comes.
    """
    return run([*mpiexec(), "-n", str(ranks), *command], timeout, {**QUIET, **(env or {})}, echo)


def run(
    command: Sequence[str],
    timeout: float,
    env: Mapping[str, str] | None = None,
    echo: bool = False,
    log: Path | None = None,
) -> Finished:
    """Runs ``command`` without a launcher, with the same limits as ``launch``. ``log`` gets the output as it comes."""
    mark = uuid.uuid4().hex
    with tempfile.TemporaryFile() if log is None else log.open("w+b") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=None if echo else output,
            stderr=None if echo else subprocess.STDOUT,
            env={**_unbuffered({**os.environ, **(env or {})}), _MARK: mark},
            start_new_session=True,
        )
        timed_out = False
        left: tuple[str, ...] = ()
        try:
            process.wait(timeout)
            left = _left(mark)
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            _kill(process, mark)
        output.seek(0)
        return Finished(process.returncode, output.read().decode(errors="replace"), timed_out, left)


def _unbuffered(env: dict[str, str]) -> dict[str, str]:
    """``env`` so that Python keeps the output of a killed rank, and mixes no lines of several.

    A test whose subject is Python's output passes an empty ``PYTHONUNBUFFERED``, and has Python as users have it.
    """
    # A launch within a launch, such as those of the gate's stages, has the folder already.
    folders = [folder for folder in env.get("PYTHONPATH", "").split(os.pathsep) if folder not in ("", _WHOLE_LINES)]
    if env.get("PYTHONUNBUFFERED") == "":
        kept = {name: value for name, value in env.items() if name != "PYTHONUNBUFFERED"}
        return {**kept, "PYTHONPATH": os.pathsep.join(folders)}
    return {"PYTHONUNBUFFERED": "1", **env, "PYTHONPATH": os.pathsep.join([_WHOLE_LINES, *folders])}


def _left(mark: str) -> tuple[str, ...]:
    """The processes of a launch that still run some seconds after its launcher."""
    until = time.monotonic() + 10
    while time.monotonic() < until:
        if not (found := _marked(_MARK, mark)):
            return ()
        time.sleep(0.05)
    return tuple(found.values())


def _kill(process: subprocess.Popen[bytes], mark: str) -> None:
    """Kills the launch's process group, then all processes with its mark."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    kill_marked(_MARK, mark)
    process.wait()


def kill_marked(name: str, value: str) -> None:
    """Kills the processes that have a variable with this value in their environment, but for this one."""
    for pid in _marked(name, value):
        if pid != os.getpid():
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def _marked(name: str, value: str) -> dict[int, str]:
    """The running processes with a variable in their environment, and their command lines."""
    needle = f"{name}={value}".encode()
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                if needle in (folder / "environ").read_bytes().split(b"\0"):
                    found[int(folder.name)] = (folder / "cmdline").read_text(errors="replace").replace("\0", " ")
    return found


def main() -> int:
    """The command line."""
    ranks, timeout, *command = sys.argv[1:]
    finished = launch(int(ranks), command, float(timeout), echo=True)
    if finished.timed_out:
        print(f"killed after {timeout} s: {shlex.join(command)} on {ranks} ranks", file=sys.stderr)
        return 1
    return finished.returncode


if __name__ == "__main__":
    sys.exit(main())


def ending_together(command: Sequence[str], folder: Path, ranks: int) -> list[str]:
    """A command line that delays the exit of a rank until all ``ranks`` have ended, or 40 s.

    Launchers end the other ranks soon after one has, and MPICH's does so now and then even when it is asked not to
    (``-disable-auto-cleanup``). ``folder`` is for this one launch; the exit statuses are left in its files ``ended.*``.
    """
    script = (
        'folder=$1 ranks=$2; shift 2; "$@"; code=$?; tries=0\n'
        'echo $code > "$folder/ends.$$"; mv "$folder/ends.$$" "$folder/ended.$$"\n'
        'while [ $tries -lt 400 ] && [ "$(find "$folder" -name "ended.*" | wc -l)" -lt "$ranks" ]; do\n'
        "  sleep 0.1; tries=$((tries + 1))\ndone\nexit $code"
    )
    return ["sh", "-c", script, "rank", str(folder), str(ranks), *command]
