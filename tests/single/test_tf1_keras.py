"""`python -m dl_comm.tf1` with Keras: scripts as they were written for Keras 2.2 on TensorFlow 1."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from imported import python
from installed import needs
from launch import Finished, run
from tf1_script import QUIET, passes

if not os.environ.get("DL_COMM_TEST_EVERYTHING"):
    needs("tensorflow", "tf_keras")
pytestmark = pytest.mark.xdist_group("tf1")

PLUGIN = """
import sys
import numpy as np
import tensorflow as tf
import keras
from keras import backend as K
from keras.callbacks import Callback, LearningRateScheduler, ModelCheckpoint
from keras.layers import Conv2D, Dense, Dropout, Flatten, MaxPooling2D
from keras.layers.advanced_activations import LeakyReLU
from keras.layers.normalization import BatchNormalization
from keras.models import Sequential, load_model
from keras.preprocessing.image import ImageDataGenerator
from keras.utils import np_utils
import ml_comm as mc

mc.init_mpi()
rank, size = mc.get_rank(), mc.get_nranks()
np.random.seed(100 + rank)
tf.set_random_seed(100 + rank)
K.set_session(tf.Session(config=tf.ConfigProto(intra_op_parallelism_threads=1, inter_op_parallelism_threads=1)))

class Averaging(keras.optimizers.Optimizer):
    def __init__(self, name, **options):
        self._name = name
        super(self.__class__, self).__init__(**options)

    def get_gradients(self, loss, params):
        return mc.gradients(super(self.__class__, self).get_gradients(loss, params), 0)

def distributed(optimizer):
    kind = type(optimizer.__class__.__name__, (optimizer.__class__,), dict(Averaging.__dict__))
    return kind("Averaging", **optimizer.get_config())

class Start(Callback):
    def __init__(self, steps):
        super(Start, self).__init__()
        self.steps = steps

    def on_train_begin(self, logs=None):
        mc.init(1, 1, 100000, "tensorflow")
        mc.config_team(0, 0, self.steps, self.steps, 0, 100)

class Broadcast(Callback):
    def on_train_begin(self, logs=None):
        session = K.get_session()
        variables = tf.trainable_variables()
        floats = [v for v in variables if v.dtype == tf.Variable([0], dtype=tf.float32).dtype]
        assert all("float32_ref" in repr(v) for v in floats)
        assert {id(v) for v in self.model.trainable_weights} <= {id(v) for v in floats}
        session.run(tf.variables_initializer(variables))
        before = self.model.get_weights()
        assert size == 1 or mc.check_buffers_match(before, 1) != 0, "the ranks start from different weights"
        values = mc.broadcast(floats, 0)
        session.run(tf.group(*[tf.assign(v, value) for v, value in zip(floats, values)]))
        assert mc.check_buffers_match([session.run(v) for v in floats], 1) == 0

class AverageMetrics(Callback):
    def on_epoch_end(self, epoch, logs=None):
        for name in sorted(logs):
            value = np.array([logs[name]], np.float32)
            mc.average(value)
            logs[name] = value[0]

patterns = np.random.RandomState(0).rand(10, 12, 12, 1)
labels = np.arange(320) % 10
images = (patterns[labels] + 0.3 * np.random.RandomState(1).randn(320, 12, 12, 1)).astype("float32")
x, y = images[rank::size], np_utils.to_categorical(labels[rank::size], 10)

model = Sequential()
model.add(Conv2D(6, (3, 3), input_shape=(12, 12, 1), kernel_initializer="he_normal"))
model.add(LeakyReLU(alpha=0.1))
model.add(BatchNormalization())
model.add(MaxPooling2D(pool_size=(2, 2)))
model.add(Flatten())
model.add(Dropout(0.1))
model.add(Dense(16 / 1, activation="relu"))
model.add(Dense(10, activation="softmax"))
optimizer = distributed(getattr(keras.optimizers, sys.argv[1])(lr=float(sys.argv[2])))
model.compile(loss="categorical_crossentropy", optimizer=optimizer, metrics=["accuracy"])
assert model.optimizer is optimizer
batches = len(x) // 20
callbacks = [Start(6 * batches), Broadcast(), AverageMetrics(), LearningRateScheduler(lambda epoch: float(sys.argv[2]))]
path = sys.argv[3] + "/weights-{epoch:02d}.h5"
if rank == 0:
    callbacks.append(ModelCheckpoint(path, save_weights_only=False, period=2))
generator = ImageDataGenerator(width_shift_range=0.01, rotation_range=1)
if sys.argv[4] == "fit":
    history = model.fit(x, y, batch_size=20, epochs=6, verbose=0, callbacks=callbacks, validation_data=(x, y))
else:
    history = model.fit_generator(generator.flow(x, y, batch_size=20), steps_per_epoch=batches, epochs=6, verbose=0,
                                  callbacks=callbacks, validation_data=(x, y))
