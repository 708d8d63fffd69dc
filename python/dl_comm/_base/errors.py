"""The exceptions of dl_comm, and the conversion of error codes to exceptions."""

from __future__ import annotations

import builtins
import functools
import re
from collections.abc import Callable
from typing import Any, TypeVar, cast

_Function = TypeVar("_Function", bound=Callable[..., Any])


class CommError(RuntimeError):
    """An error of dl_comm; the base of all its exceptions."""

    # AutoGraph recreates exceptions that have this constructor. It raises a StagingError instead of all others.
    __init__ = Exception.__init__


class ArgumentError(CommError, ValueError):
    """An argument is invalid. Nothing was done; the next call works."""


class DTypeError(CommError, TypeError):
    """The operation does not support the element type. Nothing was done; the next call works."""


class NoTensorError(ArgumentError, DTypeError):
    """A tensor is None, or a masked array. Nothing was done; the next call works."""


class StateError(CommError):
    """Called before ``init``, after ``finalize``, or in a helper process of a rank. Nothing was done."""


class MismatchError(CommError):
    """The ranks issued different collectives; the message lists each call. Nothing was written; the next call works."""


class TimeoutError(CommError, builtins.TimeoutError):  # noqa: A001 - the name of the builtin
    """A call missed its deadline (``DL_COMM_TIMEOUT_S``). The team cannot be used any more."""


class PeerLostError(CommError):
    """Another process of the job has ended. The team cannot be used any more."""


REFUSALS = (ArgumentError, DTypeError)
"""Errors about the arguments of a call, which this rank then does not make."""


class RankFailedError(CommError):
    """A rank of ``dl_comm.run`` has failed. The message has its traceback; the cause is its exception, if it has one.

    Attributes:
        rank: The rank that failed first.
        signal: The number of the signal that killed it; None if none did.
    """

    rank: int = -1
    signal: int | None = None


# As users import them; tracebacks and pickles have these names.
for _kind in (CommError, ArgumentError, DTypeError, StateError, MismatchError, TimeoutError, PeerLostError):
    _kind.__module__ = "dl_comm"
RankFailedError.__module__ = "dl_comm"

_BY_CODE: dict[int, type[CommError]] = {
    -1: ArgumentError,
    -2: DTypeError,
    -3: StateError,
    -4: MismatchError,
    -5: TimeoutError,
    -6: PeerLostError,
}

# TensorFlow adds the node, the operation, and where it was created.
_IN_TEXT = re.compile(r"dl_comm error (-\d+): (.*?)(?=\n\t \[\[| \[Op:|\Z)", re.DOTALL)


def from_code(code: int, message: str) -> CommError:
    """The exception for a ``DL_COMM_ERROR_*`` code of ``dl_comm.h``."""
    error: CommError = _BY_CODE.get(code, CommError)(message)
    return error


def as_text(error: CommError) -> str:
    """The text of an error in a framework's exception, from which ``error_of`` makes it again."""
    code = next((code for code, kind in _BY_CODE.items() if isinstance(error, kind)), -7)
    return f"dl_comm error {code}: {error}"


def error_of(exception: BaseException) -> CommError | None:
    """Return the error of dl_comm that a framework's exception carries, or None if it carries none.

    Operations in a graph of TensorFlow (a ``tf.function``, ``model.fit``, a session), of ``torch.compile`` or of jax,
    and ``torch.distributed``, raise exceptions of the framework with the text of the error. All other calls raise a
    `CommError` itself, which this returns as it is::

        try:
            model.fit(...)
        except Exception as exception:
            if not isinstance(dl_comm.error_of(exception), dl_comm.PeerLostError):
                raise

    Args:
        exception: Any exception. Those that it was raised from count too.

    Thread rule: any thread.
    """
    following: BaseException | None = exception
    seen: set[int] = set()
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        if isinstance(following, CommError):
            ours: CommError = following
            return ours
        found = _in_text(following)
        if found is not None:
            return found
        following = following.__cause__ or (None if following.__suppress_context__ else following.__context__)
    return None


def note_refusal(error: BaseException) -> None:
    """Note that this rank has refused a collective: those of the other ranks in its place fail with this error."""
    from dl_comm import _dl_comm

    _dl_comm.note_refusal(f"{type(error).__name__}: {error}")


def noting_refusals(function: _Function) -> _Function:
    """Note the errors of a collective about its arguments, see `note_refusal`."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except REFUSALS as error:
            note_refusal(error)
            raise

    return cast(_Function, call)


def translate(error: BaseException) -> BaseException:
    """The dl_comm exception that the text of a framework's exception contains, else ``error`` itself.

    If a signal handler raised an exception during the wait, returns that one.
    """
    from dl_comm import _dl_comm

    raised = _dl_comm.raised_while_waiting()
    if raised is not None:
        return raised
    return _in_text(error) or error


def _in_text(error: BaseException) -> CommError | None:
    found = _IN_TEXT.search(str(error))
    return from_code(int(found.group(1)), found.group(2).strip()) if found else None
