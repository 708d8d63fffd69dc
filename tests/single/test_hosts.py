"""Two "hosts" (network namespaces): the same tests and training results as on one host."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import dl_comm
from hosts import Hosts, possible
from launch import Finished, launch

TESTS = Path(__file__).parent.parent
EXAMPLES = TESTS.parent / "examples"

pytestmark = pytest.mark.skipif(not possible(), reason="needs root and iproute2 to make network namespaces")


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with Hosts(2) as hosts:
        yield hosts


@pytest.mark.heavy  # the gate runs those of the C interface, and trains
@pytest.mark.parametrize("per_host", [1, 2])
def test_the_numpy_tests_pass_between_hosts(hosts: Hosts, per_host: int) -> None:
    quick = ["--deselect", f"{TESTS}/parallel/test_numpy.py::test_one_array_past_two_to_the_31_elements"]
    files = [f"{TESTS}/parallel/{name}.py" for name in ("test_numpy", "test_averages")] + ["--frameworks=numpy", *quick]
    finished = hosts.launch(per_host, [sys.executable, "-m", "pytest", "-x", "-q", *files], 200)
    assert finished.returncode == 0, finished.output
    assert len(re.findall(r"\d+ passed", finished.output)) == 2 * per_host, finished.output


@pytest.mark.heavy
def test_torch_gradients_lie_in_shared_memory(hosts: Hosts) -> None:
    file = f"{TESTS}/parallel/test_torch_views.py"
    finished = hosts.launch(2, [sys.executable, "-m", "pytest", "-x", "-q", file], 200)
    assert finished.returncode == 0, finished.output
    assert len(re.findall(r"\d+ passed", finished.output)) == 4, finished.output


@pytest.mark.parametrize(
    ("per_host", "name"),
    [
        pytest.param(1, "collectives", marks=pytest.mark.heavy),
        pytest.param(2, "collectives", marks=pytest.mark.heavy),
        (1, "p2p"),
        pytest.param(2, "p2p", marks=pytest.mark.heavy),
    ],
)
def test_every_collective_and_message_of_the_c_interface(
    hosts: Hosts, tmp_path: Path, per_host: int, name: str
) -> None:
    program, package = tmp_path / name, Path(dl_comm.__file__).parent
    links = [f"-L{package}", "-l:libdl_comm.so.0", f"-Wl,-rpath,{package},--allow-shlib-undefined"]
    source = TESTS / "c" / f"{name}.c"
    subprocess.run(
        ["cc", f"-I{dl_comm.get_include()}", str(source), "-o", str(program), *links], check=True, timeout=60
    )
    finished = hosts.launch(per_host, [str(program)], 100)
    assert finished.returncode == 0, finished.output


def test_training_ends_with_the_same_bits_as_on_one_host(
    hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks add in the same order on one host and on two."""
    monkeypatch.delenv("PYTHONPATH", raising=False)  # tests/absent: the example needs scikit-learn
    # With one rank on a host the example uses more threads, and BLAS then adds in another order.
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.setenv(variable, "1")

    def train(run: str) -> tuple[Finished, dict[str, np.ndarray]]:
        checkpoint = tmp_path / f"{run}.npz"
        command = [
            sys.executable,
            str(EXAMPLES / "numpy_mnist/train.py"),
            "--epochs",
            "1",
            "--checkpoint",
            str(checkpoint),
        ]
        finished = launch(2, command) if run == "one" else hosts.launch(1, command)
        assert finished.returncode == 0, finished.output
        return finished, dict(np.load(checkpoint))

    (one, weights_one), (two, weights_two) = train("one"), train("two")
    accuracy = re.compile(r"test accuracy: [\d.]+")
    assert accuracy.findall(one.output) == accuracy.findall(two.output) != []
    assert weights_one.keys() == weights_two.keys()
    for name, weight in weights_one.items():
        np.testing.assert_array_equal(weight, weights_two[name], err_msg=name)


def test_hosts_are_distinguished(hosts: Hosts, tmp_path: Path) -> None:
    script = tmp_path / "where.py"
    script.write_text(
        "import dl_comm as mc\nmc.init()\n"
        "import os\nplace = mc.num_hosts(), mc.local_size(), mc.get_rank() - mc.local_rank()\n"
        "os.write(1, b'at %d %d %d\\n' % place)"
    )
    finished = hosts.launch(2, [sys.executable, str(script)])
    assert sorted(re.findall(r"at \d \d \d", finished.output)) == ["at 2 2 0"] * 2 + ["at 2 2 2"] * 2, finished.output


@pytest.mark.parametrize("algorithm", ["auto", "doubling", "halving", "pairwise", "ring"])
def test_bytes_on_the_link(hosts: Hosts, tmp_path: Path, algorithm: str) -> None:
    """Each of two hosts sends 2 (n - 1) / n of the data: the bytes of one rank, for any number of ranks.

    Counted on the links, with what TCP adds.
    """
    script = tmp_path / "volume.py"
    script.write_text(
        "import numpy as np\nimport dl_comm as mc\nfrom pathlib import Path\nmc.init()\n"
        "sent = Path('/sys/class/net/eth0/statistics/tx_bytes')\n"
        "data = np.full(4 << 20, mc.get_rank(), np.float32)\n"
        "mc.barrier()\nbefore = int(sent.read_text())\n"
        "mean = mc.gradients([data])[0]\n"
        "mc.barrier()\nafter = int(sent.read_text())\n"
        "assert (mean == (mc.get_nranks() - 1) / 2).all()\n"
        "import os\n"
        "if mc.local_rank() == 0: os.write(1, b'volume %.4f\\n' % ((after - before) / data.nbytes))\n"
    )
    finished = hosts.launch(2, [sys.executable, str(script)], env={"DL_COMM_ALGORITHM": algorithm})
    volumes = [float(text) for text in re.findall(r"volume ([\d.]+)", finished.output)]
    assert len(volumes) == 2, finished.output
    # Packet headers and acknowledgements.
    assert all(0.99 < volume < 1.06 for volume in volumes), finished.output
