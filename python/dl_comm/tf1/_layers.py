"""`tf.layers`: the functions of TensorFlow 1, with its variable names, collections and defaults.

A layer without a name is called `dense`, `dense_1` and so on in its variable scope. Its variables are `kernel` and
`bias`, or `gamma`, `beta`, `moving_mean` and `moving_variance`. Regularizers add to the collection
REGULARIZATION_LOSSES; batch normalization in training adds to UPDATE_OPS.

Thread rule: as TensorFlow's for building graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow

from dl_comm.tf1._normalization import batch_normalization
from dl_comm.tf1._weights import Weight, cond, convolve, dense_product, layout, per_dimension, static_size

tf = tensorflow.compat.v1

__all__ = [
    "average_pooling1d",
    "average_pooling2d",
    "average_pooling3d",
    "batch_normalization",
    "conv1d",
    "conv2d",
    "conv2d_transpose",
    "conv3d",
    "dense",
    "dropout",
    "flatten",
    "max_pooling1d",
    "max_pooling2d",
    "max_pooling3d",
]

GONE = {
    "AveragePooling2D": "tf.layers.average_pooling2d",
    "BatchNormalization": "tf.layers.batch_normalization",
    "Conv2D": "tf.layers.conv2d",
    "Dense": "tf.layers.dense",
    "Dropout": "tf.layers.dropout",
    "Flatten": "tf.layers.flatten",
    "MaxPooling2D": "tf.layers.max_pooling2d",
    "conv3d_transpose": "tf.nn.conv3d_transpose",
    "separable_conv1d": "tf.nn.separable_conv2d",
    "separable_conv2d": "tf.nn.separable_conv2d",
}


def dense(
    inputs: Any,
    units: int,
    activation: Callable[[Any], Any] | None = None,
    use_bias: bool = True,
    kernel_initializer: Any = None,
    bias_initializer: Any = None,
    kernel_regularizer: Any = None,
    bias_regularizer: Any = None,
    activity_regularizer: Any = None,
    kernel_constraint: Any = None,
    bias_constraint: Any = None,
    trainable: bool = True,
    name: str | None = None,
    reuse: bool | None = None,
) -> Any:
    """Multiply the last dimension of `inputs` by a kernel, and add a bias.

    Args:
        inputs: A tensor [..., n] with a static n.
        units: The size of the last dimension of the result.
        activation: A function of the result, or None.
        use_bias: Whether to add a bias.
        kernel_initializer: Initializer of the kernel [n, units]; None: that of the variable scope, else Glorot's.
        bias_initializer: Initializer of the bias [units]; None: zeros.
        kernel_regularizer: A function from the kernel to a loss, or None.
        bias_regularizer: A function from the bias to a loss, or None.
        activity_regularizer: A function from the result to a loss, or None.
        kernel_constraint: Projection of the kernel after an update, or None.
        bias_constraint: Projection of the bias after an update, or None.
        trainable: Whether the variables are in TRAINABLE_VARIABLES.
        name: The name of the layer's variable scope.
        reuse: Whether to reuse the variables of a layer with this name.

    Raises:
        ValueError: The last dimension is not static, or variables exist already (with `reuse`: do not exist).
    """
    kernel = Weight("kernel", kernel_initializer, kernel_regularizer, kernel_constraint, trainable)
    bias = Weight("bias", bias_initializer or tf.zeros_initializer(), bias_regularizer, bias_constraint, trainable)
    with tf.variable_scope(name, "dense", [inputs], reuse=reuse):
        outputs = dense_product(inputs, units, kernel, bias if use_bias else None)
        return _apply_activation(outputs, activation, activity_regularizer)


def _convolution(rank: int) -> Callable[..., Any]:
    def convolution(
        inputs: Any,
        filters: int,
        kernel_size: int | Sequence[int],
        strides: int | Sequence[int] = 1,
        padding: str = "valid",
        data_format: str = "channels_last",
        dilation_rate: int | Sequence[int] = 1,
        activation: Callable[[Any], Any] | None = None,
        use_bias: bool = True,
        *,
        kernel_initializer: Any = None,
        bias_initializer: Any = None,
        kernel_regularizer: Any = None,
        bias_regularizer: Any = None,
        activity_regularizer: Any = None,
        kernel_constraint: Any = None,
        bias_constraint: Any = None,
        trainable: bool = True,
        name: str | None = None,
        reuse: bool | None = None,
    ) -> Any:
        """Convolve along one, two or three dimensions, as in the layer's name.

        Args:
            inputs: For two dimensions a tensor [N, H, W, C], or [N, C, H, W] with `channels_first`; C must be static.
            filters: The number of channels of the result.
            kernel_size: Height and width of the kernel, or one number for both.
            strides: Steps along height and width.
            padding: `"valid"` or `"same"`.
            data_format: `"channels_last"` or `"channels_first"`.
            dilation_rate: Distance of the kernel's elements along height and width.
            activation: A function of the result, or None.
            use_bias: Whether to add a bias.
            kernel_initializer: See `dense`; from here on, arguments are keyword-only.
            bias_initializer: See `dense`.
            kernel_regularizer: See `dense`.
            bias_regularizer: See `dense`.
            activity_regularizer: See `dense`.
            kernel_constraint: See `dense`.
            bias_constraint: See `dense`.
            trainable: See `dense`.
            name: See `dense`.
            reuse: See `dense`.

        Raises:
            ValueError: C is not static, `data_format` is invalid, or variables exist already (with `reuse`: do not).
        """
        kernel = Weight("kernel", kernel_initializer, kernel_regularizer, kernel_constraint, trainable)
        bias = Weight("bias", bias_initializer or tf.zeros_initializer(), bias_regularizer, bias_constraint, trainable)
        with tf.variable_scope(name, default, [inputs], reuse=reuse):
            outputs = convolve(
                rank,
                inputs,
                filters,
                kernel_size,
                strides,
                padding,
                data_format,
                dilation_rate,
                kernel,
                bias if use_bias else None,
            )
            return _apply_activation(outputs, activation, activity_regularizer)

    default = convolution.__name__ = convolution.__qualname__ = f"conv{rank}d"
    return convolution


conv1d = _convolution(1)
conv2d = _convolution(2)
conv3d = _convolution(3)


def conv2d_transpose(
    inputs: Any,
    filters: int,
    kernel_size: int | Sequence[int],
    strides: int | Sequence[int] = (1, 1),
    padding: str = "valid",
    data_format: str = "channels_last",
    activation: Callable[[Any], Any] | None = None,
    use_bias: bool = True,
    kernel_initializer: Any = None,
    bias_initializer: Any = None,
    kernel_regularizer: Any = None,
    bias_regularizer: Any = None,
    activity_regularizer: Any = None,
    kernel_constraint: Any = None,
    bias_constraint: Any = None,
    trainable: bool = True,
    name: str | None = None,
    reuse: bool | None = None,
) -> Any:
    """Transposed convolution of images: the result is larger by the factor `strides`. Arguments as for `conv2d`."""
    inputs = tf.convert_to_tensor(inputs)
    arranged, channels, (first, last) = layout(data_format, 2)
    sizes, steps = per_dimension(kernel_size, 2), per_dimension(strides, 2)
    weight = Weight("kernel", kernel_initializer, kernel_regularizer, kernel_constraint, trainable)
    bias = Weight("bias", bias_initializer or tf.zeros_initializer(), bias_regularizer, bias_constraint, trainable)
    with tf.variable_scope(name, "conv2d_transpose", [inputs], reuse=reuse):
        shape = [*sizes, filters, static_size(inputs, channels)]
        kernel = weight.create(shape, inputs.dtype)
        static, dynamic = inputs.shape.as_list(), tf.shape(inputs)
        grown: list[Any] = list(static)
        for axis, size, step in zip(range(first, last), sizes, steps, strict=True):
            length = dynamic[axis] if static[axis] is None else static[axis]
            grown[axis] = length * step + (max(size - step, 0) if padding.lower() == "valid" else 0)
        grown[channels] = filters
        grown[0] = dynamic[0] if static[0] is None else static[0]
        outputs = tf.nn.conv2d_transpose(
            inputs,
            kernel,
            tf.stack(grown),
            _all_strides(steps, channels),
            padding.upper(),
            data_format=arranged,
        )
        outputs.set_shape([length if isinstance(length, int) else None for length in grown])
        if use_bias:
            outputs = tf.nn.bias_add(outputs, bias.create([filters], inputs.dtype), data_format=arranged)
        return _apply_activation(outputs, activation, activity_regularizer)


def _pooling(kind: str, rank: int, name: str) -> Callable[..., Any]:
    def pool(
        inputs: Any,
        pool_size: int | Sequence[int],
        strides: int | Sequence[int],
        padding: str = "valid",
        data_format: str = "channels_last",
        name: str | None = None,
    ) -> Any:
        """Take the maximum or the mean of each window, along the dimensions in the layer's name.

        Args:
            inputs: For two dimensions a tensor [N, H, W, C], or [N, C, H, W] with `channels_first`.
            pool_size: Height and width of the window, or one number for both.
            strides: Steps along height and width.
            padding: `"valid"` or `"same"`.
            data_format: `"channels_last"` or `"channels_first"`.
            name: The name of the operation.

        Raises:
            ValueError: `data_format` is invalid.
        """
        arranged, _, _ = layout(data_format, rank)
        return tf.nn.pool(
            inputs,
            per_dimension(pool_size, rank),
            kind,
            padding.upper(),
            strides=per_dimension(strides, rank),
            data_format=arranged,
            name=name or default,
        )

    default = pool.__name__ = pool.__qualname__ = name
    return pool


max_pooling1d = _pooling("MAX", 1, "max_pooling1d")
max_pooling2d = _pooling("MAX", 2, "max_pooling2d")
max_pooling3d = _pooling("MAX", 3, "max_pooling3d")
average_pooling1d = _pooling("AVG", 1, "average_pooling1d")
average_pooling2d = _pooling("AVG", 2, "average_pooling2d")
average_pooling3d = _pooling("AVG", 3, "average_pooling3d")


def flatten(inputs: Any, name: str | None = None, data_format: str = "channels_last") -> Any:
    """Reshape a tensor [N, ...] to [N, n]. The channels vary fastest, for either `data_format`."""
    inputs = tf.convert_to_tensor(inputs)
    rank = inputs.shape.ndims
    with tf.name_scope(name, "flatten", [inputs]):
        if rank is not None and rank > 2 and data_format == "channels_first":
            inputs = tf.transpose(inputs, [0, *range(2, rank), 1])
        sizes = inputs.shape.as_list()[1:]
        if None not in sizes:
            length = 1
            for size in sizes:
                length *= size
            return tf.reshape(inputs, [-1 if length else tf.shape(inputs)[0], length])
        return tf.reshape(inputs, [tf.shape(inputs)[0], -1])


def dropout(
    inputs: Any,
    rate: Any = 0.5,
    noise_shape: Any = None,
    seed: int | None = None,
    training: Any = False,
    name: str | None = None,
) -> Any:
    """In training, set a random fraction of the elements to zero, and scale the others to keep the expected sum.

    Args:
        inputs: A tensor.
        rate: The fraction to drop, from 0 to 1.
        noise_shape: The shape of the mask, which is broadcast; None: the shape of `inputs`.
        seed: Seed of the operation.
        training: Whether to drop elements: a bool or a bool tensor.
        name: The name of the operation.
    """
    inputs = tf.convert_to_tensor(inputs)
    with tf.name_scope(name, "dropout", [inputs]):
        return cond(
            training,
            lambda: tf.nn.dropout(inputs, rate=rate, noise_shape=noise_shape, seed=seed),
            lambda: tf.identity(inputs),
        )


def _apply_activation(outputs: Any, activation: Callable[[Any], Any] | None, activity_regularizer: Any) -> Any:
    outputs = outputs if activation is None else activation(outputs)
    loss = None if activity_regularizer is None else activity_regularizer(outputs)
    if loss is not None:
        tf.add_to_collection(tf.GraphKeys.REGULARIZATION_LOSSES, loss)
    return outputs


def _all_strides(steps: list[int], channels: int) -> list[int]:
    """Extend the strides of height and width to all dimensions."""
    return [1, *steps, 1] if channels == -1 else [1, 1, *steps]
