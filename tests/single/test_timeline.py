"""``python -m dl_comm.timeline``: merged trace and report of synthetic files and of a job with a straggler."""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from dl_comm.timeline._files import BadInput, events, find
from dl_comm.timeline._metrics import TraceMetrics, exponent
from dl_comm.timeline._page import page as page_of
from dl_comm.timeline._recent import Recent
from dl_comm.timeline._report import quantile, report
from launch import Finished, launch, run

Script = Callable[..., Finished]
Event = dict[str, Any]
GB = 1e9


def span(cat: str, name: str, ts: float, dur: float, rank: int = 0, tid: int = 1, **args: Any) -> Event:
    return {"ph": "X", "cat": cat, "name": name, "pid": rank, "tid": tid, "ts": ts, "dur": dur, "args": args}


def a_step(rank: int, number: int, begin: float, late: float) -> list[Event]:
    """A synthetic step: a call of 1000 bytes that takes 100 µs, 40 of them exposed."""
    team = {"team": 0, "call": number}
    return [
        span("step", "gradients", begin + late, 0, rank, **team),
        span("phase", "queue", begin + late, 10, rank, 2, **team),
        span("phase", "wait", begin + late + 10, 90, rank, 2, **team),
        *([] if late else [span("wait_for_rank", "wait for rank 1", begin + 20, 50, rank, 2, target="rank 1", **team)]),
        span("exposed", "waits for communication", begin + late + 70, 40, rank, team=0),
        span("call", "average", begin + late, 110, rank, 2, matched=number + 1, bytes=1000, error=None, **team),
    ]


def write(folder: Path, rank: int, content: list[Event], end: str = "]") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    name = {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank} on a (pid {rank + 9})"}}
    lines = "".join(json.dumps(event) + ",\n" for event in [name, *content])
    (folder / f"rank{rank}.trace.json").write_text("[\n" + lines + end)


def synthetic(folder: Path) -> None:
    for rank in range(2):
        write(folder, rank, [event for n in range(5) for event in a_step(rank, n, 1e6 + 1000 * n, 50.0 * rank)])


def metrics_of(folder: Path) -> TraceMetrics:
    metrics = TraceMetrics()
    for path in find(folder).values():
        for event in events(path, lambda _: None):
            metrics.add(event)
    return metrics


def timeline(folder: Path, *options: str) -> Finished:
    return run([sys.executable, "-m", "dl_comm.timeline", str(folder), *options], 100)


def test_metrics_of_a_synthetic_job(tmp_path: Path) -> None:
    synthetic(tmp_path)
    content = report(metrics_of(tmp_path), None)
    whole = content["all"]
    assert whole == content["teams"][0]
    assert (whole["calls"], whole["failed"], whole["bytes"]) == (10, 0, 10_000)
    assert whole["comm_s"] == pytest.approx(1e-3)
    assert whole["exposed_s"] == pytest.approx(4e-4)
    assert whole["overlap"] == pytest.approx(0.6)
    steps = whole["steps"]
    assert (steps["count"], len(steps["series"])) == (4, 4)
    assert [steps["median_s"], steps["p95_s"]] == pytest.approx([1e-3, 1e-3])
    assert steps["exposed_most"] == {"rank": 0, "median_s": pytest.approx(4e-5)}
    assert whole["late"]["rows"] == whole["late"]["columns"] == ["0", "1"]
    assert whole["late"]["seconds"] == [[0, pytest.approx(5 * 50e-6)], [0, 0]]
    assert whole["last"] == [{"rank": 1, "times": 5, "seconds": pytest.approx(5 * 50e-6)}]
    (size,) = whole["sizes"]
    assert (size["exponent"], size["calls"], size["rate"]) == (10, 10, pytest.approx(1e7))
    assert content["reference"] == {"rate": size["best"], "source": "the best call of this timeline", "measured": False}
    assert report(metrics_of(tmp_path), (2 * GB, "x"))["reference"] == {"rate": 2 * GB, "source": "x", "measured": True}


