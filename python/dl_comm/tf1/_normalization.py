"""`tf.layers.batch_normalization`.

Thread rule: as TensorFlow's for building graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow

from dl_comm.tf1._weights import Weight, cond, static_size

tf = tensorflow.compat.v1


def batch_normalization(
    inputs: Any,
    axis: int | Sequence[int] = -1,
    momentum: Any = 0.99,
    epsilon: float = 1e-3,
    center: bool = True,
    scale: bool = True,
    beta_initializer: Any = None,
    gamma_initializer: Any = None,
    moving_mean_initializer: Any = None,
    moving_variance_initializer: Any = None,
    beta_regularizer: Any = None,
    gamma_regularizer: Any = None,
    beta_constraint: Any = None,
    gamma_constraint: Any = None,
    training: Any = False,
    trainable: bool = True,
    name: str | None = None,
    reuse: bool | None = None,
    renorm: bool = False,
    renorm_clipping: Any = None,
    renorm_momentum: float = 0.99,
    fused: bool | None = None,
    virtual_batch_size: int | None = None,
    adjustment: Any = None,
) -> Any:
    """Normalize each channel: in training by the batch's mean and variance, otherwise by their moving averages.

    In training the updates of the moving averages go to the collection UPDATE_OPS; the script runs them with
    `tf.control_dependencies` around the training operation.

    Args:
        inputs: A tensor; the size of `axis` must be static.
        axis: The dimension of the channels.
        momentum: Weight of the old value in a moving average.
        epsilon: Added to the variance.
        center: Whether to add `beta`.
        scale: Whether to multiply by `gamma`.
        beta_initializer: None: zeros.
        gamma_initializer: None: ones.
        moving_mean_initializer: None: zeros.
        moving_variance_initializer: None: ones.
        beta_regularizer: A function from `beta` to a loss, or None.
        gamma_regularizer: A function from `gamma` to a loss, or None.
        beta_constraint: Projection of `beta` after an update, or None.
        gamma_constraint: Projection of `gamma` after an update, or None.
        training: Whether to use the batch's mean and variance: a bool or a bool tensor.
        trainable: Whether `beta` and `gamma` are in TRAINABLE_VARIABLES.
        name: The name of the layer's variable scope.
        reuse: Whether to reuse the variables of a layer with this name.
        renorm: Must be False.
        renorm_clipping: Must be None.
        renorm_momentum: Not used.
        fused: False: do not use TensorFlow's fused kernel for images. That kernel uses the unbiased variance for the
            moving average.
        virtual_batch_size: Must be None.
        adjustment: Must be None.

    Raises:
        ValueError: An unsupported option is used, there are several axes, or the number of channels is not static.
    """
    del renorm_momentum
    if renorm or renorm_clipping is not None or virtual_batch_size is not None or adjustment is not None:
        raise ValueError("dl_comm.tf1 does not support renorm, virtual_batch_size and adjustment")
    inputs = tf.convert_to_tensor(inputs)
    axes = [axis] if isinstance(axis, int) else list(axis)
    if len(axes) != 1:
        raise ValueError(f"dl_comm.tf1 normalizes along one axis, not along {axes}")
    ones, zeros = tf.ones_initializer(), tf.zeros_initializer()
    gamma = Weight("gamma", gamma_initializer or ones, gamma_regularizer, gamma_constraint, trainable)
    beta = Weight("beta", beta_initializer or zeros, beta_regularizer, beta_constraint, trainable)
    mean = Weight("moving_mean", moving_mean_initializer or zeros, trainable=False)
    variance = Weight("moving_variance", moving_variance_initializer or ones, trainable=False)
    with tf.variable_scope(name, "batch_normalization", [inputs], reuse=reuse):
        weights = (gamma if scale else None, beta if center else None, mean, variance)
        outputs, updates = normalize_channels(inputs, axes[0], weights, momentum, epsilon, training, fused)
        for update in updates:
            tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, update)
        return outputs


def normalize_channels(
    inputs: Any,
    axis: int,
    weights: tuple[Weight | None, Weight | None, Weight, Weight],
    momentum: Any,
    epsilon: float,
    training: Any,
    fused: bool | None,
) -> tuple[Any, list[Any]]:
    """Normalize in the current variable scope.

    `weights` are gamma and beta (each may be None), and the moving mean and variance. Other arguments as for
    `batch_normalization`.

    Returns:
        The result, and the updates of the moving averages, which are empty if `training` is False.
    """
    size, rank = static_size(inputs, axis), inputs.shape.ndims
    axis %= rank
    dtype = tf.float32 if inputs.dtype in (tf.float16, tf.bfloat16) else inputs.dtype
    gamma, beta, mean, variance = (None if weight is None else weight.create([size], dtype) for weight in weights)
    by_kernel = rank == 4 and axis in (1, 3) and dtype == tf.float32 and fused is not False
    normalize = _normalize_images if by_kernel else _normalize
    outputs, batch_mean, batch_variance = cond(
        training,
        lambda: normalize(inputs, axis, gamma, beta, None, None, epsilon),
        lambda: normalize(inputs, axis, gamma, beta, tf.identity(mean), tf.identity(variance), epsilon),
    )
    outputs.set_shape(inputs.shape)
    if not tf.is_tensor(training) and not training:
        return outputs, []
    # If a `training` tensor is False, the batch's values equal the moving averages, so the update changes nothing.
    return outputs, [
        tf.assign_sub(moving, (moving - value) * tf.cast(1.0 - momentum, dtype), name="AssignMovingAvg")
        for moving, value in ((mean, batch_mean), (variance, batch_variance))
    ]


def _normalize(
    inputs: Any, axis: int, gamma: Any, beta: Any, mean: Any, variance: Any, epsilon: float
) -> tuple[Any, Any, Any]:
    """Normalize by `mean` and `variance`, or by the batch's if None. Returns the result and the values used."""
    rank = inputs.shape.ndims
    values = tf.cast(inputs, tf.float32) if inputs.dtype in (tf.float16, tf.bfloat16) else inputs
    if mean is None:
        mean, variance = tf.nn.moments(values, [other for other in range(rank) if other != axis])
    shape = [1] * rank
    shape[axis] = inputs.shape.as_list()[axis]
    spread = [None if each is None else tf.reshape(each, shape) for each in (mean, variance, beta, gamma)]
    outputs = tf.nn.batch_normalization(values, *spread, epsilon)
    return tf.cast(outputs, inputs.dtype), mean, variance


def _normalize_images(
    inputs: Any, axis: int, gamma: Any, beta: Any, mean: Any, variance: Any, epsilon: float
) -> tuple[Any, Any, Any]:
    """As `_normalize`, by the fused kernel."""
    size = inputs.shape.as_list()[axis]
    outputs, batch_mean, batch_variance = tf.nn.fused_batch_norm(
        inputs,
        tf.ones([size]) if gamma is None else gamma,
        tf.zeros([size]) if beta is None else beta,
        mean,
        variance,
        epsilon,
        data_format="NHWC" if axis == 3 else "NCHW",
        is_training=mean is None,
    )
    return (outputs, batch_mean, batch_variance) if mean is None else (outputs, mean, variance)
