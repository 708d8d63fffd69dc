"""For the tests of the torch.distributed backend: ``python tests/ranks.py N SECONDS python -m pytest tests/c10d/FILE``.

Each file runs on any number of ranks, each rank checks its own results. ``DL_COMM_TEST_C10D_BACKEND=gloo`` runs the
same tests on another backend. The files that start their own ranks run in a plain pytest.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

# Before torch is imported: ranks outnumber the processors.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("DL_COMM_TIMEOUT_S", "100")
os.environ.setdefault("DL_COMM_MATCH_TIMEOUT_S", "4")
os.environ.setdefault("DL_COMM_DUMP_DIR", "none")

import pytest  # noqa: E402

pytest.importorskip("torch")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from c10d_helpers import BACKEND, load  # noqa: E402

STARTS_RANKS = {"test_c10d_faults.py", "test_c10d_scripts.py"}
"""Files that a plain pytest runs."""


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """On ranks only the files for ranks; in a plain pytest only the others."""
    if collection_path.suffix != ".py":
        return None
    return True if ("RANK" in os.environ) == (collection_path.name in STARTS_RANKS) else None


@pytest.fixture(scope="session", autouse=True)
def _process_group() -> Iterator[None]:
    if "RANK" not in os.environ:
        yield
        return
    torch.set_num_threads(1)
    load()
    dist.init_process_group(BACKEND, timeout=timedelta(seconds=60))
    yield
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def _no_groups_left() -> Iterator[None]:
    """Destroys the groups that a test has made: torch's names of later groups depend on their number."""
    yield
    if dist.is_initialized():
        world = dist.distributed_c10d._world
        for group in [group for group in world.pg_map if group is not world.default_pg]:
            dist.destroy_process_group(group)


@pytest.fixture
def rank() -> int:
    """This rank."""
    return dist.get_rank()


@pytest.fixture
def size() -> int:
    """The number of ranks."""
    return dist.get_world_size()


def pytest_report_header() -> str:
    """Says which rank this is, and the backend."""
    return f"rank {os.environ.get('RANK', '-')} of {os.environ.get('WORLD_SIZE', '-')}, backend {BACKEND}"
