"""Broadcasts, metrics, errors and the path, with tensors in GPU memory on any number of ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

import dl_comm as mc
import dl_comm.torch as cdl
from job import Job
from values import DTYPES, of_rank, same_bits

ASKED = os.environ.get("DL_COMM_GPU_PATH", "auto")


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bool], ids=str)
@pytest.mark.parametrize("count", [0, 1, 777, 300_001])
def test_broadcast_from_each_root(job: Job, dtype: torch.dtype, count: int) -> None:
    everyone = [of_rank(rank, count, dtype) for rank in range(job.size)]
    for root in range(job.size):
        mine = everyone[job.rank].to(job.device, copy=True)
        (result,) = mc.broadcast([mine], root)
        # In place.
        assert result is mine
        assert result.device == job.device
        assert same_bits(result, everyone[root])


def test_parameters_and_buffers(job: Job) -> None:
    def model(seed: int) -> torch.nn.Module:
        torch.manual_seed(seed)
        made = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 3), torch.nn.BatchNorm2d(3), torch.nn.Linear(2, 2))
        made[1].running_mean += seed
        made[1].num_batches_tracked += seed
        return made

    mine, expected = model(job.rank).to(job.device), model(0)
    cdl.broadcast_parameters(mine)
    for name, value in expected.state_dict().items():
        assert same_bits(mine.state_dict()[name], value), name
    assert mc.check_buffers_match([value for value in mine.state_dict().values()], 1) == 0


@pytest.mark.parametrize("everywhere", [False, True], ids=["on root", "on all"])
def test_the_state_of_an_optimizer(job: Job, everywhere: bool) -> None:
    """Adam's state has tensors in host memory (step) and on the GPU; ranks without them get them."""
    root = job.size - 1
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 4).to(job.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01 * (job.rank + 1))
    if everywhere or job.rank == root:
        for _ in range(job.rank + 1):
            optimizer.zero_grad()
            (model(torch.ones(5, 3, device=job.device)) * (job.rank + 1)).sum().backward()
            optimizer.step()
    cdl.broadcast_optimizer_state(optimizer, root)
    state = optimizer.state_dict()
    assert state["param_groups"][0]["lr"] == 0.01 * (root + 1)
    assert [float(state["state"][i]["step"]) for i in range(2)] == [root + 1.0] * 2
    moments = [state["state"][i][name] for i in range(2) for name in ("exp_avg", "exp_avg_sq")]
    assert all(moment.device == job.device for moment in moments)
    assert all(float(moment.abs().sum()) > 0 for moment in moments)
    assert mc.check_buffers_match(moments, 1) == 0


def test_messages(job: Job) -> None:
    following, before = (job.rank + 1) % job.size, (job.rank - 1) % job.size
    for count in (1, 300_001):
        out = [torch.full((count,), -1.0, device=job.device), torch.full((4,), -1.0, device=job.device)]
        status = cdl.sendrecv(torch.full((count + 2,), job.rank, device=job.device) * 1.0, following, out, before)
        assert status == (before, 0, 4 * (count + 2))
        assert (out[0] == before).all()
        assert out[1].tolist() == [before, before, -1, -1], "the message is shorter"


@pytest.mark.parametrize("place", ["gpu", "host"])
def test_messages_in_memory_that_is_used_again(job: Job, place: str) -> None:
    """A long message is read after the work before it, and written before the work after it, wherever both ends are."""
    following, before = (job.rank + 1) % job.size, (job.rank - 1) % job.size
    sent = torch.empty(1 << 22, device=job.device)
    out = torch.empty(1 << 22, device=job.device if place == "gpu" else "cpu")
    for step in range(5):
        for _ in range(20):
            sent.fill_(-1)
        sent.fill_(job.rank + 10 * step)
        cdl.sendrecv(sent, following, out, before)
        sent.fill_(-2)
        assert (out == before + 10 * step).all(), step
        if step == 2:
            sent = torch.empty(1 << 22, device=job.device)


def test_metrics(job: Job) -> None:
    mean = cdl.average(torch.tensor([job.rank, 2.0], device=job.device))
    assert mean.device == job.device
    torch.testing.assert_close(mean.cpu(), torch.tensor([job.middle, 2.0]))
    assert cdl.average(float(job.rank), "loss") == pytest.approx(job.middle)


