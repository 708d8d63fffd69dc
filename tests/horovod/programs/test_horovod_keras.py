"""`horovod.keras` and `horovod.tensorflow.keras` on ranks: Keras 3 on TensorFlow and on torch, and ``tf_keras``."""

from __future__ import annotations

import pytest
from hvd_ranks import run_ranks

KERASES = {
    "tensorflow": {"KERAS_BACKEND": "tensorflow", "TF_USE_LEGACY_KERAS": "0"},
    "torch": {"KERAS_BACKEND": "torch", "TF_USE_LEGACY_KERAS": "0"},
    "tf_keras": {"KERAS_BACKEND": "tensorflow", "TF_USE_LEGACY_KERAS": "1"},
}

# Sums of gradients do not depend on how the data are split, so every rank must find what one process does.
SCRIPT = """
import os
import numpy as np
import horovod.keras as hvd
from horovod import _keras

keras = _keras.keras_module()
hvd.init()
rank, size = hvd.rank(), hvd.size()
x = np.random.default_rng(0).normal(size=(8, 3)).astype("float32")
y = x.sum(1, keepdims=True)


def make(seed, **options):
    keras.utils.set_random_seed(seed)
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(2), keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.1, momentum=0.5)
    if options.pop("distributed", True):
        optimizer = hvd.DistributedOptimizer(optimizer, **options)
        assert type(optimizer).__name__ == "SGD"
    model.compile(optimizer, loss="mse")
    return model


def fit(model, own, batch, **more):
    here = slice(rank * len(x) // size, (rank + 1) * len(x) // size) if own else slice(None)
    return model.fit(x[here], y[here], batch_size=batch, shuffle=False, verbose=0, **more)


def copied(model):
    other = make(0)
    other.set_weights(model.get_weights())
    return other


def same(first, second):
    for a, b in zip(first.get_weights(), second.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


alone = make(0, distributed=False)
fit(alone, False, 8, epochs=3)
for options in ({}, {"gradient_predivide_factor": 2.0}, {"groups": 2}):
    model = make(0, **options)
    fit(model, True, 4, epochs=3)
    same(model, alone)
model = make(0, backward_passes_per_step=2, average_aggregated_gradients=True)
fit(model, True, 2, epochs=3)
same(model, alone)

# Different starts: the first batch is not equal, what follows is.
model = make(rank)
callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(initial_lr=0.1, warmup_epochs=2, verbose=1),
]
history = fit(model, True, 2, epochs=3, callbacks=callbacks).history
of_all = hvd.allgather(np.concatenate([each.reshape(-1) for each in model.get_weights()])[np.newaxis])
np.testing.assert_allclose(of_all[0], of_all[-1], rtol=1e-6)
of_all = hvd.allgather(np.array([history["loss"]]))
np.testing.assert_allclose(of_all[0], of_all[-1], rtol=1e-9)
np.testing.assert_allclose(history["lr"][-1], 0.1, rtol=1e-5)

# A model with layers of its own on each rank.
model = make(0, distributed=False)
optimizer = hvd.PartialDistributedOptimizer(keras.optimizers.SGD(0.1), local_layers=model.layers[1])
model.compile(optimizer, loss="mse")
fit(model, True, 4)
first = hvd.allgather(np.asarray(model.layers[0].get_weights()[0])[np.newaxis])
np.testing.assert_allclose(first[0], first[-1], rtol=1e-6)
last = hvd.allgather(np.asarray(model.layers[1].get_weights()[0])[np.newaxis])
assert not np.allclose(last[0], last[-1])

path = f"{os.environ['FOLDER']}/{rank}.keras"
model = make(0)
fit(model, True, 4)
model.save(path)
loaded = hvd.load_model(path)
fit(loaded, True, 4)
fit(model, True, 4)
same(loaded, model)

# The state of an elastic training: with the moments, as the same steps from it have the same results.
model = make(rank)
model.optimizer.learning_rate.assign(0.1 * (rank + 1))
state = hvd.elastic.KerasState(model, epoch=rank, batch=0)
state.sync()
of_all = hvd.allgather(np.concatenate([each.reshape(-1) for each in model.get_weights()])[np.newaxis])
np.testing.assert_array_equal(of_all[0], of_all[-1])
callbacks = [hvd.elastic.UpdateBatchStateCallback(state), hvd.elastic.UpdateEpochStateCallback(state)]
ends = []
for _ in range(2):
    fit(model, True, 2, epochs=2, callbacks=callbacks)
    assert (state.epoch, state.batch) == (2, 0)
    ends.append(copied(model))
    state.restore()
    assert state.epoch == 0
same(*ends)
fit(model, True, 2, epochs=3, callbacks=[*callbacks, hvd.elastic.CommitStateCallback(state, batches_per_commit=100)])
ends = [copied(model)]
fit(model, True, 2)
state.restore()
same(ends[0], model)
assert state.epoch == 3
assert hvd.broadcast(np.array([rank]), 1)[0] == 1
try:
    hvd.DistributedOptimizer(keras.optimizers.SGD(), op=hvd.Adasum)
except ValueError:
    print("refused")
print("done")
hvd.shutdown()
"""


@pytest.mark.parametrize(
    "which", [pytest.param(name, marks=pytest.mark.heavy) if name != "tensorflow" else name for name in KERASES]
)
def test_keras(which: str, tmp_path: object) -> None:
    for output in run_ranks(SCRIPT, 2, {**KERASES[which], "FOLDER": str(tmp_path)}, timeout=300):
        assert "refused" in output
        assert "done" in output


TF_KERAS = """
import tensorflow as tf
import horovod.tensorflow as hvd
import horovod.tensorflow.keras as hvd_keras

hvd.init()
layer = hvd.SyncBatchNormalization(axis=-1)
x = tf.reshape(tf.range(12.0), (4, 3))
whole = tf.keras.layers.BatchNormalization(axis=-1)
expected = whole(x, training=True)
found = layer(x[2 * hvd.rank() : 2 * hvd.rank() + 2], training=True)
tf.debugging.assert_near(found, expected[2 * hvd.rank() : 2 * hvd.rank() + 2], atol=1e-3)
optimizer = hvd.DistributedOptimizer(tf.keras.optimizers.Adam(0.1))
assert type(optimizer).__name__ == "Adam"
config = optimizer.get_config()
assert type(optimizer).from_config(config).get_config() == config
assert issubclass(hvd.elastic.TensorFlowKerasState, hvd_keras.elastic.KerasState)
try:
    hvd_keras.elastic.KerasState(tf.keras.Sequential([tf.keras.layers.Dense(1)]), optimizer)
except ValueError as error:
    assert "build" in str(error)
    print("refused")
print("done")
"""


@pytest.mark.heavy
@pytest.mark.parametrize("which", ["tensorflow", "tf_keras"])
def test_tensorflow_keras(which: str) -> None:
    for output in run_ranks(TF_KERAS, 2, KERASES[which], timeout=300):
        assert "refused" in output
        assert "done" in output
