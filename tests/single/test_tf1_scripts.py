"""`python -m dl_comm.tf1`: TF1 scripts in processes of their own, several checks in each."""

from __future__ import annotations

import gzip
import sys
from pathlib import Path

import numpy as np
import pytest

from installed import needs
from launch import run as run_command
from tf1_script import QUIET, passes, start

needs("tensorflow")
pytestmark = pytest.mark.xdist_group("tf1")

NAMES = """
import importlib
import sys
import numpy as np
import tensorflow as tf
import tensorflow.contrib.layers as as_name
import tensorflow.compat.v1 as as_v1
from tensorflow import estimator, layers
from tensorflow.compat import v1 as from_compat
from tensorflow.contrib import framework, layers as from_contrib
from tensorflow.examples.tutorials.mnist import input_data
from tensorflow.python.framework import ops
from tensorflow.train import SessionRunHook

assert as_name is from_contrib is tf.contrib.layers
assert estimator is tf.estimator and layers is tf.layers
assert from_compat is as_v1 is tf.compat.v1 and as_v1.layers is tf.layers
assert SessionRunHook is tf.train.SessionRunHook is tf.estimator.SessionRunHook
assert ops.Graph is tf.Graph and tf.python.framework.ops is ops
assert tf.VERSION == tf.__version__

# graphs, sessions and reference variables, as in TF1
assert not tf.executing_eagerly()
x = tf.placeholder(tf.float32, [None, 3])
assert x.shape[1].value == 3
assert not tf.control_flow_v2_enabled() and not tf.resource_variables_enabled()
v = tf.get_variable("v", [3], initializer=tf.ones_initializer())
assert v.dtype == tf.float32._as_ref
config = tf.ConfigProto(allow_soft_placement=True)
config.gpu_options.allow_growth = True
with tf.Session(config=config) as session:
    session.run(tf.global_variables_initializer())
    assert session.run(tf.reduce_sum(x * v), {x: [[1, 2, 3]]}) == 6
data = tf.data.Dataset.range(3).make_one_shot_iterator().get_next()
with tf.Session() as session:
    assert [session.run(data) for _ in range(3)] == [0, 1, 2]
data = tf.data.Dataset.range(5).apply(tf.contrib.data.shuffle_and_repeat(5, 2))
data = data.apply(tf.contrib.data.map_and_batch(lambda i: 2 * i, 4))
data = data.apply(tf.contrib.data.batch_and_drop_remainder(1)).make_one_shot_iterator().get_next()
step = tf.contrib.framework.get_or_create_global_step()
assert step is tf.train.get_global_step() is framework.get_global_step()
normal = tf.contrib.distributions.Normal(0.0, 1.0).prob(0.0)
with tf.Session() as session:
    batches = [session.run(data) for _ in range(2)]
    assert [batch.shape for batch in batches] == [(1, 4)] * 2 and {i % 2 for i in np.ravel(batches)} == {0}
    assert abs(session.run(normal) - 0.3989) < 1e-4
tf.app.flags.DEFINE_integer("epochs", 3, "Epochs.")
assert tf.app.flags.FLAGS.epochs == 5
tf.logging.set_verbosity(tf.logging.ERROR)
assert tf.gfile.Exists(__file__)
everything = {}
exec("from tensorflow import *", everything)
assert everything["placeholder"] is tf.placeholder and everything["layers"] is tf.layers
tf.mine = 1
assert tf.mine == 1

# what is not there says so, with its name and this line
def line():
    return sys._getframe(1).f_lineno

def refused(ask, *texts):
    try:
        ask()
    except (AttributeError, ImportError) as error:
        for text in texts:
            assert text in str(error), (text, str(error))
    else:
        raise AssertionError(texts)

def slim():
    from tensorflow.contrib import slim

def slim_as_name():
    import tensorflow.contrib.slim as slim

def from_rnn():
    from tensorflow.contrib.rnn import NoSuchCell

def nothing():
    from tensorflow.contrib.layers import nothing

here = line()
refused(lambda: tf.contrib.cudnn_rnn.X, "tf.contrib.cudnn_rnn (", f"script.py, line {here + 1})", "keras.layers.LSTM")
refused(lambda: tf.contrib.rnn.NoSuchCell, "tf.contrib.rnn.NoSuchCell (", f"script.py, line {here + 2})")
refused(lambda: tf.estimator.DNNClassifier, "tf.estimator.DNNClassifier (", f"line {here + 3})")
refused(lambda: tf.no_such_thing, "tf.no_such_thing (", f"line {here + 4})")
refused(lambda: tf.compat.v1.no_such_thing, "tf.no_such_thing (", f"line {here + 5})")
refused(slim, "tf.contrib.slim (", "script.py, line", "tf.layers")
refused(slim_as_name, "tf.contrib.slim (", "script.py, line")
refused(from_rnn, "tf.contrib.rnn.NoSuchCell (", "script.py, line")
refused(nothing, "tf.contrib.layers.nothing (", "script.py, line")
refused(lambda: importlib.import_module("tensorflow.contrib.slim"), "tf.contrib.slim (", f"script.py, line {line()})")
assert not hasattr(tf, "no_such_thing") and not hasattr(tf.contrib, "slim") and hasattr(tf, "contrib")
assert "placeholder" in dir(tf) and "estimator" in dir(tf) and "dense" in dir(tf.layers)

# packages that are written for TensorFlow 2 have theirs
import dl_comm as mc
mean = mc.gradients([x], 0)[0]
mc.init(2, 1, 3, "tensorflow")
import keras
import dl_comm.keras
import dl_comm.tensorflow as cdl
import tensorflow.contrib.keras as tfk
assert tf.keras.layers.Dense is keras.layers.Dense is tfk.layers.Dense
he = tf.Variable(tfk.initializers.he_normal()([200, 100], dtype=tf.float32), name="he")
dense = keras.layers.Dense(2, kernel_initializer="ones")
made = dense(x)
optimizer = cdl.DistributedOptimizer(tf.train.GradientDescentOptimizer(0.5))
train = optimizer.minimize(tf.reduce_sum(x * v), var_list=[v])
with tf.train.MonitoredTrainingSession(hooks=[cdl.BroadcastHook()]) as session:
    assert session.run(mean, {x: [[1, 2, 3]]}).tolist() == [[1, 2, 3]]
    assert session.run(made, {x: [[1, 2, 3]]}).tolist() == [[6, 6]]
    assert abs(session.run(he).std() - 0.1) < 0.02
    session.run(train, {x: [[1, 2, 3]]})
    np.testing.assert_allclose(session.run(v), [0.5, 0, -0.5])
assert mc.average(np.array([2], np.float32)) == [2]

from dl_comm.tf1 import install
assert install() is tf
mc.finalize()
mc.finalize()
print("fine")
"""


