"""`tf.estimator` under `python -m dl_comm.tf1`: alone, and on several ranks as in the porting guide."""

from __future__ import annotations

import pytest

from installed import needs
from tf1_script import passes

needs("tensorflow")
pytestmark = pytest.mark.xdist_group("tf1")

ESTIMATOR = """
import os
import numpy as np
import tensorflow as tf

events = []

class Count(tf.train.SessionRunHook):
    def __init__(self, name):
        self.name = name
        self.runs = 0

    def begin(self):
        events.append(self.name + " begins")

    def after_run(self, run_context, run_values):
        self.runs += 1

    def end(self, session):
        events.append(f"{self.name} {self.runs}")

x = np.random.RandomState(0).rand(50, 3).astype(np.float32)
y = x @ np.array([[1.0], [2.0], [3.0]], np.float32)

def model_fn(features, labels, mode, params, config):
    assert config.tf_random_seed == 1
    weight = tf.get_variable("weight", [3, 1], initializer=tf.zeros_initializer())
    predicted = features["x"] @ weight
    if mode == tf.estimator.ModeKeys.PREDICT:
        assert labels is None
        predictions = {"y": predicted, "double": 2 * predicted}
        return tf.estimator.EstimatorSpec(mode, predictions, prediction_hooks=[Count("predict")])
    loss = tf.losses.mean_squared_error(labels, predicted)
    if mode == tf.estimator.ModeKeys.EVAL:
        metrics = {"mae": tf.metrics.mean_absolute_error(labels, predicted)}
        return tf.estimator.EstimatorSpec(mode, loss=loss, eval_metric_ops=metrics, evaluation_hooks=[Count("eval")])
    train_op = tf.train.GradientDescentOptimizer(params["lr"]).minimize(loss, tf.train.get_global_step())
    return tf.estimator.EstimatorSpec(
        mode, loss=loss, train_op=train_op, training_hooks=[Count("train")], training_chief_hooks=[Count("chief")])

config = tf.estimator.RunConfig(
    tf_random_seed=1, save_checkpoints_steps=20, log_step_count_steps=10,
    session_config=tf.ConfigProto(intra_op_parallelism_threads=1))
estimator = tf.estimator.Estimator(model_fn, config=config, params={"lr": 0.3})
assert os.path.isdir(estimator.model_dir) and estimator.params == {"lr": 0.3}
forever = tf.estimator.inputs.numpy_input_fn({"x": x}, y, batch_size=16, num_epochs=None, shuffle=True)
once = tf.estimator.inputs.numpy_input_fn({"x": x}, y, batch_size=16, shuffle=False)

def steps():
    return int(estimator.get_variable_value("global_step"))

# training begins at the start, goes on from the checkpoint, and stops where it shall
untrained = estimator.evaluate(once)
np.testing.assert_allclose(untrained["mae"], y.mean(), rtol=1e-5)
assert untrained["global_step"] == 0 and events == ["eval begins", "eval 4"], (untrained, events)
events.clear()
assert estimator.train(forever, max_steps=50, hooks=[Count("mine")]) is estimator
assert events == ["mine begins", "train begins", "chief begins", "mine 50", "train 50", "chief 50"], events
assert steps() == 50 and estimator.latest_checkpoint() == os.path.join(estimator.model_dir, "model.ckpt-50")
assert {f"model.ckpt-{step}.index" for step in (0, 20, 40, 50)} <= set(os.listdir(estimator.model_dir))
weight = estimator.get_variable_value("weight")
assert np.abs(weight[:, 0] - [1, 2, 3]).max() < 0.5, weight
events.clear()
estimator.train(forever, max_steps=50)
assert not events, "50 steps were done before"
estimator.train(forever, steps=5)
assert steps() == 55 and events == ["train begins", "chief begins", "train 5", "chief 5"], events
assert estimator.get_variable_names() == ["global_step", "weight"]
estimator.train(lambda params: tf.data.Dataset.from_tensor_slices(({"x": x}, y)).batch(10))
assert steps() == 60, "it ends with the data"
other = tf.estimator.Estimator(model_fn, estimator.model_dir, config, {"lr": 0.0})
other.train(forever, max_steps=61)
assert np.array_equal(other.get_variable_value("weight"), estimator.get_variable_value("weight"))

# metrics over all 50 examples, the last batch having 2
weight = estimator.get_variable_value("weight")
errors = x @ weight - y
result = estimator.evaluate(once)
np.testing.assert_allclose(result["mae"], np.abs(errors).mean(), rtol=1e-3)
batches = [(errors[i : i + 16] ** 2).mean() for i in range(0, 50, 16)]
np.testing.assert_allclose(result["loss"], np.mean(batches), rtol=1e-3)
assert result["global_step"] == 61 and set(result) == {"mae", "loss", "global_step"}
result = estimator.evaluate(once, steps=1, name="one", hooks=[Count("mine")])
np.testing.assert_allclose(result["mae"], np.abs(errors[:16]).mean(), rtol=1e-3)
assert events[-2:] == ["mine 1", "eval 1"] and os.listdir(estimator.eval_dir("one"))
old = estimator.evaluate(once, checkpoint_path=os.path.join(estimator.model_dir, "model.ckpt-50"))
assert old["global_step"] == 50

# predictions one by one, with the caller's graph left alone
graph = tf.get_default_graph()
for i, predicted in enumerate(estimator.predict(once)):
    assert tf.get_default_graph() is graph
    np.testing.assert_allclose(predicted["double"], 2 * x[i] @ weight, rtol=1e-4)
assert i == 49 and events[-1] == "predict 4", events
(batch, *_) = estimator.predict(once, "y", yield_single_examples=False)
assert set(batch) == {"y"} and batch["y"].shape == (16, 1)

spec = tf.estimator.EvalSpec(once, throttle_secs=0)
result, exports = tf.estimator.train_and_evaluate(estimator, tf.estimator.TrainSpec(forever, max_steps=100), spec)
assert result["global_step"] == 100 == steps() and exports == []

def plain(features, labels, mode):
    loss = tf.reduce_mean(tf.get_variable("v", [1]) * labels)
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=tf.no_op())

batch = tf.estimator.inputs.numpy_input_fn(x, np.arange(50), 20, num_epochs=2, shuffle=False)
features, labels = batch()
with tf.Session() as session:
    seen = []
    try:
        while True:
            seen.append(session.run([features, labels]))
    except tf.errors.OutOfRangeError:
        pass
assert [len(rows) for rows, _ in seen] == [20] * 5, "batches go across the ends of epochs"
assert np.concatenate([numbers for _, numbers in seen]).tolist() == [*range(50)] * 2
assert np.array_equal(seen[2][0], x[[*range(40, 50), *range(10)]])
shuffled = tf.estimator.inputs.numpy_input_fn(np.arange(50), None, 50, shuffle=True)()
with tf.train.MonitoredSession() as session:
    order = session.run(shuffled).tolist()
assert sorted(order) == [*range(50)] != order

def nothing(features, labels):
    pass

for kind, text, wrong in (
    (ValueError, "not both", lambda: estimator.train(forever, steps=1, max_steps=1)),
    (ValueError, "invalid steps: 0", lambda: estimator.train(forever, steps=0)),
    (ValueError, "invalid steps: 0", lambda: estimator.evaluate(once, steps=0)),
    (TypeError, "SessionRunHook", lambda: estimator.train(forever, steps=1, hooks=[nothing])),
    (ValueError, "does not take params", lambda: tf.estimator.Estimator(plain, params={})),
    (TypeError, "EstimatorSpec", lambda: tf.estimator.Estimator(tf.estimator.EstimatorSpec("infer", predictions=1))),
    (TypeError, "RunConfig", lambda: tf.estimator.Estimator(plain, config={})),
    (ValueError, "warm_start", lambda: tf.estimator.Estimator(plain, warm_start_from="x")),
    (ValueError, "EstimatorSpec, not NoneType", lambda: tf.estimator.Estimator(nothing).train(batch)),
    (ValueError, "train_op", lambda: tf.estimator.EstimatorSpec("train", loss=tf.constant(1.0))),
    (ValueError, "scalar", lambda: tf.estimator.EstimatorSpec("eval", loss=tf.zeros([2]))),
    (ValueError, "mode", lambda: tf.estimator.EstimatorSpec("fit")),
    (ValueError, "save_checkpoints", lambda: tf.estimator.RunConfig(save_checkpoints_steps=1, save_checkpoints_secs=1)),
    (ValueError, "no checkpoint", lambda: tf.estimator.Estimator(plain).get_variable_names()),
    (ValueError, "none of the keys", lambda: next(estimator.predict(once, "z"))),
    (ValueError, "shuffle", lambda: tf.estimator.inputs.numpy_input_fn(x, y)),
    (ValueError, "equal numbers of examples", lambda: tf.estimator.inputs.numpy_input_fn(x, y[1:], shuffle=True)),
):
    try:
        wrong()
    except kind as error:
        assert text in str(error), (text, error)
    else:
        raise AssertionError(text)
print("fine")
"""


