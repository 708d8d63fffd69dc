"""Torch's variables of this rank, in the environment after a start, and where the ranks can meet.

Thread rule: any thread.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Sequence

import numpy as np

from dl_comm import _dl_comm
from dl_comm._base import log, rc
from dl_comm._base.network import addresses
from dl_comm._base.torch_variables import Position, given, hold_port, name_rank
from dl_comm._job import state

_lock = threading.RLock()
_MASTER_BYTES = 512


def name_this_rank(master: dict[str, str]) -> None:
    """Sets torch's variables of this rank that are missing, and prints a line if there are others of somebody else."""
    if not rc.rc.torch_variables:
        return
    here = Position(_dl_comm.rank(), _dl_comm.size(), _dl_comm.local_rank(), _dl_comm.local_size())
    warning = name_rank({**here.variables(), **master})
    # Who asks to be alone knows of the other ranks.
    if warning is not None and not master and os.environ.get("DL_COMM_ALONE", "").strip() != "1":
        log.warn(warning)


def master_of_rank_0(is_alone: bool, others: Sequence[str] = ()) -> tuple[str, str]:
    """On rank 0: where ranks can meet, by the environment or on a free port, which this process keeps.

    Args:
        is_alone: Whether all ranks are on this host.
        others: Names of hosts that must reach it.
    """
    job, known = state.current, given(os.environ)
    if "MASTER_PORT" not in known:
        job.held_port = job.held_port or hold_port()
        known["MASTER_PORT"] = str(job.held_port.getsockname()[1])
    if "MASTER_ADDR" not in known:
        known["MASTER_ADDR"] = "127.0.0.1" if is_alone else reachable_address(others)
    return known["MASTER_ADDR"], known["MASTER_PORT"]


def reachable_address(others: Sequence[str]) -> str:
    """An address of this host for ``others``."""
    found = addresses(others, os.environ.get("DL_COMM_SOCKET_IFNAME") or None, anywhere=True)
    return next(iter(found), socket.gethostname())


def other_hosts() -> list[str]:
    """The names of the hosts of the other ranks."""
    return sorted({each["host"] for each in json.loads(_dl_comm.describe())["ranks"]} - {socket.gethostname()})


def name_master(address: str, port: str) -> None:
    """Sets MASTER_ADDR and MASTER_PORT if they are missing."""
    state.current.has_master = True
    name_this_rank({"MASTER_ADDR": address, "MASTER_PORT": port})


def publish_master() -> None:
    """Sets MASTER_ADDR and MASTER_PORT on all ranks, to those of rank 0. Collective, once in a job."""
    with _lock:
        if state.current.has_master:
            return
        text = np.zeros(_MASTER_BYTES, np.uint8)
        if _dl_comm.rank() == 0:
            master = " ".join(master_of_rank_0(_dl_comm.hosts() == 1, other_hosts())).encode()
            text[: len(master)] = np.frombuffer(master, np.uint8)
        if _dl_comm.size() > 1:
            _dl_comm.broadcast([text], 0, None, -1.0)
        name_master(*text.tobytes().rstrip(b"\0").decode().split())
