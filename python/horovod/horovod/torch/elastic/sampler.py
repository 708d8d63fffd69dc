"""The sampler of an elastic training with torch: not yet."""

from horovod.common.elastic import NotYet as ElasticSampler

__all__ = ["ElasticSampler"]
