"""Train MNIST with TensorFlow 2 and a loop of our own.

    mpiexec -n 2 python examples/tf_mnist/train.py

What makes it distributed is marked (1) to (4); the rest is what a script for one process has too.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import tensorflow as tf

import dl_comm
import dl_comm.tensorflow

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import mnist


def build_model() -> tf.keras.Model:
    """Two convolutions and a classifier: images [N, 28, 28, 1] to logits [N, 10]."""
    layers = tf.keras.layers
    return tf.keras.Sequential(
        [
            layers.Input((28, 28, 1)),
            layers.Conv2D(16, 3, activation="relu"),
            layers.MaxPool2D(),
            layers.Conv2D(32, 3, activation="relu"),
            layers.MaxPool2D(),
            layers.Flatten(),
            layers.Dense(10),
        ]
    )


def main() -> int:
    """Train, test and give the exit status: 1 when the ranks end with different weights."""
    args = mnist.arguments(__doc__.splitlines()[0], lr=0.002)
    dl_comm.init()  # (1)
    rank, size = dl_comm.rank(), dl_comm.size()
    threads = max(1, len(os.sched_getaffinity(0)) // dl_comm.local_size())
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(threads)

    data = mnist.load(args.data_dir, verbose=rank == 0)
    steps = mnist.steps(data.train_images, size, args.batch_size)
    total = steps * args.epochs
    warm_up = max(1, total // 10)
    model = build_model()
    variables = model.trainable_variables
    optimizer = tf.keras.optimizers.Adam(args.lr)
    optimizer.build(variables)
    dl_comm.tensorflow.broadcast_variables(model.weights)  # (2)

    @tf.function
    def train_step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, model(images, training=True))
            loss = tf.reduce_mean(losses)
        grads = dl_comm.tensorflow.gradients(tape.gradient(loss, variables))  # (3)
        optimizer.apply_gradients(zip(grads, variables, strict=True))
        return loss

    @tf.function
    def accuracy(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        hits = tf.argmax(model(images, training=False), axis=1) == labels
        return tf.reduce_mean(tf.cast(hits, tf.float64))

    progress = mnist.Progress(rank == 0, total, args.batch_size * size)
    step = 0
    for epoch in range(args.epochs):
        images, labels = mnist.shard(data.train_images, data.train_labels, rank, size, epoch)
        for begin in range(0, steps * args.batch_size, args.batch_size):
            # The rate grows from that of one rank to that of all of them while training warms up.
            share = min(1.0, step / warm_up)
            optimizer.learning_rate = args.lr * (1 + share * (size - 1))
            batch = slice(begin, begin + args.batch_size)
            loss = train_step(images[batch, ..., None], labels[batch])
            step += 1
            progress.update(step, float(loss))

    images, labels = mnist.shard(data.test_images, data.test_labels, rank, size, epoch=0)
    # (4) each rank has tested its share
    tested = float(dl_comm.tensorflow.average(accuracy(images[..., None], labels)))
    if rank == 0 and args.checkpoint:
        print("checkpoint:", tf.train.Checkpoint(model=model).write(args.checkpoint))
    same = dl_comm.check_buffers_match([np.asarray(weight) for weight in model.weights], 1) == 0
    if rank == 0:
        print(f"test accuracy: {tested:.4f}")
    dl_comm.finalize()
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
