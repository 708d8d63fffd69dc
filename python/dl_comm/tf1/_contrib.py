"""The parts of `tf.contrib` with an equivalent: initializers, regularizers and some layers, global steps, data.

Thread rule: as TensorFlow's for building graphs.
"""

from __future__ import annotations

import contextlib
import functools
import numbers
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow

from dl_comm.tf1 import _keras

tf = tensorflow.compat.v1

_OLD_NAMES = {"kernel": "weights", "bias": "biases"}


def _layers() -> Any:
    return _keras.legacy("layers")


def xavier_initializer(uniform: bool = True, seed: int | None = None, dtype: Any = tf.float32) -> Any:
    """Return Glorot's initializer, uniform or (truncated) normal."""
    return variance_scaling_initializer(1.0, "FAN_AVG", uniform, seed, dtype)


def variance_scaling_initializer(
    factor: float = 2.0, mode: str = "FAN_IN", uniform: bool = False, seed: int | None = None, dtype: Any = tf.float32
) -> Any:
    """Return an initializer with the variance `factor` / n, where n is FAN_IN, FAN_OUT or their mean, FAN_AVG."""
    kind = "uniform" if uniform else "truncated_normal"
    other = {} if dtype == tf.float32 else {"dtype": dtype}  # TensorFlow warns about any dtype argument
    return tf.variance_scaling_initializer(factor, mode.lower(), kind, seed=seed, **other)


def l1_regularizer(scale: float, scope: str | None = None) -> Callable[[Any], Any]:
    """Return a function of a tensor: `scale` * sum(abs(tensor)), or None if `scale` is 0.

    Raises ValueError when `scale` is not a float, or negative.
    """
    return _regularizer(scale, scope or "l1_regularizer", lambda weights: tf.reduce_sum(tf.abs(weights)))


def l2_regularizer(scale: float, scope: str | None = None) -> Callable[[Any], Any]:
    """Return a function of a tensor: `scale` * sum(tensor ** 2) / 2, or None if `scale` is 0.

    Raises ValueError when `scale` is not a float, or negative.
    """
    return _regularizer(scale, scope or "l2_regularizer", tf.nn.l2_loss)


def flatten(inputs: Any, outputs_collections: Any = None, scope: str | None = None) -> Any:
    """Reshape a tensor [N, ...] to [N, n]."""
    return _add_outputs(_layers().flatten(inputs, scope or "Flatten"), outputs_collections)


def dropout(
    inputs: Any,
    keep_prob: Any = 0.5,
    noise_shape: Any = None,
    is_training: Any = True,
    outputs_collections: Any = None,
    scope: str | None = None,
    seed: int | None = None,
) -> Any:
    """In training, keep each element with probability `keep_prob`; see `tf.layers.dropout`."""
    outputs = _layers().dropout(inputs, 1.0 - keep_prob, noise_shape, seed, is_training, scope or "Dropout")
    return _add_outputs(outputs, outputs_collections)


def max_pool2d(
    inputs: Any,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] = 2,
    padding: str = "VALID",
    data_format: str | None = None,
    outputs_collections: Any = None,
    scope: str | None = None,
) -> Any:
    """Take the maximum of each window; see `tf.layers.max_pooling2d`."""
    outputs = _layers().max_pooling2d(inputs, kernel_size, stride, padding, _format(data_format), scope or "MaxPool2D")
    return _add_outputs(outputs, outputs_collections)


def avg_pool2d(
    inputs: Any,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] = 2,
    padding: str = "VALID",
    data_format: str | None = None,
    outputs_collections: Any = None,
    scope: str | None = None,
) -> Any:
    """Take the mean of each window; see `tf.layers.average_pooling2d`."""
    outputs = _layers().average_pooling2d(
        inputs, kernel_size, stride, padding, _format(data_format), scope or "AvgPool2D"
    )
    return _add_outputs(outputs, outputs_collections)


def fully_connected(
    inputs: Any,
    num_outputs: int,
    activation_fn: Callable[[Any], Any] | None = tf.nn.relu,
    normalizer_fn: Callable[..., Any] | None = None,
    normalizer_params: Mapping[str, Any] | None = None,
    weights_initializer: Any = None,
    weights_regularizer: Any = None,
    biases_initializer: Any = tf.zeros_initializer,
    biases_regularizer: Any = None,
    reuse: bool | None = None,
    variables_collections: Any = None,
    outputs_collections: Any = None,
    trainable: bool = True,
    scope: str | None = None,
) -> Any:
    """Multiply the last dimension by `weights`, add `biases`, and apply `activation_fn` (ReLU by default).

    There are no biases with a `normalizer_fn`, or with None as `biases_initializer`. `variables_collections` must be
    None. See `tf.layers.dense` for the other arguments.
    """
    _refuse(variables_collections=variables_collections)
    with _scope(scope, "fully_connected", inputs, reuse) as options:
        layer = _layers().Dense(
            num_outputs,
            use_bias=not normalizer_fn and biases_initializer is not None,
            kernel_initializer=weights_initializer or xavier_initializer(),
            bias_initializer=biases_initializer,
            kernel_regularizer=weights_regularizer,
            bias_regularizer=biases_regularizer,
            trainable=trainable,
            **options,
        )
        outputs = _activated(layer(inputs), normalizer_fn, normalizer_params, activation_fn)
        return _add_outputs(outputs, outputs_collections)


