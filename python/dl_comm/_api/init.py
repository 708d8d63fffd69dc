"""``init``, which also loads what a framework needs.

Thread rule: any thread; collective.
"""

from __future__ import annotations

from dl_comm._api.binding import binding_named
from dl_comm._base.checks import checked_int, checked_threads
from dl_comm._base.errors import ArgumentError
from dl_comm._job import start
from dl_comm._job.gpus import pin

_BINDINGS = {None: None, "numpy": None, "tensorflow": "tensorflow", "keras": "tensorflow", "torch": "torch"}


def init(
    nthread_per_team: int | None = None,
    nteams: int = 1,
    msglen: int = 0,
    framework: str | None = None,
    *,
    threads: int | None = None,
    pin_gpu: bool = False,
    rank: int | None = None,
    size: int | None = None,
    address: str | None = None,
    key: str | None = None,
) -> None:
    """Starts dl_comm. Collective; all arguments but ``rank`` are the same on all ranks.

    Sets those of torchrun's variables that are missing: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and
    MASTER_PORT.

    Args:
        nthread_per_team: The plugin's name of ``threads``.
        nteams: Teams to create, numbered from 0. Calls on different teams run concurrently.
        msglen: Number of elements per allreduce. A hint; any length works.
        framework: ``"tensorflow"``, ``"keras"`` or ``"torch"`` loads that framework's op library now (and builds it if
            needed) instead of at its first use; None and ``"numpy"`` need none.
        threads: Threads of each team, at least 1; None: ``DL_COMM_DEFAULT_NTHREADS``, else 2.
        pin_gpu: Assigns one GPU to each rank: local rank modulo GPU count. If ranks share GPUs, rank 0 of the host logs
            it. Call it before anything uses CUDA: the process then sees only that GPU, as GPU 0. (If torch has already
            used CUDA, sets torch's current device instead.) Does nothing without GPUs.
        rank: With ``size``, ``address`` and ``key``: those of ``init_mpi``, if no launcher gives them.
        size: See ``init_mpi``.
        address: See ``init_mpi``.
        key: See ``init_mpi``.

    Raises:
        ArgumentError: An argument is out of range.
        MismatchError: The ranks passed different team settings.
        StateError: ``pin_gpu`` after TensorFlow has used its GPUs.
        TimeoutError: A rank missed the deadline. (If MPI itself waits for it, the process exits with status 1.)
        CommError: MPI, memory or threads are not available, or a rank has invalid settings. All ranks raise it.

    A second call creates missing teams; those that exist keep their threads, and rank 0 prints a line if
    ``threads`` asks for others. In a helper of a rank (see ``init_mpi``) it does nothing.
    """
    if framework is not None and (not isinstance(framework, str) or framework not in _BINDINGS):
        raise ArgumentError(f"invalid framework: {framework!r} (expected one of {', '.join(map(repr, _BINDINGS))})")
    checked_int("msglen", msglen, 0, 2**63)
    prepare = pin if pin_gpu else lambda: None
    count = checked_threads(threads, nthread_per_team)
    is_rank = start.start(count, nteams, prepare, rank=rank, size=size, address=address, key=key)
    binding = _BINDINGS[framework]
    if binding is not None and is_rank:
        binding_named(binding)
