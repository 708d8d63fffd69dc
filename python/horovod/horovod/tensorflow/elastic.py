"""Elastic training with TensorFlow: its states work, ``run`` does not yet.

    state = hvd.elastic.TensorFlowKerasState(model, optimizer, epoch=0)
    state.sync()
    state.commit()

Thread rule: the training thread; ``sync`` is collective.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from horovod import _keras
from horovod.common.elastic import ObjectState, VariablesState, run
from horovod.tensorflow.functions import broadcast_variables

__all__ = ["ObjectState", "TensorFlowKerasState", "TensorFlowState", "run"]


class TensorFlowState(VariablesState):
    """Variables, and objects as attributes.

    Args:
        variables: The variables; in a TF1 graph, by default, all global ones.
        session: That of a TF1 graph; by default the default one.
        kwargs: Objects, as of ``ObjectState``.

    Raises:
        ValueError: No variables, or a graph without a session.
    """

    def __init__(self, variables: Iterable[Any] | None = None, session: Any = None, **kwargs: Any) -> None:
        self.variables = list(tf.compat.v1.global_variables() if variables is None else variables)
        self.session = session or (None if tf.executing_eagerly() else tf.compat.v1.get_default_session())
        if not self.variables:
            raise ValueError("variables: there are none")
        if self.session is None and not tf.executing_eagerly():
            raise ValueError("session: a graph needs one")
        if self.session is None:
            super().__init__(lambda: self.variables, lambda: broadcast_variables(self.variables, 0), None, **kwargs)
        else:
            operation = broadcast_variables(self.variables, 0)
            run = self.session.run
            super().__init__(lambda: self.variables, lambda: run(operation), lambda: self.session, **kwargs)


class TensorFlowKerasState(_keras.KerasState):
    """As `horovod.keras.elastic.KerasState`.

    Args:
        model: A built model.
        optimizer: Its optimizer; by default the one that it was compiled with.
        backend: Not used.
        kwargs: Objects, as of ``ObjectState``.
    """

    def __init__(self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any) -> None:
        super().__init__(model, optimizer, **kwargs)
        self.backend = backend
