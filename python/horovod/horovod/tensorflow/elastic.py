"""Elastic training with TensorFlow: not yet. The names can be imported; their use raises NotImplementedError."""

from __future__ import annotations

from horovod.common.elastic import ObjectState, run

__all__ = ["ObjectState", "TensorFlowKerasState", "TensorFlowState", "run"]


class TensorFlowState(ObjectState):
    """The state of variables. Not yet."""


class TensorFlowKerasState(ObjectState):
    """The state of a Keras model and its optimizer. Not yet."""
