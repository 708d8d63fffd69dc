"""The benchmarks run without errors; their numbers are not checked."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from launch import QUIET, launch, run

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_overlap() -> None:
    options = ["--binding", "numpy", "--compute-ms", "1", "--average-ms", "0.3", "--steps", "5"]
    finished = launch(2, [sys.executable, str(BENCHMARKS / "overlap.py"), *options], 100)
    assert finished.returncode == 0, finished.output
    row = r"\| numpy \| \d+\.\d MiB \|( \d+\.\d\d ms \| \d+\.\d\d ms \| \d+\.\d{3} \|){2}"
    assert len(re.findall(rf"^{row}", finished.output, re.MULTILINE)) == 1, finished.output


@pytest.mark.heavy
def test_allreduce(tmp_path: Path) -> None:
    """Every available contender is correct in every case; missing ones are left out with a reason."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.allreduce",
        "--quick",
        "--sizes",
        "64",
        "65540",
        "--dtypes",
        "f32",
        "bf16",
        "--out",
        str(tmp_path),
    ]
    finished = run(command, 200, {**QUIET, "PYTHONPATH": str(BENCHMARKS.parent)})
    assert finished.returncode == 0, finished.output
    assert not finished.left, finished.left
    report = json.loads((tmp_path / "allreduce.json").read_text())
    without = [name for name in ("deepspeed",) if not importlib.util.find_spec(name)] + ["openmpi", "openmpi-mpi4py"]
    assert [(entry["contender"], entry["failed"]) for entry in report["left_out"]] == [
        (name, False) for name in without
    ]
    names = {"limit", "copy", "core", "core-shared", "numpy", "numpy-inplace", "numpy-shared", "torch", "torch-inplace"}
    names |= {"gloo", "mpich", "mpich-mpi4py"} | ({"deepspeed"} - set(without))
    kinds = [(case["kind"], case["name"], case["dtype"]) for case in report["cases"]]
    buffers = [("buffer", size, dtype) for dtype in ("f32", "bf16") for size in ("64", "65540")]
    assert kinds == [*buffers, ("latency", "64", "f32"), ("list", "tiny_100", "f32")]
    for case in report["cases"]:
        assert case["cache_line_ns"] > 0
        results = case["results"]
        assert {result["contender"] for result in results.values()} == names
        for name, result in results.items():
            if "left_out" in result:  # mpi4py has no bfloat16 type with some MPIs
                assert (name, case["dtype"], result["failed"]) == ("mpich-mpi4py", "bf16", False), result
                continue
            low, high = result["quartiles_us"]
            assert 0 < result["least_us"] <= low <= result["median_us"] <= high
            assert len(result["rounds_us"]) == 2
            assert result["iterations"] >= 6
            # The first and last results of the probe and of two rounds, on two ranks.
            elements = case["bytes"] // {"f32": 4, "bf16": 2}[case["dtype"]]
            assert result["checked"] == 3 * 2 * 2 * elements
        assert ("gloo/flat" in results) == (case["kind"] == "list")
    assert "fastest peer" in finished.output


@pytest.mark.heavy
def test_collectives(tmp_path: Path) -> None:
    """Every available contender measures every collective that it has, with the right results."""
    command = [sys.executable, "-m", "benchmarks.collectives", "--quick", "--out", str(tmp_path)]
    finished = run(command, 200, {**QUIET, "PYTHONPATH": str(BENCHMARKS.parent)})
    assert finished.returncode == 0, finished.output
    assert not finished.left, finished.left
    assert "openmpi is left out: no Open MPI was given" in finished.output
    report = json.loads((tmp_path / "collectives.json").read_text())
    names = ["allreduce", "broadcast", "all-gather", "reduce-scatter", "all-to-all", "gather", "scatter", "reduce"]
    for contender, count in {"dl_comm": 8, "mpich": 8, "gloo": 5}.items():
        cases = [case for case in report["cases"] if case["contender"] == contender]
        expected = {(name, size) for name in names[:count] for size in (64, 4096, 65536)}
        messages = ["ping-pong", "exchange", "exchange-started", "ping-pong-shared"]
        timed = {"dl_comm": messages, "mpich": messages[:3], "gloo": []}[contender]
        expected |= {(name, size) for name in timed for size in (8, 1024, 4096, 65536)}
        assert {(case["collective"], case["bytes"]) for case in cases} == expected
        assert all(0 < value < 1e7 for case in cases for value in case["rounds_us"])


