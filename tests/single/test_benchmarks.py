"""The benchmarks run; what they measure is for the one who runs them."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path

from launch import QUIET, launch, run

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_overlap() -> None:
    options = ["--face", "numpy", "--compute-ms", "1", "--average-ms", "0.3", "--steps", "5"]
    finished = launch(2, [sys.executable, str(BENCHMARKS / "overlap.py"), *options], 100)
    assert finished.returncode == 0, finished.output
    row = r"\| numpy \| \d+\.\d MiB \|( \d+\.\d\d ms \| \d+\.\d\d ms \| \d+\.\d{3} \|){2}"
    assert len(re.findall(rf"^{row}$", finished.output, re.MULTILINE)) == 1, finished.output


def test_allreduce(tmp_path: Path) -> None:
    """Every contender that is there is right in every case; one that is missing is left out with words."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.allreduce",
        "--quick",
        "--sizes",
        "64",
        "65540",
        "--out",
        str(tmp_path),
    ]
    finished = run(command, 200, {**QUIET, "PYTHONPATH": str(BENCHMARKS.parent)})
    assert finished.returncode == 0, finished.output
    assert not finished.left, finished.left
    report = json.loads((tmp_path / "allreduce.json").read_text())
    assert [(entry["contender"], entry["failed"]) for entry in report["left_out"]] == [
        ("openmpi", False),
        ("openmpi-mpi4py", False),
    ]
    names = {"limit", "copy", "core", "core-shared", "numpy", "numpy-inplace", "numpy-shared", "torch", "torch-inplace"}
    names |= {"gloo", "mpich", "mpich-mpi4py"}
    kinds = [(case["kind"], case["name"], case["dtype"]) for case in report["cases"]]
    buffers = [("buffer", size, dtype) for dtype in ("f32", "bf16", "f16", "f64") for size in ("64", "65540")]
    assert kinds == [*buffers, ("latency", "64", "f32"), ("list", "tiny_100", "f32")]
    for case in report["cases"]:
        results = case["results"]
        assert {result["contender"] for result in results.values()} == names
        for name, result in results.items():
            if "left_out" in result:  # mpi4py knows no type for bfloat16 with some MPIs
                assert (name, case["dtype"], result["failed"]) == ("mpich-mpi4py", "bf16", False), result
                continue
            low, high = result["quartiles_us"]
            assert 0 < result["least_us"] <= low <= result["median_us"] <= high
            assert len(result["rounds_us"]) == 2
            assert result["iterations"] >= 6
            # The probe and two rounds, the first and the last result of each, on two ranks.
            elements = case["bytes"] // {"f32": 4, "bf16": 2, "f16": 2, "f64": 8}[case["dtype"]]
            assert result["checked"] == 3 * 2 * 2 * elements
        assert ("gloo/flat" in results) == (case["kind"] == "list")
    assert "fastest peer" in finished.output


def test_lists_of_models() -> None:
    """The numbers of tensors and parameters that the models are known by."""
    sys.path.insert(0, str(BENCHMARKS.parent))
    try:
        lengths = importlib.import_module("benchmarks.allreduce.lists").lengths
    finally:
        sys.path.remove(str(BENCHMARKS.parent))
    known = {"resnet50": (161, 25_557_032), "bert_base": (199, 109_482_240), "gpt2_small": (148, 124_439_808)}
    assert {name: (len(lengths(name)), sum(lengths(name))) for name in known} == known
    assert len(lengths("tiny_10000")) == 10_000
