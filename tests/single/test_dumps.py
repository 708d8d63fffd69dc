"""Dumps of real jobs: when ranks write them, also ranks that have not noticed a failure."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from launch import QUIET, Finished, launch, mpiexec, run

Script = Callable[..., Finished]


def test_a_rank_that_has_not_noticed_a_failure_can_write_a_dump(script: Script, tmp_path: Path) -> None:
    finished = script(
        2,
        "import os, sys, time\nimport numpy as np\nimport dl_comm as mc\n"
        "mc.init()\n"
        f"folder, done = {str(tmp_path / 'dumps')!r}, {str(tmp_path / 'done')!r}\n"
        "if mc.get_rank() == 1:\n"
        "    try: mc.gradients([np.ones(3, np.float32)], timeout=0.5)\n"
        "    except mc.TimeoutError as error: open(done, 'w').write(str(error))\n"
        "else:\n"
        "    while not os.path.exists(done): time.sleep(0.02)\n"
        "mc.dump(folder)\n"
        "print('written', flush=True)\n"
        # The launcher may kill the other rank when one exits without MPI_Finalize.
        "open(f'{done}{mc.get_rank()}', 'w').close()\n"
        "while not all(os.path.exists(f'{done}{rank}') for rank in (0, 1)): time.sleep(0.02)\n",
        env={"DL_COMM_DUMP_DIR": str(tmp_path / "alarms")},
    )
    assert finished.output.count("written") == 2, finished.output
    for rank in range(2):
        (team,) = (t for t in json.loads((tmp_path / f"dumps/rank{rank}.json").read_text())["teams"] if t["team"] == 0)
        assert "was not complete after 0.5 s" in team["failure"]


def test_a_dump_shows_where_python_is(tmp_path: Path) -> None:
    """Also of a rank that holds the GIL."""
    program = tmp_path / "script.py"
    program.write_text(
        "import ctypes, os, sys, time\nimport dl_comm as mc\nmc.init()\n"
        "def holds_the_gil():\n"
        "    until = time.monotonic() + 50\n"
        "    open(sys.argv[1] + '.wanted', 'x').close()\n"
        "    while not os.path.exists(sys.argv[1]) and time.monotonic() < until:\n"
        "        ctypes.PyDLL(None).sleep(1)\n"
        "if mc.rank() == 1: holds_the_gil()\nmc.barrier()\n"
        "time.sleep(1 - mc.rank())\n"
        "if mc.rank() == 0: mc.dump()\nmc.barrier()\n"
    )
    requested = tmp_path / "requested"
    command = [sys.executable, str(program), str(requested)]
    job = threading.Thread(target=lambda: results.append(launch(2, command, 60, env)))
    results: list[Finished] = []
    env = {"DL_COMM_DUMP_DIR": str(tmp_path / "dumps"), "DL_COMM_STALL_WARN_S": "0"}
    job.start()
    until = time.monotonic() + 50
    request = ""
    # A dump that is written earlier does not show the function.
    while not (tmp_path / "requested.wanted").exists() and time.monotonic() < until:
        time.sleep(0.05)
    while "from 2 rank(s)" not in request and time.monotonic() < until:
        request = run([sys.executable, "-m", "dl_comm.run", "--dump", str(os.getpid())], 60).output
    requested.touch()
    job.join()
    assert results[0].returncode == 0, results[0].output
    stacks = [json.loads((tmp_path / f"dumps/rank{rank}.json").read_text())["stacks"] for rank in (0, 1)]
    assert any("in barrier" in line or "in dump" in line for line in stacks[0]), stacks[0]
    assert any("in holds_the_gil" in line for line in stacks[1]), stacks[1]


def test_a_dump_folder_of_another_user_is_not_used(script: Script, tmp_path: Path) -> None:
    """The default folder has a predictable name."""
    victim, usual = tmp_path / "victim", f"dl_comm-{os.geteuid()}"
    victim.mkdir()
    (tmp_path / usual).symlink_to(victim)
    # An empty value means unset.
    settings = {"TMPDIR": str(tmp_path), "DL_COMM_DUMP_DIR": ""}
    finished = script(2, "import dl_comm as mc\nmc.init()\nprint('written', mc.dump(), flush=True)\n", env=settings)
    assert finished.output.count("written") == 2, finished.output
    assert not list(victim.iterdir())
    (folder,) = tmp_path.glob(f"{usual}-*/*")
    assert {path.name for path in folder.iterdir()} == {"rank0.json", "rank1.json"}
    assert folder.stat().st_mode & 0o077 == folder.parent.stat().st_mode & 0o077 == 0


def test_sigusr1_is_a_request_from_the_start_on(tmp_path: Path) -> None:
    """An import installs no handler."""
    program = tmp_path / "script.py"
    program.write_text(
        "import os, signal, sys\nimport dl_comm as mc\nmc.rank\n"
        "if sys.argv[1] == 'start':\n    mc.init()\n"
        "os.kill(os.getpid(), signal.SIGUSR1)\nmc.barrier()\n"
    )
    finished = run([sys.executable, str(program), "start"], 60, QUIET)
    assert finished.returncode == 0, finished.output
    assert run([sys.executable, str(program), "import"], 60, QUIET).returncode == -signal.SIGUSR1


def test_the_next_start_removes_old_dumps(script: Script, tmp_path: Path) -> None:
    mine = tmp_path / f"dl_comm-{os.geteuid()}"
    for name, days in (("old", 8), ("young", 1)):
        (mine / name).mkdir(parents=True)
        (mine / name / "rank0.json").touch()
        os.utime(mine / name, (time.time() - days * 86400,) * 2)
    mine.chmod(0o700)
    finished = script(2, "import dl_comm as mc\nmc.init()\n", env={"TMPDIR": str(tmp_path)})
    assert finished.returncode == 0, finished.output
    assert [path.name for path in mine.iterdir()] == ["young"]


WAITS = """
import os, sys, time
import dl_comm as mc
mc.init()
open(sys.argv[1] + str(mc.rank()), "w").close()
until = time.monotonic() + 60
mine = os.path.join(os.environ["DL_COMM_DUMP_DIR"], f"rank{mc.rank()}.json")
while not os.path.exists(mine) and time.monotonic() < until: time.sleep(0.05)
assert os.path.exists(mine)
mc.barrier()
"""


@pytest.mark.parametrize("launcher", [[sys.executable, "-m", "dl_comm.run"], mpiexec()])
def test_a_request_reaches_only_the_ranks_of_a_job(tmp_path: Path, launcher: list[str]) -> None:
    """Each rank runs in a shell, which the signal would kill."""
    program, ready = tmp_path / "train.py", tmp_path / "ready"
    program.write_text(WAITS)
    inner = f"{sys.executable} {program} {ready}; code=$?; echo train.py done; exit $code"
    job = tmp_path / "job"
    outer = f"echo $$ > {job}; exec {shlex.join([*launcher, '-n', '2', 'sh', '-c', inner])}"
    results: list[Finished] = []
    env = {"DL_COMM_DUMP_DIR": str(tmp_path / "dumps")}
    thread = threading.Thread(target=lambda: results.append(run(["sh", "-c", outer], 90, env)))
    thread.start()
    until = time.monotonic() + 60
    while len(list(tmp_path.glob("ready?"))) < 2 and time.monotonic() < until:
        time.sleep(0.05)
    request = run([sys.executable, "-m", "dl_comm.run", "--dump", job.read_text().strip()], 60)
    thread.join()
    assert request.output.startswith("requested a dump from 2 rank(s)"), request.output
    assert results[0].returncode == 0, results[0].output
    assert {path.name for path in (tmp_path / "dumps").iterdir()} == {"rank0.json", "rank1.json"}


def test_a_missing_job_is_reported() -> None:
    finished = run([sys.executable, "-m", "dl_comm.run", "--dump", str(os.getpid())], 60)
    assert finished.returncode == 2
    assert "on this host runs dl_comm" in finished.output
