"""Horovod's API on dl_comm. ``import horovod.torch as hvd``; ``docs/horovod.md`` says what differs.

    import horovod.torch as hvd

    hvd.init()
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

Imports no framework and does not load the core. Thread rule: any thread.
"""

from horovod._version import __version__
from horovod.runner import run

__all__ = ["__version__", "run"]
