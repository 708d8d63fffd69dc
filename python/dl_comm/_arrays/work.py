"""Handles on started calls, and what a receive has received.

Thread rule: any thread may use every object.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator
from typing import Any, Generic, NamedTuple, TypeVar

from dl_comm import _dl_comm
from dl_comm._base.checks import seconds

Result = TypeVar("Result")
Changed = TypeVar("Changed")


def limit(timeout: float | None) -> float:
    """A deadline as in ``dl_comm_call_t``: 0 for the group's, negative for none."""
    if timeout is None:
        return 0.0
    return seconds(timeout) or -1.0


class Status(NamedTuple):
    """What a receive has received.

    Attributes:
        source: The rank of the group that sent the message.
        tag: The tag of the message.
        bytes: The length of the message in bytes.
    """

    source: int
    tag: int
    bytes: int


class Work(Generic[Result]):
    """A started call. Dropping it does nothing to the call, which keeps its arrays until it has ended.

    ``await`` works in an asyncio program; a thread of the loop's default executor waits meanwhile.
    """

    def __init__(self, handle: _dl_comm.Work, result: Callable[[_dl_comm.Work], Result]) -> None:
        self._handle, self._result = handle, result

    def test(self) -> bool:
        """Whether the call has ended; raises its error. Does not wait."""
        return self._handle.test()

    def wait(self, timeout: float | None = None) -> Result:
        """Waits for the call and returns its result.

        Args:
            timeout: In seconds; None: until the call ends, which its own deadline bounds.

        Raises:
            TimeoutError: After ``timeout``; the call goes on, and may be waited for again.
            CommError: The error of the call.
        """
        limit = 0.0 if timeout is None else max(seconds(timeout), 1e-9)
        self._handle.wait(limit)
        return self._result(self._handle)

    def map(self, change: Callable[[Result], Changed]) -> Work[Changed]:
        """A handle on the same call, whose result is ``change(result)``, made by each wait."""
        other: Any = copy.copy(self)
        made = self._result
        other._result = lambda handle: change(made(handle))
        return other  # type: ignore[no-any-return]

    def __await__(self) -> Generator[Any, None, Result]:
        import asyncio  # here, as it would cost each start 30 ms

        return asyncio.get_running_loop().run_in_executor(None, self.wait).__await__()


def synchronize() -> None:
    """Waits until the GPU has ended all calls that this process has given it; their deadlines bound that.

    A call on arrays in GPU memory returns before the GPU has run it. If a rank ends, or the deadline passes, meanwhile,
    the call is *lost*: its outputs become NaN (integers: undefined), a line says so on standard error, and this
    function, ``Work.wait``, ``write_on_rank0``, the next call and ``finalize`` raise. Not collective; any thread::

        dl_comm.gradients([grads], out=[grads])
        dl_comm.synchronize()  # grads holds the mean of all ranks
        evaluate(grads)

    Raises:
        TimeoutError: A call of this job was lost because it missed its deadline.
        PeerLostError: A call of this job was lost because a rank ended.
        StateError: In a forked child.
    """
    _dl_comm.synchronize()
