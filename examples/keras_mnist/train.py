"""Train MNIST with Keras 3 and model.fit.

    mpiexec -n 2 python examples/keras_mnist/train.py

What makes it distributed is marked (1) to (4); the rest is what a script for one process has too.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
import keras
import tensorflow as tf

import dl_comm.keras
from dl_comm import training

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import mnist


def build_model() -> keras.Model:
    """Two convolutions and a classifier: images [N, 28, 28] to probabilities [N, 10]."""
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((28, 28)),
            layers.Reshape((28, 28, 1)),
            layers.Conv2D(16, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(32, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(10, activation="softmax"),
        ]
    )


class ShowProgress(keras.callbacks.Callback):
    """Hands the loss of every batch to the progress line."""

    def __init__(self, progress: mnist.Progress) -> None:
        """Remember the line."""
        super().__init__()
        self._progress = progress
        self._step = 0

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Count the batch and show it."""
        self._step += 1
        self._progress.update(self._step, float((logs or {}).get("loss", 0.0)))


def main() -> None:
    """Train and test."""
    args = mnist.arguments(__doc__.splitlines()[0], lr=0.002)
    dl_comm.init()  # (1)
    rank, size = dl_comm.rank(), dl_comm.size()
    threads = max(1, len(os.sched_getaffinity(0)) // dl_comm.local_size())
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(threads)

    data = mnist.load(args.data_dir, verbose=rank == 0)
    images, labels = mnist.shard(data.train_images, data.train_labels, rank, size, epoch=0)
    part = training.shard(len(data.test_images))
    test = data.test_images[part.start : part.stop], data.test_labels[part.start : part.stop]
    steps = mnist.steps(data.train_images, size, args.batch_size)  # whole batches, so that each rank's counts the same
    total = steps * args.epochs

    # The rate grows from that of one rank to that of all of them over the first tenth, and falls to 0 at the end.
    rate = training.WarmUp(total // 10, training.Cosine(training.scaled_lr(args.lr), total))
    model = build_model()
    model.compile(
        dl_comm.keras.DistributedOptimizer(keras.optimizers.Adam(dl_comm.keras.LearningRate(rate))),  # (2)
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    callbacks = [dl_comm.keras.BroadcastCallback(), dl_comm.keras.MetricAverageCallback()]  # (3) and (4)
    if rank == 0:
        callbacks.append(ShowProgress(mnist.Progress(True, total, args.batch_size * size)))
        if args.checkpoint:
            path = args.checkpoint if args.checkpoint.endswith(".keras") else args.checkpoint + ".keras"
            callbacks.append(keras.callbacks.ModelCheckpoint(path))
    history = model.fit(
        images[: steps * args.batch_size],
        labels[: steps * args.batch_size],
        batch_size=args.batch_size,
        epochs=args.epochs,
        validation_data=test,
        validation_batch_size=500,
        verbose=0,
        callbacks=callbacks,
    ).history

    dl_comm.check_replicas(model)
    dl_comm.print0(f"test accuracy: {history['val_accuracy'][-1]:.4f}")
    dl_comm.finalize()


if __name__ == "__main__":
    main()
