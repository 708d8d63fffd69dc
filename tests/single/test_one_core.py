"""The torch ops, the TensorFlow ops and the Python module share one core, in any load order."""

from __future__ import annotations

import subprocess
import sys

import pytest

# Each snippet loads one binding with its framework's own loader, and prints its core.
PIECES = {
    "python": "import dl_comm\nids['python'] = dl_comm.core_id()",
    "torch": "import torch\ntorch.ops.load_library(TORCH)\nids['torch'] = torch.ops.dl_comm.core_id()",
    "tensorflow": "import tensorflow as tf\nids['tensorflow'] = int(tf.load_op_library(TENSORFLOW).dl_comm_core_id())",
    "c": "import ctypes\nlibrary = ctypes.CDLL(TORCH)\nlibrary.dl_comm_ops_core_id.restype = ctypes.c_size_t\n"
    "ids['c'] = library.dl_comm_ops_core_id()",
}
PATHS = "from dl_comm._libraries.load import ops_library\nprint(ops_library('torch'))\nprint(ops_library('tensorflow'))"
CHECK = """
assert len(set(ids.values())) == 1, ids
cores = {line.split()[-1] for line in open('/proc/self/maps') if 'libdl_comm.so' in line}
assert len(cores) == 1, cores
import dl_comm
dl_comm.init()
assert torch.ops.dl_comm.core_id() == dl_comm.core_id() if 'torch' in ids else True
dl_comm.finalize()
print('one core')
"""


def python(text: str) -> str:
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def paths() -> str:
    torch, tensorflow = python(PATHS).split()
    return f"TORCH, TENSORFLOW = {torch!r}, {tensorflow!r}\nids = {{}}\n"


@pytest.mark.parametrize(
    "order",
    [
        pytest.param(("python", "torch", "tensorflow"), marks=pytest.mark.heavy),
        pytest.param(("torch", "tensorflow", "python"), marks=pytest.mark.heavy),
        pytest.param(("tensorflow", "python", "torch"), marks=pytest.mark.heavy),
        ("tensorflow", "torch", "c", "python"),
    ],
    ids=" ".join,
)
def test_one_core_in_every_order(paths: str, order: tuple[str, ...]) -> None:
    text = paths + "\n".join(PIECES[piece] for piece in order) + CHECK
    assert "one core" in python(text)


def test_a_second_core_is_refused() -> None:
    from dl_comm._dl_comm import core_id
    from dl_comm._libraries.load import check_one_core

    check_one_core("libdl_comm_torch.so", core_id())
    with pytest.raises(ImportError, match="another core"):
        check_one_core("libdl_comm_torch.so", core_id() + 1)
