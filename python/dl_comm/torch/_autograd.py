"""Fake kernels and gradients of the collectives, for torch's compiler and autograd. The ops: torch_ops/collectives.cc.

The gradient of a collective is a collective, of the same differentiable ops: so gradients have gradients, and the ranks
must all run backward. A rank that is not the root has an empty tensor as result of `reduce` and `gather`; it connects
the graph, and its gradient is empty too.

Rank and size are arguments of the ops, because they shape the graph: a graph cached on disk is not used for others.

Thread rule: any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dl_comm._base.errors import ArgumentError
from dl_comm.torch._ops import call, traced_as
from dl_comm.torch._ops import ops as _ops

try:  # private to torch; without it inductor drops calls whose results are not used
    from torch._higher_order_ops.effects import _EffectType, _register_effectful_op
except ImportError:
    _register_effectful_op = None  # type: ignore[assignment]

Tensors = list[torch.Tensor]
Shapes = Sequence[Sequence[int]]
Place = tuple[int, int, int]
"""The leading arguments of an op: the number of a group, this process's rank there, and the number of its ranks."""
How = tuple[str, float, bool]
"""The last arguments of an op: name, deadline, and whether calls match by name."""


# Fake kernels: shapes only.


def _same(tensors: Tensors, *_: Any) -> Tensors:
    return [tensor.new_empty(tensor.shape) for tensor in tensors]


def _on_root(results: Tensors, rank: int, root: int) -> Tensors:
    return results if rank == root else [result.new_empty((0,)) for result in results]


def _of_tensor(counts: list[int], index: int, size: int) -> list[int]:
    return counts[index * size : (index + 1) * size]


def _joined(tensors: Tensors, size: int, counts: list[int]) -> Tensors:
    blocks = [tensor if tensor.dim() else tensor.reshape(1) for tensor in tensors]
    extents = _sums(counts, len(blocks), size) if counts else [block.shape[0] * size for block in blocks]
    return [block.new_empty((rows, *block.shape[1:])) for block, rows in zip(blocks, extents, strict=True)]


def _sums(counts: list[int], tensors: int, size: int) -> list[int]:
    return [sum(_of_tensor(counts, index, size)) for index in range(tensors)]


def _cut(tensors: Tensors, rank: int, size: int, counts: list[int]) -> Tensors:
    extents = counts[rank::size] if counts else [_block(tensor, size) for tensor in tensors]
    return [tensor.new_empty((each, *tensor.shape[1:])) for tensor, each in zip(tensors, extents, strict=True)]


def _block(tensor: torch.Tensor, size: int) -> int:
    if not tensor.dim() or tensor.shape[0] % size:
        shape = tuple(tensor.shape)
        raise ArgumentError(f"a tensor has the shape {shape}; its first axis must be a multiple of the {size} ranks")
    extent: int = tensor.shape[0] // size
    return extent


def _exchanged(tensors: Tensors, size: int, sent: list[int], received: list[int]) -> Tensors:
    if sent:
        return _joined(tensors, size, received)
    for tensor in tensors:
        _block(tensor, size)
    return _same(tensors)


_FAKES: dict[str, Callable[..., Tensors]] = {
    "allreduce": _same,
    "broadcast": _same,
    "reduce": lambda tensors, _, rank, size, op, pre, post, root, *__: _on_root(_same(tensors), rank, root),
    "all_gather": lambda tensors, _, rank, size, counts, *__: _joined(tensors, size, counts),
    "gather": lambda tensors, _, rank, size, root, counts, *__: _on_root(_joined(tensors, size, counts), rank, root),
    "scatter": lambda tensors, _, rank, size, root, counts, *__: _cut(tensors, rank, size, counts),
    "reduce_scatter": lambda tensors, _, rank, size, op, pre, post, counts, *__: _cut(tensors, rank, size, counts),
    "all_to_all": lambda tensors, _, rank, size, sent, received, *__: _exchanged(tensors, size, sent, received),
}


def _nothing(*_: Any) -> None:
    return None


def _keep_in_graphs(op: Any) -> None:
    """Make compiled graphs keep the calls of an op, in order, also where only other ranks use the result."""
    if _register_effectful_op is None:
        torch.fx.node.has_side_effect(op)
    else:
        _register_effectful_op(op, _EffectType.ORDERED)


