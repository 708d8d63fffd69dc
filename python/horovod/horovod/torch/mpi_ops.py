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

from horovod.common import basics as _shared
from horovod.common._calls import poll, synchronize
from horovod.common.basics import HorovodBasics, barrier
from horovod.common.exceptions import HorovodInternalError
from horovod.common.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
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
    handle_average_backwards_compatibility,
)
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
init, shutdown, is_initialized = _basics.init, _basics.shutdown, _basics.is_initialized
start_timeline, stop_timeline = _basics.start_timeline, _basics.stop_timeline
size, local_size, cross_size = _basics.size, _basics.local_size, _basics.cross_size
rank, local_rank, cross_rank = _basics.rank, _basics.local_rank, _basics.cross_rank
is_homogeneous = _basics.is_homogeneous
mpi_threads_supported, mpi_enabled, mpi_built = _basics.mpi_threads_supported, _basics.mpi_enabled, _basics.mpi_built
gloo_enabled, gloo_built, nccl_built = _basics.gloo_enabled, _basics.gloo_built, _basics.nccl_built
ddl_built, ccl_built, cuda_built, rocm_built = (
    _basics.ddl_built,
    _basics.ccl_built,
    _basics.cuda_built,
    _basics.rocm_built,
)

__all__ = [
    "Adasum",
    "Average",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
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
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "handle_average_backwards_compatibility",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
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
