"""Calls by name: which names are in use, and handles on started calls.

A name is in use until its call has been synchronized, or has ended and ``HOROVOD_CYCLE_TIME`` has passed since its
submission. Horovod's engine takes as long, and scripts rely on it: until then ``poll`` is False.

Thread rule: any thread may use everything.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

from horovod.common import _environment, _job, _timeline
from horovod.common.exceptions import translate

Result = Callable[[Any], Any]


class Call:
    """A call from its submission to its end.

    Attributes:
        number: That of its handle.
        name: What the ranks match. Calls without a name match in their order: ranks may have other handles, and the
            core's path for short calls needs names that come again.
        group: The ranks.
        work: The started call, a `dl_comm.Work`; None: it is a blocking one.
        result: Makes the result from the core's.
    """

    __slots__ = ("_key", "_submitted", "_timeline", "group", "name", "number", "result", "work")

    def __init__(self, kind: str, name: str | None, process_set: Any) -> None:
        """Takes the name.

        Args:
            kind: The operation, which begins the name.
            name: The script's name, or None.
            process_set: The ranks.

        Raises:
            ValueError: The name is in use, this rank is not in the set, or Horovod is not initialized.
        """
        number = process_set.process_set_id
        self.group = _job.group_of(number)
        self.number = next(_numbers)
        self.name = f"{kind}.{name or 'noname'}"
        self.work: Any = None
        self.result: Result = lambda found: found
        self._key = (number, self.name if name else f"{self.name}.{self.number}")
        self._submitted = 0.0
        with _lock:
            other = _in_use.get(self._key)
            if other is not None and other.is_busy():
                raise ValueError(
                    f"a call with the name {self.name} is in progress: give each of several calls a name of its own, "
                    "or synchronize the first"
                )
            _in_use[self._key] = self
        self._timeline = _timeline.active
        if self._timeline is not None:
            self._timeline.begin(self._key[1], kind.removeprefix("grouped_").partition(".")[0].upper())

    def is_busy(self) -> bool:
        """Whether the name is in use."""
        if self.work is None or not self._submitted or time.perf_counter() - self._submitted < _cycle_s:
            return True
        try:
            return not self.work.test()
        except Exception:
            return False  # it has failed

    def end(self) -> None:
        """Gives up the name."""
        if _in_use.get(self._key) is self:
            del _in_use[self._key]
        if self._timeline is not None:
            self._timeline.end(self._key[1])

    def options(self) -> dict[str, Any]:
        """The core's options of a call under this name."""
        return {"group": self.group, "name": self.name, **MATCHING}

    def make(self, call: Callable[..., Any], *args: Any, is_async: bool, result: Result, **options: Any) -> Any:
        """Makes a collective of the core and returns its result, or starts it and returns its handle.

        Args:
            call: The collective.
            args: Its arguments.
            is_async: Whether to start it.
            result: Makes the result from the core's.
            options: Its further options.
        """
        options |= self.options()
        try:
            if not is_async:
                return result(call(*args, **options))
            self.work, self.result = call(*args, async_op=True, **options), result
        except Exception as error:
            raise translate(error) from error
        finally:
            if self.work is None:
                self.end()
        self._submitted = time.perf_counter()
        _started[self.number] = self
        return self.number


MATCHING: dict[str, Any] = {"by_name": True}
"""How the core matches the calls of the ranks: further options of every call."""

_lock = threading.Lock()
_numbers = itertools.count()
_in_use: dict[tuple[int | None, str], Call] = {}
_started: dict[int, Call] = {}
_cycle_s = 0.001


_OPERATORS = dict(enumerate(("mean", "sum", "adasum", "min", "max", "product")))


def reduction(op: int, prescale_factor: float, postscale_factor: float) -> dict[str, Any]:
    """The core's operator and factors, as options of a call. Raises ValueError if there is no such operator."""
    if op not in _OPERATORS:
        raise ValueError(f"invalid op: {op!r} (expected hvd.Average, Sum, Adasum, Min, Max or Product)")
    return {"op": _OPERATORS[op], "prescale": float(prescale_factor), "postscale": float(postscale_factor)}


def reduction_of_rows(op: int, prescale_factor: float, postscale_factor: float) -> dict[str, Any]:
    """As `reduction`, of a reduce-scatter. Raises NotImplementedError of other operators than Average and Sum."""
    if _OPERATORS.get(op) not in ("mean", "sum"):
        raise NotImplementedError("reducescatter has the operators hvd.Average and hvd.Sum only")
    return reduction(op, prescale_factor, postscale_factor)


def forget() -> None:
    """At the start of a job: no names, no handles, and numbers from 0 on every rank."""
    global _numbers, _cycle_s
    _numbers, _cycle_s = itertools.count(), _environment.cycle_s()
    _in_use.clear()
    _started.clear()


_job.on_start.append(forget)


def poll(handle: int) -> bool:
    """Whether a started call has ended, so that ``synchronize`` does not wait.

    Args:
        handle: That of a call of this job, not yet synchronized.

    Raises:
        ValueError: There is no such call.
    """
    call = _started.get(handle)
    if call is None:
        raise ValueError(f"handle {handle} is not that of a call, or was synchronized")
    return not call.is_busy()


def synchronize(handle: int) -> Any:
    """Waits for a started call and returns its result; None if it was synchronized already.

    Args:
        handle: That of ``allreduce_async`` or another call.

    Raises:
        HorovodInternalError: The ranks differ, one was lost, or the deadline has passed. The next call works, unless a
            rank was lost.
    """
    call = _started.pop(handle, None)
    if call is None or call.work is None:
        return None
    try:
        return call.result(call.work.wait())
    except Exception as error:
        raise translate(error) from error
    finally:
        call.end()
