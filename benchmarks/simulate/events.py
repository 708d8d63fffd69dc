"""Discrete events: processes that wait for a time or a message, and shared resources. Pure.

A process is a generator. It yields either a time (float), at which it resumes, or another `Hashable`: the name of a
message, on whose arrival it resumes. Every name is sent once and awaited once.
"""

from __future__ import annotations

import heapq
from collections.abc import Generator, Hashable
from itertools import count
from typing import Any

Process = Generator[Any, None, None]


class Resource:
    """A resource that serves requests in order: one direction of a link, or a host's memory.

    A token bucket: after idling, up to `burst` seconds of work take no time.
    """

    def __init__(self, burst: float = 0.0) -> None:
        self._burst = burst
        # When the resource has served all requests.
        self.free = -burst

    def reserve(self, now: float, seconds: float) -> float:
        """Reserves `seconds` of work from `now`; returns its end."""
        self.free = max(now - self._burst, self.free) + seconds
        return max(now, self.free)


class Clock:
    """The simulated time and the waiting processes."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Process | None, Hashable]] = []
        self._order = count()
        self._arrived: set[Hashable] = set()
        self._waiting: dict[Hashable, Process] = {}

    def begin(self, process: Process) -> None:
        """Starts a process now."""
        heapq.heappush(self._events, (self.now, next(self._order), process, None))

    def deliver(self, name: Hashable, when: float) -> None:
        """Delivers the message `name` at time `when`."""
        heapq.heappush(self._events, (when, next(self._order), None, name))

    def run(self) -> float:
        """Runs all events; returns the time of the last one.

        Raises RuntimeError if processes still wait.
        """
        while self._events:
            self.now, _, process, name = heapq.heappop(self._events)
            if process is None:
                process = self._waiting.pop(name, None)
                if process is None:
                    self._arrived.add(name)
            if process is not None:
                self._resume(process)
        if self._waiting:
            raise RuntimeError(f"no process sends {next(iter(self._waiting))!r}")
        return self.now

    def _resume(self, process: Process) -> None:
        for wanted in process:
            if isinstance(wanted, float):
                if wanted > self.now:
                    heapq.heappush(self._events, (wanted, next(self._order), process, None))
                    return
            elif wanted in self._arrived:
                self._arrived.discard(wanted)
            else:
                self._waiting[wanted] = process
                return
