"""Residual networks (He et al. 2015, arXiv:1512.03385): ResNet-50 for ImageNet, and those for CIFAR-10.

ResNet-50 halves the image in the middle convolution of a block instead of the first, as is usual by now.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


def _normed(before: int, channels: int, kernel: int, stride: int = 1) -> list[nn.Module]:
    convolution = nn.Conv2d(before, channels, kernel, stride=stride, padding=kernel // 2, bias=False)
    nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
    return [convolution, nn.BatchNorm2d(channels)]


class Bottleneck(nn.Module):
    """Three convolutions beside a shortcut, which is a convolution of its own where shapes change."""

    def __init__(self, before: int, inside: int, stride: int) -> None:
        """Make the block: `before` channels in, four times `inside` out."""
        super().__init__()
        after = 4 * inside
        self.main = nn.Sequential(
            *_normed(before, inside, 1),
            nn.ReLU(),
            *_normed(inside, inside, 3, stride),
            nn.ReLU(),
            *_normed(inside, after, 1),
        )
        changes = stride != 1 or before != after
        self.shortcut = nn.Sequential(*_normed(before, after, 1, stride)) if changes else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add both ways."""
        return functional.relu(self.main(x) + self.shortcut(x))


class ResNet50(nn.Sequential):
    """ResNet-50, for images of 224 pixels."""

    def __init__(self, classes: int) -> None:
        """Make the layers."""
        layers: list[nn.Module] = [*_normed(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, stride=2, padding=1)]
        before = 64
        for stage, count in enumerate((3, 4, 6, 3)):
            inside = 64 << stage
            for block in range(count):
                layers.append(Bottleneck(before, inside, 2 if stage > 0 and block == 0 else 1))
                before = 4 * inside
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, classes))


class Basic(nn.Module):
    """Two convolutions beside a shortcut without parameters: every second pixel, new channels zero."""

    def __init__(self, before: int, after: int) -> None:
        """Make the block; it halves the image where the channels double."""
        super().__init__()
        self.stride = after // before
        self.main = nn.Sequential(*_normed(before, after, 3, self.stride), nn.ReLU(), *_normed(after, after, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add both ways."""
        main = self.main(x)
        if self.stride > 1:
            x = functional.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 0, main.shape[1] - x.shape[1]))
        return functional.relu(main + x)


class SmallResNet(nn.Sequential):
    """The residual networks for CIFAR-10: 6 * blocks + 2 layers."""

    def __init__(self, blocks: int, classes: int) -> None:
        """Make the layers, with `blocks` blocks for each of three sizes of the image."""
        layers: list[nn.Module] = [*_normed(3, 16, 3), nn.ReLU()]
        before = 16
        for after in (16, 32, 64):
            for _ in range(blocks):
                layers.append(Basic(before, after))
                before = after
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, classes))
