"""The names of each binding, and metrics that are numbers of its framework, on 1, 2 and 3 ranks."""

from __future__ import annotations

import importlib
import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import dl_comm as mc
import ml_comm
from frameworks import ALL, COMPLEX, Framework, dtype_of


@pytest.mark.needs("tensors")
def test_every_base_name_is_there(framework: Framework) -> None:
    names = "get_rank get_nranks get_localrank rank size local_rank barrier init init_mpi finalize config_team"
    first = importlib.import_module(f"ml_comm.{framework.name}")
    for module in (framework.comm, first):
        for name in [*names.split(), "average", "broadcast", "check_buffers_match", "gradients"]:
            assert callable(getattr(module, name))
            assert name in module.__all__
        assert dir(module) == sorted(module.__all__)
    assert first.config_team is ml_comm.config_team is not framework.comm.config_team


def test_metrics_are_averaged_in_float64(framework: Framework, rank: int, size: int) -> None:
    make, middle = framework.make, (size - 1) / 2
    metrics = {
        "loss": make(np.float32(0.5 + rank)),
        "hits": make(np.array(rank)),
        "half": make(np.array([2 * rank], ml_dtypes.bfloat16)),
        "one": make(np.array([[rank + 1]])),
        "large": make(np.array(2**40 + rank)),  # not exact in float32
        "number": rank,
    }
    if rank % 2:
        metrics = dict(reversed(metrics.items()))
    means = mc.average_metrics(metrics)
    expected = {"loss": 0.5 + middle, "hits": middle, "half": 2 * middle, "one": 1 + middle}
    assert means == {**expected, "large": 2**40 + middle, "number": middle}
    assert list(means) == list(metrics)
    assert all(type(mean) is float for mean in means.values())


@pytest.mark.parametrize("dtype", [name for name in ALL if name not in COMPLEX])
def test_a_metric_of_every_type(framework: Framework, dtype: str, rank: int, size: int) -> None:
    mine = framework.make(np.array(rank == 0 if dtype == "bool" else rank, dtype_of(dtype)))
    mean = mc.average_metrics({"metric": mine})["metric"]
    assert mean == pytest.approx(1 / size if dtype == "bool" else (size - 1) / 2)


def test_weights_of_ranks(framework: Framework, rank: int, size: int) -> None:
    # rank r has r samples, and so rank 0 none and a metric that means nothing
    value = math.nan if rank == 0 and size > 1 else float(rank)
    weight = rank if size > 1 else 3
    expected = sum(r * r for r in range(size)) / max(1, sum(range(size)))
    loss = framework.make(np.array(value))
    assert mc.average_metrics({"loss": loss}, weight)["loss"] == pytest.approx(expected)
    with pytest.raises(mc.ArgumentError, match="0 on all ranks"):
        mc.average_metrics({"loss": loss}, 0)
    for wrong in (-1, math.nan, math.inf):
        with pytest.raises(mc.ArgumentError, match="finite number >= 0"):
            mc.average_metrics({"loss": loss}, wrong)


def test_nan_and_infinity_stay(framework: Framework, rank: int, size: int) -> None:
    last = rank == size - 1
    given = {"nan": math.nan if last else 1.0, "inf": math.inf if last else 1.0, "fine": 2.0}
    means = mc.average_metrics({name: framework.make(np.array(value)) for name, value in given.items()}, 0.5)
    assert math.isnan(means["nan"])
    assert means["inf"] == math.inf
    assert means["fine"] == 2.0


@pytest.mark.parametrize(
    "wrong", [np.zeros(2), np.zeros(0), np.zeros((1, 2)), np.array(1j)], ids=["2", "0", "1x2", "1j"]
)
def test_a_metric_that_is_no_number(framework: Framework, wrong: Any) -> None:
    with pytest.raises(mc.DTypeError, match="'loss' is not a number"):
        mc.average_metrics({"loss": framework.make(wrong)})
    assert mc.average_metrics({"loss": framework.make(np.array(2.0))}) == {"loss": 2.0}


@pytest.mark.needs("tensors")
def test_a_metric_that_is_no_number_on_one_rank(framework: Framework, rank: int, size: int) -> None:
    """Every rank raises, and the next metrics are those of the same call."""
    for step in range(3):
        bad = step == 0 and rank == size - 1
        metrics = {"loss": None if bad else framework.make(np.float32(step + rank))}
        if step:
            assert mc.average_metrics(metrics) == {"loss": step + (size - 1) / 2}
        else:
            with pytest.raises(mc.DTypeError if bad else mc.MismatchError, match="metric 'loss' is not a number"):
                mc.average_metrics(metrics)


def test_equal_on_all_ranks(framework: Framework, rank: int, size: int) -> None:
    make, odd = framework.make, rank == size - 1 and size > 1
    x = np.arange(6.0).reshape(2, 3)
    assert mc.equal_on_all_ranks(make(x)) is True
    assert mc.equal_on_all_ranks([make(x), make(np.array(2, np.int16)), make(np.zeros((0, 3)))]) is True
    assert mc.equal_on_all_ranks(make(np.array([np.nan, -0.0]))) is True
    for other in (x + 1, x.reshape(3, 2), x.astype(np.float32), x[:1], -0.0 * x):
        assert mc.equal_on_all_ranks([make(x), make(other if odd else x)]) is (size == 1)
    assert mc.equal_on_all_ranks([make(x)] * (1 + odd)) is (size == 1)
    with mc.Group([rank], f"alone {rank}") as alone:
        assert alone.equal_on_all_ranks(make(x + rank)) is True
    if size > 1:
        pair = mc.split(0 if rank < 2 else None)
        if pair is not None:
            assert pair.equal_on_all_ranks(make(x + rank)) is False
            assert pair.equal_on_all_ranks(make(x)) is True
    masked = np.ma.masked_array(x, x > 3)
    for wrong in ([], [None], object(), [object()], masked, [masked]):
        with pytest.raises(mc.CommError):
            mc.equal_on_all_ranks(wrong)
    assert mc.equal_on_all_ranks(make(x)) is True


def test_a_flag_and_replicas_of_tensors(framework: Framework, rank: int, size: int) -> None:
    last = rank == size - 1
    assert mc.any_rank(framework.make(np.array(last)))
    assert not mc.any_rank(framework.make(np.zeros(1, np.float32)))
    mc.check_replicas([framework.make(np.ones((2, 3), np.float32)), framework.make(np.array(4))])
    own = framework.make(np.full(3, last, np.float32))
    if size == 1:
        mc.check_replicas(own)
        return
    with pytest.raises(mc.MismatchError, match=rf"float32\[3\] of rank\(s\) {size - 1}"):
        mc.check_replicas(own)
