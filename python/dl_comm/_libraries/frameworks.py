"""Finds the installed frameworks and their versions without importing them.

Needs no other module: the build driver runs this file as a script, ``python frameworks.py torch``, before the package
exists.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import sys

FRAMEWORKS = ("torch", "tensorflow")

# The distributions of a framework, the usual one first.
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
        ImportError: The framework is not installed.
    """
    if is_installed(framework):
        for name in _DISTRIBUTIONS[framework]:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                return f"{name}-{importlib.metadata.version(name)}"
        # Slow: reads every distribution's list of files.
        for name in importlib.metadata.packages_distributions().get(framework, ()):
            return f"{name}-{importlib.metadata.version(name)}"
    raise ImportError(f"{framework} is not installed: run 'pip install dl_comm[{framework}]'")


if __name__ == "__main__":
    print(framework_version(sys.argv[1]))
