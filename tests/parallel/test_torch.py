"""The torch binding on 1, 2 or 3 ranks: averages, broadcasts, autograd, the compiler and wrong arguments."""

from __future__ import annotations

import gc
import pickle
import threading
import time
import weakref
from collections.abc import Callable

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import dl_comm  # noqa: E402
import dl_comm.torch as cdl  # noqa: E402
import ml_comm.torch  # noqa: E402
import ml_comm_torch  # noqa: E402
from dl_comm.torch import _ops  # noqa: E402


def middle(size: int) -> float:
    """Return the mean of the ranks."""
    return (size - 1) / 2


def test_strided_input_gives_contiguous_output(rank: int, size: int) -> None:
    mine = (torch.arange(12.0).reshape(3, 4) + rank).t()
    (mean,) = cdl.gradients([mine], 0)
    assert mean.is_contiguous()
    torch.testing.assert_close(mean, torch.arange(12.0).reshape(3, 4).t() + middle(size))


def test_ranks(rank: int, size: int) -> None:
    assert (cdl.get_rank(), cdl.get_nranks()) == (cdl.rank(), cdl.size()) == (rank, size)
    assert cdl.local_rank() == dl_comm.get_localrank()


def test_the_other_name_of_the_package() -> None:
    assert set(ml_comm_torch.__all__) == set(ml_comm.torch.__all__)
    assert all(getattr(ml_comm_torch, name) is getattr(ml_comm.torch, name) for name in ml_comm.torch.__all__)


def test_an_object_that_cannot_be_pickled(rank: int, size: int) -> None:
    """The root gets the exception, the others its text, and the next call works."""
    root = size - 1
    kinds = (AttributeError, pickle.PicklingError) if rank == root else dl_comm.CommError
    with pytest.raises(kinds, match="lambda") as failure:
        cdl.broadcast_object(lambda: rank, root)
    if rank != root:
        assert str(failure.value).startswith(f"rank {root} could not pickle the object of broadcast_object: ")
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if rank == root:
        optimizer.param_groups[0]["schedule"] = lambda: rank
    with pytest.raises(kinds, match="lambda"):
        cdl.broadcast_optimizer_state(optimizer, root)
    assert cdl.broadcast_object(rank, root) == root
    with pytest.raises(dl_comm.ArgumentError, match="root: -1"):
        cdl.broadcast_object(rank, -1)


