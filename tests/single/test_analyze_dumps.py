"""``python -m dl_comm.analyze_dumps`` on synthetic dumps and on real jobs that hang, crash and mismatch."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dl_comm.analyze_dumps._analysis import analyze
from dl_comm.analyze_dumps._dumps import BadInput, read
from dl_comm.analyze_dumps._findings import Finding
from dl_comm.analyze_dumps._processes import states
from dl_comm.analyze_dumps._stragglers import stragglers
from launch import Finished, launch, run

Script = Callable[..., Finished]
NOW = 1_800_000_000.0
GRADIENTS = "average 'gradients' on team 0"
MISMATCH = "collective mismatch, nothing was written:\n  rank 0: a\n  rank 1: b"


def call(state: str, ago: float, matched: int | None = None, title: str = GRADIENTS, **more: Any) -> dict[str, Any]:
    """A call submitted ``ago`` seconds before now; completed calls took half a second."""
    ended = 0.5 if state in ("done", "failed") else None
    return {
        "number": (matched or 9) - 1, "match_index": matched, "name": title, "signature": f"{abs(hash(title)):016x}",
        "state": state, "error": None, "tensors": ["tensor 0 'w': float32[64,3]"], "num_tensors": 161,
        "submitted": NOW - ago, "ended_s": ended, "waits": [], "waiting_for": [], **more,
    }  # fmt: skip


def dump(folder: Path, rank: int, calls: dict[int, list[dict[str, Any]]], size: int = 3, **more: Any) -> None:
    teams = [
        {
            "team": team,
            "matched": sum(one["state"] == "done" for one in own),
            "failure": more.get("failure") if team == 0 else None,
            "calls": own,
        }
        for team, own in calls.items()
    ]
    ranks = [{"rank": other, "host": f"node{other}", "pid": 100 + other} for other in range(size)]
    content = {"format": "dl_comm dump 2", "job": "abc", "reason": "SIGUSR1", "time": NOW, "rank": rank, "size": size}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"rank{rank}.json").write_text(json.dumps({**content, "ranks": ranks, "teams": teams, **more}))


def analyzed(folder: Path) -> list[Finding]:
    return analyze(read(folder), {})


def waiting(for_ranks: list[int], ago: float = 62.0, **more: Any) -> list[dict[str, Any]]:
    return [call("done", 70, 1), call("matching", ago, waiting_for=for_ranks, **more)]


def test_a_rank_in_user_code(tmp_path: Path) -> None:
    dump(tmp_path, 0, {0: waiting([2])})
    dump(tmp_path / "node1", 1, {0: waiting([2])})
    dump(tmp_path / "node2", 2, {0: [call("done", 70, 1)], -1: []})
    first, *others = analyzed(tmp_path)
    assert (first.kind, first.ranks, first.waiting, first.seconds, others) == ("not_called", (2,), (0, 1), 62.0, [])
    assert first.text.startswith(
        f"rank 2 on node2 (pid 102) has not called {GRADIENTS} (tensor 0 'w': float32[64,3] and 160 more), "
        f"in which ranks 0, 1 have waited 62 s for it; its last call was {GRADIENTS}, number 0, which ended 70 s "
    )


def test_the_stacks_of_a_dump_locate_user_code(tmp_path: Path) -> None:
    stacks = [
        "Thread 0x1 (most recent call first):", '  File "/lib/queue.py", line 3 in get', "",
        "Current thread 0x2 (most recent call first):",
        '  File "/home/me/data.py", line 7 in load', '  File "/home/me/train.py", line 31 in <module>',
    ]  # fmt: skip
    dump(tmp_path, 0, {0: waiting([1])}, size=2)
    dump(tmp_path, 1, {0: [call("done", 70, 1)]}, size=2, stacks=stacks)
    (finding,) = analyzed(tmp_path)
    assert finding.text.endswith(
        "it runs user code (data.py, line 7 in load, called from train.py, line 31 in <module>)"
    )


def test_the_last_call_is_that_of_the_highest_number(tmp_path: Path) -> None:
    dump(tmp_path, 0, {0: [call("done", 71, 1), *waiting([1])]}, size=2)
    dump(tmp_path, 1, {0: [call("done", 69.999, 1), call("done", 70, 2, "average on team 0")]}, size=2)
    (finding,) = analyzed(tmp_path)
    assert "its last call was average on team 0, number 1, which ended 70 s before" in finding.text


def test_ranks_outside_of_a_group_are_not_waited_for(tmp_path: Path) -> None:
    """Two groups of one name, whose members have other ranks in the job than in the group."""
    title = "allreduce (sum) on group 'part'"

    def group(*members: int) -> dict[str, Any]:
        return {"team": "part", "group": f"{sum(members):016x}", "members": list(members), "failure": None}

    dump(tmp_path, 0, {}, 5, teams=[{**group(0, 1), "matched": 3, "calls": [call("done", 70, 3, title)]}])
    dump(tmp_path, 1, {}, 5, teams=[{**group(0, 1), "matched": 3, "calls": [call("done", 70, 3, title)]}])
    waits = [call("done", 70, 1, title), call("matching", 62, title=title, waiting_for=[2])]
    dump(tmp_path, 4, {}, 5, teams=[{**group(4, 2), "matched": 1, "calls": waits}])
    dump(tmp_path, 2, {}, 5, teams=[{**group(4, 2), "matched": 1, "calls": waits[:1]}])
    dump(tmp_path, 3, {}, 5, teams=[])
    (finding,) = analyzed(tmp_path)
    assert (finding.kind, finding.ranks, finding.waiting, finding.team) == ("not_called", (2,), (4,), "part")
    assert finding.text.startswith(f"rank 2 on node2 (pid 102) has not called {title} (")


def test_a_failed_group(tmp_path: Path) -> None:
    failed = {"team": "part", "group": "ab", "members": [1], "matched": 0, "failure": "why", "calls": []}
    dump(tmp_path, 0, {0: []}, 2)
    dump(tmp_path, 1, {}, 2, teams=[failed])
    assert [finding.text for finding in analyzed(tmp_path)] == ["group 'part' has failed on rank 1: why"]
    for wrong in ({"members": [2]}, {"team": None}):
        dump(tmp_path, 1, {}, 2, teams=[failed | wrong])
        assert "rank1.json is not a dump of dl_comm, skipped" in " ".join(read(tmp_path).notes)


def test_a_lost_member_of_a_group(tmp_path: Path) -> None:
    failure = "peer lost: rank 1 (rank 2 on node2 of the job) (pid 102) has ended: killed by signal 9"
    group = {"team": "part", "group": "ab", "members": [0, 2], "matched": 0, "failure": failure, "calls": []}
    dump(tmp_path, 0, {}, teams=[group])
    dump(tmp_path, 1, {}, teams=[])
    first, *_ = analyzed(tmp_path)
    assert (first.kind, first.ranks) == ("lost", (2,))


def test_a_chain_of_waits(tmp_path: Path) -> None:
    dump(tmp_path, 0, {0: waiting([1, 2])})
    dump(tmp_path, 1, {0: [call("done", 70, 1)], -1: [call("matching", 50, title="barrier", waiting_for=[2])]})
    dump(tmp_path, 2, {0: [call("done", 70, 1)], -1: []})
    found = analyzed(tmp_path)
    assert [(one.kind, one.ranks) for one in found[:2]] == [("not_called", (2,))] * 2
    (other,) = (one for one in found if one.kind == "different_call" and one.call == GRADIENTS)
    assert other.ranks == (1,)
    assert "it waits in barrier (tensor 0 'w': float32[64,3] and 160 more) for rank 2" in other.text


def test_different_calls_and_queued_calls(tmp_path: Path) -> None:
    other = "average 'loss' on team 0"
    dump(tmp_path, 0, {0: waiting([1])}, size=2)
    dump(tmp_path, 1, {0: waiting([0], title=other)}, size=2)
    found = analyzed(tmp_path)
    assert [one.kind for one in found] == ["different_call"] * 2
    assert f"it called {other} (tensor 0" in next(one for one in found if one.ranks == (1,)).text
    dump(tmp_path, 1, {0: [*waiting([0], title=other), call("queued", 61)]}, size=2)
    (behind,) = (one for one in analyzed(tmp_path) if one.ranks == (1,))
    assert f"has called {GRADIENTS}, but it is behind {other}" in behind.text


def test_ranks_without_a_dump(tmp_path: Path) -> None:
    dump(tmp_path, 0, {0: waiting([2])})
    dump(tmp_path, 1, {0: waiting([2])})
    (no_response,) = analyzed(tmp_path)
    assert (no_response.kind, no_response.ranks) == ("no_response", (2,))
    assert "has written no dump: it has ended, is stopped, or did not get the signal" in no_response.text
    (stopped,) = analyze(read(tmp_path), {2: "is stopped"})
    assert stopped.text.startswith("rank 2 on node2 (pid 102) is stopped; ranks 0, 1 have waited 62 s for it in")
    # A dump from before the wait does not count.
    dump(tmp_path, 2, {0: [call("done", 70, 1)]}, time=NOW - 65)
    (old,) = analyzed(tmp_path)
    assert (old.kind, old.ranks) == ("no_response", (2,))
    assert "no dump since 65 s before the newest" in old.text


def test_a_lost_rank(tmp_path: Path) -> None:
    failure = "rank 1 on node1 (pid 101) has ended: killed by signal 9"
    for rank in (0, 2):
        dump(tmp_path, rank, {0: [call("done", 70, 1), call("failed", 62, error=failure)]}, failure=failure)
    (ended,) = analyzed(tmp_path)
    assert (ended.kind, ended.ranks, ended.waiting) == ("lost", (1,), (0, 2))
    assert ended.text.startswith(failure)


def test_a_timeout_counts_as_a_wait(tmp_path: Path) -> None:
    failure = "not complete after 300.0 s"
    late = call("failed", 302, error=failure, ended_s=300.0)
    for rank in (0, 1):
        dump(tmp_path, rank, {0: [call("done", 400, 1), late]}, failure=failure)
    dump(tmp_path, 2, {0: [call("done", 400, 1)]}, failure=failure)
    first, second = analyzed(tmp_path)
    assert (first.kind, first.ranks, first.seconds) == ("not_called", (2,), 302.0)
    assert (second.kind, second.waiting) == ("failed", (0, 1, 2))


def test_a_mismatch_is_not_a_wait(tmp_path: Path) -> None:
    for rank in range(2):
        dump(tmp_path, rank, {0: [call("failed", 5, error=MISMATCH), call("done", 4, 1)]}, size=2)
    (only,) = analyzed(tmp_path)
    assert (only.kind, only.text, only.waiting, only.is_problem) == ("mismatch", MISMATCH, (0, 1), True)


def test_a_rank_stalled_in_a_common_call(tmp_path: Path) -> None:
    for rank in range(3):
        dump(tmp_path, rank, {0: [call("running", 20, 1, waiting_for=[] if rank == 1 else [1])]})
    (slow,) = analyzed(tmp_path)
    assert (slow.kind, slow.ranks, slow.waiting) == ("stalled_in_call", (1,), (0, 2))


def test_a_rank_stalled_in_an_operation_of_its_own(tmp_path: Path) -> None:
    """On a parameter server, where no other rank is missing."""
    title = "a send to the parameter server (tensor 0)"
    own = call("running", 20, None, title, one_sided=True, tensors=[], num_tensors=0)
    dump(tmp_path, 0, {0: [call("done", 70, 1)], -1: [own]}, size=2)
    dump(tmp_path, 1, {0: [call("done", 70, 1)], -1: []}, size=2)
    (slow,) = analyzed(tmp_path)
    assert (slow.kind, slow.ranks, slow.waiting) == ("stalled_in_call", (0,), ())
    assert slow.text == f"rank 0 on node0 (pid 100) has waited 20 s in {title}"


def test_a_healthy_job_with_a_straggler(tmp_path: Path) -> None:
    waits = [{"ranks": [2], "seconds": 2.5}, {"ranks": [1], "seconds": 0.5}]
    for rank in range(3):
        own = waits if rank == 0 else []
        dump(tmp_path, rank, {0: [call("done", 10, 1, waits=own), call("matching", 0.01)] if rank else [
            call("done", 10, 1, waits=own), call("done", 5, 2, waits=own)]})  # fmt: skip
    late, well = analyzed(tmp_path)
    assert (late.kind, late.ranks, late.seconds, late.is_problem, well.kind) == (
        "straggler",
        (2,),
        5.0,
        False,
        "healthy",
    )
    assert [(row.ranks, row.seconds, row.calls) for row in stragglers(read(tmp_path))] == [
        ((2,), 5.0, 2),
        ((1,), 1.0, 2),
    ]


def test_the_newest_job_and_the_newest_dump_count(tmp_path: Path) -> None:
    dump(tmp_path / "old", 0, {0: waiting([1])}, size=2, job="old", time=NOW - 1000)
    dump(tmp_path / "a", 0, {0: waiting([1])}, size=1, time=NOW - 100)
    dump(tmp_path / "b", 0, {0: [call("done", 4, 1)]}, size=1)
    (tmp_path / "rank7.json").write_text('{"format":')
    (tmp_path / "rank0.trace.json").write_text("[")
    job = read(tmp_path)
    assert (job.name, job.dumps[0].path.parent.name) == ("abc", "b")
    assert [("rank7.json is not a dump" in note, "job abc is the newest" in note) for note in job.notes] == [
        (True, False),
        (False, True),
    ]
    assert [one.kind for one in analyze(job, {})] == ["idle"]


def test_findings_of_many_ranks_are_merged(tmp_path: Path) -> None:
    for rank in range(64):
        dump(tmp_path, rank, {0: waiting(list(range(1, 64))) if rank == 0 else [call("done", 70, 1)]}, size=64)
    (one,) = analyzed(tmp_path)
    assert one.ranks == tuple(range(1, 64))
    assert "ranks 1, 2, 3, 4, 5, 6, 7, ... 63 (63 ranks): not_called. For example, rank 1" in one.text


def test_states_of_processes(tmp_path: Path) -> None:
    children = [subprocess.Popen(["sleep", "100"]) for _ in range(3)]
    try:
        os.kill(children[1].pid, signal.SIGSTOP)
        children[2].kill()
        children[2].wait()
        rank_info = [{"rank": n, "host": socket.gethostname(), "pid": one.pid} for n, one in enumerate(children)]
        dump(tmp_path, 0, {0: waiting([1])}, ranks=rank_info)
        while states(read(tmp_path)) != {1: "is stopped", 2: "has ended"}:
            time.sleep(0.05)
        # A process that started after the dumps only reuses the pid.
        dump(tmp_path, 0, {0: waiting([1])}, ranks=[*rank_info[:2], {**rank_info[2], "pid": 1}], time=1000.0)
        assert states(read(tmp_path)) == {}
    finally:
        for child in children:
            child.kill()
            child.wait()


@pytest.mark.parametrize("content", ["[]", "{}", '{"format": "dl_comm dump 1"}', "no json"])
def test_bad_input(tmp_path: Path, content: str) -> None:
    with pytest.raises(BadInput, match="not a folder"):
        read(tmp_path / "none")
    with pytest.raises(BadInput, match=r"no dump \(rank"):
        read(tmp_path)
    (tmp_path / "rank0.json").write_text(content)
    finished = analyze_dumps(tmp_path)
    assert (finished.returncode, "rank0.json is not a dump" in finished.output) == (2, True), finished.output


def analyze_dumps(folder: Path, *options: str) -> Finished:
    return run([sys.executable, "-m", "dl_comm.analyze_dumps", str(folder), *options], 60)


HEAD = """
import os, signal, sys, time
import numpy as np
import dl_comm as mc
mc.init()
rank = mc.get_rank()
folder = os.environ["DL_COMM_DUMP_DIR"]
gradients = [np.ones(shape, np.float32) for shape in ((5, 2), 7, 9)]
def written(rank):
    while not os.path.exists(f"{folder}/rank{rank}.json"): time.sleep(0.05)
