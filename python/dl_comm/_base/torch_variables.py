"""The six variables by which torch and what builds on it know a rank, as torchrun sets them.

Standard library only: the wrapper of each rank under ``dl-comm-run`` imports this file. Thread rule: any thread, one at
a time where the environment changes.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterable, Mapping
from typing import NamedTuple

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
MARK = "DL_COMM_TORCH_VARIABLES"
"""For the programs that a rank starts: the pid of the rank, and the variables that name it."""
# Slurm's numbers of steps from here on are those of batch scripts and shells.
_SLURM_NO_STEP = 0xFFFF_FFF0


class Position(NamedTuple):
    """A rank in its job; ``None``: the launcher does not tell. ``launcher`` is its name in ``LAUNCHERS``."""

    rank: int
    size: int
    local_rank: int | None = None
    local_size: int | None = None
    launcher: str = ""

    @property
    def on_one_host(self) -> bool:
        """Whether all ranks are certainly on one host."""
        return self.local_size == self.size

    def variables(self) -> dict[str, str]:
        """The variables of the position."""
        values = zip(NAMES, self[:4], strict=False)
        return {name: str(value) for name, value in values if value is not None}


# Rank, size, local rank and local size: the first variable that is set counts. The first launcher with a rank and a
# size is that of the process, because one may have started another: Slurm's variables are also in the shell of a job.
LAUNCHERS = {
    "Open MPI": (
        ("OMPI_COMM_WORLD_RANK",),
        ("OMPI_COMM_WORLD_SIZE",),
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    "PALS": (
        ("PALS_RANKID",),
        ("PALS_SIZE", "PMI_SIZE"),
        ("PALS_LOCAL_RANKID", "PMI_LOCAL_RANK"),
        ("PALS_LOCAL_SIZE", "PMI_LOCAL_SIZE"),
    ),
    "MVAPICH": (
        ("MV2_COMM_WORLD_RANK",),
        ("MV2_COMM_WORLD_SIZE",),
        ("MV2_COMM_WORLD_LOCAL_RANK",),
        ("MV2_COMM_WORLD_LOCAL_SIZE",),
    ),
    "Hydra": (("PMI_RANK",), ("PMI_SIZE",), ("MPI_LOCALRANKID",), ("MPI_LOCALNRANKS",)),
    "srun": (("SLURM_PROCID",), ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), ("SLURM_LOCALID",), ()),
}


def launched(env: Mapping[str, str]) -> Position | None:
    """The position that the launcher of this process gives it; None without one that starts MPI."""
    for name, (rank, *others) in LAUNCHERS.items():
        # MPICH's launchers set the local number too, srun sets only PMI_RANK.
        if name == "Hydra" and "MPI_LOCALNRANKS" not in env and is_slurm_step(env):
            continue
        if name == "srun" and not is_slurm_step(env):
            continue
        number = _first(env, rank)
        size, local_rank, local_size = (_first(env, names) for names in others)
        if number is not None and size is not None and number < size:
            return Position(number, size, local_rank, local_size or _tasks_here(name, env), name)
    return None


def rank_of(env: Mapping[str, str]) -> int | None:
    """The rank, also if the launcher does not tell the size."""
    position = launched(env)
    return (
        position.rank
        if position
        else _first(env, (*(name for ranks, *_ in LAUNCHERS.values() for name in ranks), "PMIX_RANK"))
    )


def is_slurm_step(env: Mapping[str, str]) -> bool:
    """Whether ``srun`` has started this process, and not only its shell."""
    step = _number(env.get("SLURM_STEP_ID"))
    return step is not None and step < _SLURM_NO_STEP and "SLURM_PROCID" in env


def given(env: Mapping[str, str]) -> dict[str, str]:
    """Those of the variables that a launcher or the user has set: not those of an outer rank, or of an earlier job."""
    owner, marked = _marked(env)
    return {name: env[name] for name in NAMES if env.get(name) and not (owner and env[name] == marked.get(name))}


def name_rank(variables: Mapping[str, str]) -> str | None:
    """Sets those of ``variables`` that are missing in the environment of this process, which is a rank now.

    Changes nothing if the rank and size there are of somebody else: they are the user's, or of a launcher around this
    job. Returns a warning then.
    """
    known = given(os.environ)
    for name in ("RANK", "WORLD_SIZE"):
        if known.get(name, variables.get(name)) != variables.get(name):
            return (
                f"RANK is {known.get('RANK', 'not set')} and WORLD_SIZE is {known.get('WORLD_SIZE', 'not set')} in the "
                f"environment, but this is rank {variables['RANK']} of {variables['WORLD_SIZE']}: what reads these "
                "variables uses the wrong ones. Unset them, or start with dl-comm-run"
            )
    os.environ.update({name: value for name, value in variables.items() if name not in known})
    now = [f"{name}={os.environ[name]}" for name in NAMES if os.environ.get(name) and name not in known]
    os.environ[MARK] = " ".join([str(os.getpid()), *now])
    return None


def hold_port(port: int = 0, host: str = "") -> socket.socket:
    """A socket that keeps a port for this process and others that reuse addresses, as torch's store does.

    Nobody else gets the port while the socket is open, because it does not listen.

    Raises:
        OSError: Somebody listens on ``port``.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        held.bind((host, port))
    except OSError:
        held.close()
        raise
    return held


def _marked(env: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    owner, _, rest = env.get(MARK, "").partition(" ")
    return owner, dict(word.split("=", 1) for word in rest.split() if "=" in word)


def _tasks_here(launcher: str, env: Mapping[str, str]) -> int | None:
    """The tasks of this host by ``4(x3),2`` and the host's number."""
    node = _number(env.get("SLURM_NODEID"))
    if launcher != "srun" or node is None:
        return None
    text = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE") or ""
    tasks = [int(count) for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text) for _ in range(int(times or 1))]
    return tasks[node] if node < len(tasks) else None


def _first(env: Mapping[str, str], names: Iterable[str]) -> int | None:
    return next((number for name in names if (number := _number(env.get(name))) is not None), None)


def _number(text: str | None) -> int | None:
    return int(text) if text and text.strip().isascii() and text.strip().isdecimal() else None
