"""The timeline: a file of rank 0 with the calls in Chrome's trace format, which grows with every event.

While it grows, it is a JSON array without its end, which viewers accept; ``stop`` completes it. dl_comm records more,
on all ranks, by ``DL_COMM_TIMELINE``.

Thread rule: any thread.
"""

from __future__ import annotations

import atexit
import json
import os
import threading
import time
from typing import IO, Any

from horovod.common._environment import flag


class Timeline:
    """An open file. Calls with a name share a row."""

    def __init__(self, path: str, mark_cycles: bool) -> None:
        """Creates the file, or raises the OSError."""
        self._file: IO[str] = open(path, "w")  # noqa: SIM115 - closed by `close`
        self._marks, self._begin = mark_cycles, time.perf_counter()
        self._rows: dict[str, int] = {}
        self._lock = threading.Lock()
        since_epoch = {"start_time_since_epoch_in_micros": int(time.time() * 1e6)}
        self._file.write("[\n" + json.dumps({"name": "process_name", "ph": "M", "pid": 0, "args": since_epoch}))
        self._file.flush()

    def begin(self, name: str, activity: str) -> None:
        """The submission of a call: the ranks agree on it while they exchange data, so it has no end of its own."""
        if self._marks:
            self._write({"name": "CYCLE_START", "ph": "i", "pid": 0, "s": "g"})
        self._event(name, {"name": f"NEGOTIATE_{activity}", "ph": "B"}, {"ph": "E"}, {"name": activity, "ph": "B"})

    def end(self, name: str) -> None:
        """The end of a call."""
        self._event(name, {"ph": "E"})

    def _event(self, name: str, *events: dict[str, Any]) -> None:
        row = self._rows.get(name)
        if row is None:
            row = self._rows[name] = len(self._rows) + 1
            self._write({"name": "process_name", "ph": "M", "pid": row, "args": {"name": name}})
        self._write(*({**event, "pid": row, "tid": 0} for event in events))

    def _write(self, *events: dict[str, Any]) -> None:
        now = int((time.perf_counter() - self._begin) * 1e6)
        with self._lock:
            if not self._file.closed:
                self._file.writelines(f",\n{json.dumps({**event, 'ts': now})}" for event in events)
                self._file.flush()

    def close(self) -> None:
        """Completes the file."""
        with self._lock:
            self._file.write("\n]\n")
            self._file.close()


active: Timeline | None = None
"""The timeline that records; None on the other ranks than 0, and while none does."""


def start(path: str, mark_cycles: bool, rank: int) -> None:
    """Starts a timeline, after the end of the one before. Only rank 0 has one."""
    global active
    stop()
    if rank == 0:
        active = Timeline(path, mark_cycles)


def start_by_environment(rank: int) -> None:
    """Starts the timeline of ``HOROVOD_TIMELINE``, if it names a file."""
    path = os.environ.get("HOROVOD_TIMELINE", "")
    if path and path != "DYNAMIC":
        start(path, flag("HOROVOD_TIMELINE_MARK_CYCLES"), rank)


def stop() -> None:
    """Ends the timeline, if there is one."""
    global active
    ended, active = active, None
    if ended is not None:
        ended.close()


atexit.register(stop)
