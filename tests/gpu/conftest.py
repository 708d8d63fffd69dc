"""Fixtures of the tests of tensors in GPU memory; README.md describes how ``tests/gpu/run.sh`` runs them.

``DL_COMM_TEST_DEVICE`` is cuda (the default) or cpu. With cpu the same tests run on host memory, to check the tests
without a GPU. Most files run on every rank of a job
(``python tests/launch.py N SECONDS python -m pytest tests/gpu/test_gpu_average.py``) and use the fixture ``job``, which
starts dl_comm. Ranks share the GPUs: rank r uses number r % count.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

# Set before torch is imported, because ranks may outnumber the processors.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# GPU time is limited: report hangs early.
os.environ.setdefault("DL_COMM_TIMEOUT_S", "40")
os.environ.setdefault("DL_COMM_MATCH_TIMEOUT_S", "4")
os.environ.setdefault("DL_COMM_DUMP_DIR", "none")
sys.path.insert(0, str(Path(__file__).parent.parent))

import pytest  # noqa: E402
import torch  # noqa: E402

import dl_comm as mc  # noqa: E402
from job import KIND, Job  # noqa: E402


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips all tests without a GPU."""
    if KIND == "cuda" and not torch.cuda.is_available():
        reason = "torch finds no GPU; DL_COMM_TEST_DEVICE=cpu runs these tests on host memory"
        for item in items:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def job() -> Iterator[Job]:
    """This rank of the job, with two teams; its GPU is torch's current device."""
    mc.init(nthread_per_team=2, nteams=2)
    yield Job.here()
    mc.finalize()
