"""Detects the launcher of this process from the environment, before MPI starts. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


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


# Name, family, and the variables of rank, size and local rank that identify it.
_LAUNCHERS = (
    (
        "Open MPI's mpirun",
        "openmpi",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
    ),
    ("Cray's PALS", None, "PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID"),
    ("an mpiexec of the MPICH family", "mpich", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    ("srun", None, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
)

# Probes are not part of the job, so they must not inherit these.
_PREFIXES = ("PMI_", "PMIX_", "OMPI_", "PRTE_", "HYDI_", "MPI_LOCAL", "PALS_", "SLURM_", "DL_COMM_HELPER_OF")


def launch_of(env: Mapping[str, str]) -> Launch | None:
    """The launcher of a process with this environment; None without a launcher.

    A shell on a compute node also has Slurm's variables; they count only with more than one process.
    """
    for launcher, family, *variables in _LAUNCHERS:
        rank, size, local_rank = (_number(env.get(variable)) for variable in variables)
        known = {"srun": (size or 0) > 1, "Cray's PALS": rank is not None}
        if known.get(launcher, rank is not None or size is not None):
            # srun may set PMI variables without a local rank.
            local_rank = _number(env.get("SLURM_LOCALID")) if local_rank is None else local_rank
            return Launch(launcher, family if "SLURM_PROCID" not in env else None, rank, size, local_rank)
    return None


def without_launcher(env: Mapping[str, str]) -> dict[str, str]:
    """The environment without a launcher's variables."""
    return {name: value for name, value in env.items() if not name.startswith(_PREFIXES)}


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isdigit() else None
