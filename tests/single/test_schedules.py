"""The exact lines that schedules print, and exits during a schedule."""

from __future__ import annotations

import os
import re
from collections.abc import Callable

import pytest

from launch import Finished

Script = Callable[..., Finished]

HEAD = """
import os, time
import numpy as np
import {package} as mc
mc.init(2, 2, 1000)
def calls(team, count):
    return [float(mc.gradients([np.full(3, 2.0 ** i + mc.get_rank(), np.float32)], team)[0][0]) for i in range(count)]
"""

SO_FAR = r"Rank (\d+) has waited a total of (\d+\.\d{6}) seconds for communication to complete so far on team (\d+) "
SO_FAR += r"\(calls = (\d+)\)"
AT_END = (
    r"Rank (\d+) waited a total of (\d+\.\d{6}) seconds for communication to complete summed across all thread teams"
)


def reports(finished: Finished) -> tuple[list[tuple[str, ...]], list[tuple[str, ...]]]:
    """The plugin's two kinds of lines; no other is allowed."""
    assert finished.returncode == 0, finished.output
    lines = finished.output.splitlines()
    so_far = [found.groups() for line in lines if (found := re.fullmatch(SO_FAR, line))]
    at_end = [found.groups() for line in lines if (found := re.fullmatch(AT_END, line))]
    assert len(so_far) + len(at_end) == len(lines), finished.output
    return so_far, at_end


@pytest.mark.parametrize("package", ["dl_comm", "ml_comm"])
@pytest.mark.parametrize("verbosity", [0, 1, 2])
def test_lines_of_waiting(script: Script, package: str, verbosity: int) -> None:
    text = HEAD.format(package=package) + (
        f"mc.config_team(0, 0, 3, 9, {verbosity}, 4)\nmc.config_team(1, 1, 20, 20, {verbosity}, 100)\n"
        "calls(0, 9); calls(1, 9)\nmc.finalize(); mc.finalize()\n"
    )
    so_far, at_end = reports(script(2, text))
    ranks = [[], ["0"], ["0", "1"]][verbosity]
    for rank in ("0", "1"):
        mine = [(team, calls) for who, _, team, calls in so_far if who == rank]
        assert mine == ([("0", "0"), ("0", "4"), ("0", "8"), ("1", "0")] if rank in ranks else [])
        totals = [float(seconds) for who, seconds, team, _ in so_far if who == rank and team == "0"]
        assert totals == sorted(totals), "a total so far"
        assert [float(seconds) >= totals[-1] for who, seconds in at_end if who == rank] == [True] * (rank in ranks)


def test_the_end_before_the_last_call(script: Script) -> None:
    """A mean that no call has returned still ends on every rank, and is reported."""
    text = HEAD.format(package="dl_comm") + (
        "mc.config_team(0, 0, 0, 50, 1, 0)\nassert calls(0, 5) == [1.5, 0, 2.5, 4.5, 8.5]\n"
        "if mc.get_rank() == 0: time.sleep(0.5)\n"
    )
    finished = script(2, text)
    assert finished.returncode == 0, finished.output
    assert finished.output.count("finalize() came before the last of team 0's max_steps calls") == 1, finished.output
    assert len(re.findall(AT_END, finished.output)) == 1


def test_an_uncaught_exception_with_a_call_in_flight(script: Script) -> None:
    text = HEAD.format(package="dl_comm") + (
        "mc.config_team(0, 0, 0, 50)\ntry:\n    calls(0, 5)\n    if mc.get_rank() == 1: raise RuntimeError('mine')\n"
        "    calls(0, 5)\nexcept mc.CommError as error:\n    print('caught:', type(error).__name__, flush=True)\n"
    )
    finished = script(2, text)
    assert not finished.timed_out
    assert "caught: PeerLostError" in finished.output, finished.output


def test_the_environment_sets_the_cool_down(script: Script) -> None:
    text = HEAD.format(package="ml_comm") + (
        "mc.config_team(0, 0, -6, 8)\nassert calls(0, 8) == [1.5, 0, 2.5, 4.5, 8.5, 16.5, 32.5 + 64.5, 128.5]\n"
    )
    assert script(2, text, env={"DL_COMM_COOLDOWN": "after"}).returncode == 0
    finished = script(1, HEAD.format(package="dl_comm"), env={"DL_COMM_COOLDOWN": "soon"})
    assert "DL_COMM_COOLDOWN is 'soon'; set it to 'after' or 'last'" in finished.output


THREADS = """
def threads(expected):
    "Team 0's threads by number: where each may run. A thread names and binds itself, which may take a moment."
    end, found = time.monotonic() + 20, {}
    while len(found) < expected and time.monotonic() < end:
        time.sleep(0.05)
        for task in os.listdir("/proc/self/task"):
            name = open(f"/proc/self/task/{task}/comm").read().strip()
            if name.startswith("dlcomm-0."):
                found[int(name.partition(".")[2])] = os.sched_getaffinity(int(task))
    time.sleep(0.2)
    return found
"""


def test_thread_affinity(script: Script) -> None:
    cpu = sorted(os.sched_getaffinity(0))[-1]
    text = HEAD.format(package="dl_comm") + THREADS + "threads(2)\nfound = threads(2)\n"
    text += f"assert found == {{0: {{{cpu}}}, 1: {{{cpu}}}}}, found\nassert calls(0, 3) == [1.5, 2.5, 4.5]\n"
    finished = script(2, text, env={"DL_COMM_AFFINITY": str(cpu)})
    assert finished.returncode == 0, finished.output
    finished = script(1, HEAD.format(package="dl_comm"), env={"DL_COMM_AFFINITY": "1000"})
    assert "DL_COMM_AFFINITY names processor 1000" in finished.output, finished.output


@pytest.mark.parametrize(("call", "threads"), [("mc.init()", 3), ("mc.init(5, 1)", 5)])
def test_threads_of_the_environment(script: Script, call: str, threads: int) -> None:
    text = f"import os, time, dl_comm as mc\n{call}\n" + THREADS + f"print('threads:', sorted(threads({threads})))\n"
    finished = script(1, text, env={"DL_COMM_DEFAULT_NTHREADS": "3"})
    assert f"threads: {list(range(threads))}" in finished.output, finished.output


def test_double_precision_of_the_environment(script: Script) -> None:
    """1e8 + 1 - 1e8 is 0 in float32 and 1 in float64."""
    text = HEAD.format(package="dl_comm") + (
        "value = [1e8, 1.0, -1e8][mc.get_rank()]\n"
        "mean = float(mc.gradients([np.float32([value])], 0)[0][0]) * 3\n"
        "os.write(1, f'mean: {mean}\\n'.encode())\n"  # one write, so that lines do not mix
    )
    for level, expected in (("0", 0.0), ("1", 1.0)):
        finished = script(3, text, env={"DL_COMM_DEFAULT_PREC_LEVEL": level})
        means = [float(mean) for mean in re.findall(r"mean: (\S+)", finished.output)]
        assert means == pytest.approx([expected] * 3), finished.output
