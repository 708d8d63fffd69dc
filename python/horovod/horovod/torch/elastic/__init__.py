"""Elastic training: not yet. The names can be imported; their use raises NotImplementedError."""

from horovod.common.elastic import ObjectState, run
from horovod.torch.elastic.sampler import ElasticSampler
from horovod.torch.elastic.state import TorchState

__all__ = ["ElasticSampler", "ObjectState", "TorchState", "run"]
