"""One rank of a fault test: ``c10d_scenario.py CASE FOLDER``. Writes its results to ``FOLDER/rankN.json``.

The odd rank is the last one; it causes the fault, and the others detect it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

from c10d_helpers import BACKEND, load  # noqa: E402

from observations import Observations  # noqa: E402

RANK = int(os.environ.get("RANK", os.environ.get("PMI_RANK", "0")))
SIZE = int(os.environ.get("WORLD_SIZE", os.environ.get("PMI_SIZE", "1")))
ODD = RANK == SIZE - 1


def meet(ranks: int = SIZE) -> None:
    """Waits until the first ``ranks`` have imported all, which on a busy machine takes longer than a deadline."""
    load()
    folder = Path(sys.argv[2])
    (folder / f"up{RANK}").touch()
    until = time.monotonic() + 90
    while not all((folder / f"up{rank}").exists() for rank in range(ranks)):
        assert time.monotonic() < until, "a rank has not started"
        time.sleep(0.01)


def start(seconds: float = 60) -> None:
    load()
    torch.set_num_threads(1)
    dist.init_process_group(BACKEND, timeout=timedelta(seconds=seconds))


def total(group: Any = None) -> None:
    """A sum with a checked value."""
    ones = torch.ones(5)
    dist.all_reduce(ones, group=group)
    assert ones.tolist() == [dist.get_world_size(group)] * 5


def mismatches(record: Callable[..., None]) -> None:
    """Different calls: an error on every rank, and the next call works."""
    start()
    record("before", total)
    record("shape", lambda: dist.all_reduce(torch.ones(7 if ODD else 6)))
    record("between", total)
    record("dtype", lambda: dist.all_reduce(torch.ones(4, dtype=torch.float64 if ODD else torch.float32)))
    record("op", lambda: dist.all_reduce(torch.ones(4), dist.ReduceOp.MAX if ODD else dist.ReduceOp.SUM))
    record("root", lambda: dist.broadcast(torch.ones(4), 1 if ODD else 0))
    call = dist.all_gather_into_tensor if ODD else dist.reduce_scatter_tensor
    shapes = (4 * SIZE, 4) if ODD else (4, 4 * SIZE)
    record("call", lambda: call(torch.ones(shapes[0]), torch.ones(shapes[1])))
    group = dist.new_group(group_desc="readers")
    record("group", lambda: dist.all_reduce(torch.ones(3 if ODD else 2), group=group, async_op=True).wait())
    record("name", lambda: print("the group's name is", group.group_name))
    record("after in the group", lambda: total(group))
    record("after", total)


class Ends(torch.autograd.Function):
    """Ends the process in the backward pass of one rank."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        """Returns its argument."""
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        """Ends the odd rank."""
        if ODD:
            os.kill(os.getpid(), signal.SIGKILL)
        return gradient


def backward(record: Callable[..., None]) -> None:
    """A rank ends while the others wait for its buckets."""
    start()
    first, second = nn.Linear(400, 400), nn.Linear(400, 400)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(first, second), bucket_cap_mb=0.1)
    record("step", lambda: model(torch.ones(2, 400)).sum().backward())
    hooked = Ends.apply(model(torch.ones(2, 400)))
    record("lost", lambda: hooked.sum().backward())
    record("next", total)


def late(record: Callable[..., None]) -> None:
    """A rank that misses the deadline of the group."""
    meet()
    start(4)
    record("before", total)
    if ODD:
        time.sleep(12)
    record("late", total)


def late_receive(record: Callable[..., None]) -> None:
    """A message that never comes."""
    meet()
    start(2)
    record("before", total)
    if not ODD:
        record("late", lambda: dist.recv(torch.ones(1), SIZE - 1))
    else:
        time.sleep(5)


def late_wait(record: Callable[..., None]) -> None:
    """A rank that misses the deadline of a wait, and comes later."""
    start()
    record("before", total)
    ones = torch.ones(5)
    if ODD:
        time.sleep(5)
    work = dist.all_reduce(ones, async_op=True)
    record("late", lambda: work.wait(timedelta(seconds=60 if ODD else 1)))


def file_gone(record: Callable[..., None]) -> None:
    """The file of the store is removed before the end."""
    import dl_comm

    load()
    file = Path(sys.argv[2]) / "store"
    dist.init_process_group(BACKEND, init_method=f"file://{file}", rank=RANK, world_size=SIZE)
    record("work", total)
    dist.barrier()
    if RANK == 0:
        file.unlink()
    dist.barrier()
    record("destroy", dist.destroy_process_group)
    record("finalize", dl_comm.finalize)


def absent(record: Callable[..., None]) -> None:
    """A rank that never calls init_process_group."""
    if ODD:
        time.sleep(15)
        return
    meet(SIZE - 1)
    record("absent", lambda: (start(4), total()))


def debug(record: Callable[..., None]) -> None:
    """TORCH_DISTRIBUTED_DEBUG=DETAIL wraps the groups, and adds its own checks."""
    start()
    record("work", total)
    record("group", lambda: total(dist.new_group()))
    model = nn.parallel.DistributedDataParallel(nn.Linear(5, 5))
    record("step", lambda: model(torch.ones(2, 5)).sum().backward())
    whole = torch.zeros(SIZE)
    record("gather", lambda: dist.all_gather_into_tensor(whole, torch.ones(1)))
    dist.destroy_process_group()


def never_destroys(record: Callable[..., None]) -> None:
    """The script ends with groups, models and works."""
    start()
    record("work", total)
    globals()["kept"] = [dist.new_group() for _ in range(3)]
    globals()["model"] = nn.parallel.DistributedDataParallel(nn.Linear(5, 5))
    globals()["work"] = dist.all_reduce(torch.ones(1000), async_op=True)
    globals()["future"] = globals()["work"].get_future().then(lambda value: value.value()[0])
    globals()["work"].wait()


def loader(record: Callable[..., None]) -> None:
    """The processes of a DataLoader inherit the groups."""
    start()
    total()
    group = dist.new_group()
    total(group)

    class Numbers(torch.utils.data.Dataset):  # type: ignore[misc]
        """Sixteen numbers."""

        def __len__(self) -> int:
            return 16

        def __getitem__(self, index: int) -> float:
            return float(index)

    def read() -> None:
        for _ in range(2):
            found = [value for batch in torch.utils.data.DataLoader(Numbers(), 2, num_workers=2) for value in batch]
            assert sum(found) == 120
            total(group)

    record("read", read)
    record("fork", forked)
    record("after", total)
    dist.destroy_process_group()


def forked() -> None:
    """A collective in a forked child is an error at once."""
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        try:
            dist.all_reduce(torch.ones(1))
        except RuntimeError as error:
            os._exit(7 if "fork" in str(error) else 1)
        os._exit(2)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code == 7, code


def wrong_rank(record: Callable[..., None]) -> None:
    """Started by mpiexec: the script gives torch other ranks than those of the job that dl_comm runs."""
    import dl_comm

    dl_comm.init_mpi()
    record("own", lambda: print(dl_comm.get_rank(), dl_comm.get_nranks()))
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), SIZE, RANK == 0)
    other = (RANK + 1) % SIZE
    record("rank", lambda: dist.init_process_group(BACKEND, store=store, rank=other, world_size=SIZE))
    record("size", lambda: dist.init_process_group(BACKEND, store=dist.HashStore(), rank=0, world_size=1))
    dl_comm.barrier()  # Rank 0 serves the store.


def stopped(record: Callable[..., None]) -> None:
    """A rank that holds the GIL for some seconds: the others wait."""
    start()
    record("before", total)
    if ODD:
        ctypes.PyDLL(None).usleep(1_500_000)
    record("after", total)
    dist.destroy_process_group()


CASES = {
    case.__name__: case
    for case in (
        mismatches,
        backward,
        late,
        late_wait,
        late_receive,
        file_gone,
        absent,
        debug,
        never_destroys,
        loader,
        wrong_rank,
        stopped,
    )
}

if __name__ == "__main__":
    CASES[sys.argv[1]](Observations(Path(sys.argv[2]) / f"rank{RANK}.json").record)
