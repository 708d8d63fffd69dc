"""Plain processes become ranks by a Python store, such as torch's, without MPI."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from imported import python
from launch import launch
from plain_ranks import Ranks
from ranks import free_port

torch_stores = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")

HEAD = """
from dl_comm._job.start import start_by_store
del os.environ["DL_COMM_RANK"], os.environ["DL_COMM_SIZE"], os.environ["DL_COMM_ADDR"]
class Files:  # a store in a folder, in Python
    def __init__(self, folder): self.folder = folder
    def path(self, key): return os.path.join(self.folder, key.replace("/", "_"))
    def set(self, key, value):
        part = f"{self.path(key)}.{os.getpid()}.{threading.get_ident()}"
        with open(part, "wb") as file: file.write(value)
        os.replace(part, self.path(key))
    def get(self, key):
        with open(self.path(key), "rb") as file: return file.read()
    def check(self, keys): return all(os.path.exists(self.path(key)) for key in keys)
    def add(self, key, by):
        import fcntl
        with open(self.path("lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            total = (int(self.get(key)) if self.check([key]) else 0) + by
            self.set(key, b"%d" % total)
        return total
    def delete_key(self, key): raise NotImplementedError("no key is removed")
"""

STORES = {
    "tcp": "dist.TCPStore('127.0.0.1', PORT, None, rank == 0, wait_for_workers=False)",
    "prefix": "dist.PrefixStore('job', dist.TCPStore('127.0.0.1', PORT, None, rank == 0, wait_for_workers=False))",
    "file": "dist.FileStore(os.path.join(FOLDER, 'file'), size)",
    "hash": "dist.HashStore()",
    "python": "Files(FOLDER)",
}


@torch_stores
@pytest.mark.xdist_group("torch")
@pytest.mark.parametrize(
    ("store", "size"),
    [(store, size) for store in STORES for size in (1, 2, 3) if store != "hash" or size == 1],
)
def test_ranks_start_again_and_again_by_a_store(ranks: Ranks, tmp_path: Path, store: str, size: int) -> None:
    """Ranks may change from start to start. No time is lost in waits with a long granularity."""
    made = STORES[store].replace("PORT", str(free_port())).replace("FOLDER", repr(str(tmp_path)))
    text = f"""
{"import torch.distributed as dist" if store != "python" else ""}
store, me = {made}, rank
for start in range(3):
    rank = (me + start) % size
    start_by_store(store, rank, size)
    assert (dl_comm.get_rank(), dl_comm.get_nranks(), dl_comm.num_hosts()) == (rank, size, 1)
    dl_comm.init()
    check_mean()
    dl_comm.barrier()
    assert not json.loads(_dl_comm.describe())["mpi"]["initialized"]
    try: start_by_store(store, rank, size)
    except dl_comm.StateError as error: assert "initialized already" in str(error)
    else: raise SystemExit("no error")
    check_mean()
    dl_comm.finalize()
import weakref
if isinstance(store, Files):
    dead = weakref.ref(store)
    del store
    assert dead() is None, "kept after finalize"
elif me == 0:
    time.sleep(1)  # the others end first: their clients would log the end of this server
"""
    if store != "python":
        ranks.python = python("torch.distributed")
    ranks.run(size, HEAD + text)


def test_exceptions_of_a_store_are_in_the_error(ranks: Ranks, tmp_path: Path) -> None:
    """That of rank 0 reaches all ranks; a signal's is raised as it is."""
    text = """
class Broken(Files):
    def add(self, key, by):
        if self.breaks: raise OSError(28, "no space left\\nat all")
        return super().add(key, by)
    breaks = False
def fails(store, kind, *texts, numbers=(rank, size)):
    try: start_by_store(store, *numbers)
    except kind as error: caught = str(error)
    else: raise SystemExit("no error")
    assert all(text in caught for text in texts), caught
    assert len(caught.splitlines()) <= 1
fails(object(), ValueError, "a object has no set")
fails(Files("/nowhere"), ValueError, "rank 5 of 2", numbers=(5, 2))
fails(Files("/nowhere"), ValueError, "invalid rank: 'a'", numbers=("a", 2))
fails(Files("/nowhere"), dl_comm.CommError, "has failed with -1: FileNotFoundError", numbers=(0, 2))
class Interrupted(Files):
    def check(self, keys): raise KeyboardInterrupt
    def set(self, key, value): raise KeyboardInterrupt
fails(Interrupted("/nowhere"), KeyboardInterrupt)
store = Broken(FOLDER)
store.breaks = rank == 1
if rank == 1:
    fails(store, dl_comm.CommError, "add of 'dl_comm/", "OSError: [Errno 28] no space left")
    store.breaks = False
start_by_store(store, rank, size)
dl_comm.init()
check_mean()
"""
    ranks.run(2, HEAD + text.replace("FOLDER", repr(str(tmp_path))))


def test_the_program_may_use_dl_comm_while_a_store_is_asked(ranks: Ranks, tmp_path: Path) -> None:
    """Other threads, and the functions of the store itself: no lock is held. A second start or an end is refused."""
    text = """
import weakref
seen, starting = set(), True
class Slow(Files):
    def check(self, keys):
        time.sleep(0.01)
        if starting:
            assert not dl_comm.is_initialized()
            class Holder: pass
            holder = Holder()
            weakref.finalize(holder, _dl_comm.release, 0, 1)
            del holder
            for call in (dl_comm.finalize, dl_comm.init, lambda: start_by_store(self, rank, size)):
                try: call()
                except dl_comm.StateError as error: seen.add(str(error))
            json.loads(_dl_comm.describe())
        return super().check(keys)
polls, ended = [], False
def poll():
    while not ended:
        polls.append(dl_comm.is_initialized())
        try: _dl_comm.rank()
        except dl_comm.StateError: pass
        time.sleep(0.001)
thread = threading.Thread(target=poll)
thread.start()
time.sleep(0.05 * rank)
start_by_store(Slow(FOLDER), rank, size)
starting = False
dl_comm.init()
check_mean()
ended = True
thread.join()
assert len(polls) > 5
assert len(seen) == 1 and "on this thread" in seen.pop(), seen
dl_comm.finalize()
# Threads that start at the same time: one does, the other gets an error.
outcomes = []
store = Files(FOLDER)
def start():
    try: outcomes.append(start_by_store(store, rank, size))
    except dl_comm.StateError as error: outcomes.append(str(error))
threads = [threading.Thread(target=start) for _ in range(3)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert outcomes.count(None) == 1 and sum("initialized already" in str(o) for o in outcomes) == 2, outcomes
dl_comm.init()
check_mean()
"""
    ranks.run(2, HEAD + text.replace("FOLDER", repr(str(tmp_path))))


CHILD = """
import os, subprocess, sys
here = os.path.dirname(os.path.abspath(__file__))
import multiprocessing
from dl_comm._job.start import start_by_store

def work(number):
    start_by_store(Files(here), number, 2)
    dl_comm.init()
    mean = dl_comm.gradients([np.full(3, number, np.float32)])[0][0]
    result = dl_comm.get_rank(), dl_comm.get_nranks(), float(mean)
    child = "import dl_comm; dl_comm.init_mpi(); print(dl_comm.get_rank(), dl_comm.get_nranks())"
    out = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, check=True).stdout
    assert out.split() == [str(number), "2"], out
    dl_comm.finalize()
    return result

def forked(number):
    try: start_by_store(Files(here), number, 2)
    except dl_comm.StateError as error: return str(error)
"""


@pytest.mark.parametrize("under", ["mpiexec", "store"])
def test_a_spawned_child_of_a_rank_may_be_a_rank_of_another_job(tmp_path: Path, under: str) -> None:
    """A forked one may not: it has the memory of the rank, but not its threads."""
    (tmp_path / "parent").mkdir()
    head = "import threading, numpy as np, dl_comm" + HEAD.replace(
        'del os.environ["DL_COMM_RANK"], os.environ["DL_COMM_SIZE"], os.environ["DL_COMM_ADDR"]', ""
    ).replace("from dl_comm._job.start import start_by_store", "import os")
    start = "start_by_store(Files(os.path.join(here, 'parent')), 0, 1)" if under == "store" else "dl_comm.init_mpi()"
    program = tmp_path / "train.py"
    program.write_text(
        head
        + CHILD
        + f"""
if __name__ == "__main__":
    {start}
    dl_comm.init()
    if dl_comm.get_rank() == 0:
        with multiprocessing.get_context("spawn").Pool(2) as pool:
            assert pool.map(work, range(2), 1) == [(0, 2, 0.5), (1, 2, 0.5)]
        with multiprocessing.get_context("fork").Pool(1) as pool:
            assert "forked from" in pool.map(forked, [0])[0]
    dl_comm.barrier()
    os.write(1, b"fine\\n")
"""
    )
    command = [sys.executable, str(program)]
    if under == "mpiexec":
        finished = launch(2, command, 100)
        assert finished.output == "fine\n" * 2, finished.output
    else:
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env={**os.environ})
        assert done.stdout == "fine\n", done.stderr
