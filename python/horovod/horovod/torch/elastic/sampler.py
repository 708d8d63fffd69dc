"""The sampler of an elastic training with torch: not yet."""

from __future__ import annotations

from horovod.common.elastic import _NotYet


class ElasticSampler(_NotYet):
    """Cuts a data set into shards of the ranks, and remembers what was used. Not yet."""