@pytest.mark.heavy  # the gate runs the one of the porting guide
def test_estimator(tmp_path):
    passes(tmp_path, ESTIMATOR)


GUIDE = """
import os
import sys
import numpy as np
import tensorflow as tf
import dl_comm as mc
import dl_comm.tensorflow as cdl


class BcastTensors(tf.train.SessionRunHook):

  def __init__(self):
    self.bcast = None

  def begin(self):
    if not self.bcast:
      new_vars   = mc.broadcast(tf.trainable_variables(),0)
      self.bcast = tf.group(*[tf.assign(v,new_vars[k]) for k,v in enumerate(tf.trainable_variables())])

  def after_create_session(self, session, coord):
     session.run(self.bcast)


class CheckWeights(tf.train.SessionRunHook):

  def __init__(self):
    self.matches = []

  def after_run(self, run_context, run_values):
    weights = run_context.session.run(tf.trainable_variables())
    self.matches.append(mc.check_buffers_match(weights, 1))


def model_fn(features, labels, mode):
    hidden = tf.layers.dense(features, 8, activation=tf.nn.tanh)
    loss = tf.losses.mean_squared_error(labels, tf.layers.dense(hidden, 1))
    if mode == tf.estimator.ModeKeys.EVAL:
        return tf.estimator.EstimatorSpec(mode=mode, loss=loss)
    optimizer = tf.train.MomentumOptimizer(0.05, 0.9)
    grads_and_vars = optimizer.compute_gradients(loss)
    grads     =  mc.gradients([gv[0] for gv in grads_and_vars], 0)
    gs_and_vs = [(g,v) for (_,v), g in zip(grads_and_vars, grads)]
    minimize_op = optimizer.apply_gradients(gs_and_vs, tf.train.get_global_step())
    return tf.estimator.EstimatorSpec(
        mode=mode, loss=loss, train_op=minimize_op, training_hooks=[broadcast, check])


check, broadcast = CheckWeights(), BcastTensors()
mc.init_mpi()
rank, size = mc.get_rank(), mc.get_nranks()
rng = np.random.RandomState(0)
x = rng.normal(size=(60, 3)).astype(np.float32)
y = np.sin(x.sum(1, keepdims=True))

# a graph that is older than init, and a session that is still there after finalize
mean = mc.gradients([tf.constant([float(rank)])], 0)[0]
mc.init(2, 1, 100, "tensorflow")
session = tf.Session()
assert session.run(mean) == [(size - 1) / 2]

# only rank 0 keeps what it trains
classifier = tf.estimator.Estimator(
    model_fn=model_fn,
    model_dir=sys.argv[1] if rank == 0 else None,
    config=tf.estimator.RunConfig(tf_random_seed=rank + 1),
)
own = tf.estimator.inputs.numpy_input_fn(x[rank::size], y[rank::size], batch_size=10, num_epochs=None, shuffle=True)
test = tf.estimator.inputs.numpy_input_fn(x[rank::size], y[rank::size], batch_size=10, shuffle=False)
first = np.array([classifier.evaluate(test)["loss"]], np.float32)
mc.average(first)
classifier.train(input_fn=own, max_steps=20)
assert check.matches == [0] * 20, check.matches
loss = np.array([classifier.evaluate(test)["loss"]], np.float32)
mc.average(loss)
assert loss[0] < first[0], (loss, first)
weights = [classifier.get_variable_value(name) for name in ("dense/kernel", "dense/bias", "dense_1/kernel")]
assert mc.check_buffers_match(weights, 1) == 0

# from rank 0's checkpoint, which the others get by broadcast, momentum and global step too
check.matches.clear()
broadcast = cdl.BroadcastHook()
classifier = tf.estimator.Estimator(model_fn=model_fn, model_dir=sys.argv[1] if rank == 0 else None)
classifier.train(input_fn=own, steps=3)
assert check.matches == [0] * 3, check.matches
assert classifier.get_variable_value("global_step") == 23
mc.finalize()
mc.finalize()
session.close()
print("fine")
"""


@pytest.mark.parametrize(
    "ranks", [pytest.param(1, marks=pytest.mark.heavy), pytest.param(2, marks=pytest.mark.heavy), 3]
)
def test_the_porting_guides_estimator(tmp_path, ranks):
    passes(tmp_path, GUIDE, str(tmp_path / "model"), ranks=ranks)
    assert (tmp_path / "model" / "model.ckpt-23.index").exists()
