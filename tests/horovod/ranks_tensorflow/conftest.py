"""Starts Horovod on the ranks of the job. Apart from `ranks`, because torch and TensorFlow cannot share a process."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"


@pytest.fixture(scope="session", autouse=True)
def _horovod() -> Iterator[None]:
    import horovod.tensorflow as hvd

    hvd.init()
    yield
    hvd.shutdown()


@pytest.fixture
def rank() -> int:
    """This rank."""
    import horovod.tensorflow as hvd

    return hvd.rank()


@pytest.fixture
def size() -> int:
    """The number of ranks."""
    import horovod.tensorflow as hvd

    return hvd.size()