def test_names_behaviour_and_what_is_missing(tmp_path):
    passes(tmp_path, NAMES, "--epochs=5")


LAYERS = """
import numpy as np
import tensorflow as tf

rng = np.random.RandomState(0)
images = rng.normal(size=(4, 6, 6, 3)).astype(np.float32)
rows = images.reshape(4, -1)
training = tf.placeholder_with_default(False, [])
x = tf.placeholder(tf.float32, [None, 6, 6, 3])
flat = tf.layers.flatten(x)
l2 = tf.contrib.layers.l2_regularizer(0.1)

first = tf.layers.dense(flat, 5, activation=tf.nn.relu, kernel_regularizer=l2)
second = tf.layers.dense(flat, 5, use_bias=False)
named = tf.layers.dense(flat, 2, name="named", kernel_initializer=tf.ones_initializer(), trainable=False)
again = tf.layers.dense(flat, 2, name="named", reuse=True)
deep = tf.layers.dense(x, 2, name="deep", activity_regularizer=l2)
conv = tf.layers.conv2d(x, 4, 3, strides=(2, 1), bias_initializer=tf.ones_initializer())
same = tf.layers.conv2d(x, 4, [3, 3], padding="SAME", activation=tf.nn.relu)
first_conv = tf.layers.conv2d(tf.transpose(x, [0, 3, 1, 2]), 4, 3, data_format="channels_first", name="nchw")
line = tf.layers.conv1d(x[:, 0], 4, 3)
volume = tf.layers.conv3d(x[..., None], 4, 2)
upwards = tf.layers.conv2d_transpose(x, 2, 3, strides=2)
most = tf.layers.max_pooling2d(x, 2, 2)
mean = tf.layers.average_pooling2d(x, [3, 3], 3)
most1, mean3 = tf.layers.max_pooling1d(x[:, 0], 2, 2), tf.layers.average_pooling3d(x[..., None], (6, 6, 3), 1)
normal = tf.layers.batch_normalization(flat, training=training, momentum=0.9)
image_normal = tf.layers.batch_normalization(x, training=training, momentum=0.9, center=False)
plain_normal = tf.layers.batch_normalization(x, fused=False, training=True, scale=False)
tested_normal = tf.layers.batch_normalization(x, name="tested")
dropped = tf.layers.dropout(tf.ones([1000]), 0.2, training=training, seed=1)
kept = tf.layers.dropout(x, 0.9)
full = tf.contrib.layers.fully_connected(flat, 3)
linear = tf.contrib.layers.fully_connected(flat, 3, activation_fn=None, biases_initializer=None, scope="linear")
contrib_conv = tf.contrib.layers.conv2d(x, 2, 3, normalizer_fn=tf.layers.batch_normalization)
contrib_normal = tf.contrib.layers.batch_norm(
    x, decay=0.5, is_training=training, updates_collections=None, scale=True, scope="bn")
dense_layer = tf.layers.Dense(3, use_bias=False, name="class")
twice = [dense_layer(flat), dense_layer(flat)]
separable = tf.layers.separable_conv2d(x, 4, 3, name="separable")
cell = tf.nn.rnn_cell.MultiRNNCell([tf.contrib.rnn.BasicLSTMCell(5), tf.nn.rnn_cell.GRUCell(5)])
unrolled, _ = tf.nn.dynamic_rnn(cell, x[:, 0], dtype=tf.float32)
with tf.variable_scope("outer"):
    tf.layers.dense(flat, 1)
with tf.variable_scope("outer", reuse=True):
    tf.layers.dense(flat, 1)

moments = ["gamma", "beta", "moving_mean", "moving_variance"]
names = [variable.op.name for variable in tf.global_variables()]
assert names == [
    "dense/kernel", "dense/bias", "dense_1/kernel", "named/kernel", "named/bias", "deep/kernel", "deep/bias",
    "conv2d/kernel", "conv2d/bias", "conv2d_1/kernel", "conv2d_1/bias", "nchw/kernel", "nchw/bias",
    "conv1d/kernel", "conv1d/bias", "conv3d/kernel", "conv3d/bias", "conv2d_transpose/kernel", "conv2d_transpose/bias",
    *["batch_normalization/" + name for name in moments],
    *["batch_normalization_1/" + name for name in moments if name != "beta"],
    *["batch_normalization_2/" + name for name in moments if name != "gamma"],
    *["tested/" + name for name in moments],
    "fully_connected/weights", "fully_connected/biases", "linear/weights", "Conv/weights",
    *["Conv/batch_normalization/" + name for name in moments], *["bn/" + name for name in moments],
    "class/kernel", "separable/depthwise_kernel", "separable/pointwise_kernel", "separable/bias",
    *["rnn/multi_rnn_cell/cell_0/basic_lstm_cell/" + name for name in ("kernel", "bias")],
    *["rnn/multi_rnn_cell/cell_1/gru_cell/" + name
      for name in ("gates/kernel", "gates/bias", "candidate/kernel", "candidate/bias")],
    "outer/dense/kernel", "outer/dense/bias",
], names
untrained = {variable.op.name for variable in tf.global_variables()} - {v.op.name for v in tf.trainable_variables()}
assert untrained == {name for name in names if "moving" in name or name.startswith("named")}
updates = tf.get_collection(tf.GraphKeys.UPDATE_OPS)
assert len(updates) == 6
assert len(tf.losses.get_regularization_losses()) == 2
assert first.op.name == "dense/Relu" and conv.shape.as_list() == [None, 2, 4, 4]
assert upwards.shape.as_list() == [None, 13, 13, 2] and volume.shape.as_list() == [None, 5, 5, 2, 4]
for wrong in (
    lambda: tf.layers.dense(tf.placeholder(tf.float32, [None, None]), 2),
    lambda: tf.layers.dense(flat, 2, name="named"),
    lambda: tf.layers.conv2d(x, 2, (3, 3, 3)),
    lambda: tf.layers.conv2d(x, 2, 3, data_format="NHWC"),
    lambda: tf.contrib.layers.l2_regularizer(1),
):
    try:
        wrong()
    except ValueError:
        continue
    raise AssertionError("no ValueError")

with tf.Session() as session:
    session.run(tf.global_variables_initializer())
    weights = dict(zip(names, session.run(tf.global_variables())))

    def given(tensor, **more):
        return session.run(tensor, {x: images, **more})

    def close(tensor, expected):
        np.testing.assert_allclose(given(tensor), expected, rtol=1e-4, atol=1e-5)

    limit = np.sqrt(6 / (108 + 5))
    assert 0.8 * limit < np.abs(weights["dense/kernel"]).max() < limit, "Glorot's initializer"
    close(first, np.maximum(rows @ weights["dense/kernel"], 0))
    close(second, rows @ weights["dense_1/kernel"])
    close(named, np.stack([rows.sum(1)] * 2, 1))
    close(again, np.stack([rows.sum(1)] * 2, 1))
    close(deep, images @ weights["deep/kernel"])
    # as TensorFlow 1.15, a regularizer of the result gives the mean over the batch
    squares = [(weights["dense/kernel"] ** 2).sum(), ((images @ weights["deep/kernel"]) ** 2).sum() / len(images)]
    close(tf.stack(tf.losses.get_regularization_losses()), [0.05 * each for each in squares])

    def convolved(kernel, down=1, right=1):
        height, width = images.shape[1] - 2, images.shape[2] - 2
        sums = [[np.tensordot(images[:, i : i + 3, j : j + 3], kernel, 3) for j in range(0, width, right)]
                for i in range(0, height, down)]
        return np.array(sums).transpose(2, 0, 1, 3)

    close(conv, convolved(weights["conv2d/kernel"], down=2) + 1)
    close(same[:, 1:-1, 1:-1], np.maximum(convolved(weights["conv2d_1/kernel"]), 0))
    assert given(first_conv).shape == (4, 4, 4, 4) if tf.test.is_gpu_available() else True
    kernel = weights["conv1d/kernel"]
    close(line, np.stack([np.tensordot(images[:, 0, i : i + 3], kernel, 2) for i in range(4)], 1))
    close(volume[:, 0, 0, 0], np.tensordot(images[:, :2, :2, :2, None], weights["conv3d/kernel"], 4))
    # each pixel puts a kernel down
    put = np.zeros((4, 13, 13, 2), np.float32)
    for i in range(6):
        for j in range(6):
            put[:, 2 * i : 2 * i + 3, 2 * j : 2 * j + 3] += np.tensordot(
                images[:, i, j], weights["conv2d_transpose/kernel"], [[1], [3]])
    close(upwards, put)

    close(most, images.reshape(4, 3, 2, 3, 2, 3).max((2, 4)))
    close(mean, images.reshape(4, 2, 3, 2, 3, 3).mean((2, 4)))
    close(most1, images[:, 0].reshape(4, 3, 2, 3).max(2))
    close(mean3[:, 0, 0, 0, 0], images.mean((1, 2, 3)))
    close(kept, images)
    assert (given(dropped) == 1).all()
    ones = session.run(dropped, {training: True})
    assert set(ones.tolist()) == {0.0, 1.25} and 150 < (ones == 0).sum() < 250

    # testing uses the moving averages, here 0 and 1; training the batch's, and moves the averages a tenth of the way
    close(normal, rows / np.sqrt(1.001))
    close(tested_normal, images / np.sqrt(1.001))
    channels = images.mean((0, 1, 2)), images.var((0, 1, 2))
    normalized = (images - channels[0]) / np.sqrt(channels[1] + 0.001)
    close(plain_normal, normalized)
    at_training = session.run([normal, image_normal], {x: images, training: True})
    np.testing.assert_allclose(at_training[0], (rows - rows.mean(0)) / np.sqrt(rows.var(0) + 0.001), atol=1e-5)
    np.testing.assert_allclose(at_training[1], normalized, atol=1e-4)
    session.run(updates[:4], {x: images})
    moved = dict(zip(names, session.run(tf.global_variables())))
    assert not moved["batch_normalization/moving_mean"].any(), "no update outside training"
    session.run(updates[:4], {x: images, training: True})
    moved = dict(zip(names, session.run(tf.global_variables())))
    expected = {
        "batch_normalization/moving_mean": 0.1 * rows.mean(0),
        "batch_normalization/moving_variance": 0.9 + 0.1 * rows.var(0),
        "batch_normalization_1/moving_mean": 0.1 * channels[0],
        "batch_normalization_1/moving_variance": 0.9 + 0.1 * images.var((0, 1, 2), ddof=1),
    }
    for name, value in expected.items():
        np.testing.assert_allclose(moved[name], value, rtol=1e-4, atol=1e-5, err_msg=name)

    for each in twice:
        close(each, rows @ weights["class/kernel"])
    assert given(separable).shape == (4, 4, 4, 4) and given(unrolled).shape == (4, 6, 5)
    assert all(variable.dtype == tf.as_dtype("float32_ref") for variable in tf.global_variables())
    close(full, np.maximum(rows @ weights["fully_connected/weights"], 0))
    close(linear, rows @ weights["linear/weights"])
    close(contrib_conv[:, 1:-1, 1:-1], np.maximum(convolved(weights["Conv/weights"]), 0) / np.sqrt(1.001))
    close(contrib_normal, images / np.sqrt(1.001))
    np.testing.assert_allclose(session.run(contrib_normal, {x: images, training: True}), normalized, atol=1e-4)
    (moving_mean,) = [v for v in tf.global_variables() if v.op.name == "bn/moving_mean"]
    np.testing.assert_allclose(session.run(moving_mean), 0.5 * channels[0], atol=1e-5)
    xavier = tf.contrib.layers.xavier_initializer()([200, 100])
    he = tf.contrib.layers.variance_scaling_initializer()([200, 100])
    assert abs(session.run(xavier).std() - np.sqrt(2 / 300)) < 0.003
    assert abs(session.run(he).std() - np.sqrt(2 / 200)) < 0.003
print("fine")
"""


