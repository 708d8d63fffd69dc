"""Deadlines, numbers, dumps and timelines from Python, on any number of ranks."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import dl_comm as mc

TEAM = 1


def numbers(team: int) -> dict[str, float]:
    """What the team has counted; a call is counted a moment after its caller has it back."""
    time.sleep(0.05)
    return dict(mc.stats()["teams"][team])


def test_a_small_average_takes_one_step_and_no_message_more_than_its_data(rank: int, size: int) -> None:
    """The comparison of signatures costs no flag and no message: they go with the data's."""
    mc.barrier()
    before = numbers(TEAM)
    for _ in range(10):
        mc.gradients([np.full(4, rank, np.float32)], TEAM)
    change = {key: value - before[key] for key, value in numbers(TEAM).items()}
    assert change["calls"] == 10
    assert change["failed"] == 0
    assert change["bytes"] == 10 * 16
    assert change["shm_rounds"] == 10
    others = mc.num_hosts() - 1
    assert change["shm_flags"] == 10 * (3 if others else 1), "packed; between hosts also reduced, unpacked"
    assert change["messages"] == 10 * 2 * others, "its part to each other host, and the result"


def test_stats_tell_where_the_time_goes(rank: int, size: int) -> None:
    mc.barrier()
    before = mc.stats()
    assert (before["rank"], before["size"]) == (rank, size)
    assert set(before["teams"]) >= {-1, 0, 1}
    start = numbers(TEAM)
    if rank == 0:
        time.sleep(0.4)
    mc.gradients([np.ones(1_000_000, np.float32)], TEAM)
    change = {key: value - start[key] for key, value in numbers(TEAM).items()}
    assert change["copied_s"] > 0
    assert change["reduced_s"] > 0
    if rank > 0:
        assert change["waited_s"] > 0.2
        assert change["exposed_s"] > 0.2
    assert 0 <= numbers(TEAM)["overlap"] <= 1


def test_a_writer_gets_curves(rank: int) -> None:
    written: list[tuple[str, float, int]] = []

    class SummaryWriter:
        def add_scalar(self, name: str, value: float, step: int) -> None:
            written.append((name, value, step))

    curves = mc.StatsWriter(SummaryWriter(), prefix="comm")
    for _ in range(5):
        mc.gradients([np.ones(2**18, np.float32)], TEAM)
    time.sleep(0.05)
    values = curves.write(7)
    assert written == [(name, value, 7) for name, value in values.items()]
    assert set(values) == {f"comm/{name}" for name in ("calls", "mib", "exposed", "overlap", "waited")}
    assert values["comm/mib"] == pytest.approx(values["comm/calls"])
    assert values["comm/calls"] > 0
    assert 0 < values["comm/exposed"] <= 1.01
    assert curves.read()["comm/calls"] == 0
    assert mc.StatsWriter().write(1).keys() == mc.StatsWriter(print).read().keys()
    with pytest.raises(mc.ArgumentError, match="add_scalar"):
        mc.StatsWriter(3)


def test_deadlines(rank: int, size: int) -> None:
    mc.set_timeout(50, TEAM)
    mc.set_timeout(100)
    for timeout in (None, 0, 30, 0.5, np.float32(20)):
        (mean,) = mc.gradients([np.full(3, rank, np.float64)], TEAM, timeout=timeout)
        assert (mean == (size - 1) / 2).all()
        (value,) = mc.broadcast([np.full(3, rank)], timeout=timeout)
        assert (value == 0).all()
        mc.barrier(timeout=timeout)
    for wrong in (-1, float("nan"), "soon", True):
        with pytest.raises(mc.ArgumentError, match="timeout"):
            mc.gradients([np.ones(1)], TEAM, timeout=wrong)  # type: ignore[arg-type]
        with pytest.raises(mc.ArgumentError, match="timeout"):
            mc.set_timeout(wrong)  # type: ignore[arg-type]
    with pytest.raises(mc.ArgumentError, match="team 60"):
        mc.set_timeout(3, 60)


