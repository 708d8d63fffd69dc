"""The elastic state of a training with torch: not yet."""

from horovod.common.elastic import NotYet, not_yet

TorchState = StateHandler = ModelStateHandler = OptimizerStateHandler = SamplerStateHandler = NotYet
get_handler_registry = set_handler_registry = not_yet
