"""Every example runs on 2 ranks, on data of an installed package, with the common output.

With ``DL_COMM_TEST_MNIST`` (a folder with the IDX files of MNIST) they must reach 0.97 on 2 and on 3 ranks.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from imported import TORCH, python
from launch import launch, run

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
NAMES = ["numpy_mnist", "torch_mnist", "tf_mnist", "tf1_mnist", "estimator_mnist", "keras_mnist"]
IN_GATE = ("numpy_mnist", "torch_mnist", "keras_mnist")
MNIST = os.environ.get("DL_COMM_TEST_MNIST")


def interpreter(name: str) -> list[str]:
    if name == "numpy_mnist":
        return [sys.executable]
    if name == "estimator_mnist":
        return [sys.executable, "-m", "dl_comm.tf1"]
    return python(*TORCH) if name == "torch_mnist" else python("tensorflow")


def accuracy(name: str, ranks: int, *options: str) -> tuple[float, str]:
    finished = launch(ranks, [*interpreter(name), str(EXAMPLES / name / "train.py"), *options], 280)
    assert finished.returncode == 0, finished.output
    # Not necessarily the last line: finalize may print after it, and output may be buffered.
    found = re.findall(r"^test accuracy: (\d\.\d{4})$", finished.output, re.MULTILINE)
    assert len(found) == 1, finished.output
    assert re.search(r"^images/s: [1-9]\d*$", finished.output, re.MULTILINE), finished.output
    return float(found[0]), finished.output


@pytest.mark.parametrize(
    "name", [name if name in IN_GATE else pytest.param(name, marks=pytest.mark.heavy) for name in NAMES]
)
@pytest.mark.timeout(300)
def test_example_on_bundled_digits(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip({"torch_mnist": "torch", "numpy_mnist": "numpy"}.get(name, "tensorflow"))
    # Without a framework's cache, the example uses scikit-learn's digits.
    monkeypatch.delenv("PYTHONPATH", raising=False)  # tests/absent
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    monkeypatch.setenv("DL_COMM_CACHE", os.environ.get("DL_COMM_CACHE", str(Path("~/.cache/dl_comm").expanduser())))
    monkeypatch.chdir(tmp_path)
    checkpoint = tmp_path / "checkpoints" / {"keras_mnist": "model.keras"}.get(name, "model")
    checkpoint.parent.mkdir()
    reached, output = accuracy(name, 2, "--epochs", "6", "--checkpoint", str(checkpoint))
    assert reached >= 0.85, output
    assert "scikit-learn" in output
    assert list(checkpoint.parent.iterdir()), "rank 0 wrote a checkpoint"


@pytest.mark.skipif(not MNIST, reason="DL_COMM_TEST_MNIST names no folder")
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.timeout(300)
def test_example_on_mnist(name: str, ranks: int) -> None:
    reached, output = accuracy(name, ranks, "--data-dir", str(MNIST), "--epochs", "2")
    assert reached >= 0.97, output


TORCHMPI = sorted(path.name for path in (EXAMPLES / "torchmpi").glob("mnist_*.py"))


@pytest.mark.heavy
@pytest.mark.parametrize("name", TORCHMPI)
def test_examples_of_torchmpi(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On MNIST, if it is there; else on few digits, which asynchronous training learns slowly."""
    monkeypatch.delenv("PYTHONPATH", raising=False)  # tests/absent
    options = ["--data-dir", str(MNIST), "--epochs", "2"] if MNIST else ["--epochs", "10", "--batch-size", "32"]
    finished = launch(2, [sys.executable, str(EXAMPLES / "torchmpi" / name), *options], 120)
    assert finished.returncode == 0, finished.output
    (reached,) = re.findall(r"^test accuracy: (\d\.\d+)$", finished.output, re.MULTILINE)
    assert float(reached) >= (0.97 if MNIST else 0.8), finished.output


