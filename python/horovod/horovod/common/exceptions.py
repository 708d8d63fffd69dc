"""Horovod's exceptions, and which errors of dl_comm become which of them.

Thread rule: any thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class HorovodInternalError(RuntimeError):
    """A collective failed: the ranks differ, a rank was lost, or the deadline has passed."""


class HostsUpdatedInterrupt(RuntimeError):
    """The hosts of an elastic job have changed.

    Attributes:
        skip_sync: Whether the state needs no broadcast after the reset.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the hosts of the job have changed")
        self.skip_sync = skip_sync


def get_version_mismatch_message(name: str, version: str, installed_version: str) -> str:
    """The text of a ``HorovodVersionMismatchError``."""
    return f"{name} {version} is imported, but the bindings were built for {installed_version}"


class HorovodVersionMismatchError(ImportError):
    """A framework has another version than its bindings. Never raised: dl_comm builds its bindings as needed."""

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(get_version_mismatch_message(name, version, installed_version))
        self.name, self.version, self.installed_version = name, version, installed_version


NOT_INITIALIZED = "Horovod has not been initialized; use hvd.init()."


@contextmanager
def translated() -> Iterator[None]:
    """In this context, errors of dl_comm become Horovod's: a wrong argument ValueError, others HorovodInternalError."""
    try:
        yield
    except Exception as error:
        raise translate(error) from error


def translate(error: BaseException) -> BaseException:
    """Horovod's exception for one of dl_comm; any other one as it is."""
    import dl_comm

    if not isinstance(error, dl_comm.CommError):
        return error
    if isinstance(error, (dl_comm.ArgumentError, dl_comm.DTypeError, dl_comm.StateError)):
        return ValueError(str(error))
    return HorovodInternalError(str(error))
