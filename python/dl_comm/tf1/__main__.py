"""The command `dl-comm tf1 script.py args...`, or `python -m dl_comm.tf1`.

Thread rule: a command.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Container, Sequence
from pathlib import Path
from types import TracebackType

USAGE = """\
usage: {prog} SCRIPT [ARGUMENT...]
       {prog} -m MODULE [ARGUMENT...]

Runs a TensorFlow 1 script on the TensorFlow that is installed.\
"""


def main(arguments: Sequence[str] | None = None, prog: str = "python -m dl_comm.tf1") -> int:
    """Run the script or module of the command line.

    Returns the exit status if nothing runs; the script's own exit and exceptions propagate.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    as_module = arguments[:1] == ["-m"]
    rest = arguments[1:] if as_module else arguments
    if not rest or rest[0].startswith("-"):
        asked = rest[:1] in (["-h"], ["--help"])
        print(USAGE.format(prog=prog), file=sys.stdout if asked else sys.stderr)
        return 0 if asked else 2
    target = rest[0]
    if not as_module and not os.path.exists(target):
        print(f"dl_comm.tf1: {target} does not exist", file=sys.stderr)
        return 2

    from dl_comm.tf1 import install

    install()
    sys.argv = rest
    before = sys.excepthook
    program = getattr(sys.modules["__main__"], "__file__", None) or __file__  # dl-comm, or this file
    ours = (__file__, str(Path(__file__).parents[1] / "__main__.py"), program, runpy.__file__, "<frozen runpy>")

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        shown = _without_frames(trace, ours)
        before(kind, error.with_traceback(shown), shown)

    sys.excepthook = hook
    is_safe = getattr(sys.flags, "safe_path", False)
    if as_module:
        if not is_safe:
            sys.path[0] = os.getcwd()  # as Python does; it was the folder of the command dl-comm
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        if not is_safe:
            sys.path[0] = os.path.dirname(os.path.realpath(target))  # as Python does; it was the working directory
        runpy.run_path(target, run_name="__main__")
    return 0


def _without_frames(trace: TracebackType | None, ours: Container[str]) -> TracebackType | None:
    """The traceback as Python prints it for a script that it runs directly."""
    while trace is not None and trace.tb_frame.f_code.co_filename in ours:
        trace = trace.tb_next
    return trace


if __name__ == "__main__":
    sys.exit(main())
