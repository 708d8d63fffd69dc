"""For the tests that run on every rank of a job: ``mpiexec -n N python -m pytest tests/parallel``.

Each file runs on any number of ranks, each rank checks its own results. The first failure of a rank ends its run, and
the others hear of it at their next collective.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

# Before any framework is imported: ranks outnumber the processors.
for variable in ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"):
    os.environ.setdefault(variable, "1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("DL_COMM_TIMEOUT_S", "100")
# Mismatches are reported earlier than by default, where they must be certain.
os.environ.setdefault("DL_COMM_MATCH_TIMEOUT_S", "4")
os.environ.setdefault("DL_COMM_DUMP_DIR", "none")

import pytest  # noqa: E402

import dl_comm as mc  # noqa: E402


@pytest.fixture(scope="session", autouse=True)
def _dl_comm() -> Iterator[None]:
    mc.init(nthread_per_team=2, nteams=2)
    yield
    mc.finalize()


@pytest.fixture
def rank() -> int:
    """This rank."""
    return mc.get_rank()


@pytest.fixture
def size() -> int:
    """The number of ranks."""
    return mc.get_nranks()


def pytest_report_header() -> str:
    """Says which rank this is."""
    mc.init_mpi()
    return f"rank {mc.get_rank()} of {mc.get_nranks()}, {mc.num_hosts()} host(s)"
