"""Which variables a launcher passes on, and the rank that a launcher's variables give.

Thread rule: any thread.
"""

from __future__ import annotations

import os
import re

LOG_LEVEL_STR = ["FATAL", "ERROR", "WARNING", "INFO", "DEBUG", "TRACE"]
IGNORE_REGEXES = {"BASH_FUNC_.*", "OLDPWD", ".*CUDA_VISIBLE_DEVICES", "_HOROVOD_SECRET_KEY"}
KUBEFLOW_MPI_EXEC = "/etc/mpi/kubexec.sh"


def is_exportable(v: str) -> bool:
    """Whether ranks on other hosts get a variable of this name."""
    return not any(re.match(pattern, v) for pattern in IGNORE_REGEXES)


def get_env_rank_and_size() -> tuple[int, int]:
    """The rank and the number of ranks that the environment gives; (0, 1) without a launcher.

    Raises:
        RuntimeError: Only one of the two is there.
    """
    for library in ("HOROVOD", "OMPI_COMM_WORLD", "PMI"):
        rank, size = os.environ.get(f"{library}_RANK"), os.environ.get(f"{library}_SIZE")
        if rank is not None and size is not None:
            return int(rank), int(size)
        if rank is not None or size is not None:
            raise RuntimeError(f"only one of {library}_RANK and {library}_SIZE is set")
    return 0, 1


def is_kubeflow_mpi() -> bool:
    """Whether Kubeflow's MPI operator has started this process."""
    return os.environ.get("OMPI_MCA_plm_rsh_agent") == KUBEFLOW_MPI_EXEC  # noqa: SIM112 - Open MPI's name
