"""The building blocks of layers: variables, and products and convolutions with them.

Thread rule: as TensorFlow's for building graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow

tf = tensorflow.compat.v1

_LETTERS = {1: "W", 2: "HW", 3: "DHW"}


@dataclass(frozen=True)
class Weight:
    """The name, initializer, regularizer and constraint of a layer's variable."""

    name: str
    initializer: Any = None
    regularizer: Any = None
    constraint: Any = None
    trainable: bool = True

    def create(self, shape: list[int], dtype: Any) -> Any:
        """Create the variable in the current variable scope, or return the existing one if the scope reuses it."""
        return tf.get_variable(
            self.name,
            shape,
            dtype.base_dtype,
            initializer=self.initializer,
            regularizer=self.regularizer,
            constraint=self.constraint,
            trainable=self.trainable,
        )


def dense_product(inputs: Any, units: int, kernel: Weight, bias: Weight | None) -> Any:
    """Multiply the last dimension of `inputs` by a kernel, and add a bias, in the current variable scope."""
    inputs = tf.convert_to_tensor(inputs)
    size, rank = static_size(inputs, -1), inputs.shape.ndims
    weights = kernel.create([size, units], inputs.dtype)
    if rank == 2:
        outputs = tf.matmul(inputs, weights)
    else:
        outputs = tf.tensordot(inputs, weights, [[rank - 1], [0]])
        outputs.set_shape([*inputs.shape.as_list()[:-1], units])
    return outputs if bias is None else tf.nn.bias_add(outputs, bias.create([units], inputs.dtype))


def convolve(
    rank: int,
    inputs: Any,
    filters: int,
    kernel_size: int | Sequence[int],
    strides: int | Sequence[int],
    padding: str,
    data_format: str,
    dilation_rate: int | Sequence[int],
    kernel: Weight,
    bias: Weight | None,
) -> Any:
    """Convolve along `rank` dimensions, and add a bias, in the current variable scope."""
    inputs = tf.convert_to_tensor(inputs)
    arranged, channels, _ = layout(data_format, rank)
    outputs = tf.nn.convolution(
        inputs,
        kernel.create([*per_dimension(kernel_size, rank), static_size(inputs, channels), filters], inputs.dtype),
        padding.upper(),
        strides=per_dimension(strides, rank),
        dilation_rate=per_dimension(dilation_rate, rank),
        data_format=arranged,
    )
    if bias is None:
        return outputs
    added = bias.create([filters], inputs.dtype)
    return tf.nn.bias_add(outputs, added, data_format="NHWC" if channels == -1 else "NCHW")


def cond(condition: Any, then: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
    """Return the result of one of the functions; if `condition` is a tensor, the graph makes the choice."""
    if not tf.is_tensor(condition):
        return then() if condition else otherwise()
    return tf.cond(tf.cast(condition, tf.bool), then, otherwise)


def static_size(inputs: Any, axis: int) -> int:
    """Return the static size of a dimension. Raises ValueError when it is unknown."""
    size = None if inputs.shape.ndims is None else inputs.shape.as_list()[axis]
    if size is None:
        raise ValueError(f"the size of dimension {axis} of a layer's input must be static: {inputs}")
    return int(size)


def layout(data_format: str, rank: int) -> tuple[str, int, tuple[int, int]]:
    """Return TensorFlow's name of the format, the axis of the channels, and the range of the `rank` other axes."""
    if data_format == "channels_last":
        return f"N{_LETTERS[rank]}C", -1, (1, rank + 1)
    if data_format == "channels_first":
        return f"NC{_LETTERS[rank]}", 1, (2, rank + 2)
    raise ValueError(f"invalid data_format: {data_format!r} (expected 'channels_last' or 'channels_first')")


def per_dimension(value: int | Sequence[int], rank: int) -> list[int]:
    """Expand `value` to one number for each of `rank` dimensions."""
    values = [int(each) for each in value] if isinstance(value, Iterable) else [int(value)] * rank
    if len(values) != rank:
        raise ValueError(f"{values} must have {rank} numbers, one for each dimension")
    return values