for _ in range(3): mc.gradients(gradients)
"""


def job(script: Script, folder: Path, text: str, timeout: int = 300, **settings: str) -> Finished:
    """``timeout``: the deadline of calls, not of the start."""
    env = {"DL_COMM_DUMP_DIR": str(folder), "DL_COMM_STALL_WARN_S": "1", "DL_COMM_TIMEOUT_S": "300"}
    return script(3, f"{HEAD}mc.set_timeout({timeout})\n{text}", 100, {**env, **settings})


def test_a_real_rank_that_sleeps(script: Script, tmp_path: Path) -> None:
    text = "if rank == 2: written(0), written(1), os.kill(os.getpid(), signal.SIGUSR1), written(2)\n"
    finished = job(script, tmp_path / "dumps", text + "mc.gradients(gradients)\nprint('fine', flush=True)\n")
    assert finished.output.count("fine") == 3, finished.output
    report = analyze_dumps(tmp_path / "dumps")
    assert "rank 2 on " in report.output.split("\n")[2], report.output
    assert "has not called average on team 0 (tensor 0: float32[5, 2] and 2 more), in which ranks 0, 1" in report.output
    assert "its last call was average on team 0, number 2" in report.output
    assert report.returncode == 1
    as_json = json.loads(analyze_dumps(tmp_path / "dumps", "--json").output)
    (finding,) = (one for one in as_json["findings"] if one["is_problem"])
    assert (finding["kind"], finding["ranks"], finding["waiting"]) == ("not_called", [2], [0, 1])


def test_a_real_group_whose_member_sleeps(script: Script, tmp_path: Path) -> None:
    text = """
