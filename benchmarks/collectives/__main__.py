"""The command line: `python -m benchmarks.collectives` from the root of the repository."""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import benchmarks.collectives as package
from benchmarks.common import machine, plot
from benchmarks.common import options as common
from benchmarks.common.grid import grid, number, ratio
from benchmarks.common.tools import Missing, Tools, mpich_program, program
from benchmarks.common.tools import package as installed

ROOT = Path(__file__).parents[2]
SOURCE = Path(__file__).parent / "c" / "collectives.c"
MESSAGES = Path(__file__).parent / "c" / "messages.c"
Times = dict[tuple[str, int], list[float]]


def ours(tools: Tools, ranks: int, source: Path) -> list[list[str]]:
    """dl_comm."""
    found = installed("dl_comm")
    flags = [
        f"-I{found}/include",
        f"-L{found}",
        "-l:libdl_comm.so.0",
        f"-Wl,-rpath,{found}",
        "-Wl,--allow-shlib-undefined",
    ]
    path = _compile(tools, mpich_program(tools, "mpicc"), "ours", source, flags)
    return [[mpich_program(tools, "mpiexec"), "-n", str(ranks), path]]


def limit(tools: Tools, ranks: int, source: Path) -> list[list[str]]:
    """Copies of the bytes that must move."""
    if source == MESSAGES:
        return []
    path = _compile(tools, mpich_program(tools, "mpicc"), "limit", source, ["-DLIMIT"])
    return [[mpich_program(tools, "mpiexec"), "-n", str(ranks), path]]


def mpich(tools: Tools, ranks: int, source: Path) -> list[list[str]]:
    """MPICH."""
    path = _compile(tools, mpich_program(tools, "mpicc"), "mpich", source, ["-DUSE_MPI"])
    return [[mpich_program(tools, "mpiexec"), "-n", str(ranks), path]]


def openmpi(tools: Tools, ranks: int, source: Path) -> list[list[str]]:
    """Open MPI."""
    if tools.openmpi is None:
        raise Missing("no Open MPI was given (--openmpi PREFIX)")
    compiler = program(tools.openmpi / "bin/mpicc", "mpicc of the Open MPI")
    path = _compile(tools, compiler, "openmpi", source, ["-DUSE_MPI"])
    launcher = program(tools.openmpi / "bin/mpirun", "mpirun of the Open MPI")
    options = ["--allow-run-as-root", "--map-by", "slot:OVERSUBSCRIBE", "--bind-to", "none"]
    return [[launcher, *options, "-n", str(ranks), path]]


def gloo(tools: Tools, ranks: int, source: Path) -> list[list[str]]:
    """torch.distributed with gloo."""
    installed("torch")
    if source == MESSAGES:
        return []
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    worker = [sys.executable, "-m", "benchmarks.collectives.gloo", str(port), str(ranks)]
    return [[*worker, str(rank)] for rank in range(ranks)]


CONTENDERS = {"dl_comm": ours, "limit": limit, "mpich": mpich, "openmpi": openmpi, "gloo": gloo}


def _compile(tools: Tools, compiler: str, name: str, source: Path, flags: list[str]) -> str:
    target = tools.folder / f"{name}_{source.stem}"
    if not target.exists():
        command = [compiler, "-std=gnu11", "-O3", "-march=native", str(source), "-o", str(target), *flags]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        if done.returncode != 0:
            raise Missing(f"{' '.join(command)} failed: {done.stderr.strip()[-600:]}")
    return str(target)


def measure(
    name: str, tools: Tools, ranks: int, arguments: list[str], deadline_s: float
) -> dict[tuple[str, int], float]:
    """The times of one run of a contender, in microseconds, by collective and bytes."""
    times = _run(name, CONTENDERS[name](tools, ranks, SOURCE), arguments, deadline_s)
    if ranks == 2:
        times |= _run(name, CONTENDERS[name](tools, ranks, MESSAGES), arguments, deadline_s)
    return times


