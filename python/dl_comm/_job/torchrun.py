"""Ranks of torchrun: its variables, and the store of its agent."""

from __future__ import annotations

import json
import os
import socket
import stat
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from dl_comm import _dl_comm
from dl_comm._base.errors import CommError

# Rank and number of ranks, by the variables of launchers that start MPI.
_PMI = ("PMI_RANK", "PMI_SIZE")
_OPEN_MPI = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
_OTHERS = (("PALS_RANKID", "PALS_SIZE"), ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"))
# In the order of the core's mark for child processes.
_VARIABLES = ("TORCHELASTIC_RUN_ID", "RANK", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
_FOREVER = timedelta(days=365)


def numbers(env: Mapping[str, str], is_connected: Callable[[int], bool], with_open_mpi: bool) -> tuple[int, int] | None:
    """The rank and the number of ranks that torchrun gives a process with this environment; None: not its process.

    Args:
        env: The environment.
        is_connected: Whether a file descriptor is a connected stream socket.
        with_open_mpi: Whether dl_comm uses Open MPI.

    A launcher that starts MPI comes first. But where ``srun`` or ``mpiexec`` has started the agents of torchrun, their
    variables are those of the agents, whose numbers may be equal to those of the ranks.
    """
    rank, size = _number(env.get("RANK")), _number(env.get("WORLD_SIZE"))
    if "TORCHELASTIC_RUN_ID" not in env or rank is None or size is None:
        return None
    if env.get("DL_COMM_ALONE", "").strip() == "1":
        return None
    # Python closes the launcher's connection in the processes that the agent starts.
    connection = _number(env.get("PMI_FD"))
    if connection is not None and is_connected(connection):
        return None
    launchers = [*_OTHERS, *([_PMI] if connection is None else []), *([_OPEN_MPI] if with_open_mpi else [])]
    of_launchers = [(_number(env.get(first)), _number(env.get(second))) for first, second in launchers]
    return None if (rank, size) in of_launchers else (rank, size)


def here(env: Mapping[str, str]) -> tuple[int, int] | None:
    """As ``numbers``, in this process."""
    if "TORCHELASTIC_RUN_ID" not in env or _is_launched_by_rank(env):
        return None
    version = json.loads(_dl_comm.describe())["mpi"]["library_version"]
    return numbers(env, is_connected, "Open MPI" in version)


def _is_launched_by_rank(env: Mapping[str, str]) -> bool:
    """Whether a rank of torchrun has started this process by another launcher, which has set its own variables."""
    try:
        position, _, variables = json.loads(env.get("DL_COMM_HELPER_OF", ""))
    except ValueError:
        return False
    is_rank = position["pid"] == os.getpid()
    is_inside = variables == [env.get(name, "") for name in _VARIABLES]
    return is_inside and not is_rank and not _dl_comm.is_helper()


def store() -> Any:
    """The store of this job of torchrun, a part of that of its agent.

    Ranks that torchrun has started again after a failure have another part. After a change of the number of nodes they
    may have the same part, with the keys of ranks that were killed.

    Raises:
        CommError: torch cannot be imported, or the store cannot be reached.
    """
    try:
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]
        from torch.distributed.rendezvous import rendezvous
    except ImportError as error:
        raise CommError(f"torchrun has started this process, but it cannot import torch: {error}") from error
    seconds = json.loads(_dl_comm.describe()).get("settings", {}).get("DL_COMM_TIMEOUT_S", 300)
    try:
        # As init_process_group() does it.
        found, _rank, _size = next(iter(rendezvous("env://", timeout=timedelta(seconds=seconds) or _FOREVER)))
        return PrefixStore("dl_comm", found)
    except (RuntimeError, ValueError) as error:
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        first = next(iter(str(error).splitlines()), "")
        raise CommError(f"cannot reach torchrun's store at {address} (MASTER_ADDR, MASTER_PORT): {first}") from error


def is_connected(descriptor: int) -> bool:
    """Whether a file descriptor is a connected stream socket."""
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return False
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            connection.getpeername()
            return connection.type == socket.SOCK_STREAM
    except OSError:
        return False


def _number(text: str | None) -> int | None:
    return int(text) if text and text.strip().isdecimal() else None
