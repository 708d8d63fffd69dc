"""Synchronized batch normalization on 1, 2, 3 ranks against the framework's own on the joined batch in one process."""

from __future__ import annotations

import copy
import functools
from typing import Any

import numpy as np
import pytest

import dl_comm
from frameworks import Framework, dtype_of, same

# Layers of Keras are not for sessions.
pytestmark = [pytest.mark.needs("layers"), pytest.mark.modes("eager", "function")]

CHANNELS = 3
SCALE, OFFSET = np.array([0.5, -1.0, 2.0]), np.array([1.0, 0.0, -1.0])
EPSILON = 1e-3


class TorchLayers:
    """Layers of torch. ``affine``, ``share`` (of a batch in the statistics), ``epsilon``: what all frameworks have."""

    def __init__(self, framework: Framework) -> None:
        self.torch, self.sync = framework.torch, framework.comm.SyncBatchNorm

    def pair(
        self, shape: Any, dtype: str, affine: bool = True, share: float = 0.1, epsilon: float = EPSILON, **own: Any
    ) -> Any:
        """The layer of one process, and the same for ranks; ``shape`` of a sample, ``own`` options of torch."""
        nn, torch = self.torch.nn, self.torch
        kind = [nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d][len(shape) - 1]
        own["dtype"] = torch.float64 if dtype == "float64" else torch.float32  # halves have wider parameters
        alone = kind(CHANNELS, **{"eps": epsilon, "momentum": share, "affine": affine, **own})
        if affine:
            with torch.no_grad():
                alone.weight.copy_(torch.tensor(SCALE))
                alone.bias.copy_(torch.tensor(OFFSET))
        return alone, self.sync.convert(copy.deepcopy(alone))

    def step(self, layer: Any, x: Any, v: Any) -> list[Any]:
        """The output of a training step, and the gradients of the input, and of scale and offset if there are."""
        x.requires_grad_()
        y = layer(x)
        return [y, *self.torch.autograd.grad(y, [x, *layer.parameters()], v)]

    def statistics(self, layer: Any) -> list[Any]:
        """The running mean and variance."""
        return [each.numpy() for each in layer.buffers()]

    def evaluate(self, layer: Any, x: Any) -> Any:
        """The output without training."""
        return layer.eval()(x)

    def load(self, layer: Any, source: Any) -> None:
        """Copies all parameters and statistics."""
        layer.load_state_dict(source.state_dict())


class KerasLayers:
    """As ``TorchLayers``."""

    def __init__(self, framework: Framework) -> None:
        import keras

        import dl_comm.keras

        self.tf, self.kinds = framework.tf, (keras.layers.BatchNormalization, dl_comm.keras.SyncBatchNormalization)

    def pair(
        self, shape: Any, dtype: str, affine: bool = True, share: float = 0.1, epsilon: float = EPSILON, **own: Any
    ) -> Any:
        own = {"axis": 1, "dtype": dtype if dtype.startswith("float") else f"mixed_{dtype}", **own}
        own |= {"epsilon": epsilon, "momentum": 1 - share, "center": affine, "scale": affine}
        layers = [kind(**own) for kind in self.kinds]
        for layer in layers:
            layer.build((None, *shape))
            if affine:
                layer.gamma.assign(SCALE)
                layer.beta.assign(OFFSET)
        return layers

    def step(self, layer: Any, x: Any, v: Any, mask: Any = None) -> list[Any]:
        with self.tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x, training=True, mask=mask)
        return [y, *tape.gradient(y, [x, *[each.value for each in layer.trainable_variables]], v)]

    def statistics(self, layer: Any) -> list[Any]:
        return [layer.moving_mean.numpy(), layer.moving_variance.numpy()]

    def evaluate(self, layer: Any, x: Any) -> Any:
        return layer(x, training=False)

    def load(self, layer: Any, source: Any) -> None:
        layer.set_weights(source.get_weights())


@pytest.fixture
def layers(framework: Framework) -> Any:
    return {"torch": TorchLayers, "tensorflow": KerasLayers}[framework.name](framework)


