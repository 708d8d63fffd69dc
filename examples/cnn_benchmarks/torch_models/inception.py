"""Inception v3 (Szegedy et al. 2015, arXiv:1512.00567), without the auxiliary classifier."""

from __future__ import annotations

import torch
from torch import nn

Kernel = int | tuple[int, int]


def _conv(before: int, channels: int, kernel: Kernel = 1, stride: int = 1, padding: Kernel = 0) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(before, channels, kernel, stride, padding, bias=False), nn.BatchNorm2d(channels, eps=0.001), nn.ReLU()
    )


def _row(before: int, channels: int, length: int) -> nn.Module:
    return _conv(before, channels, (1, length), padding=(0, length // 2))


def _column(before: int, channels: int, length: int) -> nn.Module:
    return _conv(before, channels, (length, 1), padding=(length // 2, 0))


class Branches(nn.ModuleList):
    """Ways side by side whose channels are joined."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Go all ways."""
        return torch.cat([way(x) for way in self], 1)


def _pooled(before: int, channels: int) -> nn.Module:
    return nn.Sequential(nn.AvgPool2d(3, 1, 1), _conv(before, channels))


def _square(before: int, pooled: int) -> nn.Module:
    """Convolutions of 5 by 5, and of 3 by 3 twice, at 35 pixels."""
    return Branches(
        [
            _conv(before, 64),
            nn.Sequential(_conv(before, 48), _conv(48, 64, 5, padding=2)),
            nn.Sequential(_conv(before, 64), _conv(64, 96, 3, padding=1), _conv(96, 96, 3, padding=1)),
            _pooled(before, pooled),
        ]
    )


def _to_17(before: int) -> nn.Module:
    return Branches(
        [
            _conv(before, 384, 3, 2),
            nn.Sequential(_conv(before, 64), _conv(64, 96, 3, padding=1), _conv(96, 96, 3, 2)),
            nn.MaxPool2d(3, 2),
        ]
    )


def _long(before: int, inside: int) -> nn.Module:
    """Convolutions of 7 by 7 as rows and columns, at 17 pixels."""
    return Branches(
        [
            _conv(before, 192),
            nn.Sequential(_conv(before, inside), _row(inside, inside, 7), _column(inside, 192, 7)),
            nn.Sequential(
                _conv(before, inside),
                _column(inside, inside, 7),
                _row(inside, inside, 7),
                _column(inside, inside, 7),
                _row(inside, 192, 7),
            ),
            _pooled(before, 192),
        ]
    )


def _to_8(before: int) -> nn.Module:
    return Branches(
        [
            nn.Sequential(_conv(before, 192), _conv(192, 320, 3, 2)),
            nn.Sequential(_conv(before, 192), _row(192, 192, 7), _column(192, 192, 7), _conv(192, 192, 3, 2)),
            nn.MaxPool2d(3, 2),
        ]
    )


def _wide(before: int) -> nn.Module:
    """Rows and columns of 3 side by side, at 8 pixels."""

    def split() -> nn.Module:
        return Branches([_row(384, 384, 3), _column(384, 384, 3)])

    return Branches(
        [
            _conv(before, 320),
            nn.Sequential(_conv(before, 384), split()),
            nn.Sequential(_conv(before, 448), _conv(448, 384, 3, padding=1), split()),
            _pooled(before, 192),
        ]
    )


class Inception3(nn.Sequential):
    """Inception v3, for images of 299 pixels."""

    def __init__(self, classes: int) -> None:
        """Make the layers."""
        super().__init__(
            _conv(3, 32, 3, 2),
            _conv(32, 32, 3),
            _conv(32, 64, 3, padding=1),
            nn.MaxPool2d(3, 2),
            _conv(64, 80),
            _conv(80, 192, 3),
            nn.MaxPool2d(3, 2),
            _square(192, 32),
            _square(256, 64),
            _square(288, 64),
            _to_17(288),
            _long(768, 128),
            _long(768, 160),
            _long(768, 160),
            _long(768, 192),
            _to_8(768),
            _wide(1280),
            _wide(2048),
            nn.AdaptiveAvgPool2d(1),
            nn.Dropout(),
            nn.Flatten(),
            nn.Linear(2048, classes),
        )
