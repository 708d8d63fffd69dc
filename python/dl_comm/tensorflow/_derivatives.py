"""The gradients of the collectives. Importing this module registers them.

The gradient of a rank's tensor is that of the sum of all ranks' losses, so every rank must compute the gradient.
It is made of collectives with gradients of their own. Integers and bools have none.

Thread rule: TensorFlow calls these functions, on any thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from dl_comm._arrays.arguments import NO_FACTORS
from dl_comm._base.table import (
    OPERATORS,
    SCALED,
    AllGather,
    Allreduce,
    AllToAll,
    Broadcast,
    Gather,
    Reduce,
    ReduceScatter,
    Scatter,
)
from dl_comm.tensorflow import _ops

_NAMES = {code: name for codes in (OPERATORS, SCALED) for name, code in codes.items()}
_SUM, _MIN, _MAX = (OPERATORS[name] for name in ("sum", "min", "max"))
_LINEAR = ("sum", "mean")
_EXTREMES = (_MIN, _MAX)
_PLAIN_BROADCAST = "DlCommBroadcast"


class _Backward:
    """The backward call of an op: its differentiable tensors, and what gives collectives like the op's."""

    def __init__(self, op: Any, upstream: Sequence[Any]) -> None:
        self.op, self.outputs = op, len(op.outputs)
        numbers, name = _ops.settings_of(op)
        self.name = f"{name}/gradient"
        self.indices = [i for i, y in enumerate(op.outputs) if y.dtype.is_floating or y.dtype.is_complex]
        self.x = [op.inputs[i] for i in self.indices]
        self.y = [op.outputs[i] for i in self.indices]
        self.dy = [
            tf.zeros_like(y) if upstream[i] is None else tf.convert_to_tensor(upstream[i])
            for i, y in zip(self.indices, self.y, strict=True)
        ]
        if op.type == _PLAIN_BROADCAST:  # to all ranks
            numbers = [Broadcast.code, _SUM, 0, numbers[0], *NO_FACTORS, *numbers[1:]]
        self.code, self.operator, self.group, self.root = map(int, numbers[:4])
        self.factors, self.timeout, self.by_name = (numbers[4], numbers[5]), numbers[7], bool(int(numbers[6]) & 2)
        lists = range(self.outputs, len(op.inputs), self.outputs)
        self.counts = [op.inputs[first + i] for first in lists for i in self.indices]

    def call(
        self, code: int, tensors: Sequence[Any], counts: Sequence[Any] = (), name: str = "", **options: Any
    ) -> list[Any]:
        """Runs a collective on the group and with the root of the op."""
        options = {"root": self.root, "timeout": self.timeout, "by_name": self.by_name, "counts": counts, **options}
        return list(_ops.collective(code, tensors, self.name + name, self.group, **options))

    def scaled(self, tensors: Sequence[Any]) -> list[Any]:
        """Multiplies by the factor of each input in the results: that of a mean, or of factors."""
        if self.operator == _SUM:
            return list(tensors)
        factor = tf.constant(self.factors[0] * self.factors[1], tf.float64)
        if _NAMES[self.operator] == "mean":
            factor /= tf.cast(_ops.run("dl_comm_group", self.group).size, tf.float64)
        return [tensor * tf.cast(factor, tensor.dtype) for tensor in tensors]

    def shared(self, total: Sequence[Any], y: Sequence[Any]) -> list[Any]:
        """The gradients of a minimum or maximum: the ranks and elements that have it share the whole gradient."""
        masks = [tf.cast(tf.equal(x, y), x.dtype) for x, y in zip(self.x, y, strict=True)]
        ties = self.call(Allreduce.code, masks, name=": ties")
        return [dy * mask / number for dy, mask, number in zip(total, masks, ties, strict=True)]

    def refuse(self, collective: str) -> LookupError:
        return LookupError(
            f"dl_comm: {collective} with op={_NAMES[self.operator]!r} has no gradient; sum, mean, min and max have one"
        )

    def results(self, gradients: Sequence[Any]) -> list[Any]:
        """The gradients of all inputs of the op."""
        found: list[Any] = [None] * len(self.op.inputs)
        for i, gradient in zip(self.indices, gradients, strict=True):
            found[i] = gradient
        return found