def test_layers_have_the_names_and_values_of_tensorflow_1(tmp_path):
    passes(tmp_path, LAYERS)


MNIST = """
import sys
import numpy as np
import tensorflow as tf
from tensorflow.examples.tutorials.mnist import input_data

mnist = input_data.read_data_sets(sys.argv[1], one_hot=True, validation_size=4, seed=3)
assert [part.num_examples for part in mnist] == [16, 4, 5]
assert mnist.train.images.shape == (16, 784) and mnist.train.images.dtype == np.float32
assert mnist.test.images.max() == 1.0 and mnist.test.labels.shape == (5, 10)
assert mnist.validation.labels.argmax(1).tolist() == [0, 1, 2, 3]
seen = []
for _ in range(4):
    images, labels = mnist.train.next_batch(6)
    assert images.shape == (6, 784) and (images[:, 0] * 255).round().tolist() == labels.argmax(1).tolist()
    seen += labels.argmax(1).tolist()
assert mnist.train.epochs_completed == 1
assert sorted(seen[:16]) == sorted(i % 10 for i in range(4, 20)) != seen[:16]
plain = input_data.read_data_sets(sys.argv[1], reshape=False, dtype=tf.uint8, validation_size=0).train
images, labels = plain.next_batch(20, shuffle=False)
assert images.shape == (20, 28, 28, 1) and images.dtype == np.uint8 and labels.tolist() == [*range(10)] * 2
for folder, kind, text in ((sys.argv[1] + "/none", FileNotFoundError, "downloads"), (sys.argv[2], ValueError, "IDX")):
    try:
        input_data.read_data_sets(folder)
    except kind as error:
        assert text in str(error), error
    else:
        raise AssertionError(folder)
print("fine")
"""