for _name, _fake in _FAKES.items():
    traced_as(_name, f"{_name}_no_grad")(_fake)
    traced_as(f"{_name}_out")(_nothing)
    _keep_in_graphs(getattr(_ops, _name).default)


# Gradients. Each function gets the gradients of the floating-point results, the shapes of their inputs, and the
# arguments of the op; it returns the gradients of these inputs. Names get a suffix, so that errors tell which call.


def _allreduce(
    ctx: Any, grads: Tensors, shapes: Shapes, place: Place, op: str, pre: float, post: float, how: How
) -> Tensors:
    if op in ("sum", "mean"):
        found: Tensors = call(_ops.allreduce, grads, *place, op, pre, post, *how)
        return found
    if op not in ("min", "max", "product") or (pre, post) != (1.0, 1.0):
        raise _no_gradient("allreduce", op)
    saved = ctx.saved_tensors
    inputs, outputs = saved[: len(grads)], saved[len(grads) :]
    if op == "product":
        return _of_product(grads, inputs, place, how)
    # As torch.amax: ranks with equal values share the gradient.
    chosen = [(x == y).to(grad.dtype) for x, y, grad in zip(inputs, outputs, grads, strict=True)]
    sums = call(_ops.allreduce, [*grads, *chosen], *place, "sum", 1.0, 1.0, *how)
    return [total * mine / number for total, mine, number in zip(sums, chosen, sums[len(grads) :], strict=False)]


def _of_product(grads: Tensors, inputs: Sequence[torch.Tensor], place: Place, how: How) -> Tensors:
    """The gradients of a product: those of the results times the factors of the other ranks, of which some may be 0."""
    rank = place[1]
    sums = call(_ops.allreduce, grads, *place, "sum", 1.0, 1.0, *how)
    factors = call(_ops.all_gather, [x.unsqueeze(0) for x in inputs], *place, [], f"{how[0]}: factors", *how[1:])
    others = [torch.cat([each[:rank], each[rank + 1 :]]).prod(0) for each in factors]
    return [total * other for total, other in zip(sums, others, strict=True)]


def _no_gradient(collective: str, op: str) -> ArgumentError:
    error: ArgumentError = ArgumentError(f"{collective} with op={op!r} has no gradient: pass x.detach()")
    return error


def _scaled(grads: Tensors, factor: float) -> Tensors:
    return grads if factor == 1 else [grad * factor for grad in grads]


def _linear(collective: str, op: str, size: int, pre: float, post: float) -> float:
    """The factor of every input in a sum or mean."""
    if op not in ("sum", "mean"):
        raise _no_gradient(collective, op)
    return pre * post / (size if op == "mean" else 1)


def spread(tensors: Tensors, shapes: Shapes, place: Place, root: int) -> Tensors:
    """On a rank that is not the root: tensors of these shapes without values of their own, connected to `tensors`."""
    if place[1] == root:
        return tensors
    return [tensor.sum(dtype=tensor.dtype).expand(tuple(shape)) for tensor, shape in zip(tensors, shapes, strict=True)]


def _broadcast(ctx: Any, grads: Tensors, shapes: Shapes, place: Place, root: int, how: How) -> Tensors:
    return spread(call(_ops.reduce, grads, *place, "sum", 1.0, 1.0, root, *how), shapes, place, root)


def _reduce(
    ctx: Any,
    grads: Tensors,
    shapes: Shapes,
    place: Place,
    op: str,
    pre: float,
    post: float,
    root: int,
    how: How,
) -> Tensors:
    factor = _linear("reduce", op, place[2], pre, post)
    return _scaled(call(_ops.broadcast, spread(grads, shapes, place, root), *place, root, *how), factor)


def _all_gather(ctx: Any, grads: Tensors, shapes: Shapes, place: Place, counts: list[int], how: How) -> Tensors:
    found = call(_ops.reduce_scatter, grads, *place, "sum", 1.0, 1.0, counts, *how)
    return [each.reshape(tuple(shape)) for each, shape in zip(found, shapes, strict=True)]