def _of_allreduce(back: _Backward) -> list[Any]:
    if back.operator in _EXTREMES:
        return back.shared(back.call(Allreduce.code, back.dy), back.y)
    if _NAMES[back.operator] not in _LINEAR:
        raise back.refuse("allreduce")
    return back.call(Allreduce.code, back.dy, operator=back.operator, factors=back.factors)


def _of_reduce(back: _Backward) -> list[Any]:
    if back.operator in _EXTREMES:
        both = back.call(Broadcast.code, back.dy + back.y)
        return back.shared(both[: len(back.dy)], both[len(back.dy) :])
    if _NAMES[back.operator] not in _LINEAR:
        raise back.refuse("reduce")
    return back.scaled(back.call(Broadcast.code, back.dy))


def _of_broadcast(back: _Backward) -> list[Any]:
    return back.call(Reduce.code, back.dy)


def _of_all_gather(back: _Backward) -> list[Any]:
    # The input may be a scalar.
    blocks = back.call(ReduceScatter.code, back.dy, back.counts)
    return [tf.reshape(block, tf.shape(x)) for block, x in zip(blocks, back.x, strict=True)]


def _of_gather(back: _Backward) -> list[Any]:
    # The gradients of other ranks than the root have no rows, so the blocks need counts.
    size = _ops.run("dl_comm_group", back.group).size
    counts = back.counts or [tf.fill([size], _ops.extent(x)[0]) for x in back.x]
    blocks = back.call(Scatter.code, back.dy, counts)
    return [tf.reshape(block, tf.shape(x)) for block, x in zip(blocks, back.x, strict=True)]


def _of_scatter(back: _Backward) -> list[Any]:
    joined = back.call(Gather.code, back.dy, back.counts)
    return [_with_zeros(rows, x) for rows, x in zip(joined, back.x, strict=True)]


def _with_zeros(rows: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    """The rows as long as `x`: only the root has some."""
    missing = tf.shape(x)[0] - tf.shape(rows)[0]
    return tf.concat([rows, tf.zeros(tf.concat([[missing], tf.shape(x)[1:]], 0), x.dtype)], 0)


def _of_reduce_scatter(back: _Backward) -> list[Any]:
    if back.operator in _EXTREMES:
        both = back.call(AllGather.code, back.dy + back.y, back.counts * 2)
        return back.shared(both[: len(back.dy)], both[len(back.dy) :])
    if _NAMES[back.operator] not in _LINEAR:
        raise back.refuse("reduce_scatter")
    return back.scaled(back.call(AllGather.code, back.dy, back.counts))


def _of_all_to_all(back: _Backward) -> list[Any]:
    sent, received = back.counts[: len(back.x)], back.counts[len(back.x) :]
    return back.call(AllToAll.code, back.dy, received + sent)


_OF = {
    Allreduce.code: _of_allreduce,
    Broadcast.code: _of_broadcast,
    Reduce.code: _of_reduce,
    AllGather.code: _of_all_gather,
    Gather.code: _of_gather,
    Scatter.code: _of_scatter,
    ReduceScatter.code: _of_reduce_scatter,
    AllToAll.code: _of_all_to_all,
}


def _of_collective(op: Any, *upstream: Any) -> list[Any]:
    back = _Backward(op, upstream)
    return back.results(_OF[back.code](back) if back.indices else [])


tf.RegisterGradient("DlCommCollective")(_of_collective)
tf.RegisterGradient("DlCommBlockCollective")(_of_collective)
tf.RegisterGradient(_PLAIN_BROADCAST)(_of_collective)
tf.no_gradient("DlCommGroup")
