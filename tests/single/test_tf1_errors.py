"""What a TF1 script prints when ranks fail or differ."""

from __future__ import annotations

import pytest

from installed import needs
from tf1_script import start

needs("tensorflow")
pytestmark = pytest.mark.xdist_group("tf1")

LEAVES = """
import tensorflow as tf
import dl_comm as mc
mc.init(2, 1, 1, "tensorflow")
if mc.get_rank() == 1:
    raise RuntimeError("on purpose")
mean = mc.gradients([tf.constant(1.0)], 0)[0]
with tf.Session() as session:
    session.run(mean)
"""


def test_an_exception_on_one_rank_ends_the_others(tmp_path):
    finished = start(tmp_path, LEAVES, ranks=2)
    assert not finished.timed_out
    assert finished.returncode != 0
    assert "PeerLostError: the program failed on rank 1" in finished.output, finished.output
    # In the traceback of the rank, and in the line of the other one.
    assert finished.output.count("RuntimeError: on purpose") == 2, finished.output
    assert "client/session.py" not in finished.output


DIFFERS = """
import tensorflow as tf
import dl_comm as mc
mc.init(2, 1, 1, "tensorflow")
values = tf.placeholder(tf.float32, [None])
mean = mc.gradients([values], 0)[0]
with tf.Session() as session:
    session.run(mean, {values: [1.0] * (3 + mc.get_rank())})
"""


def test_an_error_in_a_session_is_printed_once_and_short(tmp_path):
    finished = start(tmp_path, DIFFERS, ranks=2)
    assert finished.returncode != 0
    output = finished.output
    assert output.count("collective mismatch") == output.count("Traceback") in (1, 2), output
    # Python prints the type and the message apart, and the other rank may print between them.
    for text in ("InvalidArgumentError", 'script.py", line 8, in <module>', "script.py, line 6."):
        assert output.count(text) == output.count("Traceback"), output
    for text in ("client/session.py", "Original stack trace", "another exception", "runpy", "dl_comm/tf1"):
        assert text not in output