def conv2d(
    inputs: Any,
    num_outputs: int,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] = 1,
    padding: str = "SAME",
    data_format: str | None = None,
    rate: int | Sequence[int] = 1,
    activation_fn: Callable[[Any], Any] | None = tf.nn.relu,
    normalizer_fn: Callable[..., Any] | None = None,
    normalizer_params: Mapping[str, Any] | None = None,
    weights_initializer: Any = None,
    weights_regularizer: Any = None,
    biases_initializer: Any = tf.zeros_initializer,
    biases_regularizer: Any = None,
    reuse: bool | None = None,
    variables_collections: Any = None,
    outputs_collections: Any = None,
    trainable: bool = True,
    scope: str | None = None,
) -> Any:
    """Convolve images with `weights` and add `biases`, in the scope `Conv`; otherwise as `fully_connected`."""
    _refuse(variables_collections=variables_collections)
    with _scope(scope, "Conv", inputs, reuse) as options:
        layer = _layers().Conv2D(
            num_outputs,
            kernel_size,
            stride,
            padding,
            _format(data_format),
            rate,
            use_bias=not normalizer_fn and biases_initializer is not None,
            kernel_initializer=weights_initializer or xavier_initializer(),
            bias_initializer=biases_initializer,
            kernel_regularizer=weights_regularizer,
            bias_regularizer=biases_regularizer,
            trainable=trainable,
            **options,
        )
        outputs = _activated(layer(inputs), normalizer_fn, normalizer_params, activation_fn)
        return _add_outputs(outputs, outputs_collections)


def batch_norm(
    inputs: Any,
    decay: Any = 0.999,
    center: bool = True,
    scale: bool = False,
    epsilon: float = 0.001,
    activation_fn: Callable[[Any], Any] | None = None,
    param_initializers: Mapping[str, Any] | None = None,
    param_regularizers: Mapping[str, Any] | None = None,
    updates_collections: Any = tf.GraphKeys.UPDATE_OPS,
    is_training: Any = True,
    reuse: bool | None = None,
    variables_collections: Any = None,
    outputs_collections: Any = None,
    trainable: bool = True,
    batch_weights: Any = None,
    fused: bool | None = None,
    data_format: str = "NHWC",
    zero_debias_moving_mean: bool = False,
    scope: str | None = None,
    renorm: bool = False,
    renorm_clipping: Mapping[str, Any] | None = None,
    renorm_decay: float = 0.99,
) -> Any:
    """Normalize each channel, in the scope `BatchNorm`; see `tf.layers.batch_normalization`.

    If `updates_collections` is None, computing the result also updates the moving averages. The keys of
    `param_initializers` and `param_regularizers` are variable names. `variables_collections`, `batch_weights` and
    `zero_debias_moving_mean` are not supported and raise ValueError.
    """
    _refuse(
        variables_collections=variables_collections,
        batch_weights=batch_weights,
        zero_debias_moving_mean=zero_debias_moving_mean or None,
    )
    chosen = {f"{name}_initializer": value for name, value in (param_initializers or {}).items()}
    chosen |= {f"{name}_regularizer": value for name, value in (param_regularizers or {}).items()}
    with _scope(scope, "BatchNorm", inputs, reuse) as options:
        layer = _layers().BatchNormalization(
            axis=-1 if _format(data_format) == "channels_last" else 1,
            momentum=decay,
            epsilon=epsilon,
            center=center,
            scale=scale,
            trainable=trainable,
            fused=fused,
            renorm=renorm,
            renorm_clipping=renorm_clipping,
            renorm_momentum=renorm_decay,
            **chosen,
            **options,
        )
        before = tf.get_collection(tf.GraphKeys.UPDATE_OPS)
        outputs = layer(inputs, training=is_training)
        # The layer adds its updates to UPDATE_OPS.
        tf.get_collection_ref(tf.GraphKeys.UPDATE_OPS)[:] = before
        if updates_collections is None:
            with tf.control_dependencies(layer.updates):
                outputs = tf.identity(outputs)
        else:
            for update in layer.updates:
                tf.add_to_collections(updates_collections, update)
        return _add_outputs(_activated(outputs, None, None, activation_fn), outputs_collections)


def batch_and_drop_remainder(batch_size: Any) -> Callable[[Any], Any]:
    """Return a function for `Dataset.apply` that makes batches of equal size."""
    return lambda dataset: dataset.batch(batch_size, drop_remainder=True)