losses = history.history["loss"]
assert losses[-1] < 0.7 * losses[0], losses
assert {"acc", "val_acc"} <= set(history.history), history.history
trained = K.batch_get_value(model.trainable_weights)
assert mc.check_buffers_match(trained, 1) == 0
assert mc.check_buffers_match(model.evaluate(x, y, verbose=0), 1) != 0 or size == 1  # each rank has its own part
if rank == 0:
    again = load_model(path.format(epoch=6))
    for left, right in zip(again.get_weights(), model.get_weights()):
        np.testing.assert_array_equal(left, right)
    assert type(again.optimizer).__name__ == sys.argv[1]
mc.finalize()
tf.logging.warn("a warning of the script")
print("fine")
"""


@pytest.mark.parametrize(
    ("optimizer", "rate", "how", "ranks"),
    [
        pytest.param("SGD", 0.05, "fit", 2, marks=pytest.mark.heavy),
        ("Adam", 0.005, "fit_generator", 2),
        ("RMSprop", 0.003, "fit", 1),
    ],
)
def test_a_script_of_the_plugins_time(tmp_path, optimizer, rate, how, ranks):
    output = passes(tmp_path, PLUGIN, optimizer, str(rate), str(tmp_path), how, ranks=ranks)
    written = sorted(path.name for path in tmp_path.glob("weights-*"))
    assert written == ["weights-02.h5", "weights-04.h5", "weights-06.h5"]
    for advice in ("deprecated", "WARNING:tensorflow", "UserWarning", "future version"):
        assert advice not in output.replace("WARNING:tensorflow:a warning of the script", "")
    assert output.count("a warning of the script") == ranks


NAMES = """
import keras
import numpy as np
import tensorflow as tf
import tensorflow.keras as as_name
import tensorflow.keras.backend as K
from keras import objectives
from keras.backend.tensorflow_backend import get_session, set_session
from keras.engine import InputSpec, Layer, Model
from keras.engine.topology import Input
from keras.layers.core import Dense
from keras.layers.merge import concatenate
from keras.optimizers import Adam, adam
from keras.utils.generic_utils import get_custom_objects
from keras.utils.np_utils import to_categorical
from tensorflow.contrib.keras import layers as from_contrib
from tensorflow.keras.layers import LSTM

assert as_name is tf.keras is keras is tf.contrib.keras and K is keras.backend
assert Dense is keras.layers.Dense is from_contrib.Dense and LSTM is keras.layers.LSTM
assert keras.layers.core.Dense is Dense and keras.engine.Layer is Layer is keras.layers.Layer
assert Model is keras.models.Model is keras.Model and adam is Adam is tf.keras.optimizers.Adam
assert keras.__version__.startswith("2.") and objectives.mse is keras.losses.mse

# packages that are written for TensorFlow 2 have Keras 3, before and after
import dl_comm.keras
scope = {"__name__": "keras.here"}
exec("import keras; from keras.layers import Dense; import keras.ops; version = keras.__version__", scope)
assert scope["version"].startswith("3.") and scope["Dense"] is not Dense

for ask, text in (
    (lambda: keras.ops, "keras.ops ("),
    (lambda: keras.optimizers.Ftrl, "instead: tf.train.FtrlOptimizer"),
    (lambda: keras.utils.multi_gpu_model, "instead: a rank for each GPU"),
    (lambda: keras.no_such_thing, "keras.no_such_thing ("),
):
    try:
        ask()
    except AttributeError as error:
        assert text in str(error) and "script.py" in str(error), error
    else:
        raise AssertionError(text)

# variables and optimizers are those of Keras 2.2, however they are asked for
reference = tf.as_dtype("float32_ref")
assert K.variable(1.0).dtype == K.zeros([2]).dtype == reference
assert K.variable(np.ones(2)).dtype == keras.backend.ones((2, 2)).dtype == reference
inputs = Input((4,))
outputs = concatenate([Dense(2)(inputs), keras.layers.BatchNormalization()(inputs)])
outputs = Dense(3)(LSTM(5)(keras.layers.Reshape((2, 3))(outputs)))
for given in ("adam", "SGD", Adam(lr=0.01), Adam(learning_rate=0.01, name="mine"), tf.train.AdamOptimizer(0.01)):
    model = Model(inputs, outputs)
    model.compile(given, "mse")
    assert isinstance(model.optimizer, keras.optimizers.Optimizer)
    loss = [model.train_on_batch(np.ones((8, 4)), np.ones((8, 3))) for _ in range(2)]
    assert np.isfinite(loss).all() and loss[1] != loss[0]
    assert all(v.dtype == reference for v in model.weights)
assert abs(K.get_value(Adam(learning_rate=0.01).lr) - 0.01) < 1e-6

# whole floats are dimensions, as in TensorFlow 1
assert tf.placeholder(tf.float32, [None, 28 / 2]).shape.as_list() == [None, 14]
assert tf.get_variable("w", [4 / 2, np.float32(3)]).shape.as_list() == [2, 3]
assert tf.Dimension(4.0).value == 4
try:
    tf.placeholder(tf.float32, [2.5])
except (TypeError, ValueError) as error:
    assert "2.5" in str(error)
