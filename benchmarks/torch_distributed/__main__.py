"""The command line: `python -m benchmarks.torch_distributed` from the root of the repository."""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import benchmarks.torch_distributed as package
from benchmarks.common import deepspeed, machine, plot
from benchmarks.common import options as common
from benchmarks.common.grid import number, ratio
from benchmarks.common.tools import Missing, Tools

ROOT = Path(__file__).parents[2]
LARGE = [1 << 20, 8 << 20, 64 << 20]
SIZES = {
    "all_reduce": [64, 4 << 10, 64 << 10, 8 << 20, 64 << 20],
    "all_gather_into_tensor": LARGE,
    "reduce_scatter_tensor": LARGE,
    "all_to_all_single": LARGE,
}
Case = dict[str, Any]


def measure(ranks: int, options: dict[str, Any], deadline_s: float) -> list[Case]:
    """Runs the workers; returns the cases that rank 0 printed. Raises RuntimeError if one fails."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    try:
        own, with_deepspeed = deepspeed.environment(ranks), True
    except Missing as missing:
        print(f"left out: deepspeed: {missing}", file=sys.stderr)
        own, with_deepspeed = {}, False
    options = {**options, "deepspeed": with_deepspeed}
    shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.torch_distributed.worker", json.dumps(options)]
    running = [
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "DL_COMM_DUMP_DIR": "none", **own, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(ranks)
    ]
    try:
        output = [process.communicate(timeout=deadline_s)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    if any(process.returncode != 0 for process in running):
        raise RuntimeError(f"the ranks ended with {[process.returncode for process in running]}")
    return [json.loads(line) for line in output[0].splitlines() if line.startswith("{")]


def medians(case: Case) -> dict[str, float]:
    """The median of each contender's rounds, in microseconds."""
    return {name: 1e6 * statistics.median(rounds) for name, rounds in case["rounds_s"].items()}


def exposed(case: Case) -> dict[str, float]:
    """The median over the rounds of a step's time above that of ``no_sync``, in microseconds."""
    alone = case["rounds_s"].get("no_sync", [])
    return {
        name: 1e6 * statistics.median(one - other for one, other in zip(rounds, alone, strict=True))
        for name, rounds in case["rounds_s"].items()
        if alone and name != "no_sync"
    }


def markdown(cases: list[Case]) -> str:
    """The tables of collectives and of training steps."""
    lines = [
        "| ranks | collective | bytes | dl_comm, µs | gloo, µs "
        "| gloo / dl_comm | DeepSpeed / dl_comm | over the core, µs |",
        "|---" * 8 + "|",
    ]
    steps = ["| ranks | step | dl_comm, ms | gloo, ms | gloo / dl_comm | exposed, dl_comm | exposed, gloo | ratio |"]
    steps.append("|---" * 8 + "|")
    for case in cases:
        found = medians(case)
        ours, gloo = found["dl_comm"], found["gloo"]
        if "bytes" in case:
            above = number(ours - found["core"]) if "core" in found else "-"
            peer = ratio(found["deepspeed"], ours) if "deepspeed" in found else "-"
            cells = [
                case["ranks"],
                case["case"],
                case["bytes"],
                number(ours),
                number(gloo),
                ratio(gloo, ours),
                peer,
                above,
            ]
            lines.append("| " + " | ".join(map(str, cells)) + " |")
        else:
            waits = exposed(case)
            mine, theirs = waits.get("dl_comm"), waits.get("gloo")
            cells = [case["ranks"], case["case"], number(ours / 1e3), number(gloo / 1e3), ratio(gloo, ours)]
            cells += [number(wait and wait / 1e3) for wait in (mine, theirs)]
            # Without any exposed communication a ratio means nothing.
            cells.append(ratio(theirs, mine) if mine is not None and mine > 0 else "-")
            steps.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n\n" + "\n".join(steps) + "\n"


