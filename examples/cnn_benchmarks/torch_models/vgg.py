"""VGG with 16 layers (Simonyan, Zisserman 2015, arXiv:1409.1556, configuration D)."""

from __future__ import annotations

from torch import nn

BLOCKS = ((2, 64), (2, 128), (3, 256), (3, 512), (3, 512))
"""How many convolutions each block has, and how many channels."""


def vgg16(classes: int) -> nn.Module:
    """Thirteen convolutions and three dense layers, for images of 224 pixels."""
    layers: list[nn.Module] = []
    before = 3
    for count, channels in BLOCKS:
        for _ in range(count):
            layers += [nn.Conv2d(before, channels, 3, padding=1), nn.ReLU()]
            before = channels
        layers.append(nn.MaxPool2d(2))
    layers += [nn.Flatten(), nn.Linear(512 * 7 * 7, 4096), nn.ReLU(), nn.Dropout()]
    layers += [nn.Linear(4096, 4096), nn.ReLU(), nn.Dropout(), nn.Linear(4096, classes)]
    net = nn.Sequential(*layers)
    for layer in net:
        if isinstance(layer, nn.Conv2d):  # without this a net that deep passes nothing on
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return net
