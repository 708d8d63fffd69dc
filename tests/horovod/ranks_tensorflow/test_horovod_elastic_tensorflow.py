"""The state of elastic training with TensorFlow, eagerly and in a TF1 graph."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import horovod.tensorflow as hvd


@pytest.mark.parametrize("graph", [False, True])
def test_variables_are_those_of_rank_0_and_return_to_what_was_saved(rank: int, graph: bool) -> None:
    with ExitStack() as within:
        session: Any = None
        if graph:
            within.enter_context(tf.Graph().as_default())
            session = within.enter_context(tf.compat.v1.Session())
        variables = [tf.Variable([1.0 + rank, 2.0]), tf.Variable(rank, dtype=tf.int64)]
        if graph:
            session.run(tf.compat.v1.global_variables_initializer())

        def assign(value: int) -> None:
            for variable in variables:
                given = np.full(variable.shape, value, variable.dtype.as_numpy_dtype)
                variable.load(given, session) if graph else variable.assign(given)

        def values() -> list[Any]:
            found = session.run(variables) if graph else [each.numpy() for each in variables]
            return [each.tolist() for each in found]

        state = hvd.elastic.TensorFlowState(None if graph else variables, epoch=rank)
        state.sync()
        assert values() == [[1.0, 2.0], 0]
        assert state.epoch == 0
        assign(5)
        state.epoch = 5
        state.restore()
        assert values() == [[1.0, 2.0], 0]
        assert state.epoch == 0
        assign(6)
        state.epoch = 6
        state.commit()
        assign(7)
        state.restore()
        assert values() == [[6.0, 6.0], 6]
        assert state.epoch == 6


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="variables: there are none"):
        hvd.elastic.TensorFlowState()
    with tf.Graph().as_default():
        variable = tf.Variable(1.0)
        with pytest.raises(ValueError, match="session"):
            hvd.elastic.TensorFlowState([variable])
