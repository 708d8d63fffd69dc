"""What a type checker tells a user of dl_comm. Only checked (stage "types" of ``tests/stages.py``), never run.

A line with ``type: ignore`` must be an error: the checker reports one that is not needed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import assert_type

import dl_comm
import dl_comm.torch as cdl
from dl_comm import Group, Status, Work
from dl_comm.compat import cray, torchmpi

Array = NDArray[np.float32]


def arrays(x: Array, many: list[Array], number: float, count: int, scalar: np.float32) -> None:
    """The result has the type of the argument."""
    assert_type(dl_comm.allreduce(x), Array)
    assert_type(dl_comm.allreduce(x, "mean", name="x", timeout=3.0, out=x), Array)
    assert_type(dl_comm.allreduce(many, "max"), list[Array])
    assert_type(dl_comm.allreduce(number), float)
    assert_type(dl_comm.allreduce(count, "max"), int)
    assert_type(dl_comm.allreduce(scalar), np.float32)
    assert_type(dl_comm.reduce(x, 0, "min"), Array | None)
    assert_type(dl_comm.all_gather(x, ragged=True), Array)
    assert_type(dl_comm.all_gather(many), list[Array])
    assert_type(dl_comm.all_gather(count), Any)
    assert_type(dl_comm.gather(x, counts=[1, 2]), Array | None)
    assert_type(dl_comm.gather(number), Any)
    assert_type(dl_comm.scatter(None, 1, out=x), Array)
    assert_type(dl_comm.reduce_scatter(x, "sum", prescale=0.5), Array)
    assert_type(dl_comm.all_to_all(many), list[Array])
    assert_type(dl_comm.all_to_all(x, send_counts=[1, 2]), Array)
    assert_type(dl_comm.all_to_all(x, send_counts=[1, 2], return_counts=True), Any)
    assert_type(dl_comm.broadcast([x, x], 0), list[Array])
    assert_type(dl_comm.broadcast(x, in_place=False), Array)
    assert_type(dl_comm.broadcast(number), float)
    assert_type(dl_comm.average(x), np.ndarray[Any, Any])
    assert_type(dl_comm.average(count), float)
    assert_type(dl_comm.average(scalar), float)
    assert_type(dl_comm.recv(x), Any)
    assert_type(dl_comm.sendrecv(x, 1, x), Status)


def started(x: Array, later: bool) -> None:
    """With ``async_op`` it is a handle of it."""
    assert_type(dl_comm.allreduce(x, async_op=True), Work[Array])
    assert_type(dl_comm.allreduce(x, async_op=True).wait(), Array)
    assert_type(dl_comm.allreduce(x, async_op=later), Array | Work[Array])
    assert_type(dl_comm.reduce(x, async_op=True), Work[Array | None])
    assert_type(dl_comm.all_gather(x, async_op=True), Work[Array])
    assert_type(dl_comm.all_gather(1, async_op=True), Any)
    assert_type(dl_comm.gather(x, async_op=True), Work[Array | None])
    assert_type(dl_comm.scatter(None, out=x, async_op=True), Work[Array])
    assert_type(dl_comm.reduce_scatter([x], async_op=True), Work[list[Array]])
    assert_type(dl_comm.all_to_all(x, async_op=True), Work[Array])
    assert_type(dl_comm.broadcast([x], async_op=True), Work[list[Array]])


async def awaited(x: Array) -> None:
    """And may be awaited."""
    assert_type(await dl_comm.allreduce(x, async_op=True), Array)


def objects(rank: int, settings: dict[str, int]) -> None:
    """Objects keep their types; what the other ranks pass does not count."""
    assert_type(dl_comm.broadcast_object(settings), dict[str, int])
    assert_type(dl_comm.broadcast_object(settings if rank == 0 else None), dict[str, int])
    received: dict[str, int] = dl_comm.broadcast_object()
    assert_type(dl_comm.all_gather_object(received), list[dict[str, int]])
    assert_type(dl_comm.gather_object("a"), list[str] | None)


def methods(group: Group, x: Array, tensor: torch.Tensor) -> None:
    """Those of groups as the functions."""
    assert_type(group.allreduce(x), Array)
    assert_type(group.allreduce(tensor, "mean"), torch.Tensor)
    assert_type(group.allreduce(x, async_op=True), Work[Array])
    assert_type(group.reduce(x), Array | None)
    assert_type(group.all_gather(x), Array)
    assert_type(group.all_gather(2.5), Any)
    assert_type(group.gather(x), Array | None)
    assert_type(group.scatter(x, out=x), Array)
    assert_type(group.reduce_scatter(x), Array)
    assert_type(group.all_to_all(x, async_op=True), Work[Array])
    assert_type(group.broadcast([x]), list[Array])
    assert_type(group.average(3), float)
    assert_type(group.broadcast_object("a"), str)
    assert_type(group.all_gather_object(1), list[int])
    assert_type(group.split(0), Group | None)
    assert_type(group.grid(data=-1).data, Group)


def tensors(x: torch.Tensor, many: list[torch.Tensor]) -> None:
    """Those of torch, by either module."""
    assert_type(dl_comm.allreduce(x), torch.Tensor)
    assert_type(dl_comm.average(x), torch.Tensor)
    assert_type(cdl.allreduce(x), torch.Tensor)
    assert_type(cdl.allreduce(many), list[torch.Tensor])
    assert_type(cdl.allreduce(1.5), float)
    assert_type(cdl.allreduce(x, async_op=True), Work[torch.Tensor])
    assert_type(cdl.allreduce(x, async_op=True).wait(), torch.Tensor)
    assert_type(cdl.reduce(x), torch.Tensor | None)
    assert_type(cdl.all_gather(x), torch.Tensor)
    assert_type(cdl.all_gather(1), Any)
    assert_type(cdl.gather(x), torch.Tensor | None)
    assert_type(cdl.scatter(x), torch.Tensor)
    assert_type(cdl.scatter(None, out=x), torch.Tensor)
    assert_type(cdl.reduce_scatter(x), torch.Tensor)
    assert_type(cdl.all_to_all(many), list[torch.Tensor])
    assert_type(cdl.broadcast(many, in_place=False), list[torch.Tensor])
    assert_type(cdl.broadcast(many, async_op=True), Work[list[torch.Tensor]])
    assert_type(cdl.average(x), torch.Tensor)
    assert_type(cdl.broadcast_object({"a": 1}), dict[str, int])


def operators(x: Array, mine: dl_comm.Operator, text: str) -> None:
    """An operator that does not exist is an error."""
    dl_comm.allreduce(x, mine)
    dl_comm.allreduce(x, "avg")  # type: ignore[call-overload]
    dl_comm.allreduce(x, text)  # type: ignore[call-overload]
    cdl.reduce(torch.ones(1), 0, "average")  # type: ignore[call-overload]
    dl_comm.world().reduce_scatter(x, "bit_nand")  # type: ignore[call-overload]


def arguments(x: Array, group: Group) -> None:
    """So are arguments that do not exist, and those of another function."""
    dl_comm.allreduce("text")  # type: ignore[call-overload]
    dl_comm.allreduce(x, counts=[1])  # type: ignore[call-overload]
    dl_comm.reduce_scatter(1.0)  # type: ignore[call-overload]
    dl_comm.rc.exceptionhook = False  # type: ignore[attr-defined]
    dl_comm.rc.excepthook = "no"  # type: ignore[assignment]


def other_libraries(x: Array) -> None:
    """Names that ``dl_comm`` does not list have types, too."""
    assert_type(dl_comm.get_rank(), int)
    assert_type(cray.get_waited(0), float)
    assert_type(dl_comm.push_communicator("a"), int)
    assert_type(torchmpi.communicator().local, Group)


def helpers(x: Array, group: Group, model: torch.nn.Module) -> None:
    """Decisions, output, checkpoints."""
    assert_type(dl_comm.any_rank(x.max() > 1), bool)
    assert_type(group.any_rank(True), bool)
    assert_type(dl_comm.random_states(), list[str])
    dl_comm.set_random_states(dl_comm.random_states())
    dl_comm.check_replicas(model, x, group=group)
    group.check_replicas(model)
    dl_comm.print0("loss", 0.5, end="")
    dl_comm.get_logger(__name__, ranks=[0]).info("epoch %d", 3)
    assert_type(dl_comm.training.shard(3, even="drop"), range)
    dl_comm.training.shard(3, even=True)  # type: ignore[arg-type]
    sampler = cdl.DistributedSampler(x)
    sampler.advance(32)
    assert_type(sampler.state_dict(), dict[str, int])
    dl_comm.any_rank(True, team=1)  # type: ignore[call-arg]
