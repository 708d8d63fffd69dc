"""Tensor lists of models: the shapes of the gradients, in parameter order. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod

Shape = tuple[int, ...]


def resnet50() -> Iterator[Shape]:
    """ResNet-50 (He et al., 2015, table 1) with 1000 classes, as torchvision has it: 161 tensors."""
    yield from _convolution(3, 64, 7)
    channels = 64
    for blocks, width in ((3, 64), (4, 128), (6, 256), (3, 512)):
        for block in range(blocks):
            yield from _convolution(channels, width, 1)
            yield from _convolution(width, width, 3)
            yield from _convolution(width, 4 * width, 1)
            if block == 0:
                yield from _convolution(channels, 4 * width, 1)
            channels = 4 * width
    yield from _dense(channels, 1000)


def bert_base() -> Iterator[Shape]:
    """BERT-base, uncased (Devlin et al., 2018), with its pooler: 199 tensors."""
    width = 768
    yield from ((rows, width) for rows in (30522, 512, 2))
    yield from _norm(width)
    for _ in range(12):
        for _ in range(4):
            yield from _dense(width, width)
        yield from _norm(width)
        yield from _dense(width, 4 * width)
        yield from _dense(4 * width, width)
        yield from _norm(width)
    yield from _dense(width, width)


def gpt2_small() -> Iterator[Shape]:
    """GPT-2 small (Radford et al., 2019), the output tied to the embedding: 148 tensors."""
    width = 768
    yield from ((rows, width) for rows in (50257, 1024))
    for _ in range(12):
        yield from _norm(width)
        yield from _dense(width, 3 * width)
        yield from _dense(width, width)
        yield from _norm(width)
        yield from _dense(width, 4 * width)
        yield from _dense(4 * width, width)
    yield from _norm(width)


def tiny(count: int = 10_000) -> Iterator[Shape]:
    """Many tensors of 1 to 97 elements."""
    return ((1 + index % 97,) for index in range(count))


def _convolution(inputs: int, outputs: int, side: int) -> Iterator[Shape]:
    """A convolution without a bias, and its batch normalization."""
    yield (outputs, inputs, side, side)
    yield from _norm(outputs)


def _norm(width: int) -> Iterator[Shape]:
    yield from ((width,), (width,))


def _dense(inputs: int, outputs: int) -> Iterator[Shape]:
    yield from ((outputs, inputs), (outputs,))


LISTS: dict[str, Callable[[], Iterator[Shape]]] = {
    "resnet50": resnet50,
    "bert_base": bert_base,
    "gpt2_small": gpt2_small,
    "tiny_10000": tiny,
    "tiny_100": lambda: tiny(100),
}
"""The lists by name."""


def lengths(name: str) -> tuple[int, ...]:
    """The number of elements of every tensor of a list."""
    return tuple(prod(shape) for shape in LISTS[name]())
