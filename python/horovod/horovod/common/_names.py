"""The names that every binding has: operators, start and end, ranks, build queries, timeline, process sets.

A binding takes all of them (``import *``, and ``__all__`` here), so that there is one list.

Thread rule: that of `basics`.
"""

from __future__ import annotations

from horovod.common.basics import HorovodBasics
from horovod.common.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set

__all__ = [*(name for name in vars(HorovodBasics) if not name.startswith("_"))]
__all__ += ["ProcessSet", "add_process_set", "global_process_set", "remove_process_set"]

_basics = HorovodBasics()
Average, Sum, Adasum, Min, Max, Product = range(6)
init, shutdown, is_initialized = _basics.init, _basics.shutdown, _basics.is_initialized
start_timeline, stop_timeline = _basics.start_timeline, _basics.stop_timeline
size, local_size, cross_size = _basics.size, _basics.local_size, _basics.cross_size
rank, local_rank, cross_rank = _basics.rank, _basics.local_rank, _basics.cross_rank
is_homogeneous, mpi_threads_supported = _basics.is_homogeneous, _basics.mpi_threads_supported
mpi_enabled, mpi_built, cuda_built = _basics.mpi_enabled, _basics.mpi_built, _basics.cuda_built
gloo_enabled, gloo_built, nccl_built = _basics.gloo_enabled, _basics.gloo_built, _basics.nccl_built
ddl_built, ccl_built, rocm_built = _basics.ddl_built, _basics.ccl_built, _basics.rocm_built