def test_differences_of_bits_are_found(job: Job) -> None:
    tensor = torch.ones(1000, device=job.device)
    assert mc.check_buffers_match([tensor]) == 0
    tensor[-1] += job.rank
    assert mc.check_buffers_match([tensor]) == (1 if job.size > 1 else 0)


def test_the_path_is_the_one_asked_for(job: Job) -> None:
    cdl.gradients([torch.ones(3, device=job.device)], 0)
    gpu = job.gpu()
    if not job.on_gpu:
        assert gpu is None
        return
    assert gpu is not None
    assert gpu["gpu"] == job.device.index
    assert gpu["gpu_name"] == torch.cuda.get_device_name(job.device)
    shared = torch.cuda.device_count() < mc.local_size()
    if job.size == 1:
        assert gpu["path"] == "single_rank"
    elif ASKED == "auto":
        assert gpu["path"] in ("ipc", "staged") if shared else gpu["path"] in ("nccl", "ipc", "staged")
        assert "share a GPU" in gpu["reason"] or not shared
    else:
        assert gpu["path"] == ASKED
    if job.rank == 0:
        os.write(1, f"\nteam 0 of {job.size} ranks: {gpu}\n".encode())


class TestWrongCalls:
    """An error on every affected rank, and the next call works."""

    @pytest.fixture(autouse=True)
    def goes_on(self, job: Job) -> Iterator[None]:
        yield
        for count in (1, 100_000):
            (mean,) = cdl.gradients([torch.full((count,), float(job.rank), device=job.device)], 0)
            assert bool((mean == job.middle).all())

    @pytest.mark.parametrize("count", [3, 300_000])
    def test_shapes_that_differ(self, job: Job, count: int) -> None:
        if job.size == 1:
            pytest.skip("needs two ranks")
        mine = torch.ones(count + (job.rank == 0), device=job.device)
        with pytest.raises(mc.MismatchError, match=str(count + 1)):
            cdl.gradients([mine], 0, name="shapes")
        assert bool((mine == 1).all())

    def test_types_that_differ(self, job: Job) -> None:
        if job.size == 1:
            pytest.skip("needs two ranks")
        dtype = torch.float32 if job.rank == 0 else torch.int32
        with pytest.raises(mc.MismatchError, match="int32"):
            cdl.gradients([torch.ones(3, dtype=dtype, device=job.device)], 0)

    def test_roots_that_differ(self, job: Job) -> None:
        if job.size == 1:
            pytest.skip("needs two ranks")
        with pytest.raises(mc.MismatchError):
            cdl.broadcast([torch.ones(3, device=job.device)], min(job.rank, 1))

    def test_devices_that_differ(self, job: Job) -> None:
        if job.size == 1 or not job.on_gpu:
            pytest.skip("needs a GPU and two ranks")
        mc.create_team(41)
        mine = torch.ones(3, device="cpu" if job.rank == 0 else job.device)
        with pytest.raises(mc.MismatchError):
            cdl.gradients([mine], 41, name="devices")

    def test_a_list_of_two_devices(self, job: Job) -> None:
        mixed = [torch.ones(2, device=job.device), torch.ones(2, device="cpu" if job.on_gpu else "meta")]
        for tensors in (mixed, mixed[::-1]):
            with pytest.raises(mc.ArgumentError, match="device"):
                cdl.gradients(tensors, 0)

    def test_types_without_a_mean(self, job: Job) -> None:
        with pytest.raises(mc.DTypeError, match="bool"):
            cdl.gradients([torch.ones(2, dtype=torch.bool, device=job.device)], 0)

    def test_towers(self, job: Job) -> None:
        towers = [[torch.full((2,), float(job.rank + tower), device=job.device)] for tower in range(2)]
        if job.on_gpu:
            with pytest.raises(mc.ArgumentError, match="towers"):
                cdl.gradients(towers, 0)
            return
        for tower in cdl.gradients(towers, 0):
            torch.testing.assert_close(tower[0], torch.full((2,), job.middle + 0.5))
