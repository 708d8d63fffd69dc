"""The command line: `python -m benchmarks.allreduce` from the root of the repository."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import benchmarks.allreduce as package
from benchmarks.allreduce.cases import ITEM_BYTES, LATENCY_SIZES, MODELS, SIZES, Case, buffers, latencies, models
from benchmarks.allreduce.contenders import BINDINGS, CONTENDERS, CUDA_CONTENDERS, AllreduceContender
from benchmarks.allreduce.lists import LISTS
from benchmarks.allreduce.orchestrate import Bench, Options
from benchmarks.allreduce.plot import draw
from benchmarks.allreduce.table import tables
from benchmarks.common import machine, plot
from benchmarks.common import options as common
from benchmarks.common.tools import Tools

ROOT = Path(__file__).parents[2]
DEVICES = {"cpu": CONTENDERS, "cuda": CUDA_CONTENDERS}
NAMES = list(dict.fromkeys(contender.name for contenders in DEVICES.values() for contender in contenders))
KINDS = ("buffer", "latency", "list")
QUICK: dict[str, Any] = {
    "ranks": [2],
    "sizes": [64, 4 << 10, 64 << 10],
    "latency_sizes": [64],
    "lists": ["tiny_100"],
    "rounds": 2,
    "most": 10,
    "trial_s": 0.005,
    "latency_s": 0.02,
}
FULL: dict[str, Any] = {
    "ranks": [2, 3, 4],
    "sizes": list(SIZES),
    "latency_sizes": list(LATENCY_SIZES),
    "lists": list(MODELS),
    "rounds": Options.rounds,
    "most": Options.most,
    "trial_s": Options.trial_s,
    "latency_s": Options.latency_s,
}
# Differences on a GPU.
CUDA: dict[str, Any] = {
    "ranks": [2, 4],
    "sizes": [1 << 10, 4 << 10, 64 << 10, 256 << 10, 1 << 20, 8 << 20, 64 << 20, 256 << 20, 1 << 30],
    "latency_sizes": [4 << 10],
    "lists": ["resnet50", "gpt2_small"],
}


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the options; defaults are FULL or QUICK."""
    parser = common.parser(package, "allreduce", Options.deadline_s)
    parser.add_argument("--device", choices=DEVICES, default="cpu", help="memory of the tensors (cpu)")
    parser.add_argument("--ranks", nargs="+", type=int, help="processes on this host (2 3 4)")
    parser.add_argument("--sizes", nargs="+", type=_bytes, help="bytes of single buffers, such as 64, 4K, 8M")
    parser.add_argument("--dtypes", nargs="+", choices=ITEM_BYTES, default=["f32", "bf16", "f16", "f64"])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="kinds of cases (all)")
    parser.add_argument("--latency-sizes", nargs="+", type=_bytes, help="bytes of buffers with percentiles (64 4K)")
    parser.add_argument("--lists", nargs="+", choices=LISTS, help=f"lists of tensors ({' '.join(MODELS)})")
    parser.add_argument("--only", nargs="+", choices=NAMES, help="only these contenders")
    parser.add_argument("--binding", nargs="+", choices=BINDINGS, help="only these bindings of dl_comm")
    parser.add_argument("--rounds", type=int, help="trials of each contender in each case (3)")
    parser.add_argument("--most", type=int, help="maximum of timed iterations in a trial")
    parser.add_argument("--trial-s", type=float, help="seconds of timed iterations in a trial (0.1)")
    parser.add_argument("--latency-s", type=float, help="the same for percentiles (0.5)")
    parser.add_argument("--openmpi", type=Path, help="prefix of an Open MPI 5 with bin/mpicc and bin/mpirun")
    options = parser.parse_args(words)
    full = FULL if options.device == "cpu" else {**FULL, **CUDA}
    common.complete(options, QUICK if options.quick else full)
    if min(options.ranks) < 1 or min([*options.sizes, *options.latency_sizes, options.rounds]) < 1:
        parser.error("ranks, sizes and rounds must be at least 1")
    return options


def chosen(options: argparse.Namespace) -> list[AllreduceContender]:
    """The contenders that `--only` and `--binding` select."""
    return [
        contender
        for contender in DEVICES[options.device]
        if (not options.only or contender.name in options.only)
        and (not options.binding or not contender.binding or contender.binding in options.binding)
    ]


def cases(options: argparse.Namespace) -> list[Case]:
    """The selected cases. Percentiles and lists use float32, or the first selected type without it."""
    dtype = "f32" if "f32" in options.dtypes else options.dtypes[0]
    kinds = {
        "buffer": buffers(options.sizes, options.dtypes),
        "latency": latencies(options.latency_sizes, dtype),
        "list": models(options.lists, dtype),
    }
    return [case for kind in KINDS if kind in options.kinds for case in kinds[kind]]


def main() -> int:
    """Measures, prints tables and writes files; returns 1 if a contender failed or was wrong."""
    options = parse()
    common.begin(options.out)
    print(package.__doc__)
    with tempfile.TemporaryDirectory() as folder:
        tools = Tools(Path(folder), options.mpich.absolute(), options.openmpi and options.openmpi.absolute())
        timing = Options(
            options.rounds, options.trial_s, options.latency_s, options.most, deadline_s=options.deadline_s
        )
        bench = Bench(chosen(options), tools, timing, ROOT)
        versions = machine.versions(tools, ("dl_comm", "numpy", "torch", "mpi4py", "ml_dtypes"))
        about = {"machine": machine.describe(), "versions": versions, "quick": options.quick}
        print(json.dumps(about, indent=1), flush=True)
        for ranks in options.ranks:
            bench.run(ranks, cases(options))
            _write(options.out, {**about, "load_after": machine.describe()["load"]}, bench)
    print(f"\n{tables(bench.cases)}")
    for entry in bench.left_out:
        print(f"left out on {entry['ranks']} ranks: {entry['contender']}: {entry['reason']}")
    print(f"\n{options.out / 'allreduce.json'}")
    _draw(options, about, bench)
    return int(bench.failed)


def _write(folder: Path, about: dict[str, Any], bench: Bench) -> None:
    report = {
        **about,
        "method": package.__doc__,
        "timing": vars(bench.options),
        "cases": bench.cases,
        "left_out": bench.left_out,
        "idle": bench.idle,
    }
    (folder / "allreduce.json").write_text(json.dumps(report, indent=1) + "\n")


def _draw(options: argparse.Namespace, about: dict[str, Any], bench: Bench) -> None:
    """Draws a plot for each type; the first one has no suffix."""
    where = plot.about(about["machine"], about["versions"])
    title = f"Average of a buffer over ranks on one host: {where}"
    for number, dtype in enumerate(options.dtypes):
        path = options.out / ("allreduce" if number == 0 else f"allreduce_{dtype}")
        try:
            for drawn in draw(bench.cases, dtype, title, path):
                print(drawn)
        except ImportError as error:
            print(f"no plot: {error}; run 'pip install matplotlib'")
            return


def _bytes(text: str) -> int:
    """64, 4K, 8M or 1G as a number of bytes."""
    scale = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:].upper(), 1)
    try:
        return int(text.rstrip("KMGkmg")) * scale
    except ValueError:
        raise argparse.ArgumentTypeError(f"invalid size: {text!r} (expected for example 64, 4K, 8M or 1G)") from None


if __name__ == "__main__":
    sys.exit(main())