def _gather(ctx: Any, grads: Tensors, shapes: Shapes, place: Place, root: int, counts: list[int], how: How) -> Tensors:
    size = place[2]
    blocks = [tuple(shape) or (1,) for shape in shapes]
    rows = _sums(counts, len(blocks), size) if counts else [size * block[0] for block in blocks]
    joined = [(extent, *block[1:]) for block, extent in zip(blocks, rows, strict=True)]
    found = call(_ops.scatter, spread(grads, joined, place, root), *place, root, counts, *how)
    return [each.reshape(tuple(shape)) for each, shape in zip(found, shapes, strict=True)]


def _scatter(ctx: Any, grads: Tensors, shapes: Shapes, place: Place, root: int, counts: list[int], how: How) -> Tensors:
    return spread(call(_ops.gather, grads, *place, root, counts, *how), shapes, place, root)


def _reduce_scatter(
    ctx: Any,
    grads: Tensors,
    shapes: Shapes,
    place: Place,
    op: str,
    pre: float,
    post: float,
    counts: list[int],
    how: How,
) -> Tensors:
    factor = _linear("reduce_scatter", op, place[2], pre, post)
    return _scaled(call(_ops.all_gather, grads, *place, counts, *how), factor)


def _all_to_all(
    ctx: Any,
    grads: Tensors,
    shapes: Shapes,
    place: Place,
    sent: list[int],
    received: list[int],
    how: How,
) -> Tensors:
    found: Tensors = call(_ops.all_to_all, grads, *place, received, sent, *how)
    return found


def _kept(counts: list[int], floating: Sequence[bool], size: int) -> list[int]:
    """The counts of the tensors that have gradients."""
    return [count for index, keeps in enumerate(floating) if keeps for count in _of_tensor(counts, index, size)]


def _register(name: str, gradient: Callable[..., Tensors], saves: Callable[..., bool]) -> None:
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
        tensors, *arguments = inputs
        ctx.arguments = arguments
        ctx.shapes = [tensor.shape for tensor in tensors]
        ctx.floating = [tensor.is_floating_point() or tensor.is_complex() for tensor in tensors]
        if saves(*arguments):
            pairs = zip(ctx.floating, tensors, output, strict=True)
            inputs_and_outputs = [(x, y) for floating, x, y in pairs if floating]
            ctx.save_for_backward(*(x for x, _ in inputs_and_outputs), *(y for _, y in inputs_and_outputs))

    def backward(ctx: Any, grads: Tensors) -> tuple[Any, ...]:
        *arguments, call_name, timeout, by_name = ctx.arguments
        place, arguments = tuple(arguments[:3]), arguments[3:]
        known = [grad for grad, floating in zip(grads, ctx.floating, strict=True) if floating]
        shapes = [shape for shape, floating in zip(ctx.shapes, ctx.floating, strict=True) if floating]
        arguments = [_kept(each, ctx.floating, place[2]) if isinstance(each, list) else each for each in arguments]
        found = iter(
            gradient(ctx, known, shapes, place, *arguments, (f"{call_name or name}.gradient", timeout, by_name))
        )
        result = [next(found) if floating else None for floating in ctx.floating]
        # torch counts an empty list of numbers as one of tensors.
        return result, *([] if isinstance(each, list) and not each else None for each in ctx.arguments)

    torch.library.register_autograd(f"dl_comm::{name}", backward, setup_context=setup_context)


def _saves_nothing(*_: Any) -> bool:
    return False


_register("allreduce", _allreduce, lambda group, rank, size, op, *_: op in ("min", "max", "product"))
_GRADIENTS: dict[str, Callable[..., Tensors]] = {
    "broadcast": _broadcast,
    "reduce": _reduce,
    "all_gather": _all_gather,
    "gather": _gather,
    "scatter": _scatter,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
}


def gradient_of(name: str, grads: Tensors, shapes: Shapes, place: Place, own: Sequence[Any], how: How) -> Tensors:
    """Return the gradients of the tensors of a collective; `own`: its own arguments, as the op takes them."""
    return _GRADIENTS[name](None, grads, shapes, place, *own, how)


for _name, _gradient in _GRADIENTS.items():
    _register(_name, _gradient, _saves_nothing)
