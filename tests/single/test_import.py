"""The package imports no framework, works without one, and reports missing ones."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version

import pytest

BLOCK = "import sys\nfor name in ('torch', 'tensorflow', 'keras'): sys.modules[name] = None\n"


def python(text: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60, check=False)


def test_import_imports_no_framework() -> None:
    done = python("import sys, dl_comm; print(sorted({'torch', 'tensorflow', 'keras', 'mpi4py'} & set(sys.modules)))")
    assert done.stdout.strip() == "[]", done.stderr


def test_the_core_is_loaded_when_a_name_is_used() -> None:
    text = "import sys, dl_comm, dl_comm.run\nprint('dl_comm._dl_comm' in sys.modules, 'numpy' in sys.modules)\n"
    done = python(text + "dl_comm.init\nprint('dl_comm._dl_comm' in sys.modules)\ndl_comm.nothing")
    assert done.stdout.split() == ["False", "False", "True"], done.stderr
    assert "module 'dl_comm' has no attribute 'nothing'" in done.stderr


def test_numpy_works_without_frameworks() -> None:
    done = python(
        BLOCK + "import numpy as np, dl_comm as mc\n"
        "mc.init()\nprint(mc.get_rank(), mc.get_nranks(), mc.gradients([np.ones(3)], 0)[0].sum())\nmc.finalize()"
    )
    assert done.stdout.split() == ["0", "1", "3.0"], done.stderr


@pytest.mark.parametrize("framework", ["torch", "tensorflow", "keras"])
def test_a_missing_framework_is_an_import_error(framework: str) -> None:
    done = python(BLOCK + f"import dl_comm.{framework}")
    assert done.returncode == 1
    assert "Error" in done.stderr.splitlines()[-1]
    assert framework in done.stderr or "tensorflow" in done.stderr


def test_the_stub_declares_what_the_module_has() -> None:
    import ast
    from pathlib import Path

    import dl_comm
    from dl_comm import _dl_comm

    stub = ast.parse(Path(dl_comm.__file__).with_name("_dl_comm.pyi").read_text())
    declared = {node.name for node in stub.body if isinstance(node, ast.FunctionDef)}
    assert declared == {name for name in dir(_dl_comm) if not name.startswith("__")}
    assert Path(dl_comm.__file__).with_name("py.typed").exists()
    assert set(dir(dl_comm)) - {"compat"} <= set(dl_comm.__all__)


def test_a_replaced_name_stays_replaced() -> None:
    """Also before the first use of another one, which imports them all."""
    program = "import dl_comm; dl_comm.size = lambda: 7; dl_comm.rank(); print(dl_comm.size())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "7\n"


def test_the_version() -> None:
    command = [sys.executable, "-m", "dl_comm", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.startswith(f"dl_comm {version('dl_comm')}, built for ")
    assert done.returncode == 0
