"""dl-comm-run's listener gets the reports of its ranks despite invalid or many other connections."""

from __future__ import annotations

import contextlib
import json
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dl_comm.run import _listener
from dl_comm.run._listener import Listener

NEST = b"[" * 60_000 + b"\n"


def caller(listener: Listener, data: bytes = b"") -> socket.socket:
    host, _, port = listener.addresses[0].rpartition(":")
    made = socket.create_connection((host, int(port)), timeout=20)
    made.sendall(data)
    return made


def hello(listener: Listener, rank: int) -> bytes:
    return listener.token.encode() + json.dumps({"rank": rank, "host": "h"}).encode() + b"\n"


def is_accepted(listener: Listener, rank: int) -> bool:
    with caller(listener, hello(listener, rank)) as member:
        answered = member.recv(16) == b"ok\n"
    return answered and rank in listener.ranks


def closed(intruder: socket.socket) -> bool:
    """Whether the listener closes the connection; unread data makes it a reset."""
    with intruder, contextlib.suppress(ConnectionError):
        return intruder.recv(16) == b""
    return True


@pytest.fixture
def listener() -> Iterator[Listener]:
    made = Listener(["127.0.0.1"])
    made.start()
    yield made
    made.close(0)


def test_unauthenticated_connections_are_ignored(listener: Listener) -> None:
    wrong = "0" * len(listener.token)
    assert closed(caller(listener, hello(listener, 5).replace(listener.token.encode(), wrong.encode())))
    assert closed(caller(listener, b'{"token": 1}' + NEST))
    assert is_accepted(listener, 5)
    assert list(listener.ranks) == [5]


@pytest.mark.parametrize(
    "line", [NEST, b'{"rank": Infinity, "host": ""}\n', b"{}\n", b"0\n", b"\xff\n", b"x" * (2 << 20)]
)
def test_invalid_messages_with_the_token_are_harmless(listener: Listener, line: bytes) -> None:
    with contextlib.suppress(ConnectionError):
        assert closed(caller(listener, listener.token.encode() + line))
    assert is_accepted(listener, 1)


def test_silent_connections_are_closed(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_listener, "_TOKEN_TIMEOUT_S", 0.3)
    slow = [caller(listener), caller(listener, b"0123")]
    with caller(listener, hello(listener, 2)) as member:
        assert member.recv(16) == b"ok\n"
        assert all(closed(intruder) for intruder in slow)
        member.sendall(b'{"status": 0, "signal": 0}\n')
        assert member.recv(16) == b"ok\n", "a rank may be silent for long"


def test_arbitrary_bytes(listener: Listener) -> None:
    """Any bytes, with and without the token: later ranks are still accepted."""
    lines = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["rank", "host", "status"]), inner),
        max_leaves=6,
    ).map(lambda value: json.dumps(value).encode() + b"\n")

    @settings(max_examples=150, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.booleans(), st.lists(st.binary(max_size=50) | lines, max_size=4))
    def one(known: bool, pieces: list[bytes]) -> None:
        with contextlib.suppress(ConnectionError), caller(listener, listener.token.encode() if known else b"") as made:
            for piece in pieces:
                made.sendall(piece)
        assert listener._thread.is_alive()

    one()
    assert is_accepted(listener, 7)


FLOOD = """
import json, resource, socket, sys
from dl_comm.run._listener import Listener
listener = Listener(["127.0.0.1"])
listener.start()
print(listener.addresses[0], listener.token, flush=True)
sys.stdin.readline()
listener.close()
print(sorted(listener.ranks), flush=True)
"""


def test_more_connections_than_descriptors() -> None:
    """The listener may use 128 descriptors; 400 unauthenticated connections stay open."""

    def few() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))

    process = subprocess.Popen(
        [sys.executable, "-c", FLOOD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=few,
    )
    assert process.stdin
    assert process.stdout
    try:
        address, token = process.stdout.readline().split()
        host, _, port = address.rpartition(":")
        intruders = [socket.create_connection((host, int(port)), timeout=20) for _ in range(400)]
        started = time.monotonic()
        with socket.create_connection((host, int(port)), timeout=60) as member:
            member.sendall(token.encode() + b'{"rank": 3, "host": "h"}\n')
            assert member.recv(16) == b"ok\n"
        assert time.monotonic() - started < 30
        out, err = process.communicate("\n", timeout=60)
        for intruder in intruders:
            intruder.close()
    finally:
        process.kill()
        process.wait()
    assert (out.strip(), err) == ("[3]", "")
