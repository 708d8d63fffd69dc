"""The exceptions of dl_comm, and the one place where error codes become exceptions."""

from __future__ import annotations

import builtins
import re


class CommError(RuntimeError):
    """Something went wrong in dl_comm; the base of all its exceptions."""

    # By this AutoGraph knows that it can make the exception from a text. It raises a StagingError for all others.
    __init__ = Exception.__init__


class ArgumentError(CommError, ValueError):
    """An argument is wrong. Nothing was done; the next call works."""


class DTypeError(CommError, TypeError):
    """The element type has no meaning for the operation. Nothing was done; the next call works."""


class StateError(CommError):
    """Called before ``init``, after ``finalize``, or in a helper of a rank. Nothing was done."""


class MismatchError(CommError):
    """The ranks called different things; the text shows who called what. Nothing was written; the next call works."""


class TimeoutError(CommError, builtins.TimeoutError):  # noqa: A001 - the name that the builtin has
    """A call was not complete at its deadline (``DL_COMM_TIMEOUT_S``). The team cannot be used any more."""


class PeerLostError(CommError):
    """Another process of the job has ended. The team cannot be used any more."""


_BY_CODE: dict[int, type[CommError]] = {
    -1: ArgumentError,
    -2: DTypeError,
    -3: StateError,
    -4: MismatchError,
    -5: TimeoutError,
    -6: PeerLostError,
}

_IN_TEXT = re.compile(r"dl_comm error (-\d+): (.*)", re.DOTALL)


def from_code(code: int, message: str) -> CommError:
    """The exception for a ``DL_COMM_ERROR_*`` code of ``dl_comm.h``."""
    error: CommError = _BY_CODE.get(code, CommError)(message)
    return error


def translate(error: BaseException) -> BaseException:
    """The exception that an op library put into the text of a framework's exception, else ``error`` itself.

    Where the handler of a signal has raised an exception meanwhile, that one.
    """
    from dl_comm import _dl_comm

    raised = _dl_comm.raised_while_waiting()
    if raised is not None:
        return raised
    found = _IN_TEXT.search(str(error))
    return from_code(int(found.group(1)), found.group(2).strip()) if found else error
