"""What ranks take of the address space and of /dev/shm, and what they give back."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

import hosts
from launch import QUIET, mpiexec, run
from plain_ranks import Ranks

USED = """
def used():  # MiB of the file system of the shared memory
    system = os.statvfs(os.environ["DL_COMM_SHM_DIR"])
    return (system.f_blocks - system.f_bfree) * system.f_frsize / 2**20
"""


@contextmanager
def file_system(size: str) -> Iterator[str]:
    """A folder on a file system of this size, for the shared memory of a job."""
    if os.geteuid() != 0 or not shutil.which("mount"):
        pytest.skip("needs root to mount a file system")
    with tempfile.TemporaryDirectory(prefix="test_of_dl_comm.") as folder:
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], check=True)
        try:
            yield folder
            assert not os.listdir(folder)
        finally:
            subprocess.run(["umount", "--lazy", folder], check=True)


LIMITED = """
import resource
limit = int(os.environ["LIMIT_MB"]) * 10**6
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
"""


def test_ranks_start_with_little_address_space(ranks: Ranks) -> None:
    ranks.run(
        2,
        LIMITED
        + """
dl_comm.init()
assert (dl_comm.allreduce(np.full(2, rank + 1.0)) == 3).all()
for count in (1 << 20, 3 << 20):  # larger than a segment, and in shared memory
    assert (dl_comm.allreduce(np.full(count, rank + 1, np.float32)) == 3).all()
    shared = dl_comm.shared_zeros(count, np.float32)
    shared += rank + 1
    assert (dl_comm.allreduce(shared) == 3).all()
    del shared
if rank == 0:
    dl_comm.send(np.arange(1 << 19), 1)
else:
    received = np.empty(1 << 19, int)
    dl_comm.recv(received, 0)
    assert (received == np.arange(1 << 19)).all()
try: shared = [dl_comm.shared_zeros(32 << 20, np.uint8) for _ in range(64)]
except dl_comm.CommError as error: assert "32768 KiB" in str(error) and "ulimit -v" in str(error), error
else: raise SystemExit("no error")
check_mean()
dl_comm.finalize()
""",
        {"LIMIT_MB": "1500"},
    )


def test_the_limit_of_one_rank_is_named_by_all(ranks: Ranks) -> None:
    text = """
import resource
if rank == 1:
    (line,) = (line for line in open("/proc/self/status") if line.startswith("VmSize"))
    limit = int(line.split()[1]) * 1024 + 90 * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    dl_comm.init()
    dl_comm.shared_zeros(64 << 20, np.uint8)
except dl_comm.CommError as error: assert "ulimit -v" in str(error), error
else: raise SystemExit("no error")
"""
    ranks.run(2, text)


def test_a_failure_in_one_group_keeps_nothing_else(ranks: Ranks) -> None:
    """Only what its ranks may still write, and that until they have left."""
    with file_system("1g") as folder:
        ranks.run(
            2,
            USED
            + """
import gc
dl_comm.init()
def work():
    for number in range(20):
        with dl_comm.Group(None, f"g{number}") as group:
            dl_comm.allreduce(np.ones(2), group=group)
    for _ in range(20):
        array = dl_comm.shared_zeros(1 << 20)
        dl_comm.allreduce(array)
        del array
    with dl_comm.shared_memory():
        for _ in range(20):
            array = np.ones(1 << 18) * 2
            del array
    gc.collect()
    for _ in range(3):  # the ranks free what both have left
        with dl_comm.Group(None, "last") as group:
            dl_comm.allreduce(np.ones(2), group=group)
        dl_comm.barrier()
    return used()
before = work()
for failure in range(3):
    group = dl_comm.Group(None, "slow", timeout=0.5)
    array = dl_comm.shared_zeros(1 << 21, np.float32)
    if rank == 0:
        try: dl_comm.allreduce(array, group=group)
        except dl_comm.TimeoutError: pass
        else: raise SystemExit("no error")
    dl_comm.barrier()
    del array
    group.free()
    del group
    dl_comm.barrier()
    assert work() <= before + 1, (failure, before, used())
dl_comm.finalize()
""",
            {"DL_COMM_SHM_DIR": folder},
        )


@pytest.mark.parametrize("size", [2, 4])
def test_too_little_memory_for_a_group_is_an_error(ranks: Ranks, size: int) -> None:
    with file_system("3m") as folder:
        text = """
try:
    dl_comm.init()
    dl_comm.allreduce(np.ones(1 << 20))
except dl_comm.CommError as error: print(f"{type(error).__name__}: {error}", flush=True)
else: raise SystemExit("no error")
"""
        processes = [ranks.start(rank, size, text, {"DL_COMM_SHM_DIR": folder}) for rank in range(size)]
        for process in processes:
            output = ranks.succeeds(process)
            assert re.search(r"\d+ KiB of shared memory.* of 3072 KiB are free.*DL_COMM_SHM_DIR", output), output


def test_mpi_does_not_crash_in_a_small_folder() -> None:
    if not hosts.possible():
        pytest.skip("needs root")
    program = """
import dl_comm
try: dl_comm.init()
except dl_comm.CommError as error: assert "MPI needs 26 MiB in /dev/shm for the 4 ranks" in str(error), error
else: raise SystemExit("no error")
"""
    inside = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=24m tmpfs /dev/shm && exec "$@"', "-"]
    finished = run([*inside, *mpiexec(), "-n", "4", sys.executable, "-c", program], 60, QUIET)
    assert finished.returncode == 0, finished.output


@pytest.mark.parametrize("size", [2, 4])
def test_many_groups_share_the_memory_of_a_container(ranks: Ranks, size: int) -> None:
    """As many after each round, also after one in which there was no space left."""
    with file_system("64m") as folder:
        ranks.run(
            size,
            """
import gc
dl_comm.init()
def fill(number, count):
    groups = []
    try:
        for _ in range(number):
            groups.append(dl_comm.Group(None, "g"))
            values = dl_comm.allreduce(np.full(count, rank + 1.0), group=groups[-1])
            assert (values == size * (size + 1) / 2).all()
            dl_comm.all_gather(np.ones(3), group=groups[-1])
        return number
    except dl_comm.CommError as error:
        assert "KiB of shared memory" in str(error), error
        return len(groups)
    finally:
        for group in groups: group.free()
        del groups
        gc.collect()
        dl_comm.barrier()
for _ in range(2): assert fill(64, 2) == 64
failed = [fill(64, 1 << 18) for _ in range(2)]
assert failed[0] == failed[1] < 64, failed
assert fill(64, 2) == 64
dl_comm.finalize()
""",
            {"DL_COMM_SHM_DIR": folder},
        )
