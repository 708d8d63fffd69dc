"""Detects the launcher of this process from the environment, before MPI starts. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dl_comm._base.torch_variables import launched
from dl_comm._job import torchrun


@dataclass(frozen=True)
class Launch:
    """The launcher of this process.

    Attributes:
        launcher: Its name.
        family: Its MPI: ``mpich`` or ``openmpi``; None: several.
        rank: The rank of this process; None: unknown.
        size: The number of processes.
        local_rank: The rank on this host.
    """

    launcher: str
    family: str | None
    rank: int | None
    size: int | None
    local_rank: int | None

    @property
    def first_on_host(self) -> bool:
        """Whether this process reports for its host; true for every process if the launcher sets no rank."""
        return not self.local_rank if self.local_rank is not None else not self.rank


# Name and family of the launchers of _base.torch_variables that start MPI.
_LAUNCHERS = {
    "Open MPI": ("Open MPI's mpirun", "openmpi"),
    "PALS": ("Cray's PALS", None),
    "MVAPICH": ("MVAPICH's mpirun", "mpich"),
    "Hydra": ("an mpiexec of the MPICH family", "mpich"),
    "srun": ("srun", None),
}

# Those that start no MPI; the processes find each other by a store. DL_COMM_RANK comes before Kubernetes.
_PLAIN = (
    ("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("Kubernetes", "JOB_COMPLETION_INDEX", "DL_COMM_SIZE"),
    ("something that sets DL_COMM_RANK", "DL_COMM_RANK", "DL_COMM_SIZE"),
)

# Probes are not part of the job, so they must not inherit these.
_PREFIXES = (
    *("PMI_", "PMIX_", "OMPI_", "PRTE_", "HYDI_", "MPI_LOCAL", "PALS_", "SLURM_", "TORCHELASTIC_"),
    *("JOB_COMPLETION_INDEX", "DL_COMM_HELPER_OF", "DL_COMM_RANK", "DL_COMM_SIZE", "DL_COMM_ADDR", "DL_COMM_JOB_KEY"),
)


def launch_of(env: Mapping[str, str]) -> Launch | None:
    """The launcher of a process with this environment; None without a launcher.

    A shell on a compute node also has Slurm's variables; they count only with more than one process.
    """
    if torchrun.here(env):
        return _plain(env, *_PLAIN[0])
    position = launched(env)
    if position and (position.launcher != "srun" or position.size > 1):
        launcher, family = _LAUNCHERS[position.launcher]
        family = family if "SLURM_PROCID" not in env else None
        return Launch(launcher, family, position.rank, position.size, position.local_rank)
    if "DL_COMM_SIZE" in env and "DL_COMM_ADDR" in env and env.get("DL_COMM_ALONE", "").strip() != "1":
        for plain in _PLAIN[:0:-1]:
            if plain[1] in env:
                return _plain(env, *plain)
    return None


def _plain(env: Mapping[str, str], launcher: str, rank: str, size: str, local_rank: str = "") -> Launch:
    return Launch(launcher, None, *(_number(env.get(variable)) for variable in (rank, size, local_rank)))


def without_launcher(env: Mapping[str, str]) -> dict[str, str]:
    """The environment without a launcher's variables."""
    return {name: value for name, value in env.items() if not name.startswith(_PREFIXES)}


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isdecimal() else None
