"""Merges the files of all ranks into one trace for https://ui.perfetto.dev or chrome://tracing.

Viewers require that the spans of a track nest. Concurrent calls and waits of callers overlap, so they get additional
tracks. Steps become instants. All times are relative to the first event.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from dl_comm.timeline._files import Event, Log, events
from dl_comm.timeline._metrics import GROUP

# Ids of the additional tracks: above all thread ids.
_TRACKS = 1_000_000


def merge(files: Mapping[int, Path], first: float, out: TextIO, log: Log) -> int:
    """Writes the trace of ``files`` (by rank) to ``out``; returns the number of events.

    Args:
        files: The result of ``_files.find``.
        first: The time of the first event in microseconds; it becomes 0.
        out: Gets one JSON object with one event on a line.
        log: Gets a note for each file without an end.
    """
    count = 0
    out.write('{"displayTimeUnit": "ms", "traceEvents": [')
    for path in files.values():
        tracks = _Tracks()
        overlapping: list[Event] = []
        for event in events(path, log):
            if event["ph"] == "M" and event["name"] == GROUP:
                tracks.groups[int(event["args"]["number"])] = str(event["args"]["name"])
            if event["ph"] == "X":
                event["ts"] = round(event["ts"] - first, 3)
                event["dur"] = round(event["dur"], 3)
                if event["cat"] == "step":
                    del event["dur"]
                    event.update(ph="i", s="p")
                elif tracks.kind(event):
                    overlapping.append(event)
                    continue
            count += _write(out, event, count)
        for event in tracks.arrange(overlapping):
            count += _write(out, event, count)
    out.write("\n]}\n")
    return count


def _write(out: TextIO, event: Event, count: int) -> int:
    out.write((",\n" if count else "\n") + json.dumps(event, separators=(",", ":")))
    return 1


class _Tracks:
    """The additional tracks of a rank."""

    def __init__(self) -> None:
        self.groups: dict[int, str] = {}
        """The names of the groups that are no teams."""
        # By kind: the end of the last span of each track.
        self._ends: dict[str, list[float]] = {}
        self._tracks: dict[tuple[str, int], int] = {}

    def kind(self, event: Event) -> str:
        """The kind of track of a span; empty if it stays on its thread's track."""
        team = event["args"].get("team", 0)
        group = "other calls" if team == -1 else f"calls of {self.groups.get(team, f'team {team}')}"
        if event["cat"] == "call" or (event["cat"] == "phase" and event["name"] == "queue"):
            return group
        return f"{group}: callers wait" if event["cat"] == "exposed" else ""

    def arrange(self, spans: list[Event]) -> list[Event]:
        """The spans with their tracks, and the tracks' names. A call's queue phase is on the call's track."""
        out: list[Event] = []
        calls: dict[tuple[Any, Any], int] = {}
        for event in sorted(spans, key=lambda event: (event["ts"], -event["dur"], event["cat"] != "call")):
            kind, args = self.kind(event), event["args"]
            call = (args.get("team"), args.get("call"))
            if event["cat"] == "phase" and call in calls:
                track = calls[call]
            else:
                track = self._track(kind, event["ts"], event["ts"] + event["dur"])
                if event["cat"] != "exposed":
                    calls[call] = track
            if (kind, track) not in self._tracks:
                self._tracks[kind, track] = _TRACKS + len(self._tracks)
                out += self._named(event["pid"], kind, track)
            out.append({**event, "tid": self._tracks[kind, track]})
        return out

    def _track(self, kind: str, begin: float, end: float) -> int:
        ends = self._ends.setdefault(kind, [])
        for track, end_before in enumerate(ends):
            if end_before <= begin:
                ends[track] = end
                return track
        ends.append(end)
        return len(ends) - 1

    def _named(self, pid: int, kind: str, track: int) -> list[Event]:
        tid = self._tracks[kind, track]
        names: dict[str, dict[str, Any]] = {
            "thread_name": {"name": kind + (f" ({track + 1})" if track else "")},
            "thread_sort_index": {"sort_index": len(self._tracks) - 1000},
        }
        return [{"ph": "M", "name": name, "pid": pid, "tid": tid, "args": args} for name, args in names.items()]
