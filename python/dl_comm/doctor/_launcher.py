"""What the environment tells of the launcher that started this process, before MPI is up. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Launch:
    """Who started this process.

    Attributes:
        launcher: The launcher, in words.
        family: Its MPI: ``mpich`` or ``openmpi``; None: it serves several.
        rank: The rank that it gave; None when it does not tell.
        size: How many processes it started.
        local_rank: The rank among those of the host.
    """

    launcher: str
    family: str | None
    rank: int | None
    size: int | None
    local_rank: int | None

    @property
    def first_on_host(self) -> bool:
        """Whether this process speaks for its host; every process does where the launcher does not tell."""
        return not self.local_rank if self.local_rank is not None else not self.rank


# Launcher, family, and the variables of rank, size and local rank, by which it is known.
_LAUNCHERS = (
    (
        "Open MPI's mpirun",
        "openmpi",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
    ),
    ("Cray's PALS", None, "PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID"),
    ("an mpiexec of MPICH's kind", "mpich", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    ("srun", None, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
)

# What a probe must not inherit: it is no part of the job.
_PREFIXES = ("PMI_", "PMIX_", "OMPI_", "PRTE_", "HYDI_", "MPI_LOCAL", "PALS_", "SLURM_", "DL_COMM_HELPER_OF")


def launch_of(env: Mapping[str, str]) -> Launch | None:
    """The launcher of a process with this environment; None when nobody launched it.

    Slurm's variables are also set in a shell on a compute node; they count when they tell of more than one process.
    """
    for launcher, family, *variables in _LAUNCHERS:
        rank, size, local_rank = (_number(env.get(variable)) for variable in variables)
        known = {"srun": (size or 0) > 1, "Cray's PALS": rank is not None}
        if known.get(launcher, rank is not None or size is not None):
            # Slurm prints PMI too: its variables know the local rank then.
            local_rank = _number(env.get("SLURM_LOCALID")) if local_rank is None else local_rank
            return Launch(launcher, family if "SLURM_PROCID" not in env else None, rank, size, local_rank)
    return None


def without_launcher(env: Mapping[str, str]) -> dict[str, str]:
    """The environment without what a launcher put there."""
    return {name: value for name, value in env.items() if not name.startswith(_PREFIXES)}


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isdigit() else None
