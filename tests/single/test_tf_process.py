"""TensorFlow in processes of their own: before init, one thread only, deadlines, and the porting guide's script."""

from __future__ import annotations

from pathlib import Path

import pytest

from imported import python
from installed import needs
from launch import launch

needs("tensorflow")
pytestmark = pytest.mark.xdist_group("tensorflow")


def run(folder: Path, ranks: int, script: str, *arguments: str, **environment: str) -> str:
    """Run `script` on `ranks` ranks, and give what it printed; fail when a rank failed."""
    path = folder / "script.py"
    path.write_text(script)
    environment.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    result = launch(ranks, [*python("tensorflow"), str(path), *arguments], timeout=120, env=environment)
    assert result.returncode == 0, result.output
    return str(result.output)


BEFORE_INIT = """
import tensorflow as tf
import dl_comm as mc
import dl_comm.tensorflow as dt

def refused(call):
    try:
        call()
    except (mc.StateError, tf.errors.FailedPreconditionError) as error:
        assert isinstance(mc.error_of(error), mc.StateError), error
        return True
    return False

x = tf.constant([2.0])
assert refused(lambda: mc.gradients([x], 0))
assert refused(lambda: mc.broadcast([x], 0))
with tf.Graph().as_default():
    mean = mc.gradients([tf.constant([2.0])], 0)[0]
    session = tf.compat.v1.Session()
step = tf.function(lambda value: dt.gradients([value])[0])
step.get_concrete_function(tf.TensorSpec([1]))
assert refused(lambda: session.run(mean))
for call in (dt.allreduce, dt.reduce, dt.all_gather):
    assert refused(lambda: call(x))
mc.init()
assert session.run(mean) == [2.0]
assert step(x).numpy() == [2.0]
assert mc.gradients([x], 0)[0].numpy() == [2.0]
mc.finalize()
mc.finalize()
assert refused(lambda: session.run(mean))
assert refused(lambda: step(x))
print("fine")
"""


def test_graphs_may_be_built_before_init_but_not_run(tmp_path):
    assert "fine" in run(tmp_path, 1, BEFORE_INIT)


KERNELS = """
from tensorflow.python.framework.kernels import get_registered_kernels_for_op
from dl_comm.tensorflow import _ops

_ops.library()
collectives = ("DlCommCollective", "DlCommBlockCollective")
for op in ("DlCommGradients", "DlCommBroadcast", "DlCommCoreId", "DlCommGroup", *collectives):
    kernels = {kernel.device_type: kernel for kernel in get_registered_kernels_for_op(op).kernel}
    assert set(kernels) == {"CPU", "GPU"}, (op, kernels)
    # One list has all types, and none of its tensors has to come to the host.
    assert not kernels["GPU"].constraint, kernels["GPU"]
    on_host = {"DlCommCoreId": ["core_id"], "DlCommGroup": ["rank", "size"], "DlCommBlockCollective": ["counts"]}
    assert list(kernels["GPU"].host_memory_arg) == on_host.get(op, []), kernels["GPU"]
print("fine")
"""


def test_every_op_has_a_kernel_for_gpus(tmp_path):
    assert "fine" in run(tmp_path, 1, KERNELS)


PLACES = """
import sys
import tensorflow as tf
import dl_comm as mc
import dl_comm.tensorflow as dt
from dl_comm.tensorflow import _ops

assert not _ops._has_gpus()  # as on every machine without
_ops._has_gpus = lambda: True
built_with = sys.argv[1]
tf.test.is_built_with_cuda = lambda: built_with == "cuda"
mc.init(1, 2)

def places():
    with tf.Graph().as_default():
        x = tf.constant([2.0])
        made = mc.gradients([x], 0), mc.gradients([x], 1), mc.gradients([[x], [x]], 1)[0], mc.broadcast([x], 0)
        return [tensors[0].op.device for tensors in made]

def collectives():
    with tf.Graph().as_default():
        x = tf.constant([2.0])
        made = [dt.allreduce(x), *dt.broadcast([x], group=mc.Group()), dt.reduce(x), dt.allreduce(x, "adasum")]
        return [tensor.op.device for tensor in [*made, dt.all_gather(x), dt.reduce_scatter(x)]]

host = "/device:CPU:0"
assert collectives() == (["", "", "", host, "", ""] if built_with == "cuda" else [host] * 6), collectives()
assert places() == (["", "", host, ""] if built_with == "cuda" else [host] * 4), places()
mc.config_team(0, 0, 2, 10, 0, 0)  # 8 of 10 calls do not block
assert places() == ([host, "", host, ""] if built_with == "cuda" else [host] * 4), places()
x = tf.constant([2.0])
assert sum(float(mc.gradients([x], 0)[0][0]) for _ in range(11)) == 22
assert places() == (["", "", host, ""] if built_with == "cuda" else [host] * 4), places()
mc.finalize()
print("fine")
"""