def draw(cases: list[Case], title: str, path: Path) -> list[Path]:
    """A panel for each collective and number of ranks. Raises ImportError without matplotlib."""
    plt = plot.pyplot()
    timed = [case for case in cases if "bytes" in case]
    names, counts = (list(dict.fromkeys(case[key] for case in timed)) for key in ("case", "ranks"))
    figure, panels = plt.subplots(
        len(counts), len(names), figsize=(3 * len(names), 2.8 * len(counts)), squeeze=False, layout="constrained"
    )
    for row, ranks in zip(panels, counts, strict=True):
        for panel, name in zip(row, names, strict=True):
            chosen = [case for case in timed if case["case"] == name and case["ranks"] == ranks]
            for contender in chosen[0]["rounds_s"]:
                points = [(case["bytes"], medians(case)[contender]) for case in chosen]
                panel.loglog(*zip(*points, strict=True), marker=".", label=contender)
            panel.set_title(f"{name}, {ranks} ranks", fontsize=9)
            panel.set_xlabel("bytes")
            panel.grid(color="0.9")
            panel.legend(fontsize=7)
        row[0].set_ylabel("µs, slowest rank")
    figure.suptitle(title, fontsize=10)
    return plot.save(figure, path)


def main() -> int:
    """Measures, prints tables and writes files; returns 1 if a run failed."""
    parser = common.parser(package, "torch_distributed", 1800.0)
    parser.add_argument("--ranks", nargs="+", type=int, help="processes on this host (2 4)")
    parser.add_argument("--rounds", type=int, help="turns of each contender in each case (7)")
    parser.add_argument("--seconds", type=float, help="seconds of timed calls in a turn (0.1)")
    parser.add_argument("--train-s", type=float, help="seconds of timed steps in a turn (5)")
    parser.add_argument("--no-training", action="store_true", help="collectives only")
    options = parser.parse_args()
    quick = {"ranks": [2], "rounds": 2, "seconds": 0.001, "train_s": 0.001}
    full = {"ranks": [2, 4], "rounds": 7, "seconds": 0.1, "train_s": 5.0}
    common.complete(options, quick if options.quick else full)
    common.begin(options.out)
    print(package.__doc__)
    sizes = (
        {name: [size for size in each if size <= 1 << 20] for name, each in SIZES.items()} if options.quick else SIZES
    )
    model, batch = ("transformer_small", 1) if options.quick else ("transformer_large", 4)
    work = {"rounds": options.rounds, "seconds": options.seconds, "train_s": options.train_s, "sizes": sizes}
    work |= {"model": "" if options.no_training else model, "batch": batch}
    with tempfile.TemporaryDirectory() as folder:
        versions = machine.versions(Tools(Path(folder), options.mpich.absolute()), ("dl_comm", "torch"))
    about: dict[str, Any] = {"machine": machine.describe(), "versions": versions, "quick": options.quick}
    print(json.dumps(about, indent=1), flush=True)
    cases: list[Case] = []
    failed = False
    for ranks in options.ranks:
        try:
            cases += measure(ranks, work, options.deadline_s)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            print(f"{ranks} ranks are left out: {error}", flush=True)
            failed = True
    report = {**about, "method": package.__doc__, "cases": cases, "load_after": machine.describe()["load"]}
    (options.out / "torch_distributed.json").write_text(json.dumps(report, indent=1) + "\n")
    table = markdown(cases)
    (options.out / "torch_distributed.md").write_text(table)
    print(f"\n{table}\n{options.out / 'torch_distributed.json'}")
    if failed or not cases:
        return 1
    try:
        where = plot.about(about["machine"], about["versions"])
        for drawn in draw(cases, f"torch.distributed on one host: {where}", options.out / "torch_distributed"):
            print(drawn)
    except ImportError as error:
        print(f"no plot: {error}; run 'pip install matplotlib'")
    return 0


if __name__ == "__main__":
    sys.exit(main())
