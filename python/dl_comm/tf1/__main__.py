"""The command `python -m dl_comm.tf1 script.py args...`.

Thread rule: a command.
"""

from __future__ import annotations

import os
import runpy
import sys
from types import TracebackType

USAGE = """\
usage: python -m dl_comm.tf1 SCRIPT [ARGUMENT...]
       python -m dl_comm.tf1 -m MODULE [ARGUMENT...]

Runs a TensorFlow 1 script on the TensorFlow that is installed.\
"""


def main(arguments: list[str]) -> int:
    """Run the script or module of the command line.

    Returns the exit status if nothing runs; the script's own exit and exceptions propagate.
    """
    as_module = arguments[:1] == ["-m"]
    rest = arguments[1:] if as_module else arguments
    if not rest or rest[0].startswith("-"):
        asked = rest[:1] in (["-h"], ["--help"])
        print(USAGE, file=sys.stdout if asked else sys.stderr)
        return 0 if asked else 2
    target = rest[0]
    if not as_module and not os.path.exists(target):
        print(f"dl_comm.tf1: {target} does not exist", file=sys.stderr)
        return 2

    from dl_comm.tf1 import install

    install()
    sys.argv = rest
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        shown = _without_our_frames(trace)
        before(kind, error.with_traceback(shown), shown)

    sys.excepthook = hook
    if as_module:
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        if not getattr(sys.flags, "safe_path", False):
            sys.path[0] = os.path.dirname(os.path.realpath(target))  # as Python does; it was the working directory
        runpy.run_path(target, run_name="__main__")
    return 0


def _without_our_frames(trace: TracebackType | None) -> TracebackType | None:
    """The traceback as Python prints it for a script that it runs directly."""
    ours = (__file__, runpy.__file__, "<frozen runpy>")
    while trace is not None and trace.tb_frame.f_code.co_filename in ours:
        trace = trace.tb_next
    return trace


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