@pytest.mark.heavy
def test_torch_distributed(tmp_path: Path) -> None:
    """Both backends in every case, and the core where it has the call."""
    pytest.importorskip("torch")
    command = [sys.executable, "-m", "benchmarks.torch_distributed", "--quick", "--out", str(tmp_path)]
    finished = run(command, 200, {**QUIET, "PYTHONPATH": str(BENCHMARKS.parent)})
    assert finished.returncode == 0, finished.output
    assert not finished.left, finished.left
    cases = json.loads((tmp_path / "torch_distributed.json").read_text())["cases"]
    sizes = [("all_reduce", 64), ("all_reduce", 4096), ("all_reduce", 65536)]
    sizes += [(name, 1 << 20) for name in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")]
    assert [(case["case"], case.get("bytes")) for case in cases] == [*sizes, ("ddp", None), ("fsdp2", None)]
    for case in cases:
        with_deepspeed = {"deepspeed"} if importlib.util.find_spec("deepspeed") else set()
        extra = {"all_reduce": {"core", *with_deepspeed}, "ddp": {"no_sync"}}.get(case["case"], set())
        assert set(case["rounds_s"]) == {"dl_comm", "gloo"} | extra
        assert all(len(rounds) == 2 and min(rounds) > 0 for rounds in case["rounds_s"].values())
    text = (tmp_path / "torch_distributed.md").read_text()
    assert len([line for line in text.splitlines() if line.startswith("| 2 |")]) == len(cases)


@pytest.mark.heavy
def test_allreduce_cuda_contenders_in_host_memory(tmp_path: Path) -> None:
    """The contenders of `--device cuda`, on tensors in host memory."""
    command = [sys.executable, "-m", "benchmarks.allreduce", "--quick", "--device", "cuda", "--sizes", "65540"]
    command += ["--dtypes", "f32", "--out", str(tmp_path)]
    environment = {**QUIET, "PYTHONPATH": str(BENCHMARKS.parent), "BENCH_DEVICE": "cpu"}
    finished = run(command, 200, environment)
    report = json.loads((tmp_path / "allreduce.json").read_text())
    assert [entry["contender"] for entry in report["left_out"]] == ["torch-nccl"], finished.output
    for case in report["cases"]:
        contenders = {result["contender"]: result for result in case["results"].values()}
        assert set(contenders) == {"limit-copy", "limit-pinned", "nccl", "ipc", "staged", "torch-gloo", "mpich-host"}
        for name, result in contenders.items():
            assert (result["checked"] > 0) == (not name.startswith("limit")), (name, result)


def test_slow_contenders_get_fewer_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """No further trials after the time of a case, and none with longer buffers after a timeout."""
    orchestrate, processes = (_module(monkeypatch, name) for name in ("allreduce.orchestrate", "common.processes"))
    buffers, contenders = (_module(monkeypatch, f"allreduce.{name}") for name in ("cases", "contenders"))
    trials: list[tuple[str, int]] = []

    class Fake(orchestrate.Bench):  # type: ignore[misc, name-defined]
        """A bench whose contenders do nothing."""

        def running(self, present: Any, ranks: int, **case: str) -> Any:
            return nullcontext(present)

        def check_idle(self, ranks: int) -> None:
            """Always idle."""

        def trial(self, contender: Any, ranks: int, line: str, numbers: int, seconds: float) -> Any:
            length = int(line.split()[-1])
            trials.append((contender.name, length))
            if contender.name == "gloo" and length >= 256:
                raise processes.TimedOut("late")
            return processes.Answer(np.full((ranks, numbers), 1e-3), ["1"] * ranks)

    monkeypatch.setattr(orchestrate, "cache_line_ns", lambda tools: None)
    both = [contender for contender in contenders.CONTENDERS if contender.name in ("core", "gloo")]
    cases = list(buffers.buffers([64, 1024, 4096], ["f32"]))
    bench = Fake(both, None, orchestrate.Options(rounds=3), BENCHMARKS.parent)
    bench.run(2, cases)
    assert [trials.count(("core", length)) for length in (16, 256, 1024)] == [4, 4, 4]
    assert [trials.count(("gloo", length)) for length in (16, 256, 1024)] == [4, 1, 0]
    reasons = [case["results"]["gloo"].get("left_out", "") for case in bench.cases]
    assert [text[:8] for text in reasons] == ["", "lost: la", "too slow"]
    assert not bench.failed
    trials.clear()
    Fake(both, None, orchestrate.Options(rounds=3, case_s=0.0), BENCHMARKS.parent).run(2, cases[:1])
    assert trials.count(("core", 16)) == 2  # the probe and one more


def test_lists_of_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """The published numbers of tensors and parameters of the models."""
    lengths = _module(monkeypatch, "allreduce.lists").lengths
    known = {"resnet50": (161, 25_557_032), "bert_base": (199, 109_482_240), "gpt2_small": (148, 124_439_808)}
    assert {name: (len(lengths(name)), sum(lengths(name))) for name in known} == known
    assert len(lengths("tiny_10000")) == 10_000


@pytest.mark.heavy
def test_training(tmp_path: Path) -> None:
    """Ranks are bit-identical, dl_comm and DDP train the same model, and the numbers are consistent."""
    command = [sys.executable, "-m", "benchmarks.training", "--quick", "--models", "mlp", "--out", str(tmp_path)]
    finished = run(command, 100, {**QUIET, "PYTHONPATH": str(BENCHMARKS.parent)})
    assert finished.returncode == 0, finished.output
    assert not finished.left, finished.left
    report = json.loads((tmp_path / "training.json").read_text())
    assert report["left_out"] == []
    (case,) = report["cases"]
    assert (case["ranks"], case["model"], case["parameters"]) == (2, "mlp", 784 * 1024 + 1024 * 1025 + 1025 * 10 + 1024)
    verified, results = case["verified"], case["results"]
    assert verified["problems"] == []
    # Six steps before the trials; two trials of two untimed and three timed steps.
    assert verified["agreed_after"] == {"ours": [4, 6, 16], "ddp": [4, 6, 16]}
    assert verified["distances"]["4"].keys() == {"ours-ddp"}
    assert verified["distances"]["4"]["ours-ddp"] < 1e-3
    assert list(results) == ["one", "independent", "ours", "ddp"]
    for name, result in results.items():
        low, high = result["quartiles_ms"]
        assert 0 < low <= result["step_ms"] <= high
        assert result["steps_per_s"] == pytest.approx(1e3 / result["step_ms"])
        assert (result["steps"], len(result["rounds_ms"])) == (6, 2)
        assert ("exposed_ms" in result) == (name in ("ours", "ddp"))
        assert (result["reported_busy_ms"] is not None) == (name == "ours")
        if name in ("ours", "ddp"):
            without = results["independent"]["rounds_ms"]
            differences = [mine - base for mine, base in zip(result["rounds_ms"], without, strict=True)]
            assert result["exposed_ms"] == pytest.approx(np.median(differences))
    assert 0 <= results["ours"]["reported_exposed_ms"] < results["ours"]["step_ms"]
    assert "exposed: ddp/ours" in finished.output


def test_training_verification(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong parameters are detected: at the start, between ranks, and between contenders."""
    verify = _module(monkeypatch, "training.verify")
    first, step = np.linspace(-1, 1, 99, dtype=np.float32), np.ones(99, np.float32)
    models = {"first": first, "right": first + step, "near": first + 1.0001 * step, "far": first + 0.5 * step}
    for name, model in models.items():
        model.tofile(tmp_path / name)

    def problems(*calls: tuple[Any, ...]) -> int:
        found = verify.Verification()
        for name, *values in calls:
            getattr(found, name)(*values)
        return len(found.report()["problems"])

    assert problems(("start", {"ours": ["a", "a"], "ddp": ["a", "a"]})) == 0
    assert problems(("start", {"ours": ["a", "a"], "ddp": ["a", "b"]})) == 1
    assert problems(("agreement", "ours", ["a", "a"], True, 4), ("agreement", "independent", ["a", "b"], False, 4)) == 0
    assert problems(("agreement", "ours", ["a", "b"], True, 4), ("agreement", "independent", ["a", "a"], False, 4)) == 2
    paths = {name: tmp_path / name for name in models}
    assert problems(("distance", paths["first"], paths["right"], paths["near"], 4)) == 0
    assert problems(("distance", paths["first"], paths["right"], paths["far"], 4)) == 1
    assert problems(("distance", paths["first"], paths["first"], paths["first"], 4)) == 1, "nothing was trained"
    (tmp_path / "short").write_bytes(b"")
    assert problems(("distance", paths["first"], paths["right"], tmp_path / "short", 4)) == 1


def _module(monkeypatch: pytest.MonkeyPatch, name: str) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS.parent))
    return importlib.import_module(f"benchmarks.{name}")
