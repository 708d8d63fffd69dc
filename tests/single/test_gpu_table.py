"""The results of tests/gpu/run.sh, and their table."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent.parent / "gpu"
RUN = {
    "machine": {"gpus": ["NVIDIA H200, 143771 MiB"], "driver": "580.1", "kernel": "6.8", "processors": 16},
    "versions": {"python": "3.12.1", "torch": "2.11.0"},
}


def step(stage: str | None, name: str, status: str = "passed", seconds: int = 3, why: str | None = None) -> Any:
    return {"stage": stage, "name": name, "status": status, "seconds": seconds, "why": why}


def case(size: int, kind: str = "buffer", **medians: float) -> Any:
    names = {name.replace("_", "-"): median for name, median in medians.items()}
    return {"ranks": 2, "kind": kind, "name": "", "dtype": "f32", "bytes": size, "median_us": names}


def run_script(name: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(FOLDER / name), *words], capture_output=True, text=True, check=False)


def test_the_table_has_the_last_result_of_each_step_and_figure(tmp_path: Path) -> None:
    first = {
        **RUN,
        "date": "2026-01-02T03:04:05+00:00",
        "steps": [step(None, "import"), step("4", "ipc on 2 ranks", "failed", 240), step("2", "driver")],
        "benchmarks": {
            "benchmark": [case(4096, ipc=999.0, limit_copy=1.0), case(1 << 28, ipc=500.0, limit_copy=250.0)]
        },
    }
    second = {
        **RUN,
        "date": "2026-01-02T04:04:05+00:00",
        "steps": [step("4", "ipc on 2 ranks", seconds=31), step("10", "memcheck", "left out", 0, "no sanitizer")],
        "benchmarks": {
            "benchmark": [case(4096, "latency", ipc=150.0), case(4096, ipc=100.0, limit_copy=5.0, torch_gloo=2000.0)],
            "benchmark_mps": [case(1 << 28, ipc=300.0, staged=24000.0, limit_copy=250.0)],
        },
    }
    files = []
    for number, run in enumerate((second, first)):  # in any order
        files.append(tmp_path / f"{number}.json")
        files[-1].write_text(json.dumps({"runs": [run]}))
    done = run_script("table.py", *map(str, files))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "2026-01-02: NVIDIA H200, 143771 MiB, driver 580.1; Linux 6.8, 16 processors; python 3.12.1, torch 2.11.0.",
        "",
        "| stage | step | result | seconds |",
        "|---|---|---|---|",
        "|  | import | passed | 3 |",
        "| 2 | driver | passed | 3 |",
        "| 4 | ipc on 2 ranks | passed | 31 |",
        "| 10 | memcheck | left out, no sanitizer |  |",
        "",
        "| ranks | what | type | path | median | of the GPU's copy | fastest other |",
        "|---|---|---|---|---|---|---|",
        "| 2 | 4 KiB | f32 | ipc | 100.0 us | 5% | torch-gloo, 2.00 ms |",
        "| 2 | 4 KiB (latency) | f32 | ipc | 150.0 us |  |  |",
        "| 2 | 256 MiB | f32 | ipc | 500.0 us | 50% |  |",
        "| 2 | 256 MiB (with MPS) | f32 | ipc | 300.0 us | 83% |  |",
        "| 2 | 256 MiB (with MPS) | f32 | staged | 24.00 ms | 1% |  |",
    ]


def test_a_run_adds_its_results_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "steps.txt").write_text("\timport\tpassed\t4\t\n3\tauto on 1 ranks\tfailed\t17\t\n")
    assert run_script("results.py", str(tmp_path)).returncode == 0
    (tmp_path / "steps.txt").write_text("6\tbenchmark\tpassed\t40\t\n10\tmemcheck\tleft out\t0\tno GPU\n")
    (tmp_path / "benchmark").mkdir()
    results = {"ipc": {"group": "ours", "median_us": 12.5}, "nccl": {"group": "ours", "left_out": "one GPU"}}
    cases = [
        {"ranks": 2, "kind": "buffer", "name": "", "dtype": "f32", "tensors": 1, "bytes": 4096, "results": results}
    ]
    (tmp_path / "benchmark" / "allreduce.json").write_text(json.dumps({"cases": cases}))
    done = run_script("results.py", str(tmp_path))
    assert done.returncode == 0, done.stderr
    first, second = json.loads((tmp_path / "results.json").read_text())["runs"]
    assert first["steps"] == [step(None, "import", seconds=4), step("3", "auto on 1 ranks", "failed", 17)]
    assert first["benchmarks"] == {}
    assert first["versions"]["torch"]
    assert first["machine"]["kernel"]
    assert second["steps"][1] == step("10", "memcheck", "left out", 0, "no GPU")
    assert second["benchmarks"] == {"benchmark": [case(4096, ipc=12.5)]}
    assert run_script("table.py", str(tmp_path / "results.json")).stdout.count("12.5 us") == 1


def test_unknown_stages_and_parts_are_refused() -> None:
    for words in (["-", "stage", "11"], ["-", "stage"], ["-", "ipcc"]):
        done = subprocess.run([str(FOLDER / "run.sh"), *words], capture_output=True, text=True, check=False)
        assert done.returncode == 2, done.stdout
        assert "run.sh: " in done.stderr
