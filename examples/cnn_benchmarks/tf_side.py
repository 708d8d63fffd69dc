"""The benchmark's training step in TensorFlow, with models of Keras 3."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import dl_comm
import dl_comm.tensorflow
import tf_models


class Trainer:
    """A model with its optimizer, whose gradients dl_comm averages, or nobody."""

    def __init__(self, args: argparse.Namespace, threads: int) -> None:
        """Build what the options say; `threads` is how many an operation may use."""
        tf.config.threading.set_intra_op_parallelism_threads(threads)
        tf.config.threading.set_inter_op_parallelism_threads(threads)
        keras.utils.set_random_seed(dl_comm.rank())  # different on purpose: the ranks get equal by a broadcast
        self._net = tf_models.build(args.model, args.shape)
        variables = self._net.trainable_variables
        self.parameters = sum(int(np.prod(variable.shape)) for variable in variables)
        optimizer = _optimizer(args.optimizer, args.init_learning_rate)
        if args.variable_update == "dl_comm":
            optimizer = dl_comm.tensorflow.DistributedOptimizer(optimizer)
            dl_comm.tensorflow.broadcast_variables(self._net.variables)
        optimizer.build(variables)

        @tf.function(jit_compile=False)
        def step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                logits = self._net(images, training=True)
                loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
            optimizer.apply(tape.gradient(loss, variables), variables)
            return loss

        self._step = step

    def prepare(self, images: np.ndarray, labels: np.ndarray) -> tuple[tf.Tensor, tf.Tensor]:
        """Turn a batch of `data` into tensors of this framework."""
        return tf.constant(images), tf.constant(labels)

    def step(self, images: tf.Tensor, labels: tf.Tensor) -> float:
        """Train one step, and give its loss."""
        return float(self._step(images, labels))

    def weights(self) -> list[Any]:
        """Give what must be equal on all ranks."""
        return list(self._net.trainable_variables)

    def close(self) -> None:
        """Nothing is to be ended before MPI."""

    @staticmethod
    def decode(path: Path, side: int) -> np.ndarray:
        """Read a JPEG file: the largest square in its middle, as uint8 [side, side, 3]."""
        image = tf.io.decode_jpeg(tf.io.read_file(str(path)), channels=3).numpy()
        short = min(image.shape[:2])
        top, left = ((length - short) // 2 for length in image.shape[:2])
        square = image[top : top + short, left : left + short]
        return tf.cast(tf.round(tf.image.resize(square, (side, side), antialias=True)), tf.uint8).numpy()


def _optimizer(name: str, lr: float) -> Any:
    if name == "rmsprop":
        return keras.optimizers.RMSprop(lr, rho=0.9, momentum=0.9, epsilon=1.0)
    if name == "adam":
        return keras.optimizers.Adam(lr, epsilon=1e-8)
    return keras.optimizers.SGD(lr, momentum=0.9 if name == "momentum" else 0.0)