def test_exposed_time_is_that_of_each_rank(tmp_path: Path) -> None:
    """Rank 0 waits 700 µs of each step for rank 1, which waits for nobody."""
    for rank in range(2):
        steps = [event for n in range(5) for event in a_step(rank, n, 1e6 + 1000 * n, 50.0 * rank)]
        for event in steps:
            if event["cat"] == "exposed":
                event["dur"] = 0.0 if rank else 700.0
        write(tmp_path, rank, steps)
    steps = report(metrics_of(tmp_path), None)["all"]["steps"]
    assert steps["exposed_most"] == {"rank": 0, "median_s": pytest.approx(7e-4)}
    assert steps["exposed_least"] == {"rank": 1, "median_s": 0}
    assert [part["exposed_s"] for part in steps["series"]] == pytest.approx([7e-4] * 4)
    page = tmp_path / "page.html"
    finished = timeline(tmp_path, "-o", str(tmp_path / "trace.json"), "--html", str(page))
    assert "exposed communication a step: 700 µs on rank 0, 0 on rank 1; overlap" in finished.output, finished.output
    assert "700 µs on rank 0, 0 on rank 1" in page.read_text()


def test_quantiles_and_size_classes() -> None:
    values = [5.0, 1.0, 4.0, 2.0]
    assert quantile(values, 0.5) == statistics.median(values)
    assert quantile(values, 1.0) == 5.0
    assert quantile([], 0.5) is None
    assert [exponent(size) for size in (0, 1, 2, 3, 1024, 1025)] == [-1, 0, 1, 2, 10, 11]