part = mc.Group([2, 1], name="part", timeout=2) if rank else None
if rank == 1:
    time.sleep(3)
try: part and part.allreduce(np.ones(3))
except mc.CommError: mc.dump(folder)
if rank != 2: mc.dump(folder)
"""
    job(script, tmp_path / "dumps", text)
    report = analyze_dumps(tmp_path / "dumps")
    assert report.returncode == 1, report.output
    (line,) = (line for line in report.output.splitlines() if "has not called" in line)
    assert re.match(r"rank 1 on \S+ .* has not called allreduce \(sum\) on group 'part' .* rank 2 has waited \d", line)
    assert "it waits in" not in report.output, report.output


def test_a_real_lost_rank(tmp_path: Path) -> None:
    program, dumps = tmp_path / "script.py", tmp_path / "dumps"
    program.write_text(
        HEAD + "if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\n"
        "try: mc.gradients(gradients)\nexcept mc.PeerLostError: written(2 - rank)\n"
    )
    # The shell delays the exit that mpiexec sees, so that the other ranks can write their dumps.
    command = ["sh", "-c", f"{shlex.join([sys.executable, str(program)])}; sleep 4"]
    launch(3, command, 60, {"DL_COMM_DUMP_DIR": str(dumps)})
    report = analyze_dumps(dumps)
    assert report.returncode == 1, report.output
    first = report.output.split("\n")[2]
    assert first.startswith("rank 1 on "), report.output
    assert "has ended: killed by signal 9" in first or "has ended; ranks" in first, report.output


def test_a_real_mismatch(script: Script, tmp_path: Path) -> None:
    text = (
        "try: mc.gradients(gradients if rank else gradients[:2])\nexcept mc.MismatchError: mc.dump(folder)\n"
        "mc.barrier()\n"
    )
    finished = job(script, tmp_path / "dumps", text)
    assert finished.returncode == 0, finished.output
    report = analyze_dumps(tmp_path / "dumps")
    assert report.returncode == 1
    assert "ranks 1, 2: average on team 0 of 3 tensors\n    tensor 2: float32[9]" in report.output, report.output


def test_real_ranks_in_different_calls(script: Script, tmp_path: Path) -> None:
    text = (
        "try: mc.gradients(gradients) if rank else mc.barrier()\nexcept mc.CommError: mc.dump(folder), time.sleep(3)\n"
    )
    # The deadline passes before the ranks check whether they wait for each other.
    job(script, tmp_path / "dumps", text, timeout=4, DL_COMM_MATCH_TIMEOUT_S="300")
    report = analyze_dumps(tmp_path / "dumps")
    assert report.returncode == 1
    assert "has not called average on team 0 (tensor 0: float32[5, 2] and 2 more)" in report.output, report.output
    assert "it waits in barrier" in report.output, report.output
    job(script, tmp_path / "more", text)
    report = analyze_dumps(tmp_path / "more")
    assert report.returncode == 1
    assert "rank 0: has made 3 calls on team 0, and waits in barrier" in report.output, report.output
    assert "ranks 1, 2: has made 2 calls on the control team, and waits in average on team 0" in report.output, (
        report.output
    )
