"""The collectives on torch tensors in compiled graphs, on 1, 2, 3 ranks."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import dl_comm  # noqa: E402
import dl_comm.torch as cdl  # noqa: E402
from dl_comm.torch import _ops  # noqa: E402

pytestmark = pytest.mark.costly


def calls(x: torch.Tensor, group: cdl.Group | None = None) -> list[torch.Tensor]:
    """A function with each collective."""
    total = cdl.allreduce(x * 2, group=group)
    joined = cdl.all_gather([total, x], group=group)
    block = cdl.reduce_scatter(joined[1], "mean", group=group)
    spread = cdl.all_to_all(joined[0], group=group)
    on_root = [cdl.reduce(x, group=group), cdl.gather(block, group=group)]
    copy = cdl.broadcast([x + 1], in_place=False, group=group)[0]
    mine = cdl.scatter(joined[0] * 1.5, group=group)
    return [total, block, spread, copy, mine, *(each for each in on_root if each is not None)]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_graphs(rank: int, size: int, backend: str) -> None:
    torch.compiler.reset()
    compiled = torch.compile(calls, fullgraph=True, backend=backend)
    for length in (3, 5, 8):
        for needs_gradient in (False, True):
            x = torch.linspace(1, 2, length).mul(rank + 1).requires_grad_(needs_gradient)
            expected, found = calls(x), compiled(x)
            for one, other in zip(expected, found, strict=True):
                torch.testing.assert_close(one, other)
            if needs_gradient:
                (of_expected,) = torch.autograd.grad(sum(each.square().sum() for each in expected), x)
                (of_found,) = torch.autograd.grad(sum(each.square().sum() for each in found), x)
                torch.testing.assert_close(of_expected, of_found)


def test_compiled_graphs_see_the_group(rank: int, size: int) -> None:
    torch.compiler.reset()
    compiled = torch.compile(lambda x, group: cdl.all_gather(x, group=group), fullgraph=True, backend="aot_eager")
    groups = [cdl.Group(), cdl.Group([rank]), cdl.Group(range(size)[::-1]), None]
    x = torch.full((2,), float(rank))
    for group in groups:
        assert torch.equal(compiled(x, group), cdl.all_gather(x, group=group))
    assert groups[0] is not None
    groups[0].free()
    with pytest.raises((dl_comm.CommError, RuntimeError), match="freed"):
        compiled(x, groups[0])
    later = cdl.Group()
    assert torch.equal(compiled(x, later), cdl.all_gather(x))


def test_ops_pass_opcheck(rank: int, size: int) -> None:
    ops = _ops.ops
    for needs_gradient in (False, True):

        def tensors(needs_gradient: bool = needs_gradient) -> list[torch.Tensor]:
            return [
                torch.rand(4 * size, 3, requires_grad=needs_gradient),
                torch.rand(size, requires_grad=needs_gradient),
            ]

        for op, arguments in [
            (ops.allreduce, ("sum", 1.0, 1.0)),
            (ops.allreduce, ("max", 1.0, 1.0)),
            (ops.broadcast, (0,)),
            (ops.reduce, ("mean", 1.0, 1.0, 0)),
            (ops.all_gather, ([],)),
            (ops.gather, (0, [])),
            (ops.scatter, (0, [])),
            (ops.reduce_scatter, ("sum", 1.0, 1.0, [])),
            (ops.all_to_all, ([], [])),
        ]:
            torch.library.opcheck(op.default, (tensors(), 0, rank, size, *arguments, "opcheck", -1.0))
    out = (tensors(False), tensors(False), 0, rank, size, "sum", 1.0, 1.0, "", -1.0)
    torch.library.opcheck(ops.allreduce_out.default, out)
    with pytest.raises(RuntimeError, match="reset"):
        ops.broadcast([torch.ones(1)], 0, rank, size + 1, 0, "", -1.0)


def test_cuda_graphs_leave_the_calls_out() -> None:
    unsafe = getattr(torch.Tag, "cudagraph_unsafe", None)
    if unsafe is None:
        pytest.skip("this torch does not ask which ops a CUDA graph may hold")
    torch.compiler.reset()
    called = []

    def backend(module: torch.fx.GraphModule, _: list[torch.Tensor]) -> object:
        called.extend(node.target for node in module.graph.nodes if node.op == "call_function")
        return module.forward

    torch.compile(calls, fullgraph=True, backend=backend)(torch.ones(4))
    ours = {target for target in called if str(target).startswith("dl_comm.")}
    assert len(ours) >= 8, called
    assert all(unsafe in target.tags for target in ours), [(target, target.tags) for target in ours]
    for name in ("average_", "average", "average_no_grad", "broadcast_", "allreduce_out", "all_gather_no_grad"):
        assert unsafe in getattr(_ops.ops, name).default.tags, name
