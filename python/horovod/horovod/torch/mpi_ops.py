"""Horovod's collectives on torch tensors.

    handle = hvd.allreduce_async(gradient, name="layer1", op=hvd.Sum)
    rows = hvd.allgather(torch.ones(hvd.rank() + 1, 3))  # (sum of all ranks' rows, 3), on every rank
    total = hvd.synchronize(handle)

Of all: tensors are contiguous, of any shape, on the CPU or a GPU. The ranks of ``process_set`` must all make the call;
``name`` is what they match, and is numbered if it is None. The forms that end in ``_`` write into their tensor and
return it. ``*_async`` forms return a handle for ``poll`` and ``synchronize``; nobody else may use the tensors until
then. ``grouped_*`` take a list of tensors and return a list. The blocking forms that return new tensors are
differentiable; backward is collective, too.

Reductions take integers of 8, 32 and 64 bits and floating-point numbers, also bfloat16; the others every type.
``prescale_factor`` multiplies the input and ``postscale_factor`` the result: integers in float64, then truncated, and
types of 16 bits on the CPU in float32.

Raises, of all:
    ValueError: At the call: a tensor has a wrong type or is not contiguous, the name is in use, this rank is not in the
        process set, an argument is invalid, or Horovod is not initialized.
    HorovodInternalError: From the blocking form or ``synchronize``: the ranks differ, one was lost, or the deadline has
        passed. On every rank; the next call works, unless a rank was lost.

Thread rule: any thread may make calls, poll and synchronize. No function holds the GIL while it waits.
"""

from __future__ import annotations

from horovod.common import _names
from horovod.common import basics as _shared
from horovod.common._calls import poll, synchronize
from horovod.common._names import *  # noqa: F403 (its __all__)
from horovod.common.basics import HorovodBasics, barrier
from horovod.common.exceptions import HorovodInternalError
from horovod.torch._allgather import allgather, allgather_async, grouped_allgather, grouped_allgather_async
from horovod.torch._allreduce import (
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
)
from horovod.torch._allreduce import handle_average_backwards_compatibility as handle_average_backwards_compatibility
from horovod.torch._alltoall import alltoall, alltoall_async
from horovod.torch._broadcast import broadcast, broadcast_, broadcast_async, broadcast_async_
from horovod.torch._forms import Adasum, Average, Max, Min, Product, Sum
from horovod.torch._reducescatter import (
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
)
from horovod.torch._sparse import sparse_allreduce_async

_basics = HorovodBasics(__file__, "torch")
is_homogeneous = _basics.is_homogeneous

__all__ = [
    *_names.__all__,
    "Adasum",
    "Average",
    "HorovodInternalError",
    "Max",
    "Min",
    "Product",
    "Sum",
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "join",
    "poll",
    "reducescatter",
    "reducescatter_async",
    "sparse_allreduce_async",
    "synchronize",
]


def join(device: int = -1) -> int:
    """Contributes zeros to the other ranks' sums and averages until all ranks have joined. Collective.

    For ranks with less data than others. Until then the other ranks' minima, maxima, products, Adasum, and other
    collectives raise HorovodInternalError.

    Args:
        device: Not used.

    Returns:
        The rank that joined last.
    """
    return _shared.join()
