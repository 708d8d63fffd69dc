"""The torch networks with random initial weights, and their random batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Task:
    """A network and its data.

    Attributes:
        network: Creates the network, which returns scores (..., classes).
        batch: Creates `n` random inputs and their classes (...).
    """

    network: Callable[[], nn.Module]
    batch: Callable[[int, torch.Generator], Batch]


def loss(scores: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    """The mean cross entropy over all positions."""
    return functional.cross_entropy(scores.flatten(0, -2), classes.flatten())


class Residual(nn.Module):
    """A basic residual block (He et al., 2015): two 3x3 convolutions, each normalized, with a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        """A block from `inputs` to `outputs` channels; the shortcut is a 1x1 convolution if they differ."""
        super().__init__()
        self.first = nn.Sequential(*_normalized(inputs, outputs, 3, stride), nn.ReLU())
        self.second = nn.Sequential(*_normalized(outputs, outputs, 3, 1))
        self.short = nn.Sequential(*_normalized(inputs, outputs, 1, stride)) if inputs != outputs else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images [n, inputs, side, side] to [n, outputs, side / stride, side / stride]."""
        return functional.relu(self.second(self.first(x)) + self.short(x))


class Block(nn.Module):
    """A block of a GPT (Radford et al., 2019): attention to earlier tokens, then two dense layers, each normalized."""

    def __init__(self, width: int, heads: int) -> None:
        """A block of `width` channels."""
        super().__init__()
        self.heads = heads
        self.before, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.dense = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens [n, length, width] to the same."""
        n, length, width = x.shape
        parts = self.qkv(self.before(x)).view(n, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        query, key, value = parts.unbind()
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(n, length, width))
        return x.add(self.dense(x))


class Transformer(nn.Module):
    """A small GPT; the output is tied to the embedding."""

    def __init__(self, words: int, length: int, width: int, blocks: int, heads: int) -> None:
        """For `length` tokens from a vocabulary of `words`."""
        super().__init__()
        self.words, self.positions = nn.Embedding(words, width), nn.Embedding(length, width)
        for embedding in (self.words, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(blocks)))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Tokens [n, length] to scores [n, length, words]."""
        x = self.norm(self.blocks(self.words(tokens) + self.positions.weight))
        return functional.linear(x, self.words.weight)


def mlp() -> nn.Module:
    """Images of 784 pixels to ten classes."""
    return nn.Sequential(nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, CLASSES))


def resnet() -> nn.Module:
    """Images [n, 3, 32, 32] to ten classes, through three residual blocks."""
    return nn.Sequential(
        *_normalized(3, 32, 3, 1),
        nn.ReLU(),
        Residual(32, 32, 1),
        Residual(32, 64, 2),
        Residual(64, 128, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(128, CLASSES),
    )


def _normalized(inputs: int, outputs: int, side: int, stride: int) -> tuple[nn.Module, nn.Module]:
    return nn.Conv2d(inputs, outputs, side, stride, side // 2, bias=False), nn.BatchNorm2d(outputs)


def _images(*shape: int) -> Callable[[int, torch.Generator], Batch]:
    def batch(n: int, generator: torch.Generator) -> Batch:
        return torch.randn(n, *shape, generator=generator), torch.randint(CLASSES, (n,), generator=generator)

    return batch


def _tokens(words: int, length: int) -> Callable[[int, torch.Generator], Batch]:
    def batch(n: int, generator: torch.Generator) -> Batch:
        text = torch.randint(words, (n, length + 1), generator=generator)
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()

    return batch


CLASSES = 10
TASKS = {
    "mlp": Task(mlp, _images(784)),
    "resnet": Task(resnet, _images(3, 32, 32)),
    "transformer_small": Task(lambda: Transformer(1024, 64, 256, 4, 4), _tokens(1024, 64)),
    "transformer_large": Task(lambda: Transformer(8192, 64, 512, 8, 8), _tokens(8192, 64)),
}
"""The networks by name."""
