"""Ranks of torchrun: its variables, and the store of its agent."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from dl_comm import _dl_comm
from dl_comm._errors import CommError

# Rank and number of ranks, by the variables of launchers that start MPI.
_LAUNCHERS = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PALS_RANKID", "PALS_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
)
_FOREVER = timedelta(days=365)


def numbers(env: Mapping[str, str], is_open: Callable[[int], bool]) -> tuple[int, int] | None:
    """The rank and the number of ranks that torchrun gives a process with this environment; None: not its process.

    Args:
        env: The environment.
        is_open: Whether a file descriptor is open.

    A launcher that starts MPI comes first. But where ``srun`` or ``mpiexec`` has started the agents of torchrun, their
    variables are those of the agents.
    """
    rank, size = _number(env.get("RANK")), _number(env.get("WORLD_SIZE"))
    if "TORCHELASTIC_RUN_ID" not in env or rank is None or size is None:
        return None
    if env.get("DL_COMM_ALONE", "").strip() == "1":
        return None
    of_launchers = [(_number(env.get(first)), _number(env.get(second))) for first, second in _LAUNCHERS]
    if (rank, size) in of_launchers:
        return None
    # Python closes the launcher's connection in the processes that the agent starts.
    connection = _number(env.get("PMI_FD"))
    return None if connection is not None and is_open(connection) else (rank, size)


def store() -> Any:
    """The store of this job of torchrun, a part of that of its agent. Each restart of the ranks has another part.

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


def is_open(descriptor: int) -> bool:
    """Whether a file descriptor is open."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_GETFD)
    except OSError:
        return False
    return True


def _number(text: str | None) -> int | None:
    return int(text) if text and text.strip().isdigit() else None
