"""Horovod for MXNet: refused."""

raise ImportError("dl_comm's horovod has no horovod.mxnet: MXNet is retired")
