"""``dl-comm env PROGRAM...``: what mpiexec or srun starts in place of a program that asks for torch's variables first.

    mpiexec -n 2 dl-comm env python train.py

Runs the program as a child, with the variables, and ends as it ends.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from dl_comm._base.master import MasterError, Start, has_connection
from dl_comm._base.torch_variables import launched
from dl_comm.run._child import exit_as, kill_group, run_program
from dl_comm.run._options import reads_program, with_python

_USAGE = "usage: mpiexec -n 2 {prog} PROGRAM [ARGUMENT...]"


def main(arguments: Sequence[str], prog: str = "dl-comm env") -> int:
    """Runs the program; returns only after an error, the exit status 2, or after ``--help``."""
    if arguments[:1] in (["-h"], ["--help"]):
        print(
            f"{_USAGE.format(prog=prog)}\n\nRuns the program as a rank, with torch's variables (RANK, WORLD_SIZE, ...)."
        )
        return 0
    command = with_python(arguments[1:] if arguments[:1] == ["--"] else arguments)
    if not command or command[0].startswith("-"):
        return _refuse(_USAGE.format(prog=prog))
    if os.environ.get("DL_COMM_ALONE", "").strip() == "1" or _of_torchrun():
        _replace(command)
    position = launched(os.environ)
    if position is None:
        return _refuse(
            "no launcher has started this process, so it has no rank. Start it by mpiexec or srun "
            "('mpiexec -n 2 dl-comm env python train.py'), or use 'dl-comm run -n 2 python train.py' or torchrun"
        )
    if position.size > 1 and reads_program(command):
        return _refuse(f"only rank 0 gets standard input, from which {command[0]} reads its program: use a file")
    try:
        start = Start(os.environ, position)
    except MasterError as error:
        return _refuse(str(error))
    end = run_program(command, start.apply(os.environ), lambda _pid: None)
    has_failed = bool(end["status"] or end["signal"])
    start.close(not has_failed)
    if has_failed:
        kill_group(end["pid"])
    return exit_as(end)


def _of_torchrun() -> bool:
    """Whether torchrun has started this process, and no launcher inside of one of its ranks."""
    return {"TORCHELASTIC_RUN_ID", "RANK"} <= set(os.environ) and not has_connection(os.environ)


def _replace(command: list[str]) -> NoReturn:
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"dl-comm env: cannot start {command[0]}: {error.strerror}")


def _refuse(text: str) -> int:
    print(f"dl-comm env: {text}", file=sys.stderr, flush=True)
    return 2
