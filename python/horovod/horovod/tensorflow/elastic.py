"""Elastic training with TensorFlow: not yet. The names can be imported; their use raises NotImplementedError."""

from horovod.common.elastic import NotYet, ObjectState, run

__all__ = ["ObjectState", "TensorFlowKerasState", "TensorFlowState", "run"]

TensorFlowState = TensorFlowKerasState = NotYet