def test_a_truncated_file_is_read_to_its_end(tmp_path: Path) -> None:
    synthetic(tmp_path)
    path = tmp_path / "rank1.trace.json"
    whole = path.read_text()
    path.write_text(whole[: len(whole) // 2])
    finished = timeline(tmp_path, "-o", str(tmp_path / "trace.json"))
    assert finished.returncode == 0, finished.output
    assert "rank1.trace.json ends in the middle" in finished.output
    merged = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert sum(event["pid"] == 1 and event["ph"] == "X" for event in merged) > 5
    # Damage elsewhere is an error.
    path.write_text(whole.replace('"ph": "X"', '"ph": "X', 1))
    finished = timeline(tmp_path, "-o", str(tmp_path / "trace.json"))
    assert (finished.returncode, "is damaged in line" in finished.output) == (2, True), finished.output


def test_the_merged_trace_nests_and_begins_at_zero(tmp_path: Path) -> None:
    overlapping = [
        span("call", "average", 5000 + 10 * n, 100, team=0, call=n, matched=n + 1, bytes=8, error=None)
        for n in range(3)
    ]
    queue = [span("phase", "queue", 5000 + 10 * n, 30, team=0, call=n) for n in range(3)]
    write(tmp_path, 0, [span("step", "gradients", 4990, 0, team=0, call=0), *queue, *overlapping])
    assert timeline(tmp_path, "-o", str(tmp_path / "trace.json")).returncode == 0
    merged = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    (step,) = (event for event in merged if event["ph"] == "i")
    assert (step["ts"], step["s"]) == (0, "p")
    assert sorted(event["ts"] for event in merged if event.get("cat") == "call") == [10, 20, 30]
    assert nests(merged)
    tracks = {event["args"]["name"] for event in merged if event["name"] == "thread_name"}
    assert tracks == {"calls of team 0", "calls of team 0 (2)", "calls of team 0 (3)"}


def nests(merged: list[Event]) -> bool:
    """Whether overlapping spans of a track nest, except for rounding."""
    tracks: dict[Any, list[tuple[float, float]]] = defaultdict(list)
    for event in merged:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for spans in tracks.values():
        open_ends: list[float] = []
        for begin, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while open_ends and open_ends[-1] <= begin + 0.01:
                open_ends.pop()
            if open_ends and end > open_ends[-1] + 0.01:
                return False
            open_ends.append(end)
    return True


def test_bad_input(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="not a folder"):
        find(tmp_path / "none")
    assert (timeline(tmp_path).returncode, "has no timeline" in timeline(tmp_path).output) == (2, True)
    (tmp_path / "rank0.trace.json").write_text('{"traceEvents": []}')
    finished = timeline(tmp_path)
    assert (finished.returncode, "is not a timeline of dl_comm" in finished.output) == (2, True), finished.output
    synthetic(tmp_path)
    doctor = tmp_path / "doctor.json"
    doctor.write_text("{}")
    finished = timeline(tmp_path, "--doctor", str(doctor), "--html", str(tmp_path / "page.html"))
    assert (finished.returncode, "has no limit_gb_per_s" in finished.output) == (2, True), finished.output
    assert timeline(tmp_path, "--limit", "0").returncode == 2


def test_the_limit_comes_from_the_doctor(tmp_path: Path) -> None:
    synthetic(tmp_path)
    doctor, page = tmp_path / "doctor.json", tmp_path / "page.html"
    doctor.write_text(json.dumps({"checks": [{"name": "average", "facts": {"limit_gb_per_s": 3.5}}]}))
    assert timeline(tmp_path, "--doctor", str(doctor), "--html", str(page)).returncode == 0
    assert Page(page).report["reference"]["rate"] == 3.5 * GB
    assert "the machine's limit: 3.5 GB/s" in page.read_text().replace("&#x27;", "'")


def test_a_page_of_many_ranks_and_calls_stays_small(tmp_path: Path) -> None:
    metrics, recent = TraceMetrics(), Recent()
    for rank in range(64):
        for number in range(300):
            for event in a_step(rank, number, 1e6 + 1000 * number, 0.5 * rank):
                if event["cat"] == "call":
                    event["args"]["bytes"] = 1 << (number % 30)
                metrics.add(event)
                recent.add(event)
    content = report(metrics, None)
    assert len(content["all"]["steps"]["series"]) == 100
    text = page_of(content, recent.rows(metrics, 0), [])
    assert len(text) < 1_000_000
    assert content["all"]["last"][0]["rank"] == 63
    assert content["all"]["late"]["rows"][:2] == ["0-1", "2-3"]


class Page(HTMLParser):
    """The parsed page: unclosed elements, external resources, and the report in it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.counts: dict[str, int] = defaultdict(int)
        self._text = ""
        self.feed(path.read_text())
        self.report = json.loads(self._text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.counts[tag] += 1
        self.loads += [f"{tag} {name}={value}" for name, value in attrs if name in ("src", "href", "srcset", "data")]
        if tag not in ("meta", "rect", "line"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.counts[tag] += 1

    def handle_endtag(self, tag: str) -> None:
        if tag != "rect":
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self._text += data


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a real job: rank 2 is late in every step."""
    folder = tmp_path_factory.mktemp("slow")
    program = folder / "script.py"
    program.write_text(
        "import time\nimport numpy as np\nimport dl_comm as mc\nmc.init(1, 2)\n"
        "for step in range(8):\n"
        "    time.sleep(0.15 if mc.get_rank() == 2 else 0.0)\n"
        "    mc.gradients([np.ones(3000, np.float32)], 0)\n"
        "    mc.gradients([np.ones(200 * 4 ** (step % 4), np.float32)], 1)\n"
        "mc.finalize()\n"
    )
    finished = launch(3, [sys.executable, str(program)], 100, {"DL_COMM_TIMELINE": str(folder)})
    assert finished.returncode == 0, finished.output
    finished = timeline(folder, "-o", str(folder / "trace.json"), "--html", str(folder / "page.html"))
    assert finished.returncode == 0, finished.output
    assert "rank 2 came last" in finished.output.splitlines()[3], finished.output
    return folder


def test_a_group_has_its_name_and_the_ranks_of_the_job(tmp_path: Path) -> None:
    label = {"number": 1 << 30, "name": "group 'a <b>'", "members": [2, 0], "hosts": [2]}
    team = {"team": 1 << 30, "call": 0}
    for rank in (0, 1, 2):
        group = {"ph": "M", "name": "dl_comm_group", "pid": rank, "args": label}
        late = 60.0 * (rank == 2)
        spans = [
            span("call", "allreduce", 5000 + late, 100 - late, rank, matched=1, bytes=8, error=None, **team),
            *([] if late else [span("wait_for_rank", "wait for rank 0", 5010, 50, rank, target="rank 0", **team)]),
            *([] if late else [span("wait_for_rank", "wait for host 0", 5060, 10, rank, target="host 0", **team)]),
        ]
        write(tmp_path, rank, [group, *spans] if rank != 1 else [])
    content = report(metrics_of(tmp_path), None)
    assert content["names"] == {1 << 30: "group 'a <b>'"}
    view = content["teams"][1 << 30]
    assert view["late"]["rows"] == ["0", "2"]
    assert view["late"]["columns"] == ["0", "2", "host of rank 2"]
    assert view["late"]["seconds"][0] == pytest.approx([0, 50e-6, 10e-6])
    assert [(late["rank"], late["times"]) for late in view["last"]] == [(2, 1)]
    finished = timeline(tmp_path, "-o", str(tmp_path / "trace.json"), "--html", str(tmp_path / "page.html"))
    assert finished.returncode == 0, finished.output
    tracks = {
        event["args"]["name"]
        for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        if event["name"] == "thread_name"
    }
    assert tracks == {"calls of group 'a <b>'"}
    assert "<td>group &#x27;a &lt;b&gt;&#x27;</td>" in (tmp_path / "page.html").read_text()


def test_two_jobs_in_one_folder_are_separate(tmp_path: Path) -> None:
    program = tmp_path / "script.py"
    program.write_text("import dl_comm as mc\nmc.init()\nfor _ in range(4): mc.barrier()\n")
    for ranks in (3, 2):
        finished = launch(ranks, [sys.executable, str(program)], 60, {"DL_COMM_TIMELINE": str(tmp_path / "traces")})
        assert finished.returncode == 0, finished.output
    finished = timeline(tmp_path / "traces")
    assert finished.returncode == 0, finished.output
    assert "2 ranks, " in finished.output
    (note,) = re.findall(r"another job is left out, 3 rank\(s\) of job (\w+), --job \1 reads it", finished.output)
    assert "3 ranks, " in timeline(tmp_path / "traces", "--job", note).output
    assert "has no timeline of job x" in timeline(tmp_path / "traces", "--job", "x").output


def test_a_real_straggler_is_found(slow: Path) -> None:
    view = Page(slow / "page.html").report["all"]
    assert view["late"]["columns"] == ["0", "1", "2"]
    seconds = view["late"]["seconds"]
    assert seconds[0][2] == max(seconds[0])
    assert seconds[1][2] == max(seconds[1])
    # 8 times 0.15 s, minus delays of the other ranks.
    assert min(seconds[0][2], seconds[1][2]) > 0.5
    assert view["last"][0]["rank"] == 2
    assert view["steps"]["count"] == 7


def test_the_numbers_of_the_page_are_those_of_the_trace(slow: Path) -> None:
    merged = json.loads((slow / "trace.json").read_text())["traceEvents"]
    view = Page(slow / "page.html").report["all"]
    own = [event for event in merged if event.get("args", {}).get("team", -1) >= 0]
    calls = [event for event in own if event["cat"] == "call"]
    assert view["calls"] == len(calls) == 3 * 16
    assert view["bytes"] == sum(event["args"]["bytes"] for event in calls)
    late: dict[tuple[int, str], float] = defaultdict(float)
    for event in own:
        if event["cat"] == "wait_for_rank":
            late[event["pid"], event["args"]["target"]] += event["dur"] * 1e-6
    for rank, row in enumerate(view["late"]["seconds"]):
        assert row == pytest.approx([late[rank, f"rank {other}"] for other in range(3)], abs=1e-6)
    exposed = sum(event["dur"] for event in own if event["cat"] == "exposed") * 1e-6
    assert view["exposed_s"] == pytest.approx(exposed, abs=1e-6)
    queued = sum(event["dur"] for event in own if event["name"] == "queue") * 1e-6
    comm = sum(event["dur"] for event in calls) * 1e-6 - queued
    assert view["comm_s"] == pytest.approx(comm, abs=1e-5)
    assert view["overlap"] == pytest.approx(max(1 - exposed / comm, 0), abs=1e-3)
    steps = defaultdict(list)
    for event in own:
        if event["ph"] == "i" and event["args"]["team"] == 0:
            steps[event["pid"]].append(event["ts"] * 1e-6)
    times = [b - a for own in steps.values() for a, b in zip(own, own[1:], strict=False)]
    assert view["steps"]["median_s"] == pytest.approx(statistics.median(times), abs=1e-6)


def test_the_trace_follows_the_format(slow: Path) -> None:
    merged = json.loads((slow / "trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in merged} == {0, 1, 2}
    for event in merged:
        assert event["ph"] in ("X", "M", "i")
        assert event["ph"] == "M" or event["ts"] >= 0
        assert event["ph"] != "X" or (event["dur"] >= 0 and isinstance(event["tid"], int))
    assert min(event["ts"] for event in merged if event["ph"] != "M") == 0
    assert nests(merged)


def test_the_page_is_self_contained(slow: Path) -> None:
    page = Page(slow / "page.html")
    assert page.open == []
    assert page.loads == []
    text = (slow / "page.html").read_text()
    assert not any(word in text for word in ("http://", "https://", "url(", "@import"))
    assert page.counts["svg"] >= 6
    assert page.counts["details"] == 2
