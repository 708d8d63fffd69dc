"""Start and end by Horovod's variables, static process sets, the timeline, failures."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
from hvd_ranks import environment, run_ranks

from imported import TORCH, python

# One process of pytest runs all of these: torch is imported once for their ranks.
pytestmark = pytest.mark.xdist_group("torch")
HEAD = """
import os, time, torch
import horovod.torch as hvd
"""


def run(script: str, size: int, env: Mapping[str, str] | None = None, expect: int | None = 0) -> list[str]:
    """Runs a script on ranks that have imported torch."""
    return run_ranks(HEAD + script, size, env, expect=expect, python=python(*TORCH))


def run_alone(script: str, path: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs a script, which is kept in ``path``, on rank 0."""
    path.write_text(HEAD + script)
    command = [*python(*TORCH), str(path)]
    return subprocess.run(
        command, env=environment(HOROVOD_RANK="0", **env), timeout=60, capture_output=True, text=True, check=False
    )


def test_the_job_starts_ends_and_starts_again() -> None:
    script = """
for x in (lambda: hvd.rank(), lambda: hvd.allreduce(torch.ones(1)), lambda: hvd.barrier(), lambda: hvd.join(),
          lambda: hvd.start_timeline("x"), lambda: hvd.broadcast_parameters({}, 0), lambda: hvd.broadcast_object(1)):
    try: x()
    except ValueError as error: assert "hvd.init()" in str(error), error
    else: raise SystemExit("no error")
assert not hvd.is_initialized()
hvd.shutdown()
for again in range(20):
    hvd.init()
    hvd.init()
    assert (hvd.rank(), hvd.size()) == (int(os.environ["HOROVOD_RANK"]), 3)
    assert hvd.local_rank() == int(os.environ.get("HOROVOD_LOCAL_RANK", hvd.rank()))
    assert hvd.gloo_enabled() and not hvd.mpi_enabled()
    hvd.allreduce_async(torch.ones(3), name="of all")      # nobody waits for these
    hvd.allreduce_async(torch.ones(3), name=f"of {hvd.rank()}")
    if again % 2: hvd.barrier()
    hvd.shutdown()
    assert not hvd.is_initialized()
"""
    run(script, 3)


def test_one_rank_needs_no_address_and_two_do(tmp_path: Path) -> None:
    script = "hvd.init(); assert hvd.size() == 1; assert hvd.join() == 0; hvd.barrier()"
    path = tmp_path / "script.py"
    alone = run_alone(script, path, HOROVOD_SIZE="1")
    assert alone.returncode == 0, alone.stderr
    assert "set HOROVOD_GLOO_RENDEZVOUS_ADDR" in run_alone(script, path, HOROVOD_SIZE="2").stderr


@pytest.mark.heavy
def test_numbers_of_the_launcher_count() -> None:
    script = (
        "hvd.init(); assert (hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()) == (0, 1, 3, 4)"
    )
    given = {"LOCAL_RANK": "0", "LOCAL_SIZE": "1", "CROSS_RANK": "3", "CROSS_SIZE": "4"}
    run(script, 2, {f"HOROVOD_{name}": value for name, value in given.items()})


def test_static_process_sets() -> None:
    script = """
rank = int(os.environ["HOROVOD_RANK"])
lists = lambda: [hvd.ProcessSet([0]), hvd.ProcessSet(range(1, 3) if rank else reversed(range(1, 3)))]
for more in ([hvd.ProcessSet([0])], [hvd.ProcessSet([2, 1, 0])]):
    try: hvd.init(process_sets=lists() + more)
    except ValueError as error: assert "duplicate" in str(error)
    else: raise SystemExit("no error")
first, rest = sets = lists()
hvd.init(process_sets=sets)
assert hvd.mpi_ops._basics._get_process_set_ids_and_ranks() == {0: [0, 1, 2], 1: [0], 2: [1, 2]}
assert (first.process_set_id, rest.process_set_id) == (1, 2)
mine = rest if rank else first
assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=mine).item() == mine.size()
try: hvd.add_process_set([0, 1])
except ValueError as error: assert "HOROVOD_DYNAMIC_PROCESS_SETS" in str(error)
else: raise SystemExit("no error")
hvd.shutdown()
hvd.init(process_sets="dynamic")
assert hvd.add_process_set([0, 1]).process_set_id == 1
"""
    run(script, 3)


