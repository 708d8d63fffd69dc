"""The command line: `python -m benchmarks.training` from the root of the repository."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import benchmarks.training as package
from benchmarks.common import machine, plot
from benchmarks.common import options as common
from benchmarks.common.tools import Tools
from benchmarks.training.contenders import NAMES
from benchmarks.training.models import MODELS
from benchmarks.training.orchestrate import Bench, Options
from benchmarks.training.plot import draw
from benchmarks.training.table import tables

ROOT = Path(__file__).parents[2]
PACKAGES = ("dl_comm", "numpy", "torch", "tensorflow", "tensorflow-cpu", "keras")
QUICK: dict[str, Any] = {"ranks": [2], "models": ["mlp"], "rounds": 2, "steps": 3, "warm_up": 6}
FULL: dict[str, Any] = {
    "ranks": [1, 2, 4],
    "models": list(MODELS),
    "rounds": Options.rounds,
    "steps": Options.steps,
    "warm_up": Options.warm_up,
}


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the options; defaults are FULL or QUICK."""
    parser = common.parser(package, "training", Options.deadline_s)
    parser.add_argument("--ranks", nargs="+", type=int, help="processes on this host (1 2 4)")
    parser.add_argument("--models", nargs="+", choices=MODELS, help="models to train (all)")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, help="only these contenders")
    parser.add_argument("--rounds", type=int, help=f"trials of each contender in each case ({Options.rounds})")
    parser.add_argument("--steps", type=int, help="timed steps of a trial (20; largest model: 6)")
    parser.add_argument("--warm-up", type=int, help=f"steps before the first trial ({Options.warm_up})")
    options = parser.parse_args(words)
    common.complete(options, QUICK if options.quick else FULL)
    if min([*options.ranks, options.rounds, options.warm_up, options.steps or 1]) < 1:
        parser.error("ranks, rounds, steps and warm-up must be at least 1")
    return options


def main() -> int:
    """Measures, prints tables and writes files; returns 1 if a contender failed or was wrong."""
    options = parse()
    common.begin(options.out)
    print(package.__doc__)
    with tempfile.TemporaryDirectory() as folder:
        tools = Tools(Path(folder), options.mpich.absolute())
        only = tuple(options.only)
        timing = Options(options.rounds, options.steps, options.warm_up, only, deadline_s=options.deadline_s)
        bench = Bench(tools, timing, ROOT)
        versions = machine.versions(tools, PACKAGES)
        about = {"machine": machine.describe(), "versions": versions, "quick": options.quick}
        print(json.dumps(about, indent=1), flush=True)
        for ranks in options.ranks:
            for name in options.models:
                bench.run(MODELS[name], ranks)
                _write(options.out, {**about, "load_after": machine.describe()["load"]}, bench)
    print(f"\n{tables(bench.cases)}\n")
    for entry in bench.left_out:
        print(f"left out: {entry['model']} on {entry['ranks']} ranks: {entry['contender']}: {entry['reason']}")
    print(options.out / "training.json")
    _draw(options.out / "training", about, bench)
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
    (folder / "training.json").write_text(json.dumps(report, indent=1) + "\n")


def _draw(path: Path, about: dict[str, Any], bench: Bench) -> None:
    title = f"Steps of training on one host: {plot.about(about['machine'], about['versions'])}"
    try:
        for drawn in draw(bench.cases, title, path):
            print(drawn)
    except ImportError as error:
        print(f"no plot: {error}; run 'pip install matplotlib'")


if __name__ == "__main__":
    sys.exit(main())