@pytest.mark.parametrize("built_with", ["cuda", pytest.param("rocm", marks=pytest.mark.heavy)])
def test_beside_gpus_only_what_the_core_takes_there_is_left_to_tensorflow(tmp_path, built_with):
    assert "fine" in run(tmp_path, 1, PLACES, built_with)


ONE_THREAD = """
import os, sys, time
import numpy as np
import tensorflow
import dl_comm as mc
from dl_comm.tensorflow import _ops

tf = tensorflow.compat.v1
tf.disable_eager_execution()
mc.init()
rank, size = mc.get_rank(), mc.get_nranks()
flag = sys.argv[1]

x = tf.placeholder(tf.float32, [1000])
# A session may start them in any order: they are all the same call.
means = [_ops.run("dl_comm_gradients", [x], _ops.settings("same", "", 0, 1, 0, 0, 1, 0, -1))[0] for _ in range(64)]
late = x
for _ in range(200):
    late = tf.identity(late)
mark = tf.numpy_function(lambda _: open(flag, "w").close() or np.float32(0), [late], tf.float32)
config = tf.ConfigProto(inter_op_parallelism_threads=1, intra_op_parallelism_threads=1, use_per_session_threads=True)
with tf.Session(config=config) as session:
    if rank != 0:
        # Rank 0's 64 calls now wait for this rank. Its only thread must be free to go on with the rest of the graph.
        deadline = time.monotonic() + 60
        while not os.path.exists(flag):
            assert time.monotonic() < deadline, "rank 0 holds its thread while it waits"
            time.sleep(0.01)
    results = session.run([*means, mark], {x: np.full(1000, float(rank))})
for result in results[:-1]:
    np.testing.assert_allclose(result, np.full(1000, (size - 1) / 2), rtol=1e-6)
print("fine")
"""


def test_waiting_ops_hold_no_thread(tmp_path):
    assert run(tmp_path, 2, ONE_THREAD, str(tmp_path / "flag")).count("fine") == 2


ONE_THREAD_EAGER = """
import tensorflow as tf
tf.config.threading.set_inter_op_parallelism_threads(1)
tf.config.threading.set_intra_op_parallelism_threads(1)
import dl_comm as mc
import dl_comm.tensorflow as dt
mc.init()
rank, size = mc.get_rank(), mc.get_nranks()

@tf.function
def step(x):
    return [dt.gradients([x + i])[0] for i in range(64)]

for _ in range(5):
    for i, mean in enumerate(step(tf.fill([100], float(rank)))):
        assert abs(float(mean[0]) - ((size - 1) / 2 + i)) < 1e-4
print("fine")
"""


def test_a_function_with_one_thread(tmp_path):
    assert run(tmp_path, 2, ONE_THREAD_EAGER).count("fine") == 2


INTERRUPTED = """
import os, signal, sys, threading, time
import tensorflow as tf
import dl_comm as mc
import dl_comm.tensorflow as dt
mc.init()
call = getattr(dt, sys.argv[1])
call([tf.ones(3)])
if mc.get_rank() == 0:
    threading.Timer(1, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    try:
        call([tf.ones(3)])
    except KeyboardInterrupt:
        print("interrupted", flush=True)
else:
    time.sleep(3)
"""


