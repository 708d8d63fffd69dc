"""Elastic training with torch: its state and sampler work, ``run`` does not yet."""

from horovod.common.elastic import ObjectState, run
from horovod.torch.elastic.sampler import ElasticSampler
from horovod.torch.elastic.state import TorchState

__all__ = ["ElasticSampler", "ObjectState", "TorchState", "run"]
