"""Inputs of an Estimator: `numpy_input_fn`, and datasets and tensors of input functions.

Thread rule: as TensorFlow's for building graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow

tf = tensorflow.compat.v1


def numpy_input_fn(
    x: Any,
    y: Any = None,
    batch_size: int = 128,
    num_epochs: int | None = 1,
    shuffle: bool | None = None,
    queue_capacity: int = 1000,
    num_threads: int = 1,
) -> Callable[[], Any]:
    """Return an input function for arrays.

    Args:
        x: An array, or a dict of arrays, with one example per row.
        y: The labels in the same form, or None.
        batch_size: Examples per step; the last batch may be smaller.
        num_epochs: The number of epochs; None: unlimited. A batch may span two epochs.
        shuffle: Whether to shuffle each epoch; required.
        queue_capacity: Not used; shuffles over all examples.
        num_threads: Not used.

    Returns:
        A function without arguments that returns tensors: the features, or the features and labels.

    Raises:
        ValueError: `shuffle` is missing, or the arrays have different numbers of examples.
        TypeError: `x` is neither an array nor a dict.
    """
    del queue_capacity, num_threads
    if not isinstance(shuffle, bool):
        raise ValueError("numpy_input_fn needs shuffle=True or shuffle=False")
    if not isinstance(x, (np.ndarray, Mapping)):
        raise TypeError(f"x must be an array or a dict of arrays, not {type(x).__name__}")
    structure = x if y is None else (x, y)
    arrays = [np.asarray(array) for array in tf.nest.flatten(structure)]
    lengths = {len(array) for array in arrays}
    if len(lengths) != 1:
        raise ValueError(f"the arrays must have equal numbers of examples, not {sorted(lengths)}")
    (length,) = lengths

    def input_fn() -> Any:
        order = tf.data.Dataset.range(length)
        if shuffle:
            order = order.shuffle(length)
        batches = order.repeat(num_epochs).batch(batch_size)
        # Keep the arrays out of the graph, because every checkpoint contains the graph.
        rows = tf.data.make_one_shot_iterator(
            batches.map(
                lambda chosen: tuple(tf.numpy_function(lambda i: [a[i] for a in arrays], [chosen], _dtypes(arrays)))
            ).prefetch(1)
        ).get_next()
        for tensor, array in zip(rows, arrays, strict=True):
            tensor.set_shape([None, *array.shape[1:]])
        return tf.nest.pack_sequence_as(structure, list(rows))

    return input_fn


def _dtypes(arrays: list[Any]) -> list[Any]:
    return [tf.as_dtype(array.dtype) for array in arrays]


def _next_of(dataset: Any) -> Any:
    iterator = tf.data.make_initializable_iterator(dataset)
    tf.add_to_collection(tf.GraphKeys.TABLE_INITIALIZERS, iterator.initializer)  # monitored sessions run these
    return iterator.get_next()


def features_and_labels(given: Any) -> tuple[Any, Any]:
    """Split the result of an input function; labels may be None."""
    if isinstance(given, (tf.data.Dataset, tensorflow.data.Dataset)):
        given = _next_of(given)
    if not isinstance(given, (tuple, list)):
        return given, None
    if len(given) != 2:
        raise ValueError(f"input_fn must return features, or features and labels, not {len(given)} values")
    return given[0], given[1]
