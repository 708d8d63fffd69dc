"""The scripts of the documentation run with the documented results; its tables and references are complete."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import dl_comm
from dl_comm import _dl_comm
from launch import launch, run

ROOT = Path(__file__).parents[2]
PORTING = (ROOT / "docs/porting.md").read_text()


def blocks(section: str, language: str) -> list[str]:
    """The code blocks of a section of the porting page: the serial script, then the parallel one."""
    (text,) = re.findall(rf"^## {section}\n(.*?)(?=^## |\Z)", PORTING, re.MULTILINE | re.DOTALL)
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("section", ["NumPy", "PyTorch", "Keras", "TensorFlow", "TensorFlow 1"])
def test_the_parallel_script_ends_where_the_serial_one_does(section: str, tmp_path: Path) -> None:
    serial, parallel = blocks(section, "python")
    command = [sys.executable, "-m", "dl_comm.tf1"] if section == "TensorFlow 1" else [sys.executable]
    losses = []
    for name, text, ranks in (("serial", serial, 0), ("parallel", parallel, 1), ("parallel", parallel, 2)):
        path = tmp_path / f"{name}.py"
        path.write_text(text)
        env = {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
        finished = launch(ranks, [*command, str(path)], 200, env) if ranks else run([*command, str(path)], 200, env)
        assert finished.returncode == 0, finished.output
        losses += re.findall(r"^loss (\S+)$", finished.output, re.MULTILINE)
    assert len(losses) == 3
    assert [float(loss) for loss in losses] == pytest.approx([float(losses[0])] * 3, rel=2e-4)


def test_the_c_programs_end_with_the_same_weight(tmp_path: Path) -> None:
    serial, parallel = blocks("C", "c")
    package = Path(dl_comm.__file__).parent
    weights = []
    for name, text, flags in (
        ("serial", serial, []),
        (
            "parallel",
            parallel,
            [f"-I{dl_comm.get_include()}", str(package / "libdl_comm.so.0"), f"-Wl,-rpath,{package}"],
        ),
    ):
        source, program = tmp_path / f"{name}.c", tmp_path / name
        source.write_text(text)
        subprocess.run(
            ["cc", "-Wall", "-Werror", str(source), "-o", str(program), *flags, "-Wl,--allow-shlib-undefined"],
            check=True,
        )
        finished = launch(2, [str(program)], 60) if flags else run([str(program)], 60)
        assert finished.returncode == 0, finished.output
        weights.append(finished.output.strip())
    assert weights[0] == weights[1]
    assert weights[0].startswith("weight 31.1")


def test_the_manual_page_has_every_function_as_the_header_has_it() -> None:
    header = (ROOT / "core/include/dl_comm.h").read_text()
    page = (ROOT / "docs/man/dl_comm.3").read_text()
    prototypes = re.findall(r"^((?:const )?\w+\*?) (dl_\w+)\(([^;]*)\);", header, re.MULTILINE)
    assert len(prototypes) > 20
    declared = [(kind, name, re.sub(r"\s+", " ", arguments).split(", ")) for kind, name, arguments in prototypes]
    lines = re.findall(r'^\.Ft "?([^"\n]+)"?\n\.Fn (\w+) (.*)$', page, re.MULTILINE)
    assert [(kind, name, re.findall(r'"([^"]*)"', arguments)) for kind, name, arguments in lines] == declared
    errors = re.findall(r"#define (DL_COMM_ERROR_\w+)", header)
    assert re.findall(r"^\.It Dv (DL_COMM_ERROR_\w+)", page, re.MULTILINE) == errors


def test_the_example_of_the_manual_page_compiles(tmp_path: Path) -> None:
    page = (ROOT / "docs/man/dl_comm.3").read_text()
    (text,) = re.findall(r"^\.Bd -literal\n(.*?)^\.Ed", page, re.MULTILINE | re.DOTALL)
    source = tmp_path / "example.c"
    source.write_text(text.replace("\\e", "\\"))
    subprocess.run(
        ["cc", "-Wall", "-Werror", "-fsyntax-only", f"-I{dl_comm.get_include()}", str(source)], check=True, timeout=60
    )


def test_every_variable_is_in_the_table() -> None:
    """The core has the list of variables; those of the build and the tests are internal."""
    known = json.loads(_dl_comm.describe())["variables"]
    table = re.findall(r"^\| `(DL_COMM_[A-Z_]+)` \|", (ROOT / "docs/environment.md").read_text(), re.MULTILINE)
    assert sorted(table) == sorted(known)
    files = [ROOT / "core/src/config.rs", ROOT / "core/src/helper.rs", *(ROOT / "python/dl_comm").rglob("*.py")]
    used = {name for file in files for name in re.findall(r'"(DL_COMM_[A-Z_]+)"', file.read_text())}
    assert used - set(known) == {name for name in used if name.startswith(("DL_COMM_LIB", "DL_COMM_MPI"))}
    assert set(known) - used == {"DL_COMM_VENV"}, "unused variables"


def test_the_reference_is_what_the_docstrings_say(tmp_path: Path) -> None:
    """docs/api.md is the output of ``griffe2md dl_comm -o ../docs/api.md``, run in ``python/``."""
    made = tmp_path / "api.md"
    griffe2md = Path(sys.executable).parent / "griffe2md"
    subprocess.run(
        [griffe2md, "dl_comm", "-o", str(made)], cwd=ROOT / "python", check=True, timeout=100, capture_output=True
    )
    assert made.read_text() == (ROOT / "docs/api.md").read_text(), "run griffe2md again"