@pytest.mark.parametrize("call", ["allreduce", "gradients", "broadcast"])
def test_an_eager_call_ends_with_ctrl_c(tmp_path, call):
    path = tmp_path / "script.py"
    path.write_text(INTERRUPTED)
    result = launch(2, [*python("tensorflow"), str(path), call], timeout=60, env={"TF_CPP_MIN_LOG_LEVEL": "3"})
    assert "interrupted" in result.output, result.output


DEADLINE = """
import tensorflow as tf
import dl_comm as mc
mc.init()
if mc.get_rank() == 0:
    try:
        mc.gradients([tf.constant(1.0)], 0, timeout=2)
    except mc.TimeoutError:
        print("in time")
else:
    import time
    time.sleep(5)
mc.finalize()
"""


def test_a_deadline_in_eager_mode(tmp_path):
    assert "in time" in run(tmp_path, 2, DEADLINE)


LOST_PEER = """
import time
import tensorflow
import dl_comm as mc
from dl_comm import _dl_comm
from dl_comm.tensorflow import BroadcastHook

tf = tensorflow.compat.v1
tf.disable_eager_execution()
mc.init()
tf.get_variable("v", [3])
if mc.get_rank() == 0:
    try:
        with tf.train.MonitoredTrainingSession(hooks=[BroadcastHook()]):
            pass
    except tf.errors.InternalError as error:
        assert isinstance(mc.error_of(error), mc.PeerLostError), error
        print("told", flush=True)
else:
    _dl_comm.abort("ValueError: on purpose")  # what an uncaught exception does
    time.sleep(5)
"""


def test_a_lost_peer_ends_a_monitored_session_instead_of_retrying(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(LOST_PEER)
    result = launch(2, [*python("tensorflow"), str(path)], timeout=60, env={"TF_CPP_MIN_LOG_LEVEL": "3"})
    assert "told" in result.output, result.output


PORTING_GUIDE = """
import math
import numpy as np
import tensorflow
import dl_comm as mc

tf = tensorflow.compat.v1
tf.disable_eager_execution()


class BcastTensors(tf.train.SessionRunHook):

  def __init__(self):
    self.bcast = None

  def begin(self):
    if not self.bcast:
      new_vars   = mc.broadcast(tf.trainable_variables(),0)
      self.bcast = tf.group(*[tf.assign(v,new_vars[k]) for k,v in enumerate(tf.trainable_variables())])

  def after_create_session(self, session, coord):
     session.run(self.bcast)


def main():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(60, 3)), rng.normal(size=(60, 1))
    features = tf.placeholder(tf.float32, [None, 3])
    targets = tf.placeholder(tf.float32, [None, 1])
    hidden = tf.get_variable("hidden", [3, 4])
    output = tf.get_variable("output", [4, 1])
    loss = tf.reduce_mean(tf.square(tf.tanh(features @ hidden) @ output - targets))

    totsize = sum([int(np.prod(v.shape)) for v in tf.trainable_variables()])
    mc.init(2, 1, totsize, "tensorflow")
    myrank     = mc.get_rank()
    numworkers = mc.get_nranks()

    global_step = tf.train.get_or_create_global_step()
    optimizer = tf.train.GradientDescentOptimizer(0.1)
    grads_and_vars = optimizer.compute_gradients(loss)
    grads     =  mc.gradients([gv[0] for gv in grads_and_vars], 0)
    gs_and_vs = [(g,v) for (_,v), g in zip(grads_and_vars, grads)]
    minimize_op = optimizer.apply_gradients(gs_and_vs, global_step)

    train_hooks = [BcastTensors()]
    with tf.train.MonitoredTrainingSession(hooks=train_hooks) as session:
        for step in range(10):
            session.run(minimize_op, {features: x[myrank::numworkers], targets: y[myrank::numworkers]})
        weights = session.run(tf.trainable_variables())
    assert mc.check_buffers_match(weights, 1) == 0
    mc.finalize()
    print("fine")


main()
"""


@pytest.mark.parametrize(
    "ranks", [pytest.param(1, marks=pytest.mark.heavy), pytest.param(2, marks=pytest.mark.heavy), 3]
)
def test_the_porting_guides_script(tmp_path, ranks):
    assert run(tmp_path, ranks, PORTING_GUIDE).count("fine") == ranks