def test_broadcast_writes_in_place(rank: int, size: int) -> None:
    model = torch.nn.Linear(3, 2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(rank)
    columns = torch.full((2, 3), float(rank)).t()  # not contiguous
    expanded = torch.full((1,), float(rank)).expand(3)
    given = [*model.parameters(), columns, expanded]
    versions = [tensor._version for tensor in given]
    result = dl_comm.broadcast(given, size - 1)
    assert all(a is b for a, b in zip(result[:-1], given, strict=False))
    assert all((tensor == size - 1).all() for tensor in [*given[:-1], result[-1]])
    assert all(tensor._version > version for tensor, version in zip(given[:-1], versions, strict=False))
    assert (expanded == rank).all()
    assert all((parameter == size - 1).all() for parameter in dl_comm.broadcast(model.parameters(), size - 1))
    with pytest.raises(dl_comm.ArgumentError, match="root"):
        dl_comm.broadcast(list(model.parameters()), size)


def test_broadcast_object(rank: int, size: int) -> None:
    mine = {"rank": rank, "text": "x" * 1000 * rank}
    assert cdl.broadcast_object(mine, size - 1) == {"rank": size - 1, "text": "x" * 1000 * (size - 1)}
    assert cdl.broadcast_object(mine if rank == 0 else None) == {"rank": 0, "text": ""}
    with dl_comm.Group(list(range(size))[::-1]) as group:
        assert cdl.broadcast_object(mine, 0, group=group)["rank"] == size - 1


def test_lazy_modules_need_a_forward_pass(rank: int, size: int) -> None:
    lazy = torch.nn.Sequential(torch.nn.LazyLinear(2))
    optimizer = torch.optim.SGD(lazy.parameters(), lr=0.1)
    calls = [
        lambda: cdl.DistributedOptimizer(optimizer),
        lambda: cdl.broadcast_parameters(lazy),
        lambda: cdl.broadcast_parameters(lazy.state_dict()),
        lambda: cdl.broadcast_optimizer_state(optimizer),
        lambda: cdl.gradients(list(lazy.parameters())),
        lambda: cdl.allreduce(lazy[0].weight),
        lambda: cdl.broadcast([lazy[0].weight]),
    ]
    for call in calls:
        with pytest.raises(dl_comm.ArgumentError, match="run a forward pass first"):
            call()
    lazy(torch.ones(1, 3))
    averaging = cdl.DistributedOptimizer(torch.optim.SGD(lazy.parameters(), lr=0.1))
    lazy(torch.full((1, 3), float(rank))).sum().backward()
    assert torch.equal(lazy[0].weight.grad, torch.full((2, 3), (size - 1) / 2))
    averaging.step()


class TestBroadcastParameters:
    def model(self, seed: int) -> torch.nn.Module:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 3), torch.nn.BatchNorm2d(3), torch.nn.Linear(2, 2))
        model[1].running_mean += seed
        model[1].num_batches_tracked += seed
        return model

    @pytest.mark.parametrize("channels_last", [False, True])
    def test_of_a_module(self, rank: int, channels_last: bool) -> None:
        model, expected = self.model(rank), self.model(0)
        if channels_last:
            model.to(memory_format=torch.channels_last)
        cdl.broadcast_parameters(model)
        for name, value in expected.state_dict().items():
            assert torch.equal(model.state_dict()[name], value), name
        assert all(parameter.requires_grad for parameter in model.parameters())

    def test_of_a_state_dict(self, rank: int, size: int) -> None:
        model, expected = self.model(rank), self.model(size - 1)
        cdl.broadcast_parameters(model.state_dict(), root=size - 1)
        for name, value in expected.state_dict().items():
            assert torch.equal(model.state_dict()[name], value), name

    def test_of_named_parameters(self, rank: int) -> None:
        model, expected = self.model(rank), self.model(0)
        cdl.broadcast_parameters(model.named_parameters())
        for mine, value in zip(model.parameters(), expected.parameters(), strict=True):
            assert torch.equal(mine, value)
        assert model[1].num_batches_tracked == rank

    def test_bumps_the_version_that_autograd_checks(self) -> None:
        weight = torch.ones(3, requires_grad=True)
        loss = (weight * weight).sum()
        cdl.broadcast_parameters([("weight", weight)])
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    @pytest.mark.parametrize("shape", [(), (5,), (2, 0), (3, 4)], ids=str)
    def test_types_that_the_core_lacks(self, rank: int, size: int, shape: tuple[int, ...]) -> None:
        root = size - 1

        def values(rank: int) -> dict[str, torch.Tensor]:
            start = torch.arange(torch.Size(shape).numel()).reshape(shape) + rank
            types = [torch.complex64, torch.complex128, torch.int16, torch.uint16, torch.uint64, torch.float8_e4m3fn]
            return {str(dtype): (start * 1j if dtype.is_complex else start).to(dtype) for dtype in types}

        mine = values(rank)
        mine["pending"] = values(rank)["torch.complex64"].conj()
        mine["strided"] = values(rank)["torch.int16"].t() if len(shape) == 2 else values(rank)["torch.int16"]
        cdl.broadcast_parameters(mine, root)
        expected = values(root)
        for name, value in expected.items():
            # As float64 or complex128: rare types do not compare.
            wide = torch.complex128 if value.is_complex() else torch.float64
            assert torch.equal(mine[name].to(wide), value.to(wide)), name
        assert torch.equal(mine["pending"], expected["torch.complex64"].conj())
        strided = expected["torch.int16"]
        assert torch.equal(mine["strided"], strided.t() if len(shape) == 2 else strided)

    def test_nothing_to_broadcast(self) -> None:
        cdl.broadcast_parameters(torch.nn.ReLU())
        cdl.broadcast_parameters({})

    def test_expanded_buffers_are_refused_before_anything_moves(self, rank: int) -> None:
        weight = torch.full((2,), float(rank))
        with pytest.raises(ValueError, match="mask is expanded"):
            cdl.broadcast_parameters({"weight": weight, "mask": torch.ones(1).expand(3)})
        assert torch.equal(weight, torch.full((2,), float(rank)))
        cdl.broadcast_parameters({"one": torch.ones(1).expand(1)})

    def test_refuses_what_is_not_a_tensor(self) -> None:
        with pytest.raises(TypeError, match="epoch is of type int"):
            cdl.broadcast_parameters({"weight": torch.ones(2), "epoch": 3})
        with pytest.raises(TypeError, match="pairs of name and tensor"):
            cdl.broadcast_parameters([torch.ones(2)])


