"""Train MNIST with a TensorFlow 1 Estimator.

    mpiexec -n 2 dl-comm tf1 examples/estimator_mnist/train.py

These are the excerpts of the porting guide of the Cray PE DL Plugin, put together: a script for TensorFlow 1, which
runs on the TensorFlow that is installed by means of `dl_comm.tf1`.
"""

from __future__ import annotations

import math
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import dl_comm as mc

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import mnist


class BcastTensors(tf.train.SessionRunHook):
    """Gives all ranks the initial values of rank 0."""

    def __init__(self) -> None:
        """Begin with nothing to run."""
        self.bcast = None

    def begin(self) -> None:
        """Add the broadcast to the graph."""
        if not self.bcast:
            new_vars = mc.broadcast(tf.trainable_variables(), 0)
            self.bcast = tf.group(*[tf.assign(v, new_vars[k]) for k, v in enumerate(tf.trainable_variables())])

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Broadcast."""
        session.run(self.bcast)


class ShowProgress(tf.train.SessionRunHook):
    """Shows how far training is."""

    def __init__(self, progress: mnist.Progress, loss: Any) -> None:
        """Show `loss` with `progress`."""
        self.progress = progress
        self.loss = loss
        self.step = 0

    def before_run(self, run_context: Any) -> Any:
        """Ask for the loss."""
        return tf.train.SessionRunArgs(self.loss)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        """Show it."""
        self.step += 1
        self.progress.update(self.step, float(run_values.results))


def build_model(images: Any) -> Any:
    """Two convolutions and a classifier: images [N, 28, 28] to logits [N, 10]."""
    features = tf.expand_dims(images, -1)
    for filters in (16, 32):
        features = tf.layers.conv2d(features, filters, 3, activation=tf.nn.relu)
        features = tf.layers.max_pooling2d(features, 2, 2)
    return tf.layers.dense(tf.layers.flatten(features), 10)


def model_fn(features: Any, labels: Any, mode: str, params: dict[str, Any]) -> Any:
    """Build the graph of a mode: training averages the gradients over the ranks."""
    logits = build_model(features)
    predictions = {"classes": tf.argmax(logits, axis=1)}
    if mode == tf.estimator.ModeKeys.PREDICT:
        return tf.estimator.EstimatorSpec(mode=mode, predictions=predictions)

    loss = tf.losses.sparse_softmax_cross_entropy(labels=labels, logits=logits)
    metrics = {"accuracy": tf.metrics.accuracy(labels, predictions["classes"])}
    if mode == tf.estimator.ModeKeys.EVAL:
        return tf.estimator.EstimatorSpec(mode=mode, loss=loss, eval_metric_ops=metrics)

    # the rate grows from that of one rank to that of all of them while training warms up
    global_step = tf.train.get_global_step()
    share = tf.minimum(1.0, tf.cast(global_step, tf.float32) / max(1, params["max_steps"] // 10))
    optimizer = tf.train.AdamOptimizer(params["lr"] * (1.0 + share * (params["numworkers"] - 1)))

    # minimize() in two parts, with the average of the gradients between them
    grads_and_vars = optimizer.compute_gradients(loss)
    grads = mc.gradients([gv[0] for gv in grads_and_vars], 0)
    gs_and_vs = [(g, v) for (_, v), g in zip(grads_and_vars, grads)]  # noqa: B905 (as in the guide)
    minimize_op = optimizer.apply_gradients(gs_and_vs, global_step)

    train_hooks = [BcastTensors(), ShowProgress(params["progress"], loss)]
    return tf.estimator.EstimatorSpec(
        mode=mode,
        predictions=predictions,
        loss=loss,
        train_op=minimize_op,
        training_hooks=train_hooks,
        eval_metric_ops=metrics,
    )


def main() -> int:
    """Train, test and give the exit status: 1 when the ranks end with different weights."""
    args = mnist.arguments(__doc__.splitlines()[0], lr=0.002)

    # build the model once to determine its size
    build_model(tf.placeholder(tf.float32, [None, 28, 28]))
    totsize = sum([v.shape.num_elements() for v in tf.trainable_variables()])

    # initialise dl_comm: one team of two threads
    mc.init(2, 1, totsize, "tensorflow")
    myrank = mc.get_rank()
    numworkers = mc.get_nranks()

    data = mnist.load(args.data_dir, verbose=myrank == 0)
    batch_size = args.batch_size
    mnist.steps(data.train_images, numworkers, batch_size)  # exits when there is no whole batch
    max_steps = int(math.ceil(args.epochs * len(data.train_images) / (numworkers * batch_size)))

    # always wait for the result, and have rank 0 print the waiting time every 100 steps
    mc.config_team(0, 0, max_steps, max_steps, 1, 100)

    threads = max(1, len(os.sched_getaffinity(0)) // mc.local_size())
    session_config = tf.ConfigProto(inter_op_parallelism_threads=threads, intra_op_parallelism_threads=threads)
    params = {
        "lr": args.lr,
        "max_steps": max_steps,
        "numworkers": numworkers,
        "progress": mnist.Progress(myrank == 0, max_steps, batch_size * numworkers),
    }
    with tempfile.TemporaryDirectory() as model_dir:  # each rank writes checkpoints of its own, and evaluates them
        config = tf.estimator.RunConfig(session_config=session_config)
        classifier = tf.estimator.Estimator(model_fn=model_fn, model_dir=model_dir, config=config, params=params)

        # each rank trains on its share of the images, and tests its share
        x, y = mnist.shard(data.train_images, data.train_labels, myrank, numworkers, epoch=0)
        input_fn_train = tf.estimator.inputs.numpy_input_fn(x, y, batch_size, num_epochs=None, shuffle=True)
        classifier.train(input_fn=input_fn_train, max_steps=max_steps)
        x, y = mnist.shard(data.test_images, data.test_labels, myrank, numworkers, epoch=0)
        input_fn_test = tf.estimator.inputs.numpy_input_fn(x, y, batch_size=500, shuffle=False)
        tested = np.array([classifier.evaluate(input_fn=input_fn_test)["accuracy"]], np.float32)
        weights = [np.asarray(classifier.get_variable_value(name)) for name in classifier.get_variable_names()]
        if myrank == 0 and args.checkpoint:
            for part in Path(model_dir).glob(Path(classifier.latest_checkpoint()).name + ".*"):
                shutil.copy(part, args.checkpoint + part.suffix)

    mc.average(tested)  # in place
    same = mc.check_buffers_match(weights, 1) == 0
    if myrank == 0:
        print(f"test accuracy: {tested[0]:.4f}")

    # training is complete and we're ready to exit
    mc.finalize()
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