def _run(name: str, commands: list[list[str]], arguments: list[str], deadline_s: float) -> dict[tuple[str, int], float]:
    environment = {**os.environ, "DL_COMM_DUMP_DIR": "none", "OMP_NUM_THREADS": "1"}
    running = [
        subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment)
        for command in commands
    ]
    try:
        output = [process.communicate(timeout=deadline_s)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    if any(process.returncode != 0 for process in running):
        raise RuntimeError(f"{name} ended with {[process.returncode for process in running]}")
    rows = (line.split() for line in "".join(output).splitlines())
    return {(row[0], int(row[1])): float(row[2]) for row in rows if len(row) == 3}


def tables(results: dict[int, dict[str, Times]]) -> str:
    """A table for each number of ranks: microseconds, and the fastest peer over ours."""
    texts = []
    for ranks, contenders in results.items():
        rows = [["collective", "bytes", *contenders, "fastest peer / dl_comm", "dl_comm / limit"]]
        for collective, size in contenders["dl_comm"]:
            medians = {name: _median(times, collective, size) for name, times in contenders.items()}
            ours, limit = medians["dl_comm"], medians.get("limit")
            peers = [value for name, value in medians.items() if name not in ("dl_comm", "limit") and value is not None]
            cells = [number(value) for value in medians.values()]
            rows.append([collective, str(size), *cells, ratio(min(peers, default=None), ours), ratio(ours, limit)])
        texts.append(f"{ranks} ranks, µs\n{grid(rows)}")
    return "\n\n".join(texts)


def _median(times: Times, collective: str, size: int) -> float | None:
    found = times.get((collective, size))
    return statistics.median(found) if found else None


def draw(results: dict[int, dict[str, Times]], title: str, path: Path) -> list[Path]:
    """A panel for each collective and number of ranks. Raises ImportError without matplotlib."""
    plt = plot.pyplot()
    names = list(dict.fromkeys(name for contenders in results.values() for name, _ in contenders["dl_comm"]))
    size = (2.6 * len(names), 2.8 * len(results))
    figure, panels = plt.subplots(
        len(results), len(names), figsize=size, squeeze=False, sharex=True, sharey=True, layout="constrained"
    )
    legend = {}
    for row, (ranks, contenders) in zip(panels, results.items(), strict=True):
        for panel, collective in zip(row, names, strict=True):
            for name, times in contenders.items():
                points = [(key[1], statistics.median(values)) for key, values in times.items() if key[0] == collective]
                if points:
                    width = 2.0 if name == "dl_comm" else 1.0
                    (legend[name],) = panel.loglog(*zip(*points, strict=True), marker=".", linewidth=width, label=name)
            panel.set_title(f"{collective}, {ranks} ranks", fontsize=9)
            panel.grid(color="0.9")
        row[0].set_ylabel("µs, slowest rank")
    for panel in panels[-1]:
        panel.set_xlabel("bytes")
    figure.legend(legend.values(), legend.keys(), loc="outside lower center", ncols=len(legend))
    figure.suptitle(title, fontsize=10)
    return plot.save(figure, path)


def main() -> int:
    """Measures, prints tables and writes files; returns 1 if a contender failed."""
    parser = common.parser(package, "collectives", 600.0)
    parser.add_argument("--ranks", nargs="+", type=int, help="processes on this host (2 3)")
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, help="only these contenders, and dl_comm")
    parser.add_argument("--rounds", type=int, help="runs of each contender (5)")
    parser.add_argument("--seconds", type=float, help="seconds of timed calls for each size (0.1)")
    parser.add_argument("--largest", type=int, help="bytes of the largest buffers (64 MiB)")
    parser.add_argument("--openmpi", type=Path, help="prefix of an Open MPI 5 with bin/mpicc and bin/mpirun")
    options = parser.parse_args()
    quick = {"ranks": [2], "rounds": 1, "seconds": 0.001, "largest": 64 << 10}
    full = {"ranks": [2, 3], "rounds": 5, "seconds": 0.1, "largest": 64 << 20}
    common.complete(options, quick if options.quick else full)
    common.begin(options.out)
    print(package.__doc__)
    chosen = [name for name in CONTENDERS if name == "dl_comm" or not options.only or name in options.only]
    results: dict[int, dict[str, Times]] = {}
    failed = False
    arguments = [str(options.seconds), str(options.largest)]
    with tempfile.TemporaryDirectory() as folder:
        tools = Tools(Path(folder), options.mpich.absolute(), options.openmpi and options.openmpi.absolute())
        versions = machine.versions(tools, ("dl_comm", "torch"))
        about: dict[str, Any] = {"machine": machine.describe(), "versions": versions, "quick": options.quick}
        print(json.dumps(about, indent=1), flush=True)
        for ranks in options.ranks:
            results[ranks] = {}
            for turn in range(options.rounds):
                for name in list(chosen):
                    try:
                        times = measure(name, tools, ranks, arguments, options.deadline_s)
                    except (Missing, RuntimeError, subprocess.TimeoutExpired) as error:
                        print(f"{name} is left out: {error}", flush=True)
                        failed |= not isinstance(error, Missing)
                        chosen.remove(name)
                        continue
                    for key, value in times.items():
                        results[ranks].setdefault(name, defaultdict(list))[key].append(value)
                    print(f"{ranks} ranks, round {turn + 1}/{options.rounds}: {name}", flush=True)
    cases = [
        {"ranks": ranks, "contender": name, "collective": key[0], "bytes": key[1], "rounds_us": values}
        for ranks, contenders in results.items()
        for name, times in contenders.items()
        for key, values in times.items()
    ]
    report = {**about, "method": package.__doc__, "cases": cases, "load_after": machine.describe()["load"]}
    (options.out / "collectives.json").write_text(json.dumps(report, indent=1) + "\n")
    if failed or any("dl_comm" not in contenders for contenders in results.values()):
        return 1
    print(f"\n{tables(results)}\n\n{options.out / 'collectives.json'}")
    try:
        where = plot.about(about["machine"], about["versions"])
        for drawn in draw(results, f"Collectives of float32 on one host: {where}", options.out / "collectives"):
            print(drawn)
    except ImportError as error:
        print(f"no plot: {error}; run 'pip install matplotlib'")
    return 0


if __name__ == "__main__":
    sys.exit(main())
