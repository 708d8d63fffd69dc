"""Started calls: handles of the op library, and `Work` over them.

Thread rule: any thread may use every object. A wait holds no GIL.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import suppress
from typing import Any, cast

from dl_comm._arrays import work as arrays_work
from dl_comm._base.errors import TimeoutError as CallTimeoutError
from dl_comm.torch import _ops

_TEST, _WAIT_FOR, _STATUS, _DETACH = (
    getattr(_ops.ops, name).default for name in ("test", "wait_for", "status", "detach")
)


class Handle:
    """The number of a started call. The op library keeps the call's tensors until the call has ended."""

    __slots__ = ("_number",)

    def __init__(self, number: int) -> None:
        self._number = number

    def test(self) -> bool:
        """Return whether the call has ended; raise its error."""
        return bool(_ops.call(_TEST, self._number))

    def wait(self, limit: float) -> None:
        """Wait for the call, at most `limit` seconds (0: no limit); raise its error."""
        if not _ops.call(_WAIT_FOR, self._number, limit):
            raise CallTimeoutError(f"the call has not ended after {limit:g} s; it goes on")

    def status(self) -> tuple[int, int, int]:
        """Return source, tag and bytes of a receive that has ended."""
        source, tag, length = _ops.call(_STATUS, self._number)
        return int(source), int(tag), int(length)

    def __del__(self) -> None:
        with suppress(Exception):  # at the exit of the interpreter
            _DETACH(self._number)


class Work(arrays_work.Work[arrays_work.Result]):
    """A started call on torch tensors, as `dl_comm.Work`.

    On a GPU, `wait` orders torch's current stream after the call; `await` that of the loop's thread.
    """

    def __init__(self, number: int, result: Callable[[Handle], arrays_work.Result]) -> None:
        super().__init__(cast(Any, Handle(number)), cast(Any, result))

    def __await__(self) -> Generator[Any, None, arrays_work.Result]:
        import asyncio  # here, as it would cost each start 30 ms

        yield from asyncio.get_running_loop().run_in_executor(None, self._handle.wait, 0.0).__await__()
        return self.wait()