def test_mnist_from_files(tmp_path):
    def write(path: Path, elements: np.ndarray) -> None:
        header = bytes((0, 0, 8, elements.ndim)) + np.array(elements.shape, ">u4").tobytes()
        raw = header + elements.astype(np.uint8).tobytes()
        path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)

    right, wrong = tmp_path / "right", tmp_path / "wrong"
    for folder in (right, wrong):
        folder.mkdir()
        for name, count in (("train", 20), ("t10k", 5)):
            labels = np.arange(count) % 10
            images = np.full((count, 28, 28), 255)
            images[:, 0, 0] = labels
            write(folder / f"{name}-images-idx3-ubyte.gz", images)
            write(folder / f"{name}-labels-idx1-ubyte", labels if folder == right else images)
    passes(tmp_path, MNIST, str(right), str(wrong))


COMMAND = """
import os
import sys
import neighbour
assert __name__ == "__main__" and sys.argv[1:] == ["--name", "a b", "-m"] and sys.modules["__main__"].sys is sys
assert os.path.samefile(sys.path[0], os.path.dirname(__file__))

def main(argv):
    print("main has", argv)
    return 7

def fail():
    raise neighbour.OwnError("on purpose")

if os.environ["HOW"] == "run":
    neighbour.tf.app.run(argv=["x", "y"])
fail()
"""


