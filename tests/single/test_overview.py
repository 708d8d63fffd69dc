"""README's figure is drawn from results in the form that the benchmarks write."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2]))

from benchmarks import overview  # noqa: E402

pytest.importorskip("matplotlib")


def allreduce(times: dict[str, list[float]], ranks: int = 2, dtype: str = "f32") -> list[dict[str, Any]]:
    """Cases as in allreduce.json: the medians of each contender for 64 B, 128 B, ..."""
    return [
        {
            "ranks": ranks,
            "kind": "buffer",
            "dtype": dtype,
            "bytes": 64 << index,
            "results": {name: {"median_us": values[index]} for name, values in times.items()},
        }
        for index in range(len(next(iter(times.values()))))
    ]


def step(model: str, ours: float, ddp: float | None, ranks: int = 2) -> dict[str, Any]:
    """A case as in training.json; every step has 2 ms of exposed communication."""
    results = {"independent": {"step_ms": ours - 2}, "ours": {"step_ms": ours, "exposed_ms": 2.0}}
    if ddp is not None:
        results["ddp"] = {"step_ms": ddp, "exposed_ms": 2.0}
    return {"ranks": ranks, "model": model, "results": results}


def write(folder: Path, lines: list[dict[str, Any]], bars: list[dict[str, Any]]) -> None:
    (folder / "allreduce.json").write_text(json.dumps({"cases": lines}))
    (folder / "training.json").write_text(json.dumps({"cases": bars}))


def test_both_figures_are_drawn_and_the_same_results_give_the_same_files(tmp_path: Path) -> None:
    lines = allreduce({"core": [1.0, 2.0], "gloo": [9.0, 9.0], "mpich": [2.0, 3.0]})
    write(tmp_path, lines, [step("mlp", 40.0, 50.0)])
    drawn = []
    for folder in (tmp_path / "first", tmp_path / "second"):
        assert overview.main([str(tmp_path), "--out", str(folder)]) == 0
        drawn.append([(folder / f"overview-{theme.name}.svg").read_text() for theme in overview.THEMES])
    assert drawn[0] == drawn[1]
    for theme, text in zip(overview.THEMES, drawn[0], strict=True):
        assert ElementTree.fromstring(text).tag.endswith("svg")
        # Two peers: gloo and MPICH.
        for color in (theme.text, theme.ours, theme.compute, *theme.peers[:2]):
            assert color in text
        # Comments name the texts, which are drawn as paths.
        for words in ("gloo", "MPICH", "dl_comm", "DDP on gloo", "40.0 ms", "50.0 ms"):
            assert f"<!-- {words}" in text


def test_the_lines_are_the_fastest_way_of_each_library() -> None:
    cases = allreduce({"numpy-inplace": [3.0, 2.0], "core": [1.0, 4.0], "mpich-mpi4py": [5.0, 6.0]})
    cases += allreduce({"core": [0.1]}, ranks=3) + allreduce({"core": [0.1]}, dtype="f16")
    cases[1]["results"]["mpich-mpi4py"] = {"left_out": "lost"}
    assert overview.allreduce_lines(cases, 2) == {"dl_comm": [(64, 1.0), (128, 2.0)], "MPICH": [(64, 5.0)]}


def test_the_bars_are_models_that_a_peer_trains_too() -> None:
    cases = [
        step("tf-mlp", 80.0, None),
        step("mlp", 40.0, 50.0),
        step("mlp", 9.0, 9.0, ranks=4),
        step("new", 30.0, 31.0),
    ]
    assert overview.training_bars(cases, 2) == [
        ("new", [("dl_comm", 30.0, 2.0), ("DDP on gloo", 31.0, 2.0)]),
        ("MLP", [("dl_comm", 40.0, 2.0), ("DDP on gloo", 50.0, 2.0)]),
    ]


def test_missing_results_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = allreduce({"core": [1.0, 2.0]})
    write(tmp_path, lines, [step("mlp", 40.0, 50.0)])
    assert overview.main([str(tmp_path), "--ranks", "4", "--out", str(tmp_path)]) == 1
    assert "4 ranks lack" in capsys.readouterr().err
    (tmp_path / "training.json").unlink()
    assert overview.main([str(tmp_path), "--out", str(tmp_path)]) == 1
    assert "no results of benchmarks.training" in capsys.readouterr().err
    (tmp_path / "other.json").write_text("{}")
    assert overview.main([str(tmp_path / "other.json"), "--out", str(tmp_path)]) == 1
    assert "other.json has no results" in capsys.readouterr().err
    assert not list(tmp_path.glob("*.svg"))