else:
    raise AssertionError("2.5 is no dimension")
print("fine")
"""


def test_names_of_keras(tmp_path):
    passes(tmp_path, NAMES)


# As Keras 2.2: its session initializes every global variable, whoever has made it; and making a model of layers counts
# as its first call.
SESSION = """
import numpy as np
import tensorflow as tf
import keras
from keras import backend as K

ask = {
    "run": lambda v: K.get_session().run(v),
    "get_value": K.get_value,
    "eval": lambda v: K.eval(v * 1),
    "batch_get_value": lambda v: K.batch_get_value([v])[0],
    "function": lambda v: K.function([], [v * 1])([])[0],
}
for number, (name, value) in enumerate(ask.items()):
    assert value(tf.Variable(number + 0.5)) == number + 0.5, name
assert K.get_value(tf.get_variable("own", initializer=7.0)) == 7.0

changed = tf.Variable(1.0)
K.get_session().run(changed.assign(5.0))
assert K.get_value(changed) == 5.0

i = keras.layers.Input((4,))
model = keras.models.Model(i, keras.layers.Dense(3)(i))

def loss(target, prediction):
    count = tf.assign_add(tf.Variable(0.0, trainable=False), 1.0)
    return keras.losses.mean_squared_error(target, prediction) + 0 * count

model.compile("sgd", loss)
assert np.isfinite(model.fit(np.ones((8, 4)), np.ones((8, 3)), verbose=0).history["loss"][0])

at = "input_shape output_shape input output input_mask output_mask".split()
at = {name: getattr(keras.models.Model, f"get_{name}_at") for name in at}
shapes = at["input_shape"], at["output_shape"]
assert [get(model, 0) for get in shapes] == [(None, 4), (None, 3)]
assert at["input"](model, 0) is model.inputs[0] and at["output"](model, -1) is model.outputs[0]
assert at["input_mask"](model, 0) is None is at["output_mask"](model, 0)
sequential = keras.models.Sequential([keras.layers.Dense(5, input_shape=(4,)), keras.layers.Dense(2)])
assert [get(sequential, -1) for get in shapes] == [(None, 4), (None, 2)]
two = keras.models.Model([i, keras.layers.Input((6,))], [model(i), i])
assert [get(two, 0) for get in shapes] == [[(None, 4), (None, 6)], [(None, 3), (None, 4)]]
assert at["output"](model, 1) is two.outputs[0] and at["output"](model, 0) is model.outputs[0]
for layer, number, error in ((two, 1, ValueError), (two, -2, ValueError), (keras.layers.Dense(1), 0, RuntimeError)):
    try:
        layer.get_output_shape_at(number)
    except error:
        continue
    raise AssertionError(layer)

with tf.Graph().as_default() as graph, tf.Session() as session:
    v = tf.Variable(1.0)
    session.run(v.initializer)
    graph.finalize()
    assert K.get_session() is session and session.run(v) == 1.0
print("fine")
"""


def test_a_session_initializes_and_models_have_a_first_call_as_in_keras_2_2(tmp_path):
    passes(tmp_path, SESSION)


WITHOUT = """
import sys
import importlib.util

find = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "tf_keras" else find(name, package)
from dl_comm.tf1 import install
install()
import dl_comm.keras
import tensorflow as tf

def layers():
    from keras.layers import Dense

def old_layers():
    from keras.layers.core import Dense

def of_tensorflow():
    from tensorflow.keras.models import Sequential

def of_module():
    import keras
    keras.models.Sequential

by_name = lambda: tf.keras.layers.Dense, lambda: tf.layers.dense, lambda: tf.nn.rnn_cell.GRUCell
for ask in (layers, old_layers, of_tensorflow, of_module, *by_name):
    try:
        ask()
    except ImportError as error:
        assert "pip install tf_keras" in str(error) and "extra tf1" in str(error), error
    else:
        raise AssertionError(ask)
assert "tf_keras" not in sys.modules
with tf.Session() as session:
    assert session.run(tf.constant(1)) == 1
print("fine")
"""


def run_script(folder: Path, script: str) -> Finished:
    """Runs a script that calls ``install`` itself."""
    path = folder / "script.py"
    path.write_text(script)
    return run([*python("tensorflow"), str(path)], 60, QUIET)


def test_without_tf_keras_an_import_of_keras_names_the_extra(tmp_path):
    finished = run_script(tmp_path, WITHOUT)
    assert finished.returncode == 0, finished.output


@pytest.mark.parametrize(
    "name", ["engine.base_layer_utils.make_variable", "optimizers.optimizer_v1.Nadam", "backend._get_variables"]
)
def test_a_tf_keras_that_has_changed_is_refused(tmp_path, name):
    module, _, last = name.rpartition(".")
    script = f"import tf_keras.src.{module} as module\ndel module.{last}\nimport dl_comm.tf1\ndl_comm.tf1.install()"
    finished = run_script(tmp_path, script)
    assert finished.returncode == 1
    assert f"ImportError: dl_comm.tf1 needs tf_keras.src.{name}" in finished.output
