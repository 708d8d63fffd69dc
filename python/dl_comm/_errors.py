"""The exceptions of dl_comm, and the conversion of error codes to exceptions."""

from __future__ import annotations

import builtins
import re


class CommError(RuntimeError):
    """An error of dl_comm; the base of all its exceptions."""

    # AutoGraph recreates exceptions that have this constructor. It raises a StagingError instead of all others.
    __init__ = Exception.__init__


class ArgumentError(CommError, ValueError):
    """An argument is invalid. Nothing was done; the next call works."""


class DTypeError(CommError, TypeError):
    """The operation does not support the element type. Nothing was done; the next call works."""


class StateError(CommError):
    """Called before ``init``, after ``finalize``, or in a helper process of a rank. Nothing was done."""


class MismatchError(CommError):
    """The ranks issued different collectives; the message lists each call. Nothing was written; the next call works."""


class TimeoutError(CommError, builtins.TimeoutError):  # noqa: A001 - the name of the builtin
    """A call missed its deadline (``DL_COMM_TIMEOUT_S``). The team cannot be used any more."""


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
    """The dl_comm exception that the text of a framework's exception contains, else ``error`` itself.

    If a signal handler raised an exception during the wait, returns that one.
    """
    from dl_comm import _dl_comm

    raised = _dl_comm.raised_while_waiting()
    if raised is not None:
        return raised
    found = _IN_TEXT.search(str(error))
    return from_code(int(found.group(1)), found.group(2).strip()) if found else error