def test_threads_whose_calls_come_in_another_order_on_each_rank(rank: int, size: int) -> None:
    failures: list[str] = []

    def average(name: str, number: int) -> None:
        for index in range(30):
            (mean,) = mc.gradients([np.full(number + 1, rank + index + number, np.float32)], TEAM, name=name)
            if not (mean == (size - 1) / 2 + index + number).all():
                failures.append(f"{name} {index}: {mean}")

    threads = [threading.Thread(target=average, args=(f"thread {number}", number)) for number in range(4)]
    for thread in threads[rank:] + threads[:rank]:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_a_dump_tells_of_the_last_calls(rank: int, size: int, tmp_path: Path) -> None:
    mc.gradients([np.ones((2, 3), np.float32), np.ones(5)], TEAM, name="dumped")
    time.sleep(0.05)
    path = mc.dump(tmp_path)
    assert path == tmp_path / f"rank{rank}.json"
    dump = json.loads(path.read_text())
    assert (dump["rank"], dump["size"], dump["reason"]) == (rank, size, "requested")
    assert dump["ranks"][rank]["pid"] == os.getpid()
    (team,) = (team for team in dump["teams"] if team["team"] == TEAM)
    last = team["calls"][-1]
    assert last["name"] == "average 'dumped' on team 1"
    assert last["state"] == "done"
    assert last["match_index"] == team["matched"]
    assert last["tensors"] == ["tensor 0: float32[2, 3]", "tensor 1: float64[5]"]
    matched = mc.gradients([np.full(1, last["match_index"])], TEAM)[0]
    assert matched == last["match_index"], "the same on all ranks"
    with pytest.raises(mc.CommError, match="nowhere"):
        mc.dump("/proc/nowhere/at/all")


def test_a_parameter_server_is_in_numbers_dumps_and_timelines(rank: int, size: int, tmp_path: Path) -> None:
    """Each operation is a call of its group, which only this rank makes."""
    with mc.ParameterServer([np.zeros(6, np.float32), np.zeros(3)]) as server:
        mc.timeline.start(tmp_path)
        for _ in range(2 + rank):
            server.send(np.ones(6, np.float32), tensor=0)
        server.receive(async_op=True).wait()
        time.sleep(0.05)
        mc.timeline.stop()
        *_, counted = (group for group in mc.stats()["groups"] if group["name"].startswith("parameter server of "))
        assert counted["members"] == list(range(size))
        assert counted["failed"] == 0
        dump = json.loads(mc.dump(tmp_path).read_text())
        (group,) = (group for group in dump["teams"] if group["team"] == counted["name"])
        send, receive = (
            "a send to the parameter server (tensor 0)",
            "a receive from the parameter server (tensors 0 to 1)",
        )
        own = [call for call in group["calls"] if call["one_sided"]]
        assert [(call["name"], call["state"], call["bytes"]) for call in own] == [
            *[(send, "done", 24)] * (2 + rank),
            (receive, "done", 48),
        ]
        # And the calls that made the server.
        assert counted["calls"] == len(group["calls"])
        assert counted["bytes"] >= 24 * (2 + rank) + 48
    spans = [event for event in json.loads((tmp_path / f"rank{rank}.trace.json").read_text()) if event["ph"] == "X"]
    calls = [event for event in spans if event["cat"] == "call"]
    assert [call["name"] for call in calls] == [*[send] * (2 + rank), receive]
    assert {call["args"]["matched"] for call in calls} == {None}


def test_a_signal_does_no_harm(rank: int, size: int) -> None:
    for _ in range(20):
        os.kill(os.getpid(), signal.SIGUSR1)
        (mean,) = mc.gradients([np.full(3, rank, np.float64)], TEAM)
        assert (mean == (size - 1) / 2).all()


def test_a_timeline_has_the_calls(rank: int, tmp_path: Path) -> None:
    mc.timeline.start(tmp_path)
    with pytest.raises(mc.StateError, match="stop it first"):
        mc.timeline.start(tmp_path)
    mc.gradients([np.ones(100_000, np.float32)], TEAM, name="seen")
    time.sleep(0.05)
    mc.timeline.stop()
    mc.timeline.stop()
    events = json.loads((tmp_path / f"rank{rank}.trace.json").read_text())
    (call,) = (event for event in events if event.get("cat") == "call")
    assert call["name"] == "average 'seen' on team 1"
    assert call["args"]["bytes"] == 400_000
    phases = {event["name"] for event in events if event.get("cat") == "phase"}
    assert {"queue", "copy", "reduce"} <= phases
    assert sum(event.get("cat") == "step" for event in events) == 1
    assert sum(event.get("cat") == "exposed" for event in events) == 1