@pytest.mark.heavy
def test_some_ranks_of_the_launcher() -> None:
    script = """
rank = int(os.environ["HOROVOD_RANK"])
if rank != 1:
    hvd.init(comm=[0, 2])
    assert (hvd.rank(), hvd.size()) == (rank // 2, 2)
    assert hvd.allgather_object(rank) == [0, 2]
    hvd.broadcast_parameters({"x": torch.ones(1) * rank}, 1)
    assert hvd.join() in (0, 1)
else:
    import dl_comm
    job = "HOROVOD_GLOO_RENDEZVOUS_"
    dl_comm.init(rank=1, size=3, address=f"{os.environ[job + 'ADDR']}:{os.environ[job + 'PORT']}")
"""
    run(script, 3)


@pytest.mark.parametrize("marks", [pytest.param("0", marks=pytest.mark.heavy), "1"])
def test_timeline(tmp_path: Path, marks: str) -> None:
    script = """
path = os.environ["HOROVOD_TIMELINE"]
hvd.init()
hvd.allreduce(torch.ones(3), name="first")
if hvd.rank() == 0:
    text = open(path).read()
    assert "allreduce.first" in text and "NEGOTIATE_ALLREDUCE" in text, text
    assert ("CYCLE_START" in text) == (os.environ["HOROVOD_TIMELINE_MARK_CYCLES"] == "1")
hvd.synchronize(hvd.grouped_allgather_async([torch.ones(3)]))
hvd.stop_timeline()
hvd.start_timeline(path + ".2", mark_cycles=True)
hvd.broadcast(torch.ones(2), 0)
hvd.shutdown()
"""
    path = tmp_path / "timeline.json"
    run(script, 2, {"HOROVOD_TIMELINE": str(path), "HOROVOD_TIMELINE_MARK_CYCLES": marks})
    events = json.loads(path.read_text())
    assert "start_time_since_epoch_in_micros" in events[0]["args"]
    names = [event.get("args", {}).get("name") for event in events]
    assert "allreduce.first" in names
    assert "grouped_allgather.noname.1" in names
    rows = {event["pid"] for event in events if event["pid"]}
    for row in rows:
        phases = [event["ph"] for event in events if event["pid"] == row]
        assert phases.count("B") == phases.count("E") == 2
    assert any(event.get("name") == "BROADCAST" for event in json.loads((tmp_path / "timeline.json.2").read_text()))


def test_the_timeline_is_complete_after_an_exit(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    script = 'hvd.init(); hvd.start_timeline(os.environ["FILE"]); hvd.allreduce(torch.ones(1), name="only")'
    ended = run_alone(script, tmp_path / "script.py", HOROVOD_SIZE="1", FILE=str(path))
    assert ended.returncode == 0, ended.stderr
    assert "allreduce.only" in [event.get("args", {}).get("name") for event in json.loads(path.read_text())]


def test_a_lost_rank_is_an_internal_error() -> None:
    script = """
hvd.init()
hvd.allreduce(torch.ones(1))
if hvd.rank() == 1: os._exit(3)
begin = time.monotonic()
try: hvd.allreduce(torch.ones(1), name="after")
except hvd.HorovodInternalError as error: print("caught", error, flush=True)
else: raise SystemExit("no error")
assert time.monotonic() - begin < 10
os._exit(0)
"""
    outputs = run(script, 2, expect=None)
    assert "caught" in outputs[0]


def test_settings() -> None:
    script = """
hvd.init()
assert os.environ["DL_COMM_STALL_WARN_S"] == "7" and os.environ["DL_COMM_TIMEOUT_S"] == "3"
begin = time.monotonic()
if hvd.rank() == 0:
    try: hvd.allreduce(torch.ones(1))
    except hvd.HorovodInternalError as error: print("caught", error, flush=True)
    assert 2 < time.monotonic() - begin < 20
else:
    time.sleep(6)
os._exit(0)
"""
    env = {
        "HOROVOD_STALL_CHECK_TIME_SECONDS": "7",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "3",
        "HOROVOD_LOG_LEVEL": "debug",
        "HOROVOD_CACHE_CAPACITY": "1",
    }
    outputs = run(script, 2, env, expect=None)
    assert "caught" in outputs[0]
    assert outputs[0].count("HOROVOD_CACHE_CAPACITY has no effect") == 1
