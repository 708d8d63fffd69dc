"""The names of TorchMPI for its parameter server and for networks, on 1, 2 and 3 ranks."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

import dl_comm as mc
from dl_comm.compat.torchmpi import nn as mpinn
from dl_comm.compat.torchmpi import parameterserver as ps


@pytest.fixture(autouse=True)
def _free_all() -> Iterator[None]:
    yield
    mc.barrier()
    ps.freeAll()


def network(rank: int) -> torch.nn.Sequential:
    torch.manual_seed(rank)
    return torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3))


@pytest.mark.parametrize("make", [np.full, torch.full], ids=["numpy", "torch"])
def test_one_tensor(make: object, rank: int, size: int) -> None:
    full = make if make is np.full else (lambda *args: torch.full(*args))
    t = full((6,), float(rank))  # type: ignore[operator]
    server = ps.init(t)
    got = full((6,), -1.0)  # type: ignore[operator]
    ps.syncHandle(ps.receive(server, got))
    assert [float(each) for each in got] == sorted(float(each) for each in got), "each shard has its owner's values"
    mc.barrier()
    if rank == 0:
        ps.syncHandle(ps.send(server, t, "zero"))
    mc.barrier()
    ps.syncHandle(ps.send(server, full((6,), 2.0), "add"))  # type: ignore[operator]
    mc.barrier()
    assert ps.syncHandles([ps.receive(server, got), None]) == []
    assert all(float(each) == 2 * size for each in got)
    mc.barrier()
    ps.free(server)
    with pytest.raises(mc.StateError, match="was closed"):
        ps.receive(server, got)
    with pytest.raises(mc.ArgumentError, match="what init has returned"):
        ps.send(3, t, "add")  # type: ignore[arg-type]


def test_lists(rank: int, size: int) -> None:
    """The steps of TorchMPI's Downpour example."""
    net = network(rank)
    tensors = list(net.parameters())
    ps.initTensors(tensors)
    ps.syncHandles(ps.prefetchTensors(tensors))
    with torch.no_grad():
        ps.integrateTensors(tensors, lambda fetched, t: t.copy_(fetched))
    first = [each.detach() for each in network(0).parameters()]
    assert all(torch.equal(each.detach(), other) for each, other in zip(tensors, first, strict=True))
    mc.barrier()
    updates = [torch.ones_like(each) for each in tensors]
    ps.syncHandles(ps.sendTensors(tensors, updates, "add", lambda t: t * 2))
    mc.barrier()
    ps.syncHandles(ps.prefetchTensors(tensors))
    ps.integrateTensors(tensors, lambda fetched, t: torch.testing.assert_close(fetched, t.detach() + 2 * size))
    with pytest.raises(mc.ArgumentError, match="has a server already"):
        ps.initTensors(tensors[:1])
    with pytest.raises(mc.ArgumentError, match="has no server"):
        ps.prefetchTensors(updates)
    with pytest.raises(mc.ArgumentError, match="updates has 1 tensors for 4"):
        ps.sendTensors(tensors, updates[:1], "add")


def test_lists_with_an_allocator_and_values(rank: int, size: int) -> None:
    t = torch.ones(8)

    def start(server: ps.Shared, tensor: torch.Tensor) -> None:
        if rank == size - 1:
            ps.syncHandle(ps.send(server, torch.full((8,), 5.0), "copy"))

    ps.initTensors([t], lambda tensor: torch.zeros_like(tensor), start)
    ps.syncHandles(ps.prefetchTensors([t]))
    ps.integrateTensors([t], lambda fetched, own: own.copy_(fetched))
    assert (t == 5).all()


def test_networks(rank: int, size: int) -> None:
    net = network(rank)
    if size > 1:
        with pytest.raises(mc.ArgumentError, match="0.weight: the mean"):
            mpinn.checkWithAllreduce(net)
    mpinn.synchronizeParameters(net, True)
    mean = sum(each[0].weight.detach() for each in map(network, range(size))) / size  # type: ignore[misc, union-attr]
    torch.testing.assert_close(net[0].weight.detach(), mean)
    mpinn.synchronizeParameters(net)
    mpinn.checkWithAllreduce(net)
    net(torch.ones(2, 4)).sum().backward()
    own = [each.grad.clone() for each in net.parameters() if each.grad is not None]
    mpinn.synchronizeGradients(net)
    for each, before in zip(net.parameters(), own, strict=True):
        torch.testing.assert_close(each.grad, before * size)


def test_sums_that_start_during_backward(rank: int, size: int) -> None:
    net, plain = network(0), network(0)
    mpinn.async_.registerAsyncMPIBackward(net, 2)
    with pytest.raises(mc.ArgumentError, match="registered already"):
        mpinn.async_.registerAsyncMPIBackward(net)
    for turn in range(4):
        inputs = torch.full((2, 4), float(rank + turn))
        net.zero_grad()
        net(inputs).sum().backward()
        mpinn.async_.synchronizeGradients(net)
        plain.zero_grad()
        ranks = range(size) if turn % 2 else [rank]
        sum(plain(torch.full((2, 4), float(each + turn))).sum() for each in ranks).backward()  # type: ignore[union-attr]
        for each, other in zip(net.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(each.grad, other.grad)
    mpinn.async_.unregisterAsyncMPIBackward(net)
    net.zero_grad()
    net(torch.full((2, 4), 1.0 + rank)).sum().backward()
    assert net[0].weight.grad is not None