class TestBroadcastOptimizerState:
    def trained(self, make: Callable[..., torch.optim.Optimizer], steps: int, seed: int) -> torch.optim.Optimizer:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
        groups = [{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": 0.1 * (seed + 1)}]
        optimizer = make(groups, lr=0.01 * (seed + 1))
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.rand(5, 3)).sum().backward()
            optimizer.step()
        return optimizer

    @pytest.mark.parametrize(
        "make",
        [
            torch.optim.SGD,
            lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9),
            torch.optim.Adam,
            lambda p, lr: torch.optim.Adam(p, lr, amsgrad=True),
            torch.optim.Adagrad,
            torch.optim.Rprop,
            torch.optim.ASGD,
        ],
    )
    @pytest.mark.parametrize("everywhere", [False, True])
    def test_every_rank_gets_that_of_root(self, rank: int, size: int, make: Callable, everywhere: bool) -> None:
        root = size - 1
        optimizer = self.trained(make, steps=3 if rank == root or everywhere else 0, seed=rank)
        expected = self.trained(make, steps=3, seed=root).state_dict()
        cdl.broadcast_optimizer_state(optimizer, root)
        assert same(optimizer.state_dict(), expected)

    def test_state_that_root_does_not_have_is_dropped(self, rank: int) -> None:
        optimizer = self.trained(torch.optim.Adam, steps=0 if rank == 0 else 2, seed=rank)
        cdl.broadcast_optimizer_state(optimizer, 0)
        assert not optimizer.state_dict()["state"]
        assert optimizer.param_groups[1]["lr"] == 0.1