def batches(size: int, axes: int, counts: list[int], dtype: str, mean: float = 10.0) -> list[Any]:
    """The batch of each rank."""
    rng = np.random.default_rng(axes)
    shape = (CHANNELS, *[4] * axes)
    return [rng.normal(mean, 3.0, (count, *shape)).astype(dtype_of(dtype)) for count in counts[:size]]


def check(
    framework: Framework,
    layers: Any,
    mode: str,
    parts: list[Any],
    rank: int,
    tolerance: float,
    masked: bool = False,
    **options: Any,
) -> None:
    """Compares results, gradients and running statistics of some steps."""
    start = sum(len(part) for part in parts[:rank])
    mine = slice(start, start + len(parts[rank]))
    pair = layers.pair(parts[0].shape[1:], parts[0].dtype.name, **options)
    run_alone, run = (framework.runner(functools.partial(layers.step, layer), mode) for layer in pair)
    for step in range(3):
        rng = np.random.default_rng(step)
        joined = np.concatenate(parts) + parts[0].dtype.type(step)
        given = [joined, rng.normal(size=joined.shape).astype(joined.dtype)]
        given += [rng.random(joined.shape[:-1]) < 0.7] * masked
        found, expected = run(*[each[mine] for each in given]), run_alone(*given)
        same(found[:2], [each[mine] for each in expected[:2]], tolerance)
        same(list(map(dl_comm.allreduce, found[2:])), expected[2:], 10 * tolerance)
    same(layers.statistics(pair[1]), layers.statistics(pair[0]), tolerance)


@pytest.mark.parametrize("axes", [0, 1, 2, 3])
@pytest.mark.parametrize("counts", [[2, 2, 2], [3, 1, 2], [3, 0, 1]], ids=str)
def test_as_one_process_with_the_joined_batch(
    framework: Framework, mode: str, layers: Any, axes: int, counts: list[int], rank: int, size: int
) -> None:
    check(framework, layers, mode, batches(size, axes, counts, "float64"), rank, 1e-11)
    if mode == "eager":
        check(framework, layers, mode, batches(size, axes, counts, "float32"), rank, 5e-5)


@pytest.mark.parametrize("options", [{"affine": False}, {"share": 0.7, "epsilon": 0.1}], ids=str)
def test_options(framework: Framework, mode: str, layers: Any, options: dict[str, Any], rank: int, size: int) -> None:
    check(framework, layers, mode, batches(size, 2, [1, 3, 2], "float64"), rank, 1e-11, **options)


@pytest.mark.parametrize(
    ("dtype", "mean", "tolerance"), [("bfloat16", 10.0, 0.05), ("float16", 10.0, 0.01), ("float32", 10_000.0, 2e-3)]
)
def test_few_digits(
    framework: Framework, mode: str, layers: Any, dtype: str, mean: float, tolerance: float, rank: int, size: int
) -> None:
    """Neither narrow types nor a large mean cost more digits than they must."""
    parts = batches(size, 1, [50, 20, 30], dtype, mean)
    _, together = layers.pair(parts[0].shape[1:], dtype)
    found, *_ = framework.runner(lambda x: layers.step(together, x, x * 0), mode)(parts[rank])
    assert found.dtype == parts[rank].dtype
    joined = np.concatenate(parts).astype(np.float64)
    deviation = np.sqrt(joined.var((0, 2), keepdims=True) + EPSILON)
    expected = (parts[rank].astype(np.float64) - joined.mean((0, 2), keepdims=True)) / deviation
    expected = expected * SCALE[:, None] + OFFSET[:, None]
    np.testing.assert_allclose(found.astype(np.float64), expected, rtol=tolerance, atol=tolerance)


def test_evaluation_needs_no_other_rank(framework: Framework, mode: str, layers: Any, rank: int, size: int) -> None:
    (part,) = batches(1, 2, [2], "float32")
    alone, together = layers.pair(part.shape[1:], "float32")
    framework.runner(lambda x: layers.step(alone, x, x), mode)(part)
    layers.load(together, alone)
    layers.load(alone, together)
    if rank == 0:
        found, expected = (
            framework.runner(lambda x, layer=layer: [layers.evaluate(layer, x)], mode)(part)[0]
            for layer in (together, alone)
        )
        same(found, expected)
