"""Training with TensorFlow in a tf.function: without communication, and with dl_comm."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from benchmarks.common.worker import numbered
from benchmarks.training.models import Model
from benchmarks.training.trainer import BATCHES, LEARNING_RATE, MOMENTUM, SEED, Trainer

CLASSES = 10
_DENSE = (1024, 1024)


def mlp() -> Any:
    """Images of 784 pixels to ten classes."""
    dense = [keras.layers.Dense(width, activation="relu") for width in _DENSE]
    return keras.Sequential([keras.Input((784,)), *dense, keras.layers.Dense(CLASSES)])


def convnet() -> Any:
    """Images [n, 28, 28, 1] to ten classes, through two convolutions and two dense layers."""
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            layers.Conv2D(16, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(32, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(256, activation="relu"),
            layers.Dense(CLASSES),
        ]
    )


NETWORKS = {"mlp": mlp, "convnet": convnet}
"""The networks by name."""


class TensorFlowTrainer(Trainer):
    """Without communication."""

    def __init__(self, model: Model) -> None:
        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(1)
        self.rank = self.join()
        keras.utils.set_random_seed(SEED)
        network = NETWORKS[model.network]()
        optimizer = keras.optimizers.SGD(LEARNING_RATE, MOMENTUM)
        self.variables = network.trainable_variables
        optimizer.build(self.variables)
        self.distribute()
        random = np.random.default_rng(SEED + 1 + self.rank)
        shape = (model.batch, *network.input_shape[1:])
        images = [random.standard_normal(shape, np.float32) for _ in range(BATCHES)]
        classes = [random.integers(CLASSES, size=model.batch) for _ in range(BATCHES)]
        self.batches = [(tf.constant(x), tf.constant(y)) for x, y in zip(images, classes, strict=True)]
        self.steps = 0
        self.last: Any = math.nan

        @tf.function  # type: ignore[untyped-decorator]
        def step(images: Any, classes: Any) -> Any:
            with tf.GradientTape() as tape:
                scores = network(images, training=True)
                value = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(classes, scores))
            gradients = self.average(tape.gradient(value, self.variables))
            optimizer.apply_gradients(zip(gradients, self.variables, strict=True))
            return value

        self.function = step

    def join(self) -> int:
        """Joins the job; returns the rank."""
        return numbered()[0]

    def distribute(self) -> None:
        """Broadcasts the variables."""

    def average(self, gradients: list[Any]) -> list[Any]:
        """The mean of the ranks' gradients, in a graph."""
        return gradients

    def step(self) -> None:
        self.last = float(self.function(*self.batches[self.steps % BATCHES]))
        self.steps += 1

    def reported(self) -> tuple[float, float]:
        return math.nan, math.nan

    def loss(self) -> float:
        return float(self.last)

    def parameters(self) -> Iterator[np.ndarray]:
        return (np.asarray(variable) for variable in self.variables)

    def close(self) -> None:
        pass


class DlComm(TensorFlowTrainer):
    """dl_comm.tensorflow's operation on the gradients."""

    waited = 0.0

    def join(self) -> int:
        import dl_comm

        dl_comm.init()
        return int(dl_comm.get_rank())

    def distribute(self) -> None:
        import dl_comm.tensorflow as dt

        dt.broadcast_variables(self.variables)

    def average(self, gradients: list[Any]) -> list[Any]:
        import dl_comm.tensorflow as dt

        return list(dt.gradients(gradients))

    def reported(self) -> tuple[float, float]:
        import dl_comm

        before, self.waited = self.waited, dl_comm.get_waited()
        return self.waited - before, math.nan

    def close(self) -> None:
        import dl_comm

        dl_comm.finalize()


TRAINERS: dict[str, type[Trainer]] = {"plain": TensorFlowTrainer, "ours": DlComm}
"""The trainers by the name on a worker's command line."""
