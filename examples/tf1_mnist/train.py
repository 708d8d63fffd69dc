"""Train MNIST with a TensorFlow 1 graph and a monitored session.

    mpiexec -n 2 python examples/tf1_mnist/train.py

The calls are those of a script for the Cray PE DL Plugin: the graph is built with `mc.gradients` between
`compute_gradients` and `apply_gradients`, and a hook broadcasts the initial values.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import tensorflow

import dl_comm as mc
from dl_comm.tensorflow import BroadcastHook

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import mnist

tf = tensorflow.compat.v1


def build_model(images: tf.Tensor) -> tf.Tensor:
    """Two convolutions and a classifier: images [N, 28, 28] to logits [N, 10]."""

    def convolution(name: str, inputs: tf.Tensor, outputs: int) -> tf.Tensor:
        with tf.variable_scope(name):
            kernel = tf.get_variable("kernel", [3, 3, inputs.shape[-1], outputs])
            bias = tf.get_variable("bias", [outputs], initializer=tf.zeros_initializer())
        maps = tf.nn.relu(tf.nn.conv2d(inputs, kernel, strides=1, padding="VALID") + bias)
        return tf.nn.max_pool2d(maps, 2, 2, padding="VALID")

    features = convolution("conv1", tf.expand_dims(images, -1), 16)
    features = convolution("conv2", features, 32)
    flat = tf.reshape(features, [-1, 5 * 5 * 32])
    with tf.variable_scope("classifier"):
        kernel = tf.get_variable("kernel", [flat.shape[-1], 10])
        bias = tf.get_variable("bias", [10], initializer=tf.zeros_initializer())
    return flat @ kernel + bias


def main() -> int:
    """Train, test and give the exit status: 1 when the ranks end with different weights."""
    args = mnist.arguments(__doc__.splitlines()[0], lr=0.002)
    tf.disable_eager_execution()

    images = tf.placeholder(tf.float32, [None, 28, 28])
    labels = tf.placeholder(tf.int64, [None])
    logits = build_model(images)
    loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits))
    accuracy = tf.reduce_mean(tf.cast(tf.equal(tf.argmax(logits, 1), labels), tf.float32))

    # initialise dl_comm: one team of two threads, and the number of parameters
    totsize = sum(int(np.prod(v.shape)) for v in tf.trainable_variables())
    mc.init(2, 1, totsize, "tensorflow")
    myrank, numworkers = mc.get_rank(), mc.get_nranks()

    data = mnist.load(args.data_dir, verbose=myrank == 0)
    steps = mnist.steps(data.train_images, numworkers, args.batch_size)
    max_steps = steps * args.epochs

    # every step waits for its own averages; rank 0 prints now and then how long it has waited
    mc.config_team(0, 0, max_steps, max_steps, 1, max(1, max_steps // 5))

    # the rate grows from that of one rank to that of all of them while training warms up
    global_step = tf.train.get_or_create_global_step()
    share = tf.minimum(1.0, tf.cast(global_step, tf.float32) / max(1, max_steps // 10))
    optimizer = tf.train.AdamOptimizer(args.lr * (1.0 + share * (numworkers - 1)))

    # average the gradients between their computation and their application
    grads_and_vars = optimizer.compute_gradients(loss)
    grads = mc.gradients([gv[0] for gv in grads_and_vars], 0)
    gs_and_vs = [(g, v) for (_, v), g in zip(grads_and_vars, grads, strict=True)]
    train_op = optimizer.apply_gradients(gs_and_vs, global_step)

    hooks: list[tf.train.SessionRunHook] = [BroadcastHook(0)]
    if myrank == 0 and args.checkpoint:
        folder, name = os.path.split(args.checkpoint)
        hooks.append(tf.train.CheckpointSaverHook(folder or ".", save_steps=max_steps, checkpoint_basename=name))

    threads = max(1, len(os.sched_getaffinity(0)) // mc.local_size())
    config = tf.ConfigProto(inter_op_parallelism_threads=threads, intra_op_parallelism_threads=threads)
    progress = mnist.Progress(myrank == 0, max_steps, args.batch_size * numworkers)
    with tf.train.MonitoredTrainingSession(hooks=hooks, config=config) as session:
        for epoch in range(args.epochs):
            x, y = mnist.shard(data.train_images, data.train_labels, myrank, numworkers, epoch)
            for step in range(steps):
                batch = slice(step * args.batch_size, (step + 1) * args.batch_size)
                _, batch_loss = session.run([train_op, loss], {images: x[batch], labels: y[batch]})
                progress.update(epoch * steps + step + 1, float(batch_loss))
        x, y = mnist.shard(data.test_images, data.test_labels, myrank, numworkers, epoch=0)
        tested = np.array([session.run(accuracy, {images: x, labels: y})], np.float32)
        weights = session.run(tf.trainable_variables())

    mc.average(tested)  # in place: each rank has tested its share
    same = mc.check_buffers_match(weights, 1) == 0
    if myrank == 0:
        print(f"test accuracy: {tested[0]:.4f}")
    mc.finalize()
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
