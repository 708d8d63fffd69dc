"""The scripts of examples/launch, as far as this machine has their launchers."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from installed import needs
from launch import QUIET, run
from ranks import free_port

LAUNCH = Path(__file__).resolve().parents[2] / "examples" / "launch"
SETTINGS = {**QUIET, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}

needs("torch")


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("script", "launcher"),
    [
        ("torchrun", "torchrun"),
        ("mpiexec", "mpiexec"),
        ("plain", "variables"),
    ],
)
def test_training_is_resumed(tmp_path: Path, script: str, launcher: str) -> None:
    checkpoint = tmp_path / "model.pt"
    env = {**SETTINGS, "RANKS": "2", "DL_COMM_ADDR": f"localhost:{free_port()}"}
    for epochs, first in ((2, 0), (6, 2)):
        command = [str(LAUNCH / f"{script}.sh"), "--checkpoint", str(checkpoint), "--epochs", str(epochs)]
        finished = run(command, 150, env if script == "plain" else {**env, "DL_COMM_ADDR": ""})
        assert finished.returncode == 0, finished.output
        assert f"2 ranks, started by {launcher}, begin with epoch {first}\n" in finished.output, finished.output
    slopes = re.findall(r"^slope ([\d.]+)$", finished.output, re.MULTILINE)
    assert len(slopes) == 1, finished.output
    assert 2.5 < float(slopes[0]) < 3.1


@pytest.mark.heavy
def test_torchrun_starts_again_after_a_failure(tmp_path: Path) -> None:
    program, checkpoint = tmp_path / "fails_once.py", tmp_path / "model.pt"
    program.write_text(
        f"""
import os, signal, sys
sys.path.insert(0, {str(LAUNCH)!r})
import train
save = train.dl_comm.torch.save_checkpoint
def save_and_fail(path, **objects):
    save(path, **objects)
    if (objects["epoch"], os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]) == (2, "1", "0"):
        os.kill(os.getpid(), signal.SIGKILL)
train.dl_comm.torch.save_checkpoint = save_and_fail
train.train(train.Path({str(checkpoint)!r}), 4)
"""
    )
    options = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "1", "--monitor-interval", "0.5"]
    finished = run([sys.executable, "-m", "torch.distributed.run", *options, str(program)], 150, SETTINGS)
    assert finished.returncode == 0, finished.output
    assert re.findall(r"begin with epoch (\d)", finished.output) == ["0", "2"], finished.output


def test_ray(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    finished = run([sys.executable, str(LAUNCH / "ray_train.py"), str(tmp_path / "model.pt")], 200, SETTINGS)
    assert finished.returncode == 0, finished.output
    assert "2 ranks, started by arguments, begin with epoch 0" in finished.output, finished.output


def test_the_manifest_has_the_variables_of_an_indexed_job() -> None:
    yaml = pytest.importorskip("yaml")
    service, job = yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text())
    (container,) = job["spec"]["template"]["spec"]["containers"]
    env = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert job["spec"]["completionMode"] == "Indexed"
    assert int(env["DL_COMM_SIZE"]) == job["spec"]["completions"] == job["spec"]["parallelism"]
    assert env["DL_COMM_ADDR"].startswith(f"{job['metadata']['name']}-0.{service['metadata']['name']}:")
    assert "DL_COMM_JOB_KEY" in env
