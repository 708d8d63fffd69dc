"""The functions for TensorFlow tensors that `dl_comm` passes its calls to, by their names there."""

from __future__ import annotations

from dl_comm.tensorflow import _derivatives  # noqa: F401 - registers the gradients
from dl_comm.tensorflow._collectives import all_gather, all_to_all, allreduce, gather, reduce, reduce_scatter, scatter
from dl_comm.tensorflow._messages import recv, send, sendrecv
from dl_comm.tensorflow._ops import average, broadcast, gradients

ARE_IMMUTABLE = True
"""Whether no call can write into a tensor."""

__all__ = [
    "ARE_IMMUTABLE",
    "all_gather",
    "all_to_all",
    "allreduce",
    "average",
    "broadcast",
    "gather",
    "gradients",
    "recv",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send",
    "sendrecv",
]
