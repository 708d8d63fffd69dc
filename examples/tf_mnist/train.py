"""Train MNIST with TensorFlow 2 and a loop of our own.

    mpiexec -n 2 python examples/tf_mnist/train.py

What makes it distributed is marked (1) to (4); the rest is what a script for one process has too.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import tensorflow as tf

import dl_comm.tensorflow
from dl_comm import training

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


def main() -> None:
    """Train and test."""
    args = mnist.arguments(__doc__.splitlines()[0], lr=0.002)
    dl_comm.init()  # (1)
    rank, size = dl_comm.rank(), dl_comm.size()
    threads = max(1, len(os.sched_getaffinity(0)) // dl_comm.local_size())
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(threads)

    data = mnist.load(args.data_dir, verbose=rank == 0)
    steps = mnist.steps(data.train_images, size, args.batch_size)
    total = steps * args.epochs
    # The rate grows from that of one rank to that of all of them over the first tenth, and falls to 0 at the end.
    rate = training.WarmUp(total // 10, training.Cosine(training.scaled_lr(args.lr), total))
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
            optimizer.learning_rate = rate(step)
            batch = slice(begin, begin + args.batch_size)
            loss = train_step(images[batch, ..., None], labels[batch])
            step += 1
            progress.update(step, float(loss))

    part = training.shard(len(data.test_images))
    test = slice(part.start, part.stop)
    # (4) each rank has tested its part
    metrics = {"accuracy": accuracy(data.test_images[test, ..., None], data.test_labels[test])}
    tested = dl_comm.average_metrics(metrics, weight=len(part))["accuracy"]
    if args.checkpoint:
        dl_comm.write_on_rank0(args.checkpoint + ".weights.h5", lambda path: model.save_weights(str(path)))
    dl_comm.check_replicas(model)
    dl_comm.print0(f"test accuracy: {tested:.4f}")
    dl_comm.finalize()


if __name__ == "__main__":
    main()