def same(a: object, b: object) -> bool:
    """Tell whether two states hold the same values."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return isinstance(b, list | tuple) and len(a) == len(b) and all(map(same, a, b))
    return a == b


class TestAutograd:
    def test_gradient_of_a_mean_is_the_mean_of_the_gradients(self, rank: int, size: int) -> None:
        x = torch.ones(2, 3, requires_grad=True)
        y = torch.ones(4, requires_grad=True)
        mean_x, mean_y = cdl.gradients([x * (rank + 1), y], 0)
        ((rank + 2) * mean_x.sum() + rank * mean_y.sum()).backward()
        torch.testing.assert_close(x.grad, torch.full((2, 3), (rank + 1) * (middle(size) + 2)))
        torch.testing.assert_close(y.grad, torch.full((4,), middle(size)))

    def test_outputs_that_the_loss_does_not_use(self, rank: int, size: int) -> None:
        x = torch.ones(2, requires_grad=True)
        y = torch.ones(3, requires_grad=True)
        (rank * cdl.gradients([x, y], 0)[0]).sum().backward()
        torch.testing.assert_close(x.grad, torch.full((2,), middle(size)))
        torch.testing.assert_close(y.grad, torch.zeros(3))

    def test_mixed_with_tensors_without_gradient(self, rank: int, size: int) -> None:
        x = torch.ones(2, requires_grad=True)
        means = cdl.gradients([torch.tensor([rank]), x, torch.tensor([1.0 * rank])], 0)
        (rank * means[1]).sum().backward()
        torch.testing.assert_close(x.grad, torch.full((2,), middle(size)))
        assert means[0].dtype == torch.int64


class TestCompiler:
    @pytest.mark.costly
    def test_ops_pass_opcheck(self, rank: int) -> None:
        def tensors() -> list[torch.Tensor]:
            return [torch.full((2, 3), float(rank)), torch.ones(4, dtype=torch.float64)]

        ops = torch.ops.dl_comm
        torch.library.opcheck(ops.average, (tensors(), 0, "opcheck", "", 1, -1.0))
        torch.library.opcheck(ops.average_no_grad, (tensors(), 0, "opcheck", "", 1, -1.0))
        torch.library.opcheck(ops.average, ([t.requires_grad_() for t in tensors()], 0, "opcheck", "", 1, -1.0))
        torch.library.opcheck(ops.average, ([torch.rand(4, 3).t().requires_grad_()], 0, "opcheck", "", 1, -1.0))
        torch.library.opcheck(ops.average_, (tensors(), 0, "opcheck", "", -1.0))
        torch.library.opcheck(ops.broadcast_, (tensors(), 0, "opcheck", "", -1.0))

    def test_compiles_into_one_graph(self, rank: int, size: int) -> None:
        @torch.compile(fullgraph=True, backend="aot_eager")
        def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            first = torch.ops.dl_comm.average([x * 2, y], 0, "compiled", "", 1, -1.0)
            copy = y.clone()
            torch.ops.dl_comm.average_([copy], 0, "in place", "", -1.0)
            second = torch.ops.dl_comm.average([first[0] + copy.sum()], 0, "compiled again", "", 1, -1.0)
            return second[0].sum() * rank

        x = torch.full((3,), float(rank), requires_grad=True)
        y = torch.full((2,), float(rank), requires_grad=True)
        for _ in range(2):
            result = function(x, y)
            torch.testing.assert_close(result, torch.tensor(rank * 3 * (2 * middle(size) + 2 * middle(size))))
            x.grad = None
            result.backward()
            torch.testing.assert_close(x.grad, torch.full((3,), 2 * middle(size)))


class TestThreads:
    def test_waiting_does_not_hold_the_gil(self, rank: int, size: int) -> None:
        # The others wait for rank 0 in a thread; rank 0 starts only after they have got through another call meanwhile.
        if size == 1:
            pytest.skip("needs two ranks")
        if rank == 0:
            cdl.gradients([torch.ones(1)], 1)
            _ops.average_in_place([torch.ones(3)], 0, "gil")
            return
        entered = threading.Event()

        def wait() -> None:
            entered.set()
            _ops.average_in_place([torch.ones(3)], 0, "gil")

        thread = threading.Thread(target=wait)
        thread.start()
        entered.wait()
        time.sleep(0.2)  # until the thread is in the op: were the GIL held there, this would not return
        cdl.gradients([torch.ones(1)], 1)
        thread.join()

    def test_started_calls_may_be_awaited_in_any_order(self, rank: int, size: int) -> None:
        tensors = [torch.full((i + 1,), float(rank + i)) for i in range(20)]
        calls = [_ops.average_start([tensor], i % 2, f"call {i}") for i, tensor in enumerate(tensors)]
        for call in reversed(calls):
            _ops.wait(call)
        for i, tensor in enumerate(tensors):
            torch.testing.assert_close(tensor, torch.full((i + 1,), i + middle(size)))

    def test_a_forgotten_call_keeps_its_tensors(self, rank: int, size: int) -> None:
        if size == 1:
            pytest.skip("needs two ranks: the call must be under way for a while")
        if rank == 0:
            memory = np.full(1000, 1.0, dtype=np.float32)
            alive = weakref.ref(memory)  # lives as long as a tensor in it
            _ops.detach(_ops.average_start([torch.from_numpy(memory)], 0, "forgotten"))
            del memory
            gc.collect()
            assert alive() is not None
            cdl.gradients([torch.ones(1)], 1)  # now the others join in
        else:
            cdl.gradients([torch.ones(1)], 1)
            tensor = torch.zeros(1000)
            _ops.average_in_place([tensor], 0, "forgotten")
            torch.testing.assert_close(tensor, torch.full((1000,), 1 / size))
        cdl.gradients([torch.ones(1)], 0)  # the forgotten call has ended before
        _ops.wait(_ops.average_start([torch.ones(1)], 0, "next"))
        if rank == 0:
            assert alive() is None


def strided() -> torch.Tensor:
    """Return a tensor that is not contiguous."""
    return torch.ones(3, 4).t()


class TestWrongArguments:
    """Each is refused on the spot, and the process goes on."""

    @pytest.fixture(autouse=True)
    def goes_on(self, rank: int, size: int):  # noqa: ANN201 (a generator)
        yield
        torch.testing.assert_close(cdl.gradients([torch.tensor([float(rank)])], 0)[0], torch.tensor([middle(size)]))

    @pytest.mark.parametrize("call", [cdl.gradients, cdl.broadcast])
    def test_lists(self, call: Callable) -> None:
        with pytest.raises(ValueError, match="empty|no tensor"):
            call([], 0)
        with pytest.raises(dl_comm.ArgumentError, match="tensor 1 is None"):
            call([torch.ones(1), None], 0)
        with pytest.raises(TypeError, match="entry 1 of the list is of type int"):
            call([torch.ones(1), 3], 0)
        with pytest.raises(TypeError):
            call(None, 0)
        with pytest.raises(ValueError, match="meta device"):
            call([torch.ones(2, device="meta")], 0)

    def test_one_tensor_or_number_instead_of_a_list(self, rank: int, size: int) -> None:
        x, last = torch.full((2, 3), float(rank)), size - 1
        assert cdl.gradients(x).tolist() == [[middle(size)] * 3] * 2
        assert cdl.gradients(float(rank)) == middle(size)
        assert cdl.broadcast(x, last, in_place=False).tolist() == [[last] * 3] * 2
        assert x.tolist() == [[rank] * 3] * 2
        assert cdl.broadcast(x, last, name="weights") is x
        assert x.tolist() == [[last] * 3] * 2
        assert cdl.broadcast(rank, last) == last
        assert cdl.broadcast(rank + 0.5, last, async_op=True).wait() == last + 0.5
        x.fill_(rank)
        new = cdl.broadcast(x, last, in_place=False, async_op=True).wait()
        assert new.tolist() == [[last] * 3] * 2
        assert x.tolist() == [[rank] * 3] * 2
        assert dl_comm.broadcast(x, last) is x
        assert x.tolist() == [[last] * 3] * 2

    def test_metrics(self) -> None:
        for value in (None, "loss", [1.0]):
            with pytest.raises(TypeError, match="needs a tensor or a number"):
                cdl.average(value)

    def test_types_without_a_mean(self) -> None:
        with pytest.raises(TypeError, match="bool"):
            cdl.gradients([torch.ones(2, dtype=torch.bool)], 0)
        with pytest.raises(TypeError, match="ComplexFloat"):
            cdl.gradients([torch.ones(2, dtype=torch.complex64)], 0)
        with pytest.raises(TypeError, match=r"tensor 1 \('b'\)"):
            _ops.average_in_place([torch.ones(2), torch.ones(2, dtype=torch.int16)], 0, "x", "a\nb")

    def test_layouts(self) -> None:
        with pytest.raises(ValueError, match="not dense"):
            cdl.gradients([torch.eye(3).to_sparse()], 0)
        with pytest.raises(ValueError, match="not contiguous"):
            _ops.average_in_place([strided()], 0, "x")
        with pytest.raises(ValueError, match="not contiguous"):
            _ops.broadcast_in_place([strided()], 0, "x")

    @pytest.mark.parametrize("team", [-2, 100_000, 2**40])
    def test_team(self, team: int) -> None:
        with pytest.raises(ValueError, match="team"):
            cdl.gradients([torch.ones(2)], team)

    def test_root(self, size: int) -> None:
        for root in (-1, size):
            with pytest.raises(ValueError, match="root|rank"):
                cdl.broadcast([torch.ones(2)], root)

    def test_numbers_of_calls(self) -> None:
        with pytest.raises(ValueError, match="no call with number"):
            _ops.wait(10**9)
        call = _ops.average_start([torch.ones(2)], 0, "once")
        _ops.wait(call)
        with pytest.raises(ValueError, match="no call with number"):
            _ops.wait(call)


class TestRanksThatDiffer:
    """A difference is an error on every rank, and the next call works."""

    @pytest.fixture(autouse=True)
    def goes_on(self, rank: int, size: int):  # noqa: ANN201 (a generator)
        if size == 1:
            pytest.skip("needs two ranks")
        yield
        torch.testing.assert_close(cdl.gradients([torch.tensor([float(rank)])], 0)[0], torch.tensor([middle(size)]))

    def test_in_shape(self, rank: int) -> None:
        with pytest.raises(dl_comm.MismatchError):
            cdl.gradients([torch.ones(3 if rank == 0 else 4)], 0)

    def test_in_type(self, rank: int) -> None:
        with pytest.raises(dl_comm.MismatchError):
            cdl.gradients([torch.ones(3, dtype=torch.float32 if rank == 0 else torch.int32)], 0)

    def test_in_length_of_the_list(self, rank: int) -> None:
        with pytest.raises(dl_comm.MismatchError):
            cdl.gradients([torch.ones(3)] * (1 + (rank == 0)), 0)

    def test_in_name(self, rank: int) -> None:
        with pytest.raises(dl_comm.MismatchError, match="loss|accuracy"):
            cdl.average(1.0, "loss" if rank == 0 else "accuracy")

    def test_in_root(self, rank: int) -> None:
        with pytest.raises(dl_comm.MismatchError):
            cdl.broadcast([torch.ones(3)], int(rank == 0))


def test_the_plain_functions_take_torch_tensors(rank: int, size: int) -> None:
    same = [torch.ones(3, 2, dtype=torch.bfloat16), torch.nn.Parameter(torch.tensor(2.0))]
    assert dl_comm.check_buffers_match(same, 1) == 0
    assert dl_comm.check_buffers_match([torch.tensor([float(rank)])], 0) == int(size > 1)
    assert dl_comm.average(torch.tensor(float(rank))).item() == (size - 1) / 2


def test_what_the_ops_cannot_take_is_refused_in_our_words() -> None:
    sparse = torch.zeros(2).to_sparse()
    for tensor in (sparse, torch.zeros(2, device="meta")):
        with pytest.raises(dl_comm.ArgumentError, match="dense"):
            dl_comm.check_buffers_match([tensor])
    with pytest.raises(dl_comm.ArgumentError, match="dense"):
        dl_comm.broadcast([sparse])
    with pytest.raises(dl_comm.ArgumentError, match="root"):
        dl_comm.broadcast([torch.zeros(2)], [])  # type: ignore[arg-type]
    with pytest.raises(dl_comm.ArgumentError, match="invalid name: .* .expected Unicode"):
        dl_comm.gradients([torch.zeros(2)], 0, name="\ud800")


def test_flushed_subnormals_do_not_change_sums(rank: int, size: int) -> None:
    """Blocking and started calls, short and long ones, run on different threads."""
    subnormal = np.full(100_000, 0x116C2 * (rank + 1), np.uint32).view(np.float32)
    vectors = [torch.from_numpy(subnormal[:length].copy()) for length in (16, 100_000)]
    weights = [torch.tensor([1e-39 * (rank + 1), 1.0, 3.0]), torch.tensor([1e-310 * (rank + 1)], dtype=torch.float64)]
    adasum = [x.view(torch.uint8) for x in cdl.allreduce(weights, op="adasum")]
    ranks = size * (size + 1) // 2
    assert torch.set_flush_denormal(True)
    try:
        for step in range(40):
            work = cdl.allreduce(torch.ones(16), async_op=True) if step % 3 else None
            sums = [cdl.allreduce(vectors[step % 2], op="sum")]
            sums.append(cdl.allreduce(vectors[step % 2], op="sum", async_op=True).wait())
            if work is not None:
                work.wait()
            for result in sums:
                assert set(result.view(torch.int32).tolist()) == {0x116C2 * ranks}
        flushed = cdl.allreduce(weights, op="adasum")
    finally:
        torch.set_flush_denormal(False)
    assert all(torch.equal(x.view(torch.uint8), bits) for x, bits in zip(flushed, adasum, strict=True))


@pytest.mark.parametrize("gradients", [dl_comm.gradients, cdl.gradients], ids=["package", "binding"])
def test_a_generator_of_tensors_is_a_list(gradients: Callable[..., list[torch.Tensor]], rank: int, size: int) -> None:
    means = gradients(torch.full((2,), float(rank + i)) for i in range(3))
    assert [mean.tolist() for mean in means] == [[(size - 1) / 2 + i] * 2 for i in range(3)]
