"""Receives the exit reports of the ranks: TCP ports, a random token, lines of JSON. Runs one thread.

Any process that reaches a port may connect. So a connection must begin with the token, and other data is ignored. The
number of unauthenticated connections is limited; they are closed after a timeout, or when resources run out.

A failed rank gets its answer after a delay, and exits only then. So ranks that fail at the same time, and lost ranks
that another rank detected first, can report before the launcher stops them.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import json
import math
import re
import resource
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dl_comm.run._child import TOKEN_BYTES

_LINE_LIMIT = 1 << 20
_ANSWER_DELAY_S = 2.0  # less than the ranks' limit for the answer
_TOKEN_TIMEOUT_S = 5.0  # ranks send the token immediately
_MAX_UNAUTHENTICATED = 256  # or a quarter of this process's descriptors
_RETRY_S = 0.2
# The errors of Python, TensorFlow and torch for a missed deadline (dl_comm._base.errors).
_MISSED = re.compile(r"(?:TimeoutError|dl_comm error -5): .* was not complete after [\d.]+ s \(")
_DUMP_INTERVAL_S = 2.0  # a stall is told by many ranks at about the same time
_NO_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


@dataclass
class Rank:
    """A rank that has connected.

    ``end`` is its exit report (``_child.run_program``) with its last lines, or ``None``. ``order`` is the position of
    the report, from 0.
    """

    rank: int
    host: str
    started: float
    end: dict[str, Any] | None = None
    order: int | None = None
    ended: float | None = None


@dataclass(eq=False)
class _Connection:
    """A connection: its start, an incomplete line, whether it has sent the token, and its rank."""

    socket: socket.socket
    since: float = field(default_factory=time.monotonic)
    rest: bytes = b""
    authenticated: bool = False
    rank: Rank | None = None


def missed_deadline(rank: Rank) -> bool:
    """Whether the rank has ended because other ranks missed the deadline of a call."""
    return any(map(_MISSED.search, (rank.end or {}).get("tail", [])))


class Listener:
    """Listens from ``start`` to ``close``; after that, any thread may read ``ranks``.

    Args:
        addresses: This host's IPv4 addresses on which to listen.
    """

    def __init__(self, addresses: Sequence[str]) -> None:
        self.token = secrets.token_hex(TOKEN_BYTES // 2)
        self.ranks: dict[int, Rank] = {}
        self.failed_at: float | None = None  # time.monotonic() of the first reported failure
        self.dumps: set[str] = set()  # the folders of the ranks' dumps, on any host
        self._stalled_at = -math.inf  # time.monotonic() of the last request for dumps after a stall
        self._sockets = [socket.create_server((address, 0), backlog=1024) for address in addresses]
        self.addresses = ["{}:{}".format(*listening.getsockname()) for listening in self._sockets]
        self._selector = selectors.DefaultSelector()
        self._connections: dict[_Connection, None] = {}  # oldest first
        self._accepting = False
        self._retry_at = 0.0
        self._until: float | None = None
        self._ends = 0
        self._delayed: list[_Connection] = []
        self._thread = threading.Thread(target=self._serve, name="dl-comm-run listener", daemon=True)

    def start(self) -> None:
        """Starts the thread. Earlier connections wait until now."""
        for listening in self._sockets:
            listening.setblocking(False)
        # Each rank keeps a connection open. The launcher already runs with its old limit.
        _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        self._thread.start()

    def close(self, timeout: float = 8.0) -> None:
        """Waits until all ranks have closed their connections, at most ``timeout`` seconds, and ends."""
        self._until = time.monotonic() + timeout
        self._thread.join()
        self._selector.close()
        for opened in (*self._sockets, *(connection.socket for connection in self._connections)):
            opened.close()

    def _serve(self) -> None:
        while self._until is None or (self._has_ranks() and time.monotonic() < self._until):
            self._answer_delayed()
            self._drop_old()
            self._listen(time.monotonic() >= self._retry_at)
            for key, _events in self._selector.select(0.1):
                if isinstance(key.data, _Connection):
                    # An earlier event of this round may have closed it.
                    if key.data in self._connections and not self._read(key.data):
                        self._close(key.data)
                else:
                    self._accept(key.data)

    def _has_ranks(self) -> bool:
        return any(connection.authenticated for connection in self._connections)

    def _listen(self, listens: bool) -> None:
        """Starts or stops accepting connections."""
        if listens == self._accepting:
            return
        for listening in self._sockets:
            if listens:
                self._selector.register(listening, selectors.EVENT_READ, listening)
            else:
                self._selector.unregister(listening)
        self._accepting = listens

    def _accept(self, listening: socket.socket) -> None:
        try:
            accepted, _address = listening.accept()
        except OSError as error:  # or the peer has closed
            if error.errno in _NO_RESOURCES and not self._close_oldest():
                self._retry_at = time.monotonic() + _RETRY_S
                self._listen(False)
            return
        accepted.setblocking(False)
        connection = _Connection(accepted)
        self._connections[connection] = None
        self._selector.register(accepted, selectors.EVENT_READ, connection)
        limit = min(_MAX_UNAUTHENTICATED, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
        if sum(not connection.authenticated for connection in self._connections) > limit:
            self._close_oldest()

    def _close_oldest(self) -> bool:
        """Closes the oldest unauthenticated connection; returns whether there was one."""
        oldest = next((connection for connection in self._connections if not connection.authenticated), None)
        if oldest:
            self._close(oldest)
        return oldest is not None

    def _drop_old(self) -> None:
        limit = time.monotonic() - _TOKEN_TIMEOUT_S
        for connection in [each for each in self._connections if not each.authenticated and each.since < limit]:
            self._close(connection)

    def _close(self, connection: _Connection) -> None:
        del self._connections[connection]
        self._selector.unregister(connection.socket)
        connection.socket.close()

    def _read(self, connection: _Connection) -> bool:
        """Reads and answers messages; returns whether the connection stays open."""
        try:
            data = connection.socket.recv(1 << 16)
        except BlockingIOError:
            return True
        except OSError:  # the peer has closed
            return False
        connection.rest += data
        if not connection.authenticated:
            if len(connection.rest) < TOKEN_BYTES:
                return bool(data)
            token, connection.rest = connection.rest[:TOKEN_BYTES], connection.rest[TOKEN_BYTES:]
            if not hmac.compare_digest(token, self.token.encode()):
                return False
            connection.authenticated = True
        *messages, connection.rest = connection.rest.split(b"\n")
        try:
            for message in messages:
                connection.socket.sendall(self._answer(connection, json.loads(message)))
        # An invalid message, or the peer has closed.
        except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError):
            return False
        return bool(data) and len(connection.rest) < _LINE_LIMIT

    def _answer(self, connection: _Connection, message: dict[str, Any]) -> bytes:
        """Handles a message; returns the answer, empty for a failed rank, which is answered later."""
        if "dump" in message:
            return b"%d\n" % self._ask_for_dumps()
        if connection.rank is None:
            connection.rank = Rank(int(message["rank"]), str(message["host"]), time.monotonic())
            self.ranks[connection.rank.rank] = connection.rank
            return b"ok\n"
        if "dumps" in message:
            self.dumps.add(str(message["dumps"]))
            return b""
        if "stalled" in message:
            self._have_stalled()
            return b""
        rank = connection.rank
        rank.end, rank.ended, rank.order = dict(message), time.monotonic(), self._ends
        self._ends += 1
        if not (rank.end.get("status") or rank.end.get("signal")):
            return b"ok\n"
        self.failed_at = self.failed_at or rank.ended
        if missed_deadline(rank):
            self._have_stalled()
        self._delayed.append(connection)
        return b""

    def _have_stalled(self) -> None:
        """Requests dumps of all ranks: those that do not wait write none by themselves."""
        if time.monotonic() > self._stalled_at + _DUMP_INTERVAL_S:
            self._stalled_at = time.monotonic()
            self._ask_for_dumps()

    def _ask_for_dumps(self) -> int:
        """Forwards the request to the running ranks; returns their number."""
        asked = 0
        for connection in self._connections:
            if connection.rank and connection.rank.end is None:
                with contextlib.suppress(OSError):  # the peer has closed
                    connection.socket.sendall(b"dump\n")
                    asked += 1
        return asked

    def _answer_delayed(self) -> None:
        """Answers the failed ranks after the delay, or when all ranks have ended."""
        all_ended = all(rank.end for rank in self.ranks.values())
        if self._delayed and (all_ended or time.monotonic() > (self.failed_at or 0.0) + _ANSWER_DELAY_S):
            for connection in self._delayed:
                with contextlib.suppress(OSError):  # killed meanwhile
                    connection.socket.sendall(b"ok\n")
            self._delayed.clear()
