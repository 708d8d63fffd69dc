"""The settings of the process, ``dl_comm.rc``: what a start changes in it.

Needs neither the core nor a start. Thread rule: set them before the first start, on one thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dl_comm._base.checks import checked_flag
from dl_comm._base.errors import ArgumentError, StateError


class Settings:
    """What a start changes in this process, as attributes that are True or False; see ``dl_comm.rc``."""

    signal_dump: bool = True
    stack_dump: bool = True
    excepthook: bool = True
    exit_handler: bool = True
    torch_variables: bool = True
    logging: bool = True

    def __call__(self, **settings: bool) -> None:
        """Sets several, or none if one is invalid. Raises as an assignment."""
        for name, value in settings.items():
            if name not in _NAMES:
                raise ArgumentError(f"dl_comm.rc has no setting {name!r} (expected one of {', '.join(_NAMES)})")
            settings[name] = checked_flag(f"dl_comm.rc.{name}", value)
        changed = [name for name, value in settings.items() if value != getattr(self, name)]
        if changed and _is_used:
            raise StateError(f"dl_comm.rc.{changed[0]} is set after the start, which it is for; set it before init()")
        self.__dict__.update(settings)

    if not TYPE_CHECKING:  # with these, type checkers would accept other names

        def __setattr__(self, name: str, value: Any) -> None:
            self(**{name: value})

        def __delattr__(self, name: str) -> None:
            raise ArgumentError(f"dl_comm.rc.{name} is True or False; it cannot be deleted")

    def __repr__(self) -> str:
        return f"dl_comm.rc({', '.join(f'{name}={getattr(self, name)}' for name in _NAMES)})"


_NAMES = tuple(Settings.__annotations__)
_is_used = False


def use() -> Settings:
    """The settings, for a start: from now on they stay as they are."""
    global _is_used
    _is_used = True
    return rc


rc = Settings()
"""What a start changes in this process. Each setting is True unless the program sets it before the first ``init``:

    dl_comm.rc.excepthook = False
    dl_comm.rc(signal_dump=False, stack_dump=False)

For programs that embed dl_comm and have handlers of their own. An import changes nothing, whatever is set here.

- ``signal_dump``: SIGUSR1 writes a dump (docs/diagnosis.md). Handlers of the program, and of MPI, run in any case.
- ``stack_dump``: Python's faulthandler on the signal SIGRTMAX-9, by which dumps get the stacks of Python.
- ``excepthook``: ``sys.excepthook`` shortens errors that other ranks caused, or that TensorFlow repeats.
- ``exit_handler``: ``finalize`` when the interpreter exits, or, after an uncaught exception, an abort that the other
  ranks notice at once. Without it the program calls ``finalize`` itself: launchers kill the other ranks when one ends
  that has not called it.
- ``logging``: log lines go through the logger ``dl_comm`` of ``logging``, level WARNING, if the program has set a
  handler for it or for all loggers before the first ``init``; otherwise to standard error.
- ``torch_variables``: sets those of RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT that
  the environment lacks.

Ranks may have different settings. An unknown name or another type raises ArgumentError; a change after the first start
raises StateError.
"""
