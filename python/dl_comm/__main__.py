"""``dl-comm VERB``, or ``python -m dl_comm VERB``: all commands of dl_comm.

A verb loads what ``python -m dl_comm.VERB`` loads: the core only where that needs it. So ``run`` starts fast, and
``env`` and ``tf1`` leave the process to the program.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from typing import Any

# The module of a verb, the older spelling, and what the verb does.
_VERBS = {
    "run": ("run", "start a program on several ranks: dl-comm run -n 4 python train.py"),
    "env": ("run._env", "set torch's variables for a program: mpiexec -n 4 dl-comm env python train.py"),
    "doctor": ("doctor.__main__", "check the installation, alone or under mpiexec"),
    "timeline": ("timeline.__main__", "merge and report recorded timelines"),
    "dumps": ("analyze_dumps.__main__", "find the rank that hangs or is late, from dumps"),
    "build": ("build", "compile the op libraries for the installed frameworks"),
    "tf1": ("tf1.__main__", "run a TensorFlow 1 script"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line.

    Args:
        arguments: The arguments after the program's name; ``None``: those of this process.

    Returns:
        The exit status: that of the verb; 2 for an unknown one.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments and arguments[0] in _VERBS:
        verb, *rest = arguments
        module = importlib.import_module(f"dl_comm.{_VERBS[verb][0]}")
        return int(module.main(rest, prog=f"dl-comm {verb}"))
    parser = argparse.ArgumentParser(
        prog="dl-comm",
        usage="dl-comm [-h] [--version] VERB ...",
        description="Data-parallel training over MPI and shared memory.",
        epilog="\n".join(
            [
                "verbs:",
                *(f"  {verb:10}{text}" for verb, (_, text) in _VERBS.items()),
                "\n'dl-comm VERB --help' has the options of a verb.",
            ]
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_Version, help="print the version and the MPI of the build")
    parser.add_argument("verb", nargs="?", help=argparse.SUPPRESS)
    if (verb := parser.parse_known_args(arguments)[0].verb) is not None:
        parser.error(f"unknown verb {verb!r} (expected one of {', '.join(_VERBS)})")
    parser.parse_args(arguments)
    parser.print_help()
    return 0


class _Version(argparse.Action):
    """Loads the core only if it is asked for."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str) -> None:  # noqa: A002 - argparse's name
        super().__init__(option_strings, dest, nargs=0, default=argparse.SUPPRESS, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from dl_comm import _dl_comm

        mpi = json.loads(_dl_comm.describe())["mpi"]["library_version"].splitlines()[0]
        print(f"dl_comm {_dl_comm.__version__}, built for {' '.join(mpi.split())}")
        parser.exit()


if __name__ == "__main__":
    sys.exit(main())
