"""Process lifecycle: start with and without the program's own MPI, environment, lost ranks, fork, exit."""

from __future__ import annotations

import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from launch import Finished, launch, run
from plain_ranks import MEET, shared_memory

Script = Callable[..., Finished]

HEAD = """
import os, signal, sys, time
import numpy as np
import dl_comm as mc
def write_line(*words):  # one write, so that the lines of two ranks do not mix
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())
def mean(value, team=0):
    return mc.gradients([np.full(3, value, np.float32)], team)[0][0]
"""


@pytest.fixture(autouse=True)
def _nothing_stays_behind(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Neither in our folder, nor files of MPICH that no process uses any more (concurrent jobs have some, too)."""
    with shared_memory() as folder:
        monkeypatch.setenv("DL_COMM_SHM_DIR", str(folder))
        before = set(Path("/dev/shm").glob("mpich_shm*"))
        yield
        left = set(Path("/dev/shm").glob("mpich_shm*")) - before
        until = time.monotonic() + 10
        while (left := {file for file in left if file.exists() and not is_mapped(file)}) and time.monotonic() < until:
            time.sleep(0.1)
        assert left == set()


def is_mapped(file: Path) -> bool:
    """Whether a process has the file in its memory."""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            if str(file) in maps.read_text():
                return True
    return False


def test_mpi4py_first_and_after(script: Script) -> None:
    finished = script(
        2,
        "from mpi4py import MPI\n" + HEAD + "mc.init()\n"
        "assert mc.get_rank() == MPI.COMM_WORLD.rank and mean(mc.get_rank()) == 0.5\n"
        "mc.finalize()\n"
        "assert not MPI.Is_finalized() and MPI.COMM_WORLD.allreduce(1) == 2\nwrite_line('fine')",
    )
    assert finished.output.count("fine") == 2, finished.output


@pytest.mark.parametrize("level", ["single", "funneled", "serialized"])
def test_the_granted_thread_level_is_respected(script: Script, level: str) -> None:
    finished = script(
        2,
        f"import mpi4py\nmpi4py.rc.thread_level = '{level}'\nfrom mpi4py import MPI\n" + HEAD + "mc.init(2, 2)\n"
        "assert mean(mc.get_rank()) == 0.5 and mean(mc.get_rank(), 1) == 0.5\nwrite_line('fine')",
    )
    assert finished.output.count("fine") == 2, finished.output


def test_mpi4py_after_dl_comm(script: Script) -> None:
    finished = script(
        2, HEAD + "mc.init()\nfrom mpi4py import MPI\nassert MPI.COMM_WORLD.rank == mc.get_rank()\nwrite_line('fine')"
    )
    assert finished.returncode == 0, finished.output
    assert finished.output.count("fine") == 2, finished.output


def test_finalize_twice_and_use_around_it(script: Script) -> None:
    finished = script(
        2,
        HEAD + "for call in (mc.barrier, lambda: mean(1), lambda: mc.create_team(0)):\n"
        "    try: call()\n"
        "    except mc.StateError as error: assert 'init' in str(error)\n"
        "    else: raise SystemExit('no error')\n"
        "mc.finalize()\nmc.init_mpi()\nassert mc.get_nranks() == 2 and not mc.is_initialized()\n"
        "mc.init()\nassert mean(mc.get_rank()) == 0.5\nmc.finalize()\nmc.finalize()\n"
        "assert mc.get_nranks() == 2, 'ranks stay known'\n"
        "for call in (mc.world, mc.barrier, lambda: mean(1)):\n"
        "    try: call()\n"
        "    except mc.StateError as error: assert 'finalized' in str(error)\n"
        "    else: raise SystemExit('no error')\n"
        "write_line('fine')",
    )
    assert finished.output.count("fine") == 2, finished.output
    assert finished.returncode == 0


@pytest.mark.parametrize(
    "module", ["dl_comm", "dl_comm.torch", pytest.param("dl_comm.tensorflow", marks=pytest.mark.heavy), "ml_comm"]
)
def test_ranks_are_known_without_init(script: Script, module: str) -> None:
    """In every module alike. Communication needs `init` all the same."""
    pytest.importorskip(module.removeprefix("dl_comm.") if "." in module else "numpy")
    finished = script(
        2,
        HEAD + f"import importlib\nmodule = importlib.import_module({module!r})\n"
        "assert (module.size(), module.get_nranks()) == (2, 2)\n"
        "assert module.rank() == module.get_rank() == module.local_rank() == module.get_localrank()\n"
        "assert mc.topology()['size'] == 2\nmc.init()\nassert mean(module.rank()) == 0.5\nwrite_line('fine')",
    )
    assert finished.output.count("fine") == 2, finished.output


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("DL_COMM_TIMEOUT_S", "soon"),
        ("DL_COMM_DEFAULT_NTHREADS", "0"),
        ("DL_COMM_DEFAULT_PREC_LEVEL", "3"),
        ("DL_COMM_CHUNK_KB", "-1"),
    ],
)
def test_bad_environment_values_are_named(script: Script, name: str, value: str) -> None:
    finished = script(
        1,
        HEAD + "try: mc.init()\nexcept ValueError as error: write_line('refused:', error)\n"
        f"del os.environ['{name}']\nmc.init()\nassert mean(2) == 2",
        env={name: value},
    )
    assert f"refused: {name} is '{value}'" in finished.output
    assert finished.returncode == 0, finished.output


SELECTED = """
import dl_comm
data = np.ones(8, np.float32)
before = dl_comm.stats()["teams"][0]["shm_flags"]
mc.gradients([data], 0)
flags = dl_comm.stats()["teams"][0]["shm_flags"] - before
write_line("<one flag>" if flags == 1 else "<several flags>")
"""


def test_a_limit_chooses_the_path_on_all_ranks(script: Script) -> None:
    """A short call takes one round with one flag, a call beyond the limit more. Ranks with different limits refuse."""
    for value, flags in (("", "<one flag>"), ("reduce.one_round=16", "<several flags>")):
        finished = script(2, HEAD + "mc.init()" + SELECTED, env={"DL_COMM_SELECTION": value})
        assert finished.output.count(flags) == 2, finished.output
    differs = (
        "import os\nrank = os.environ.get('PMI_RANK', os.environ.get('OMPI_COMM_WORLD_RANK'))\n"
        "if rank == '1': os.environ['DL_COMM_SELECTION'] = 'reduce.one_round=16'\n"
        + HEAD
        + "try: mc.init()\nexcept mc.MismatchError as error: write_line('refused:', error)"
    )
    finished = script(2, differs)
    assert finished.output.count("refused:") == 2, finished.output
    assert "the limits reduce.one_round=16" in finished.output, finished.output
    refused = "try: mc.init()\nexcept ValueError as error: write_line('refused:', error)"
    finished = script(1, HEAD + refused, env={"DL_COMM_SELECTION": "reduce"})
    assert "refused: DL_COMM_SELECTION: 'reduce' is no limit; these are reduce.measured, " in finished.output, (
        finished.output
    )


def test_an_unknown_variable_is_named_once(script: Script) -> None:
    finished = script(2, HEAD + "mc.init()", env={"DL_COMM_TIMEUOT_S": "5"})
    assert finished.returncode == 0
    assert finished.output.count("DL_COMM_TIMEUOT_S (is DL_COMM_TIMEOUT_S meant?)") == 1, finished.output


@pytest.mark.parametrize("name", ["DL_COMM_SHM_DIR", "DL_COMM_TIMELINE"])
def test_an_unusable_folder_is_named_with_its_variable(script: Script, name: str) -> None:
    text = HEAD + "try: mc.init()\nexcept mc.CommError as error: write_line('refused:', error)"
    ranks = 2 if name == "DL_COMM_SHM_DIR" else 1  # one rank needs no shared memory
    finished = script(ranks, text, env={name: "/proc/nowhere"})
    lines = [line for line in finished.output.splitlines() if line.startswith("refused: ")]
    assert len(lines) == ranks, finished.output
    for line in lines:
        assert name in line
        assert "/proc/nowhere" in line


def test_full_shared_memory_is_reported(script: Script, tmp_path: Path) -> None:
    finished = script(
        2,
        HEAD + "try: mc.init()\nexcept mc.CommError as error: write_line('refused:', error)",
        env={"DL_COMM_CHUNK_KB": str(1 << 18), "DL_COMM_DEFAULT_NTHREADS": "256"},
    )
    assert finished.output.count("refused: rank 0") == 2, finished.output
    assert "DL_COMM_CHUNK_KB" in finished.output


EXCHANGES = """
import json
from dl_comm import _dl_comm
mc.init(nteams=1)
first = json.loads(_dl_comm.describe())["exchanges"]
mc.create_team(1)
second = json.loads(_dl_comm.describe())["exchanges"]
if mc.get_rank() == 0:
    write_line("start", *first.values(), "team", *(second[key] - first[key] for key in first))
"""


def test_the_start_costs_a_fixed_number_of_small_exchanges(script: Script) -> None:
    """All-reduces of 32 bytes, and all-gathers of what a rank has to tell."""
    costs = set()
    for ranks in (1, 2, 4):
        finished = script(ranks, HEAD + EXCHANGES)
        found = re.search(r"start (\d+) (\d+) (\d+) team (\d+) (\d+) (\d+)", finished.output)
        assert found is not None, finished.output
        allgathers, allreduces, start_bytes, *team = map(int, found.groups())
        assert start_bytes < 64 * (allgathers + allreduces), finished.output
        costs.add((allgathers, allreduces, *team[:2]))
    assert costs == {(5, 9, 1, 2)}


def test_a_late_rank_is_named_at_the_deadline(script: Script) -> None:
    finished = script(
        3,
        HEAD + MEET + "meet(os.environ['PMI_RANK'], 0, 1, 2)\nmc.init()\nmc.barrier()\nmc.set_timeout(2)\n"
        "if mc.get_rank() == 2: time.sleep(4)\n"
        "try: mean(1)\n"
        "except TimeoutError as error: assert isinstance(error, mc.TimeoutError); write_line('error:', error)\n"
        "try: mean(1)\n"
        "except mc.TimeoutError: write_line('again')\n"
        "time.sleep(4)  # the first exit from a failed job kills the others\n",
        env={"DL_COMM_STALL_WARN_S": "0.5"},
    )
    assert finished.output.count("still waiting for rank 2 on ") >= 2, finished.output
    assert finished.output.count("again") == 3, finished.output
    assert "for rank 2 on" in next(line for line in finished.output.splitlines() if "DL_COMM_STALL_WARN_S" in line)


def test_an_exception_on_one_rank_ends_the_job(script: Script) -> None:
    finished = script(
        3,
        HEAD + "mc.init()\nmean(1)\n"
        "if mc.get_rank() == 1: raise RuntimeError('bad data')\n"
        "try: mean(1)\n"
        "except mc.PeerLostError as error:\n"
        "    write_line('error:', error)\n"
        "    time.sleep(100)  # the launcher reports the first exit and kills the others\n",
        timeout=50,
    )
    assert not finished.timed_out
    assert finished.returncode != 0
    assert "bad data" in finished.output


def test_a_rank_that_leaves_early_is_named_at_once(script: Script) -> None:
    """For example with one step fewer; no rank waits for the deadline of five minutes."""
    finished = script(
        2,
        HEAD + "mc.init()\nmean(1)\n"
        "if mc.get_rank() == 1: sys.exit(0)\n"
        "try: mean(1)\n"
        "except mc.PeerLostError as error: write_line('error:', error)\n",
        timeout=50,
    )
    assert not finished.timed_out
    assert "error: rank 1 on " in finished.output
    assert "has called finalize" in finished.output


def test_a_failure_before_init_ends_the_job(script: Script) -> None:
    finished = script(
        2, HEAD + "mc.init_mpi()\nif mc.get_rank() == 1: raise RuntimeError('bad data')\nmc.init()", timeout=50
    )
    assert not finished.timed_out
    assert finished.returncode != 0


def test_finalize_keeps_the_deadline(script: Script) -> None:
    finished = script(
        2,
        HEAD + MEET + "meet(os.environ['PMI_RANK'], 0, 1)\n"
        "mc.init()\nif mc.get_rank() == 1: time.sleep(30)\nmc.finalize()",
        env={"DL_COMM_TIMEOUT_S": "2"},
        timeout=25,
    )
    assert not finished.timed_out
    assert "finalize was not complete after 2" in finished.output


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "mpirun started 2 processes"),
        ({"PALS_SIZE": "2"}, "PALS started 2 processes"),
        ({"MV2_COMM_WORLD_SIZE": "2"}, "mpirun_rsh started 2 processes"),
        ({"SLURM_NTASKS": "2", "SLURM_PROCID": "1"}, "srun started 2 processes"),
        ({"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0"}, "srun started 2 processes"),
        ({"WORLD_SIZE": "2", "RANK": "1"}, "something that sets RANK and WORLD_SIZE started 2 processes"),
    ],
)
def test_a_launcher_that_cannot_be_used_is_refused(tmp_path: Path, env: dict[str, str], words: str) -> None:
    """Otherwise every process would train as rank 0 of 1."""
    program = tmp_path / "script.py"
    program.write_text(
        HEAD + "try: mc.init()\nexcept mc.CommError as error: write_line(error)\nelse: write_line('size', mc.size())\n"
    )
    refused = run([sys.executable, str(program)], 60, env)
    assert words in refused.output
    assert "DL_COMM_ALONE=1" in refused.output
    alone = run([sys.executable, str(program)], 60, {**env, "DL_COMM_ALONE": "1"})
    assert alone.output == "size 1\n"


def test_a_shell_in_a_slurm_job_is_no_launcher(tmp_path: Path) -> None:
    program = tmp_path / "script.py"
    program.write_text(HEAD + "mc.init()\nwrite_line('size', mc.size())\n")
    batch = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}
    finished = run([sys.executable, str(program)], 60, batch)
    assert finished.output.endswith("size 1\n")
    assert "the Slurm job has 4 tasks, but this process was started without srun" in finished.output


@pytest.mark.parametrize("how", ["os.kill(os.getpid(), signal.SIGKILL)", "os._exit(0)"])
def test_a_killed_rank_is_lost_to_the_others(tmp_path: Path, how: str) -> None:
    program = tmp_path / "script.py"
    program.write_text(
        HEAD + "mc.init()\nmean(1)\n"
        f"if mc.get_rank() == 1: {how}\n"
        "try: mean(1)\n"
        "except mc.PeerLostError as error: write_line('error:', error)\n"
    )
    # The shell delays the exit that mpiexec sees, so that the other ranks can report the loss.
    finished = launch(2, ["sh", "-c", f"{shlex.join([sys.executable, str(program)])}; sleep 3"], 50)
    assert "error: rank 1 on " in finished.output
    assert "has ended" in finished.output


def test_a_forked_child_gets_an_error(script: Script) -> None:
    finished = script(
        2,
        HEAD + "mc.init()\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    try: mean(1)\n"
        "    except mc.StateError as error: write_line('error:', error)\n"
        "    sys.exit(0)\n"
        "os.waitpid(pid, 0)\nassert mean(mc.get_rank()) == 0.5\nwrite_line('fine')",
    )
    assert finished.output.count("was forked from") == 2, finished.output
    assert finished.output.count("fine") == 2, finished.output
    assert finished.returncode == 0, finished.output


def test_exit_without_finalize_is_clean(script: Script) -> None:
    finished = script(3, HEAD + "mc.init()\nassert mean(mc.get_rank()) == 1")
    assert finished.returncode == 0, finished.output
    assert finished.output == ""


def test_two_concurrent_jobs_are_independent(script: Script, tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    text = HEAD + "mc.init()\nfor i in range(200): assert mean(mc.get_rank() + i) == 0.5 + i"
    with ThreadPoolExecutor() as pool:
        jobs = [pool.submit(script, 2, text) for _ in range(2)]
    assert [job.result().returncode for job in jobs] == [0, 0]
