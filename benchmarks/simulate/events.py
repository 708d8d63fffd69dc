"""Discrete events: processes that wait for a time or for a message, and what they share. Pure.

A process is a generator. What it yields is either a time, at which it goes on, or a `Hashable` that is no number: the
name of a message, with which it goes on as soon as that has come. Every name is sent once and waited for once.
"""

from __future__ import annotations

import heapq
from collections.abc import Generator, Hashable
from itertools import count
from typing import Any

Process = Generator[Any, None, None]


class Resource:
    """What serves one after the other, in the order of asking: a link's direction, a host's memory.

    A token bucket: after idling, it does up to `burst` seconds of work in no time.
    """

    def __init__(self, burst: float = 0.0) -> None:
        self._burst = burst
        self._free = -burst

    def reserve(self, now: float, seconds: float) -> float:
        """When work that is asked for now, and takes that long, ends."""
        self._free = max(now - self._burst, self._free) + seconds
        return max(now, self._free)


class Clock:
    """The time, and who waits for what."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Process | None, Hashable]] = []
        self._order = count()
        self._came: set[Hashable] = set()
        self._waiting: dict[Hashable, Process] = {}

    def begin(self, process: Process) -> None:
        """Starts a process, at this time."""
        heapq.heappush(self._events, (self.now, next(self._order), process, None))

    def deliver(self, name: Hashable, when: float) -> None:
        """The message of that name comes at that time."""
        heapq.heappush(self._events, (when, next(self._order), None, name))

    def run(self) -> float:
        """Goes on until nothing happens any more; returns the time of the last event.

        Raises RuntimeError when processes still wait then.
        """
        while self._events:
            self.now, _, process, name = heapq.heappop(self._events)
            if process is None:
                process = self._waiting.pop(name, None)
                if process is None:
                    self._came.add(name)
            if process is not None:
                self._go_on(process)
        if self._waiting:
            raise RuntimeError(f"nobody sends {next(iter(self._waiting))!r}")
        return self.now

    def _go_on(self, process: Process) -> None:
        for wanted in process:
            if isinstance(wanted, float):
                if wanted > self.now:
                    heapq.heappush(self._events, (wanted, next(self._order), process, None))
                    return
            elif wanted in self._came:
                self._came.discard(wanted)
            else:
                self._waiting[wanted] = process
                return
