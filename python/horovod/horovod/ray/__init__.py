"""Horovod on Ray: refused."""

raise ImportError(
    "dl_comm's horovod has no horovod.ray: start a Ray actor for each rank, which calls "
    "dl_comm.init(rank=..., size=..., address=...) before hvd.init()"
)