def _regularizer(scale: float, scope: str, penalty: Callable[[Any], Any]) -> Callable[[Any], Any]:
    if isinstance(scale, numbers.Integral) or not isinstance(scale, numbers.Real) or scale < 0:
        raise ValueError(f"invalid scale of a regularizer: {scale!r} (expected a float >= 0)")

    def loss(weights: Any) -> Any:
        with tf.name_scope(scope, values=[weights]):
            return scale * penalty(weights) if scale > 0 else None

    return loss


@contextlib.contextmanager
def _scope(scope: str | None, default: str, inputs: Any, reuse: bool | None) -> Iterator[dict[str, Any]]:
    """Enter the variable scope of a layer. Gives the options of its class, whose variables get the names of contrib."""

    def renamed(getter: Callable[..., Any], name: str, *arguments: Any, **options: Any) -> Any:
        path, slash, last = name.rpartition("/")
        return getter(f"{path}{slash}{_OLD_NAMES.get(last, last)}", *arguments, **options)

    dtype = tf.convert_to_tensor(inputs).dtype.base_dtype
    with tf.variable_scope(scope, default, [inputs], reuse=reuse, custom_getter=renamed) as entered:
        yield {"name": entered.name, "dtype": dtype, "_scope": entered, "_reuse": reuse}


def _activated(outputs: Any, normalizer_fn: Any, normalizer_params: Any, activation_fn: Any) -> Any:
    if normalizer_fn is not None:
        outputs = normalizer_fn(outputs, **(normalizer_params or {}))
    return outputs if activation_fn is None else activation_fn(outputs)


def _add_outputs(outputs: Any, collections: Any) -> Any:
    if collections is not None:
        tf.add_to_collections(collections, outputs)
    return outputs


def _format(data_format: str | None) -> str:
    formats = {None: "channels_last", "NHWC": "channels_last", "NCHW": "channels_first"}
    if data_format not in formats:
        raise ValueError(f"invalid data_format: {data_format!r} (expected 'NHWC' or 'NCHW')")
    return formats[data_format]


def _refuse(**options: Any) -> None:
    for name, value in options.items():
        if value is not None:
            raise ValueError(f"dl_comm.tf1 does not support the option {name}")


LAYERS = {
    "avg_pool2d": avg_pool2d,
    "batch_norm": batch_norm,
    "conv2d": conv2d,
    "convolution2d": conv2d,
    "dropout": dropout,
    "flatten": flatten,
    "fully_connected": fully_connected,
    "l1_regularizer": l1_regularizer,
    "l2_regularizer": l2_regularizer,
    "linear": functools.partial(fully_connected, activation_fn=None),
    "max_pool2d": max_pool2d,
    "relu": fully_connected,
    "variance_scaling_initializer": variance_scaling_initializer,
    "xavier_initializer": xavier_initializer,
    "xavier_initializer_conv2d": xavier_initializer,
}
"""The names of tf.contrib.layers."""

LAYERS_GONE = {
    "conv2d_transpose": "tf.layers.conv2d_transpose",
    "convolution2d_transpose": "tf.layers.conv2d_transpose",
    "optimize_loss": "the minimize of an optimizer of tf.train",
    "one_hot_encoding": "tf.one_hot",
    "summarize_tensor": "tf.summary.scalar",
}

FRAMEWORK = {
    "assert_global_step": tf.train.assert_global_step,
    "create_global_step": tf.train.create_global_step,
    "get_global_step": tf.train.get_global_step,
    "get_or_create_global_step": tf.train.get_or_create_global_step,
    "list_variables": tf.train.list_variables,
    "load_checkpoint": tf.train.load_checkpoint,
    "load_variable": tf.train.load_variable,
    "nest": tf.nest,
}
"""The names of tf.contrib.framework."""

FROM_DATA = (
    "AUTOTUNE",
    "Counter",
    "group_by_window",
    "ignore_errors",
    "map_and_batch",
    "parallel_interleave",
    "prefetch_to_device",
    "shuffle_and_repeat",
    "unbatch",
)
"""The names of tf.contrib.data that moved to tf.data.experimental."""

FROM_NN = ("static_bidirectional_rnn", "static_rnn")
"""The names of tf.contrib.rnn that moved to tf.nn."""

DATA = {"batch_and_drop_remainder": batch_and_drop_remainder}
"""The other names of tf.contrib.data."""

GONE = {
    "cudnn_rnn": "keras.layers.LSTM and keras.layers.GRU",
    "eager": "TensorFlow 2, without dl_comm.tf1",
    "estimator": "tf.estimator.Estimator",
    "image": "tf.image",
    "learn": "tf.estimator.Estimator; for MNIST tensorflow.examples.tutorials.mnist.input_data",
    "lookup": "tf.lookup",
    "losses": "tf.losses",
    "metrics": "tf.metrics",
    "opt": "keras.optimizers",
    "slim": "tf.layers",
    "staging": "tf.data.Dataset.prefetch",
    "summary": "tf.summary",
    "tpu": "tf.tpu",
}
"""Alternatives to parts of tf.contrib."""
