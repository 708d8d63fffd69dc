"""tests/gpu/quarter_hour.sh without a GPU: a dry run, its JSON and table, and the small NCCL that it takes along."""

from __future__ import annotations

import ctypes
import gzip
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from imported import TORCH, python
from launch import launch

FOLDER = Path(__file__).parent.parent / "gpu"
CASE = {"ranks": 2, "kind": "buffer", "name": "", "dtype": "f32", "tensors": 1}


def dry_run(out: Path, *steps: int) -> dict[str, Any]:
    """The results of a dry run."""
    command = [str(FOLDER / "quarter_hour.sh"), "--dry-run", "-", *map(str, steps)]
    environment = {**os.environ, "OUT": str(out), "PYTHON": sys.executable, "DL_COMM_DUMP_DIR": "none"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=540, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads((out / "quarter_hour.json").read_text())
    assert found["dry_run"]
    assert found["versions"]["torch"]
    assert (out / "quarter_hour.md").read_text() in done.stdout
    return found


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("quarter_hour")


@pytest.mark.heavy  # starts every step
def test_a_dry_run_gives_json_and_a_table(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    found = dry_run(tmp_path, 1, 8)
    parts, blocking = found["steps"]
    assert [step["number"] for step in found["steps"]] == [1, 8]
    assert parts["status"] == blocking["status"] == "passed"
    # The simulated driver has answered, and nothing is judged.
    assert all(number["value"] > 0 and number["ok"] is None for number in parts["numbers"] + blocking["numbers"])
    assert set(blocking["medians"]["nccl"]) == {"4096", "65536"}
    table = (tmp_path / "quarter_hour.md").read_text()
    assert "A dry run: no number is one of a GPU." in table
    assert f"NCCL {found['versions']['NCCL']}" in table or "NCCL" not in found["versions"]
    assert "| `nccl`, MPS, `NCCL_COMM_BLOCKING=1` | " in table
    assert "|  | 4 KiB | 64 KiB |" in table


@pytest.mark.heavy
def test_a_dry_run_of_every_step(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    found = dry_run(tmp_path)
    assert [step["number"] for step in found["steps"]] == list(range(1, 10))
    left_out = {step["number"]: step["why"] for step in found["steps"] if step["status"] == "left out"}
    assert left_out in ({}, {4: "no compute-sanitizer"})
    tests = [number for step in found["steps"] for number in step["numbers"] if number["what"] == "tests that failed"]
    assert all(number["value"] == 0 for number in tests)


@pytest.mark.parametrize(
    "names", ["calls streams", pytest.param("average collectives training", marks=pytest.mark.heavy)]
)
def test_the_tests_for_a_gpu_pass_in_host_memory(names: str) -> None:
    """A quarter of an hour is too short to find faults of the tests."""
    pytest.importorskip("torch")
    files = [str(FOLDER / f"test_gpu_{name}.py") for name in names.split()]
    command = [*python(*TORCH, run_module="pytest"), "-q", "-x", "-p", "no:cacheprovider", *files]
    finished = launch(2, command, 200, {"DL_COMM_TEST_DEVICE": "cpu"})
    assert finished.returncode == 0, finished.output[-4000:]
    assert len(re.findall(r"\d+ passed", finished.output)) == 2, finished.output


def test_the_steps_fit_a_quarter_of_an_hour(module: ModuleType) -> None:
    assert len(module.STEPS) == 9
    assert sum(step.limit_s for step in module.STEPS) == 530
    assert all(step.must for step in module.STEPS)


def test_a_number_that_is_missing_or_too_large_is_not_right(module: ModuleType, tmp_path: Path) -> None:
    cases = [
        {**CASE, "bytes": 4096, "results": {"nccl": {"median_us": 40.0}, "torch-nccl": {"median_us": 34.0}}},
        {**CASE, "bytes": 1 << 24, "results": {"nccl": {"median_us": 192.0}, "torch-nccl": {"median_us": 160.0}}},
    ]
    (tmp_path / "allreduce.json").write_text(json.dumps({"cases": cases}))
    run = module.QuarterHour(tmp_path, None, None)
    shown = module.read(tmp_path, "", 1.0)
    below, above = (run.judge(must, shown) for must in module.STEPS[6].must)
    assert (below["value"], below["ok"]) == (6.0, True)
    assert (above["value"], above["ok"]) == (1.2, False)
    (four,) = (run.judge(must, module.Shown(1.0, "")) for must in module.STEPS[7].must)
    assert (four["value"], four["ok"]) == (None, False)
    (failed,) = (
        run.judge(must, module.Shown(1.0, "279 passed, 1 failed in 3 s\n280 passed")) for must in module.STEPS[2].must
    )
    assert (failed["value"], failed["ok"]) == (1.0, False)
    (killed,) = (run.judge(must, module.Shown(1.0, "")) for must in module.STEPS[2].must)
    assert killed["ok"] is False


def test_the_table_of_a_run(tmp_path: Path) -> None:
    numbers = [
        {"what": "4 KiB", "unit": "us", "at_most": 20, "value": 19.04, "ok": True},
        {"what": "1 MiB", "unit": "us", "at_most": 45, "value": 112.0, "ok": False},
    ]
    medians = {"ipc": {"4096": 19.04, "1048576": 1112.0}, "limit-copy": {"4096": 12.2}}
    results = {
        "date": "2026-01-02T03:04:05+00:00",
        "dry_run": False,
        "machine": {"gpus": ["NVIDIA H200, 143771 MiB"], "driver": "580.1", "kernel": "6.8", "processors": 16},
        "versions": {"python": "3.12.1", "torch": "2.11.0", "NCCL": "2.30.7"},
        "steps": [
            {"number": 4, "what": "a", "status": "left out", "why": "no b", "seconds": 0, "numbers": [], "medians": {}},
            {
                **{"number": 6, "what": "`ipc`, MPS", "status": "passed", "why": "", "seconds": 41.4},
                **{"numbers": numbers, "medians": medians},
            },
        ],
    }
    path = tmp_path / "quarter_hour.json"
    path.write_text(json.dumps(results))
    command = [sys.executable, str(FOLDER / "quarter_hour_table.py"), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "On 2026-01-02: NVIDIA H200, 143771 MiB, driver 580.1; 16 processors, Linux 6.8; Python 3.12.1, torch 2.11.0, "
        "NCCL 2.30.7.",
        "",
        "| step | result | shows | at most |",
        "|---|---|---|---|",
        "| 4 a | left out: no b |  |  |",
        "| 6 `ipc`, MPS | passed, 41 s | 4 KiB: 19 us | 20 |",
        "|  |  | 1 MiB: **112 us** | 45 |",
        "",
        "Microseconds of an allreduce of float32 in place on 2 ranks that share the GPU, medians:",
        "",
        "|  | 4 KiB | 1 MiB |",
        "|---|---|---|",
        "| `ipc`, MPS | 19 | 1,112 |",
        "| the GPU's copy of as many bytes, MPS | 12 |  |",
    ]


def test_a_small_nccl_for_one_gpu_loads_and_fits(tmp_path: Path) -> None:
    package = pytest.importorskip("nvidia.nccl")
    library = Path(next(iter(package.__path__))) / "lib" / "libnccl.so.2"
    packed, unpacked = tmp_path / "libnccl.so.2.gz", tmp_path / "libnccl.so.2"
    tool = [sys.executable, str(FOLDER / "nccl_library.py"), str(library)]
    done = subprocess.run([*tool, "90", str(packed)], capture_output=True, text=True, check=True)
    assert "MiB of GPU code for 90" in done.stdout
    # With the 18 MiB of wheels it is far from 64.
    assert packed.stat().st_size < 32 << 20
    unpacked.write_bytes(gzip.decompress(packed.read_bytes()))
    assert unpacked.stat().st_size == library.stat().st_size
    versions = []
    for path in (library, unpacked):
        version = ctypes.c_int()
        assert ctypes.CDLL(str(path)).ncclGetVersion(ctypes.byref(version)) == 0
        versions.append(version.value)
    assert versions[0] == versions[1] > 20000
    refused = subprocess.run([*tool, "35", str(packed)], capture_output=True, text=True, check=False)
    assert "no code for capability 35" in refused.stderr
