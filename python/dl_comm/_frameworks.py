"""Which frameworks are installed, in which version; found without importing them.

Stands alone: the build driver runs this file as a script, ``python _frameworks.py torch``, before there is a package.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import sys

FRAMEWORKS = ("torch", "tensorflow")

# The names under which a framework is distributed, the usual one first.
_DISTRIBUTIONS = {
    "torch": ("torch",),
    "tensorflow": ("tensorflow", "tensorflow-cpu", "tensorflow-rocm", "tf-nightly", "tf-nightly-cpu"),
}


def is_installed(framework: str) -> bool:
    """Whether the framework can be imported."""
    return importlib.util.find_spec(framework) is not None


def framework_version(framework: str) -> str:
    """Distribution and version of the installed framework, such as ``torch-2.11.0``.

    Raises:
        ImportError: It is not installed.
    """
    if is_installed(framework):
        for name in _DISTRIBUTIONS[framework]:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                return f"{name}-{importlib.metadata.version(name)}"
        # Slow, it reads every distribution's list of files.
        for name in importlib.metadata.packages_distributions().get(framework, ()):
            return f"{name}-{importlib.metadata.version(name)}"
    raise ImportError(f"{framework} is not installed; 'pip install dl_comm[{framework}]' brings it")


if __name__ == "__main__":
    print(framework_version(sys.argv[1]))
