"""One rank of a fault test: ``scenario.py BINDING CASE FOLDER``. Writes its results to ``FOLDER/rankN.json``.

The odd rank is the last one; it causes the fault, and the others detect it. Only values are asserted here; the test
compares the results of all ranks.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

for variable in ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"):
    os.environ.setdefault(variable, "1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np  # noqa: E402

import dl_comm as mc  # noqa: E402

sys.path.insert(0, str(Path(__file__).parent.parent))

from observations import Observations  # noqa: E402

PAUSE = 1.5


class Binding:
    """Averages and broadcasts NumPy arrays as tensors of a framework."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._framework = None if name == "numpy" else importlib.import_module(name)

    def tensor(self, array: np.ndarray) -> Any:
        if self.name == "torch":
            return self._framework.from_numpy(array)  # type: ignore[union-attr]
        return array if self._framework is None else self._framework.constant(array)

    def gradients(self, array: np.ndarray, name: str | None = None, timeout: float | None = None) -> np.ndarray:
        return np.asarray(mc.gradients([self.tensor(array)], 0, name=name, timeout=timeout)[0])

    def broadcast(self, array: np.ndarray, root: int) -> np.ndarray:
        return np.asarray(mc.broadcast([self.tensor(array)], root)[0])


class Rank:
    """This rank and its results."""

    def __init__(self, binding: str, folder: Path) -> None:
        self.binding = Binding(binding)
        mc.init(nthread_per_team=2, nteams=1)
        self.rank, self.size = mc.get_rank(), mc.get_nranks()
        self.odd = self.rank == self.size - 1
        self.folder = folder
        self.record = Observations(folder / f"rank{self.rank}.json").record

    def meet(self) -> None:
        """Waits until all but the odd rank are here: others may hear that one has finalized before they hear why."""
        (self.folder / f"met{self.rank}").touch()
        until = time.monotonic() + 30
        while len(list(self.folder.glob("met*"))) < self.size - 1 and time.monotonic() < until:
            time.sleep(0.02)

    def mean(self, name: str | None = None) -> None:
        """An average with a checked value."""
        (found,) = self.binding.gradients(np.array([float(self.rank)], np.float32), name)
        assert found == (self.size - 1) / 2, found


def recoverable(rank: Rank) -> None:
    """Mismatched calls: an error on every rank, and the next call works."""
    binding, odd = rank.binding, rank.odd
    rank.record("before", rank.mean)  # the first call of a framework is slow
    rank.record("shape", lambda: binding.gradients(np.ones(5 if odd else 4, np.float32), "shape"))
    rank.record("dtype", lambda: binding.gradients(np.ones(4, np.float64 if odd else np.float32), "dtype"))
    rank.record("root", lambda: binding.broadcast(np.ones(4, np.float32), 1 if odd else 0))
    rank.record("after", rank.mean)

    def thread(name: str, delay: float) -> None:
        time.sleep(delay)
        rank.record(f"order {name}", lambda: rank.mean(name))

    delays = {"first": 0.2 if odd else 0.0, "other": 0.0 if odd else 0.2}
    threads = [threading.Thread(target=thread, args=each) for each in delays.items()]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    if not odd:
        rank.record("missing", lambda: rank.mean("missing"))
    else:
        rank.record("early", lambda: rank.mean("next"))
    rank.record("next", lambda: rank.mean("next"))
    if odd:
        rank.record("extra", lambda: rank.mean("extra"))
    else:
        rank.record("late", lambda: rank.mean("last"))
    rank.record("last", lambda: rank.mean("last"))
    rank.record("fork", forked)
    rank.record("after", rank.mean)


def forked() -> None:
    """A forked child gets an error at once."""
    child = os.fork()
    if child == 0:
        signal.alarm(10)
        try:
            mc.gradients([np.ones(1)])
        except mc.StateError as error:
            os._exit(7 if "forked" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def stalls(rank: Rank) -> None:
    """A late rank, for several reasons: the others wait, print a line, and continue."""
    rank.record("before", rank.mean)
    if rank.odd:
        time.sleep(PAUSE)
    rank.record("slow", lambda: rank.mean("slow"))
    if rank.odd:
        ctypes.PyDLL(None).usleep(int(PAUSE * 1e6))  # holds the GIL
    rank.record("gil", lambda: rank.mean("gil"))
    if rank.odd:
        subprocess.Popen(["sh", "-c", f"sleep {PAUSE}; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
    rank.record("stopped", lambda: rank.mean("stopped"))


def lost(end: Callable[[], Any]) -> Callable[[Rank], None]:
    def case(rank: Rank) -> None:
        rank.record("before", rank.mean)
        if rank.odd:
            end()
        rank.record("lost", lambda: rank.mean("needed"))
        rank.record("again", lambda: rank.mean("again"))
        rank.meet()
        rank.record("finalize", mc.finalize)
        sys.exit(3)  # like after an uncaught error

    return case


def raises() -> None:
    raise RuntimeError("the odd rank fails")


def late(rank: Rank) -> None:
    """A rank that misses the deadline."""
    rank.record("before", rank.mean)
    if rank.odd:
        time.sleep(4)
    else:
        rank.record("late", lambda: rank.binding.gradients(np.ones(3, np.float32), "late", timeout=2))
    rank.record("again", lambda: rank.mean("again"))
    rank.record("finalize", mc.finalize)


def work(rank: Rank) -> None:
    """A job without faults."""
    for _ in range(20):
        rank.mean()
    rank.record("work", rank.mean)


CASES: dict[str, Callable[[Rank], None]] = {
    "recoverable": recoverable,
    "stalls": stalls,
    "sigkill": lost(lambda: os.kill(os.getpid(), signal.SIGKILL)),
    "sigsegv": lost(lambda: os.kill(os.getpid(), signal.SIGSEGV)),
    "exit0": lost(lambda: os._exit(0)),
    "exception": lost(raises),
    "late": late,
    "work": work,
}


def main() -> None:
    """Runs one case on this rank."""
    binding, case, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    try:
        rank = Rank(binding, folder)
    except mc.CommError as error:
        (folder / f"start{os.getpid()}.json").write_text(json.dumps([type(error).__name__, str(error)]))
        raise
    CASES[case](rank)


if __name__ == "__main__":
    main()