def test_the_first_command_ends_with_the_gain(tmp_path: Path) -> None:
    """Without its set-up."""
    tree = tmp_path / "examples"
    tree.mkdir()
    for name in ("run.sh", "mnist.py", "numpy_mnist"):
        (tree / name).symlink_to(EXAMPLES / name)
    (tree / "setup.sh").write_text("#!/bin/sh\n")
    (tree / "setup.sh").chmod(0o755)
    arguments = ["numpy_mnist", "--epochs", "3", "--checkpoint", str(tmp_path / "model")]
    finished = run(
        [str(tree / "run.sh"), *arguments], 120, {"DL_COMM_VENV": sys.prefix, "HOME": str(tmp_path), "PYTHONPATH": ""}
    )
    assert finished.returncode == 0, finished.output
    *_, last = finished.output.splitlines()
    assert re.fullmatch(r"dl_comm: \d+ images/s on 1 process, \d+ on 2: \d+\.\d\d times on this machine", last), (
        finished.output
    )
    failed = run([str(tree / "run.sh"), "numpy_mnist", "--epochs", "0"], 60, {"DL_COMM_VENV": sys.prefix})
    assert failed.returncode != 0
    assert "0 is not at least 1" in failed.output


def test_setup_reports_a_broken_cargo_at_once(tmp_path: Path) -> None:
    """A rustup without a default toolchain."""
    cargo = tmp_path / "bin/cargo"
    cargo.parent.mkdir()
    cargo.write_text("#!/bin/sh\necho 'error: rustup could not choose a version of cargo to run' >&2\nexit 1\n")
    cargo.chmod(0o755)
    env = {
        "PATH": f"{cargo.parent}:{os.environ['PATH']}",
        "DL_COMM_VENV": str(tmp_path / "venv"),
        "PYTHON": sys.executable,
    }
    finished = run([str(ROOT / "examples/setup.sh")], 60, env)
    assert finished.returncode == 1
    (line,) = finished.output.splitlines()
    assert "could not choose a version of cargo" in line
    assert "rustup default stable" in line
    assert not (tmp_path / "venv").exists()


@pytest.mark.skipif(any(Path("/dev").glob("nvidia[0-9]*")), reason="has a GPU")
@pytest.mark.parametrize(("versions", "chosen"), [("2.15.0+cu132, 2.15.0+cpu, 2.14.1+cpu", True), ("2.15.0", False)])
def test_setup_chooses_a_torch_without_cuda(tmp_path: Path, versions: str, chosen: bool) -> None:
    """The test's pip knows these versions, and neither builds nor installs anything."""
    python = tmp_path / "venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(
        f"""#!/bin/sh
case "$*" in
  *"pip show"*) exit 1 ;;
  *"pip index versions torch"*) echo "Available versions: {versions}" ;;
  *"pip wheel"*) while [ "$1" != -w ]; do shift; done; touch "$2/dl_comm-0-any.whl" ;;
  *install.py*) echo "installs: $*" ;;
esac
"""
    )
    python.chmod(0o755)
    env = {"DL_COMM_VENV": str(python.parent.parent), "PYTHON": sys.executable}
    finished = run([str(ROOT / "examples/setup.sh"), "torch", "examples"], 60, env)
    assert finished.returncode == 0, finished.output
    framework, core, extras = re.findall(r"^installs: .* (\S+)$", finished.output, re.MULTILINE)
    assert framework == ("torch==2.15.0+cpu" if chosen else "torch")
    assert core.endswith("/dl_comm-0-any.whl")
    assert extras == f"{core}[torch,examples]"


def test_setup_shows_why_the_core_is_not_built(tmp_path: Path) -> None:
    python = tmp_path / "venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\ncase "$*" in *"pip wheel"*) echo "no compiler" && exit 1 ;; esac\n')
    python.chmod(0o755)
    finished = run([str(ROOT / "examples/setup.sh")], 60, {"DL_COMM_VENV": str(python.parent.parent)})
    assert finished.returncode == 1
    assert finished.output.endswith("no compiler\ndl_comm: the core could not be built\n"), finished.output


def test_setup_builds_again_after_a_broken_download(tmp_path: Path) -> None:
    """The build of the test's pip fails the first time."""
    python = tmp_path / "venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(
        f"""#!/bin/sh
once() {{ [ -e "{tmp_path}/$1" ] || ! touch "{tmp_path}/$1"; }}
case "$*" in
  *"pip wheel"*) once built && while [ "$1" != -w ]; do shift; done && touch "$2/dl_comm-0-any.whl" ;;
  *install.py*) echo "installs: $*" ;;
esac
"""
    )
    python.chmod(0o755)
    finished = run([str(ROOT / "examples/setup.sh"), "examples"], 60, {"DL_COMM_VENV": str(python.parent.parent)})
    assert finished.returncode == 0, finished.output
    assert finished.output.endswith("/dl_comm-0-any.whl[examples]\n"), finished.output


