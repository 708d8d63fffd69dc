"""Assigns GPUs to ranks (local rank modulo GPU count): ``dl-comm-run --pin-gpu`` and ``init(pin_gpu=True)``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dl_comm._base.torch_variables import Position
from dl_comm._base.visible_gpus import visible_gpus
from dl_comm.run._child import one_gpu
from launch import Finished, run

# Write each line at once, because the ranks' output interleaves.
SHOW = "import os\nos.write(1, f\"sees {os.environ.get('CUDA_VISIBLE_DEVICES')}\\n\".encode())"


@pytest.mark.parametrize(
    ("variable", "expected"),
    [("0,1", ["0", "1"]), ("GPU-a, GPU-b", ["GPU-a", "GPU-b"]), ("2,-1,3", ["2"]), ("", []), ("-1", [])],
)
def test_the_variable_lists_the_visible_gpus(variable: str, expected: list[str], tmp_path: Path) -> None:
    (tmp_path / "nvidia0").touch()
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": variable}, tmp_path) == expected


def test_without_the_variable_the_devices_are_counted(tmp_path: Path) -> None:
    assert visible_gpus({}, tmp_path) == []
    for name in ("nvidia0", "nvidia3", "nvidiactl", "nvidia-uvm", "nvidia0x"):
        (tmp_path / name).touch()
    assert visible_gpus({}, tmp_path) == ["0", "1"]


def test_ranks_share_gpus_and_missing_ones_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    host, ranks = {"CUDA_VISIBLE_DEVICES": "4,5"}, [Position(rank, 3, rank, 3) for rank in range(3)]
    taken = [one_gpu(host, position, 9) for position in ranks]
    assert [each["CUDA_VISIBLE_DEVICES"] for each in taken] == ["4", "5", "4"]
    assert "3 ranks share 2 GPUs" in capsys.readouterr().err
    assert one_gpu(host, Position(0, 3), 3) == {}
    assert "sets no local rank" in capsys.readouterr().err
    assert one_gpu({"CUDA_VISIBLE_DEVICES": ""}, ranks[0], 3) == {}
    assert "there is no GPU" in capsys.readouterr().err
    assert one_gpu({"CUDA_VISIBLE_DEVICES": ""}, ranks[1], 3) == {}
    assert capsys.readouterr().err == ""


def test_the_launcher_pins(tmp_path: Path) -> None:
    script = tmp_path / "show.py"
    script.write_text(SHOW)
    command = [sys.executable, "-m", "dl_comm.run", "-n", "2", "--pin-gpu", "--all-output", "python", str(script)]
    finished = run(command, 60, {"CUDA_VISIBLE_DEVICES": "6,7"})
    assert sorted(line for line in finished.output.splitlines() if "sees" in line) == ["sees 6", "sees 7"]


def test_init_pins_and_reports_shared_gpus(script: Callable[..., Finished]) -> None:
    text = "import dl_comm\ndl_comm.init(pin_gpu=True)\n" + SHOW
    finished = script(3, text, env={"CUDA_VISIBLE_DEVICES": "6,7"})
    assert finished.returncode == 0, finished.output
    assert sorted(line for line in finished.output.splitlines() if "sees" in line) == ["sees 6", "sees 6", "sees 7"]
    assert "dl_comm: 3 ranks share 2 GPUs" in finished.output
    finished = script(2, text, env={"CUDA_VISIBLE_DEVICES": ""})
    assert finished.returncode == 0, finished.output
    assert finished.output.count("pin_gpu: there is no GPU") == 1
