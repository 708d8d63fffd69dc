"""The headers that the op libraries share (core/include/dl_comm), compiled without a framework."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
Program = Callable[..., list[str]]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Program:
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    assert compiler, "no C++ compiler"
    built = tmp_path_factory.mktemp("headers") / "op_headers"
    options = [
        "-std=c++17",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-fsanitize=undefined",
        "-fsanitize-undefined-trap-on-error",
    ]
    source = ROOT / "tests" / "cpp" / "op_headers.cc"
    subprocess.run([compiler, *options, "-I", ROOT / "core" / "include", source, "-o", built], check=True, timeout=120)

    def run(*words: object) -> list[str]:
        command = [str(built), *(str(word) for word in words)]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()

    return run


def test_the_tables_are_those_of_the_core(program: Program) -> None:
    rust = (ROOT / "core" / "src" / "collective" / "operation.rs").read_text()
    rows = re.findall(r'row\("(\S+)", (\d+), Pattern::(\w+), (\w+), Root::(\w+)\)', rust)
    assert len(rows) == 9
    collectives = [" ".join((name.replace("-", "_"), *rest)) for name, *rest in rows]
    header = (ROOT / "core" / "include" / "dl_comm.h").read_text()
    enum = re.search(r"enum dl_comm_reduce \{(.*?)\}", header, re.DOTALL)
    assert enum is not None
    codes = dict(re.findall(r"DL_COMM_(\w+) = (\d+)", enum[1]))
    operators = [
        (name, code, codes.get(f"SCALED_{name}", "-1")) for name, code in codes.items() if not name.startswith("SCALED")
    ]
    printed = program()
    assert printed[:9] == collectives
    assert [line.replace("_", "").upper() for line in printed[9:]] == [" ".join(operator) for operator in operators]


CALLS: dict[str, tuple[tuple[object, ...], str]] = {
    "all-gather": (("all_gather", 1, 3, 0, "2,5", "", ""), "6 2"),
    "all-gather of scalars": (("all_gather", 1, 3, 0, "", "", ""), "3 1"),
    "all-gather with counts": (("all_gather", 1, 3, 0, "2,5", "1,2,0", ""), "3 2 5 10 0"),
    "gather": (("gather", 0, 2, 1, "4", "", ""), "8 4"),
    "scatter": (("scatter", 0, 2, 0, "6,2", "", ""), "3 3"),
    "scatter with counts": (("scatter", 1, 2, 1, "6,2", "4,2", ""), "2 2 8 4"),
    "scatter with counts, not the root": (("scatter", 1, 2, 0, "1,2", "4,2", ""), "2 2 8 4"),
    "reduce-scatter": (("reduce_scatter", 1, 2, 0, "6", "", ""), "3 3"),
    "reduce-scatter with counts": (("reduce_scatter", 0, 2, 0, "6,1,3", "5,1", ""), "5 5 15 3"),
    "all-to-all": (("all_to_all", 1, 2, 0, "6,2", "", ""), "6 3"),
    "all-to-all with counts": (("all_to_all", 1, 2, 0, "6,2", "4,2", "0,3"), "3 2 8 4 0 6"),
    "a list": (("all_gather", 1, 3, 0, "2,5;1", "", ""), "6 2 3 1"),
    "a list with counts": (("reduce_scatter", 1, 2, 0, "6,2;3", "5,1,1,2", ""), "1 1 10 2 2 2 1 2"),
    "a list to all": (("all_to_all", 0, 2, 0, "1;2,2", "1,0,1,1", "2,1,0,3"), "3 1 1 0 2 1 3 1 2 2 0 6"),
    "without rows": (("all_to_all", 0, 2, 0, "0,4", "0,0", "1,0"), "1 0 0 0 4 0"),
}


@pytest.mark.parametrize("case", CALLS)
def test_rows_and_lengths(program: Program, case: str) -> None:
    words, expected = CALLS[case]
    assert " ".join(program(*words)).split() == expected.split()


REFUSED: dict[str, tuple[tuple[object, ...], str]] = {
    "a rest": (
        ("reduce_scatter", 0, 2, 0, "5,2", "", ""),
        "tensor 0 has the shape [5, 2]; its first axis must be a multiple of the 2 ranks",
    ),
    "a scalar": (("scatter", 1, 2, 0, "", "1,1", ""), "tensor 0 is a scalar; it has no first axis to cut into blocks"),
    "another sum": (
        ("scatter", 0, 2, 0, "5", "2,2", ""),
        "tensor 0 has the shape [5]; the counts [2, 2] have the sum 4",
    ),
    "other rows": (
        ("all_gather", 1, 2, 0, "5", "5,4", ""),
        "tensor 0 has the shape [5]; counts has 4 for this rank",
    ),
    "too few": (("gather", 0, 2, 0, "5", "5", ""), "invalid counts: [5] (expected 2 extents, one for each rank)"),
    "too few lists": (
        ("gather", 0, 2, 0, "5;5", "5,1", ""),
        "invalid counts: [5, 1] (expected 2 extents, one for each rank, for each of the 2 tensors)",
    ),
    "of a list": (
        ("reduce_scatter", 0, 2, 0, "6;3", "5,1,4,-1", ""),
        "invalid counts: [4, -1] (expected 2 extents, one for each rank)",
    ),
    "negative": (
        ("all_to_all", 0, 2, 0, "0", "0,0", "1,-1"),
        "invalid counts: [1, -1] (expected 2 extents, one for each rank)",
    ),
    "too large": (
        ("all_to_all", 0, 2, 0, "0", "0,0", f"{2**62},{2**62}"),
        f"invalid counts: [{2**62}, {2**62}] (expected 2 extents, one for each rank)",
    ),
    "receive only": (("all_to_all", 0, 2, 0, "2", "", "1,1"), "receive_counts without send_counts; give both"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(program: Program, case: str) -> None:
    words, message = REFUSED[case]
    assert program(*words) == [f"-1 {message}", f"dl_comm error -1: {message}"]
