"""Processes that a rank starts know its numbers, cannot communicate, and never start MPI as the rank."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from launch import Finished, launch, mpiexec, run

Script = Callable[..., Finished]

# A typical script: module-level code, which a spawned worker imports, asks for the rank.
MODULE = """
import os, sys
import multiprocessing
import numpy as np
import dl_comm as mc
mc.init(nteams=2)
NUMBERS = (mc.rank(), mc.size(), mc.local_rank(), mc.local_size(), mc.num_hosts())

def work(_):
    errors = []
    for call in (lambda: mc.gradients([np.ones(3, np.float32)], 0), mc.barrier, lambda: mc.create_team(5)):
        try: call()
        except mc.StateError as error: errors.append(str(error))
    mc.finalize()
    return NUMBERS, mc.rank(), mc.is_initialized(), errors
"""

POOL = """
if __name__ == "__main__":
    with multiprocessing.get_context(sys.argv[1]).Pool(2) as pool:
        for numbers, rank, initialized, errors in pool.map(work, range(2)):
            assert (numbers, rank, initialized) == (NUMBERS, NUMBERS[0], False), numbers
            assert len(errors) == 3, errors
            for text in errors:
                assert len(text.splitlines()) == 1 and "rank itself" in text, text
    assert mc.gradients([np.full(3, NUMBERS[0], np.float32)], 0)[0][0] == (NUMBERS[1] - 1) / 2
    os.write(1, b"fine\\n")
"""


@pytest.mark.parametrize("how", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_workers_are_helpers(tmp_path: Path, ranks: int, how: str) -> None:
    program = tmp_path / "train.py"
    program.write_text(MODULE + POOL)
    finished = launch(ranks, [sys.executable, str(program), how], 120)
    assert finished.output == "fine\n" * ranks
    assert finished.returncode == 0


CHILDREN = """
import os, subprocess, sys
import dl_comm as mc
mc.init()
rank = mc.rank()
assert not [name for name in os.environ if name.startswith(("PMI_", "PMIX_R", "PMIX_N", "HYDI_"))], os.environ
def child(text, *words, **env):
    # os.environ, and the environment of the C library.
    for given in ({**os.environ, **env}, {**os.environ, **env} if env else None):
        done = subprocess.run([*words, sys.executable, "-c", text], env=given, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        yield done.stdout
ask = "import os, dl_comm as mc; mc.init(); os.write(1, b'%d of %d\\\\n' % (mc.rank(), mc.size())); mc.finalize()"
assert set(child(ask)) == {f"{rank} of {mc.size()}\\n"}
assert set(child(ask, DL_COMM_ALONE="1")) == {"0 of 1\\n"}
barrier = "import dl_comm as mc; mc.barrier()"
done = subprocess.run([sys.executable, "-c", barrier], capture_output=True, text=True)
words = f"dl_comm.StateError: this process is a helper of rank {rank} (pid {os.getpid()})"
assert done.stderr.splitlines()[-1].startswith(words), done.stderr
"""

JOBS = """
if rank == 0:
    for errors in child(ask, *sys.argv[1:]):
        assert sorted(errors.splitlines()) == ["0 of 3", "1 of 3", "2 of 3"], errors
mc.barrier()
os.write(1, b"fine\\n")
"""


def test_a_program_that_a_rank_starts_is_a_helper_unless_a_launcher_starts_it(tmp_path: Path) -> None:
    program = tmp_path / "children.py"
    program.write_text(CHILDREN + JOBS)
    finished = launch(2, [sys.executable, str(program), *mpiexec(), "-n", "3"], 120)
    assert finished.output == "fine\n" * 2
    through = [sys.executable, "-m", "dl_comm.run", "-n", "3", "--all-output"]
    finished = launch(2, [sys.executable, str(program), *through], 120)
    assert finished.output == "fine\n" * 2


def test_a_child_that_was_started_before_init_is_refused(tmp_path: Path) -> None:
    """It has the launcher's variables, but not its connection: MPI would abort the job."""
    program = tmp_path / "early.py"
    program.write_text(
        "import subprocess, sys\n"
        "early = subprocess.Popen([sys.executable, '-c', 'import dl_comm as mc; mc.init()'], stderr=subprocess.PIPE)\n"
        "import dl_comm as mc\nmc.init()\n"
        "words = early.communicate()[1].decode()\n"
        "assert 'has the variables of a rank (PMI_FD), but not its connection' in words, words\n"
        "mc.barrier()\n"
    )
    finished = launch(2, [sys.executable, str(program)], 60)
    assert (finished.output, finished.returncode) == ("", 0)


def test_without_a_launcher_a_child_is_independent(tmp_path: Path) -> None:
    """For example, a notebook that runs scripts."""
    program = tmp_path / "notebook.py"
    program.write_text(
        "import subprocess, sys\nimport dl_comm as mc\nmc.init()\n"
        "subprocess.run([sys.executable, '-c', 'import dl_comm as mc; mc.init(); mc.barrier()'], check=True)\n"
    )
    finished = run([sys.executable, str(program)], 60)
    assert (finished.output, finished.returncode) == ("", 0)


LOADER = """
import os, sys
import torch
import dl_comm
import dl_comm.torch as cdl
from torch.utils.data import DataLoader, Dataset

RANK, SIZE = cdl.rank(), cdl.size()  # start MPI if needed

class Numbers(Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        assert (cdl.rank(), cdl.size()) == (RANK, SIZE)
        return torch.tensor([float(index * SIZE + RANK)])

if __name__ == "__main__":
    dl_comm.init()
    loader = DataLoader(Numbers(), batch_size=8, num_workers=1, multiprocessing_context=sys.argv[1])
    total = sum(batch.sum() for batch in loader)
    assert total == sum(index * SIZE + RANK for index in range(16)), total
    assert dl_comm.gradients([torch.tensor([float(RANK)])], 0)[0] == (SIZE - 1) / 2
    os.write(1, b"fine\\n")
"""


@pytest.mark.heavy
@pytest.mark.parametrize("how", ["spawn", "forkserver"])
def test_a_data_loader_imports_the_script_again(tmp_path: Path, how: str) -> None:
    pytest.importorskip("torch")
    program = tmp_path / "train.py"
    program.write_text(LOADER)
    finished = launch(2, [sys.executable, str(program), how], 240, {"OMP_NUM_THREADS": "1"})
    assert finished.output.count("fine\n") == 2, finished.output
    assert finished.returncode == 0, finished.output
