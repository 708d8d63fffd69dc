"""Parameter servers whose ranks end, and between hosts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hosts import Hosts, possible
from launch import Finished
from plain_ranks import Ranks

Script = Callable[..., Finished]
TESTS = Path(__file__).parents[1]

HEAD = """
import os, signal, sys, time
import numpy as np
import dl_comm
"""
INIT = """
dl_comm.init()
rank, size = dl_comm.rank(), dl_comm.size()
"""

ENDS = """
ps = dl_comm.ParameterServer(np.zeros(300_000))
dl_comm.barrier()
if rank == 1:
    time.sleep(0.5)
    END
since = time.monotonic()
try:
    while True:  # each operation alone waits for nobody
        ps.send(np.ones(300_000)) if rank == 0 else ps.receive()
        time.sleep(0.001)
except dl_comm.PeerLostError as error:
    assert time.monotonic() - since < (12 if "freed" in str(error) else 5), time.monotonic() - since
    os.write(1, f"{error}\\n".encode())
for again in range(2):
    try:
        ps.receive()
    except dl_comm.PeerLostError:
        continue
    raise SystemExit("no error")
os.write(1, b"fine\\n")
os._exit(0)
"""


@pytest.mark.parametrize(
    ("end", "text"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "rank 1"),
        ("del ps; time.sleep(8); os._exit(0)", "has freed the group"),
        ("dl_comm.finalize(); os._exit(0)", "rank 1"),
    ],
    ids=["killed", "freed", "finalized"],
)
def test_a_rank_that_ends_ends_the_server(ranks: Ranks, end: str, text: str) -> None:
    processes = [ranks.start(rank, 3, INIT + ENDS.replace("END", end)) for rank in range(3)]
    for rank in (0, 2):
        output = ranks.succeeds(processes[rank])
        assert "fine" in output, output
        assert text in output, output


def test_a_rule_that_never_returns_ends_at_the_deadline_of_the_others(script: Script) -> None:
    """A holder of a block makes the others wait, and a deadline ends the server on all ranks."""
    body = (
        HEAD
        + INIT
        + """
def rule(shard, update):
    time.sleep(8)

ps = dl_comm.ParameterServer(np.zeros(2), rules={"slow": rule})
dl_comm.barrier()
if rank == 0:
    try:
        ps.send(np.ones(2), "slow", timeout=1)
    except dl_comm.TimeoutError:
        os.write(1, b"late\\n")
        time.sleep(3)
else:
    time.sleep(0.5)
    try:
        ps.send(np.ones(2), timeout=1)
    except (dl_comm.TimeoutError, dl_comm.PeerLostError) as error:
        os.write(1, f"waited: {error}\\n".encode())
os._exit(0)
"""
    )
    finished = script(2, body, timeout=60)
    assert "late" in finished.output, finished.output
    assert "waited: " in finished.output, finished.output
    assert "shard of rank" in finished.output, finished.output


def test_a_close_waits_for_operations_of_other_threads(script: Script) -> None:
    """The owners free their memory after it."""
    body = (
        HEAD
        + INIT
        + """
import threading
big = np.ones(4_000_000)
for turn in range(10):
    ps = dl_comm.ParameterServer(big)
    sent, began = [], threading.Event()
    def send():
        began.set()
        try:
            for _ in range(20): ps.send(big); sent.append(1)
        except dl_comm.StateError as error:
            assert "was closed" in str(error), error
    thread = threading.Thread(target=send)
    thread.start()
    began.wait()
    ps.close()
    count = len(sent)
    thread.join()
    assert len(sent) <= count + 1, "one more was counted after it had ended"
    del ps
    check = dl_comm.shared_zeros(4_000_000)  # the memory that was freed
    dl_comm.barrier()
    assert not check.any()
os.write(1, b"fine\\n")
"""
    )
    finished = script(2, body, timeout=60)
    assert finished.output.count("fine") == 2, finished.output


def test_a_late_answer_of_a_rule_answers_no_other_send(script: Script) -> None:
    body = (
        HEAD
        + INIT
        + """
def rule(shard, update):
    if update[0] < 0:
        time.sleep(2)
        raise RuntimeError("late")
    shard += update

ps = dl_comm.ParameterServer(np.zeros(2), rules={"rule": rule})
dl_comm.barrier()
if rank == 0:
    try:
        ps.send(np.full(2, -1.0), "rule", timeout=0.5)
        raise SystemExit("no error")
    except dl_comm.TimeoutError:
        pass
    try:
        ps.send(np.ones(2), "rule")
    except dl_comm.CommError as error:  # the server may have ended
        assert "late" not in str(error), error
    os.write(1, b"fine\\n")
time.sleep(3)
os._exit(0)
"""
    )
    finished = script(2, body, timeout=60)
    assert finished.output.count("fine") == 1, finished.output


def test_a_forked_child_gets_an_error_and_changes_nothing(script: Script) -> None:
    body = (
        HEAD
        + INIT
        + """
ps = dl_comm.ParameterServer(np.zeros(9), rules={"max": max})
ps.send(np.ones(9), async_op=True).wait()  # with a thread
dl_comm.barrier()
child = os.fork()
if child == 0:
    for call in (lambda: ps.send(np.ones(9)), ps.receive, lambda: ps.send(np.ones(9), async_op=True)):
        try: call()
        except dl_comm.StateError as error: pass
        else: os._exit(1)
    del ps, call
    import gc
    gc.collect()
    os._exit(7)
assert os.waitpid(child, 0)[1] == 7 << 8
dl_comm.barrier()
assert (ps.receive() == size).all()
ps.close()
os.write(1, b"fine\\n")
"""
    )
    finished = script(2, body, timeout=60)
    assert finished.output.count("fine") == 2, finished.output


@pytest.fixture(scope="module")
def two_hosts() -> Iterator[Hosts]:
    with Hosts(2) as made:
        yield made


needs_hosts = pytest.mark.skipif(not possible(), reason="needs root and iproute2 to make network namespaces")


@needs_hosts
@pytest.mark.parametrize("per_host", [1, pytest.param(2, marks=pytest.mark.heavy)])
def test_the_tests_pass_between_hosts(two_hosts: Hosts, per_host: int) -> None:
    file = TESTS / "parallel/test_parameter_server.py"
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--frameworks=numpy", str(file)]
    finished = two_hosts.launch(per_host, command, 150)
    assert finished.returncode == 0, finished.output


@needs_hosts
def test_a_rank_of_another_host_that_ends_ends_the_server(two_hosts: Hosts, tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(HEAD + INIT + ENDS.replace("END", "os.kill(os.getpid(), signal.SIGKILL)"))
    finished = two_hosts.ranks(1, [sys.executable, str(path)], 60, {"DL_COMM_TIMEOUT_S": "30"})
    assert "fine" in finished.output, finished.output
    assert "rank 1" in finished.output, finished.output
