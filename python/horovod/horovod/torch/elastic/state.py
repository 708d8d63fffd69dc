"""The elastic state of a training with torch: not yet."""

from __future__ import annotations

from horovod.common.elastic import ObjectState, _NotYet, not_yet


class TorchState(ObjectState):
    """The state of models and optimizers. Not yet."""


class StateHandler(_NotYet):
    """Keeps the state of one object. Not yet."""


class ModelStateHandler(StateHandler):
    """Of a model. Not yet."""


class OptimizerStateHandler(StateHandler):
    """Of an optimizer. Not yet."""


class SamplerStateHandler(StateHandler):
    """Of a sampler. Not yet."""


get_handler_registry = set_handler_registry = not_yet
