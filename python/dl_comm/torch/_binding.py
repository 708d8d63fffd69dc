"""The functions for torch tensors that `dl_comm` passes its calls to, by their names there."""

from __future__ import annotations

from dl_comm.torch._collectives import all_gather, all_to_all, allreduce, gather, reduce, reduce_scatter, scatter
from dl_comm.torch._functions import average, broadcast, gradients
from dl_comm.torch._messages import recv, send, sendrecv
from dl_comm.torch._server import TensorKind as server_kind  # noqa: N813 - a function to its callers

ARE_IMMUTABLE = False
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
    "server_kind",
]
