"""Lost ranks that no call waits for, or with a surviving child, are detected long before the deadline."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

import hosts
from launch import Finished, ending_together, launch

PREAMBLE = """
import os, sys, time
import numpy as np
import dl_comm as mc

def lost(what):
    start = time.monotonic()
    try:
        what()
    except mc.PeerLostError as error:
        print(f"detected after {time.monotonic() - start:.0f} s: {error}", flush=True)
"""
SETTINGS = {"DL_COMM_TIMEOUT_S": "60"}


def on_ranks(body: str, folder: Path, there: hosts.Hosts | None = None) -> Finished:
    script = folder / "script.py"
    script.write_text(PREAMBLE + body)
    # The launcher does not kill ranks, so that they detect the loss themselves.
    command = ending_together([sys.executable, str(script), str(folder)], folder, 2)
    finished = launch(2, command, 120, SETTINGS) if there is None else there.launch(1, command, 120, SETTINGS)
    assert not finished.timed_out, finished.output
    return finished


def check_detected(finished: Finished) -> None:
    found = re.search(r"detected after (\d+) s: rank 1 on \w+", finished.output)
    assert found, finished.output
    assert int(found[1]) < 30, finished.output


def test_a_child_that_outlives_its_rank_does_not_hide_its_end(two: hosts.Hosts, tmp_path: Path) -> None:
    body = """
mc.init(nteams=1)
mc.gradients([np.ones(3)])
done = sys.argv[1] + "/done"
if mc.get_rank() == 1:
    if os.fork() == 0:
        until = time.monotonic() + 90
        while time.monotonic() < until and not os.path.exists(done):
            time.sleep(0.1)
        os._exit(0)
    os.kill(os.getpid(), 9)
lost(lambda: mc.gradients([np.ones(3)]))
open(done, "w").close()
"""
    check_detected(on_ranks(body, tmp_path, two))


def test_create_team_does_not_wait_for_a_rank_lost_on_another_host(two: hosts.Hosts, tmp_path: Path) -> None:
    body = """
mc.init(nteams=1)
if mc.get_rank() == 1:
    os.kill(os.getpid(), 9)
lost(lambda: mc.create_team(1))
"""
    check_detected(on_ranks(body, tmp_path, two))


def test_a_failed_start_of_one_rank_is_reported_at_once(tmp_path: Path) -> None:
    body = """
start = time.monotonic()
if os.environ.get("PMI_RANK") == "1":
    os.environ["DL_COMM_TIMELINE"] = "/proc/nowhere"
try:
    mc.init()
except mc.CommError as error:
    print(f"failed after {time.monotonic() - start:.0f} s: {error}", flush=True)
"""
    finished = on_ranks(body, tmp_path)
    found = re.search(r"failed after (\d+) s: .*/proc/nowhere", finished.output)
    if not found and "failed after" not in finished.output:
        pytest.skip("the launcher does not set PMI_RANK")
    assert found, finished.output
    assert int(found[1]) < 30, finished.output
    # The others get the same error, with the rank.
    assert finished.output.count("rank 1 on") == 2, finished.output


def test_a_forked_child_does_not_write_its_parents_timeline(tmp_path: Path) -> None:
    body = """
mc.init(nteams=1)
mc.timeline.start(sys.argv[1])
mc.gradients([np.ones(3)])
child = os.fork()
if child == 0:
    try:
        mc.timeline.stop()
    except mc.StateError:
        os._exit(7)
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
mc.gradients([np.ones(3)])
mc.timeline.stop()
"""
    finished = on_ranks(body, tmp_path)
    assert finished.returncode == 0, finished.output
    for rank in range(2):
        events = json.loads((tmp_path / f"rank{rank}.trace.json").read_text())
        assert sum(event.get("cat") == "step" for event in events) == 2
