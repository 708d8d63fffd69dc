"""Where the ranks tell how they end: a TCP port, a random token, a line of JSON each way. One thread of its own.

A rank that has failed is answered a little later, and ends only then. So those that fail together, and those whose end
another one has noticed first, come to tell before the launcher stops them.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import selectors
import socket
import threading
import time
from dataclasses import dataclass
from typing import Any

_LINE_LIMIT = 1 << 20
_HOLD_S = 2.0  # less than the time that ranks wait for the answer


@dataclass
class Rank:
    """What is known of a rank.

    ``end`` is what it told (``_child.run_program``), with its last lines, or ``None``. ``order`` counts the ends that
    were told, from 0.
    """

    rank: int
    host: str
    started: float
    end: dict[str, Any] | None = None
    order: int | None = None
    ended: float | None = None


@dataclass
class _Line:
    """A connection, what came of a line, and whose it is."""

    socket: socket.socket
    rest: bytes = b""
    rank: Rank | None = None


class Listener:
    """Listens from the start to ``close``; any thread may ask for ``ranks`` after that."""

    def __init__(self, only_here: bool) -> None:
        self.token = secrets.token_hex(16)
        self.ranks: dict[int, Rank] = {}
        self.failed_at: float | None = None  # when a rank first told of a bad end, by time.monotonic()
        self._socket = socket.create_server(("127.0.0.1" if only_here else "", 0), backlog=1024)
        self.port: int = self._socket.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._open = 0
        self._until: float | None = None
        self._ends = 0
        self._held: list[_Line] = []
        self._thread = threading.Thread(target=self._serve, name="dl-comm-run listener", daemon=True)

    def start(self) -> None:
        """Begins to answer. Connections that came before wait until now."""
        self._selector.register(self._socket, selectors.EVENT_READ)
        self._thread.start()

    def close(self, patience: float = 8.0) -> None:
        """Waits until all ranks that spoke have closed, for at most ``patience`` seconds, and ends."""
        self._until = time.monotonic() + patience
        self._thread.join()
        self._selector.close()
        self._socket.close()

    def _serve(self) -> None:
        while self._until is None or (self._open and time.monotonic() < self._until):
            self._release()
            for key, _events in self._selector.select(0.1):
                if key.data is None:
                    accepted, _address = self._socket.accept()
                    self._selector.register(accepted, selectors.EVENT_READ, _Line(accepted))
                    self._open += 1
                elif not self._read(key.data):
                    self._selector.unregister(key.fileobj)
                    key.data.socket.close()
                    self._open -= 1

    def _read(self, line: _Line) -> bool:
        """Takes what came; whether more may come."""
        try:
            data = line.socket.recv(1 << 16)
            line.rest += data
            *messages, line.rest = line.rest.split(b"\n")
            for message in messages:
                self._message(line, json.loads(message))
                if line.rank and _bad(line.rank):
                    self._held.append(line)
                else:
                    line.socket.sendall(b"ok\n")
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return False  # no rank of ours, or one that is gone
        return bool(data) and len(line.rest) < _LINE_LIMIT

    def _message(self, line: _Line, message: dict[str, Any]) -> None:
        if line.rank is None:
            if not hmac.compare_digest(str(message["token"]), self.token):
                raise ValueError("another job's")
            line.rank = Rank(int(message["rank"]), str(message["host"]), time.monotonic())
            self.ranks[line.rank.rank] = line.rank
        else:
            line.rank.end, line.rank.ended = message, time.monotonic()
            line.rank.order = self._ends
            self._ends += 1
        if self.failed_at is None and _bad(line.rank):
            self.failed_at = line.rank.ended

    def _release(self) -> None:
        """Answers those that failed, when they have waited or all have ended."""
        all_ended = all(rank.end for rank in self.ranks.values())
        if self._held and (all_ended or time.monotonic() > (self.failed_at or 0.0) + _HOLD_S):
            for line in self._held:
                with contextlib.suppress(OSError):  # it was killed meanwhile
                    line.socket.sendall(b"ok\n")
            self._held.clear()


def _bad(rank: Rank) -> bool:
    return bool(rank.end and (rank.end.get("status") or rank.end.get("signal")))