INSTALLER = """
import os, pathlib, sys
folder = pathlib.Path(__file__).parent
if sys.argv[1:] == ["config", "list"]:
    print((folder / "configuration").read_text())
    sys.exit()
with open(folder / "log", "a+") as log:
    log.seek(0)
    number = len(log.readlines())
    print(pathlib.Path(__file__).stem, *sys.argv[1:], "from", os.environ["UV_DEFAULT_INDEX"], file=log)
sys.exit(str(number) in (folder / "failing").read_text())
"""
GETS_UV = "pip install -q --disable-pip-version-check uv from "
BY_UV = f"uv pip install --python {sys.executable} --no-deps a[b] from "
BY_PIP = "pip install --no-compile --disable-pip-version-check --no-deps a[b] from "


@pytest.mark.parametrize(
    ("configuration", "failing", "calls", "status"),
    [
        ("global.timeout='9'\nglobal.index-url='https://a'", "", [GETS_UV, BY_UV + "https://a"], 0),
        ("", "1 2", [GETS_UV, BY_UV, BY_PIP, BY_PIP], 0),
        ("", "0 1 2", [GETS_UV, BY_PIP, BY_PIP], 1),
        ("global.extra-index-url='https://a'", "", [BY_PIP], 0),
    ],
)
def test_uv_installs_or_else_pip(
    tmp_path: Path, configuration: str, failing: str, calls: list[str], status: int
) -> None:
    """The test's pip and uv write down what they are asked; the ``failing`` calls of them fail."""
    for name in ("pip.py", "uv.py"):
        (tmp_path / name).write_text(INSTALLER)
    (tmp_path / "configuration").write_text(configuration)
    (tmp_path / "failing").write_text(failing)
    command = [sys.executable, str(EXAMPLES / "install.py"), "--no-deps", "a[b]"]
    finished = run(command, 60, {"PYTHONPATH": str(tmp_path), "UV_DEFAULT_INDEX": ""})
    assert finished.returncode == status, finished.output
    assert (tmp_path / "log").read_text().splitlines() == calls


def test_the_build_ends_with_the_setup(tmp_path: Path) -> None:
    """The test's build takes a minute, in a child process."""
    python, started = tmp_path / "venv/bin/python", tmp_path / "started"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\ncase "$*" in *"pip wheel"*) sh -c "echo \\$\\$ >{started} && sleep 60" ;; esac\n')
    python.chmod(0o755)
    env = {**os.environ, "DL_COMM_VENV": str(python.parent.parent)}
    with subprocess.Popen([str(ROOT / "examples/setup.sh")], env=env, stdout=subprocess.DEVNULL) as setup:
        until = time.monotonic() + 30
        while not (started.exists() and started.read_text().endswith("\n")):
            assert time.monotonic() < until, "the build does not start"
            time.sleep(0.05)
        setup.terminate()
        assert setup.wait(30) == 130
    child = Path("/proc") / started.read_text().strip()
    while child.exists() and "\nState:\tZ" not in (child / "status").read_text():
        assert time.monotonic() < until, "the build goes on"
        time.sleep(0.05)


def test_the_gate_ignores_the_environment_of_the_shell(tmp_path: Path) -> None:
    """The test stops it at its first step, in an environment whose Python shows what it gets."""
    tree = tmp_path / "tree"
    (tree / "tests").mkdir(parents=True)
    for name in ("run.sh", "environment.sh"):
        shutil.copy(ROOT / "tests" / name, tree / "tests")
    python = tree / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\nenv\nexit 1\n")
    python.chmod(0o755)
    extra = {"PYTHONPATH": "/nowhere", "DL_COMM_TIMEOUT_S": "7", "PYTHONUNBUFFERED": "1", "MPICC": "/some/mpicc"}
    seen = run([str(tree / "tests/run.sh")], 60, extra).output
    assert "MPICC=/some/mpicc" in seen
    assert f"HOME={os.environ['HOME']}" in seen
    assert not [name for name in extra if name != "MPICC" and f"{name}=" in seen], seen