def test_command(tmp_path, monkeypatch):
    (tmp_path / "neighbour.py").write_text(
        "import tensorflow as tf\ntf.placeholder(tf.float32)\nclass OwnError(Exception): pass\n"
    )
    arguments = ["--name", "a b", "-m"]
    monkeypatch.setenv("HOW", "run")
    finished = start(tmp_path, COMMAND, *arguments)
    assert finished.returncode == 7
    assert "main has ['x', 'y']" in finished.output

    monkeypatch.setenv("HOW", "fail")
    monkeypatch.chdir(tmp_path)
    as_module = run_command([sys.executable, "-m", "dl_comm.tf1", "-m", "script", *arguments], 60, QUIET)
    for finished in (start(tmp_path, COMMAND, *arguments), as_module):
        assert finished.returncode == 1
        trace = finished.output[finished.output.index("Traceback") :]
        assert trace.rstrip().endswith("OwnError: on purpose")
        assert "runpy" not in trace
        assert "tf1" not in trace
        assert trace.count("script.py") == 2

    finished = start(tmp_path, "what is this?")
    assert finished.returncode == 1
    assert "SyntaxError" in finished.output
    assert "Traceback" not in finished.output


@pytest.mark.parametrize(
    ("arguments", "returncode", "text"),
    [
        ([], 2, "usage: python -m dl_comm.tf1 SCRIPT"),
        (["-m"], 2, "usage:"),
        (["--help"], 0, "usage:"),
        (["no_such_script.py"], 2, "no_such_script.py does not exist"),
    ],
)
def test_command_line_without_a_script(arguments, returncode, text):
    finished = run_command([sys.executable, "-m", "dl_comm.tf1", *arguments], 60)
    assert finished.returncode == returncode
    assert text in finished.output
    assert "Traceback" not in finished.output


