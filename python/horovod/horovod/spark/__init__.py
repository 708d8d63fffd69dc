"""Horovod on Spark: refused."""

raise ImportError("dl_comm's horovod has no horovod.spark: start ranks with horovodrun or horovod.run on the executors")