QUEUES = """
import os
import sys
from functools import reduce
import numpy as np
import tensorflow as tf
import dl_comm as mc

folder = sys.argv[1]
records = os.path.join(folder, f"{os.getpid()}.tfrecord")
rng = np.random.RandomState(1)
with tf.python_io.TFRecordWriter(records) as writer:
    for _ in range(16):
        volume = rng.rand(4, 4, 4).astype(np.float32)
        feature = {name: tf.train.Feature(bytes_list=tf.train.BytesList(value=[array.tobytes()]))
                   for name, array in (("data", volume), ("label", volume.mean(keepdims=True)))}
        writer.write(tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString())

def read(shuffle):
    queue = tf.train.string_input_producer([records], num_epochs=None, shuffle=shuffle)
    _, example = tf.TFRecordReader().read(queue)
    parsed = tf.parse_single_example(
        example, features={"data": tf.FixedLenFeature([], tf.string), "label": tf.FixedLenFeature([], tf.string)})
    volume = tf.reshape(tf.decode_raw(parsed["data"], tf.float32), [4, 4, 4])
    volume /= (tf.reduce_sum(volume) / 4**3 + 0.)
    label = tf.reshape(tf.decode_raw(parsed["label"], tf.float32), [1])
    return tf.train.shuffle_batch(
        [tf.expand_dims(volume, axis=3), label], batch_size=4, num_threads=2, capacity=32, min_after_dequeue=8)

def net(volumes, keep_prob, training, reuse):
    kernel = tf.get_variable("w1", shape=[3, 3, 3, 1, 2], initializer=tf.contrib.layers.xavier_initializer())
    with tf.name_scope("conv1"):
        hidden = tf.nn.conv3d(volumes, kernel, strides=[1, 1, 1, 1, 1], padding="VALID") + bias
        hidden = tf.contrib.layers.batch_norm(hidden, is_training=training, decay=0.9, scope="bn1", reuse=reuse)
        hidden = tf.nn.avg_pool3d(hidden, ksize=[1, 2, 2, 2, 1], strides=[1, 2, 2, 2, 1], padding="VALID")
    flat = tf.nn.dropout(tf.reshape(hidden, [-1, 2]), keep_prob)
    return tf.matmul(flat, tf.get_variable("w2", shape=[2, 1]))

volumes, labels = read(True)
bias = tf.Variable(tf.constant(0.1, shape=[2]))
with tf.variable_scope("net"):
    loss = tf.reduce_mean(tf.abs(labels - net(volumes, 0.8, True, None)))
with tf.variable_scope("net", reuse=True):
    test_loss = tf.reduce_mean(tf.abs(labels - net(volumes, 1, False, True)))
with tf.control_dependencies(tf.get_collection(tf.GraphKeys.UPDATE_OPS)):
    optimizer = tf.train.AdamOptimizer(0.01, beta2=0.95)
    grads_and_vars = optimizer.compute_gradients(loss)
    grads = mc.gradients([gv[0] for gv in grads_and_vars], 0)
    train_step = optimizer.apply_gradients([(g, v) for (_, v), g in zip(grads_and_vars, grads)])
saver = tf.train.Saver()

# part of a reference variable is assigned, and the whole is averaged
part = tf.Variable(tf.zeros([2 * 3]), trainable=False)
totsize = sum([reduce(lambda x, y: x * y, v.get_shape().as_list()) for v in tf.trainable_variables()])
mc.init(2, 1, totsize, "tensorflow")
rank = mc.get_rank()
with tf.control_dependencies([tf.assign(part[2 * rank : 2 * rank + 2], [1.0, 2.0])]):
    whole = mc.gradients([part], 0)[0] * mc.get_nranks()
new_vars = mc.broadcast(tf.trainable_variables(), 0)
bcast = tf.group(*[tf.assign(v, new_vars[k]) for k, v in enumerate(tf.trainable_variables())])

with tf.Session(config=tf.ConfigProto(inter_op_parallelism_threads=2)) as sess:
    sess.run(tf.global_variables_initializer())
    sess.run(tf.local_variables_initializer())
    sess.run(bcast)
    coord = tf.train.Coordinator()
    threads = tf.train.start_queue_runners(coord=coord)
    for step in range(10):
        _, value = sess.run([train_step, loss])
    assert mc.check_buffers_match(sess.run(tf.trainable_variables()), 1) == 0
    total = np.array([sess.run(test_loss)], dtype=np.float32)
    mc.average(total)
    assert np.isfinite(total)
    summed = sess.run(whole)
    assert summed.tolist() == [1.0, 2.0] * mc.get_nranks() + [0.0] * (6 - 2 * mc.get_nranks()), summed
    if rank == 0:
        saver.save(sess=sess, save_path=os.path.join(folder, "best_validation"))
    coord.request_stop()
    coord.join(threads)
    mc.finalize()
mc.finalize()
print("fine")
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_queues_sessions_and_an_early_finalize(tmp_path, ranks):
    passes(tmp_path, QUEUES, str(tmp_path), ranks=ranks)
    assert (tmp_path / "best_validation.index").exists()


def test_importing_the_package_imports_no_tensorflow():
    check = "import sys, dl_comm.tf1; assert 'tensorflow' not in sys.modules"
    assert run_command([sys.executable, "-c", check], 60).returncode == 0
