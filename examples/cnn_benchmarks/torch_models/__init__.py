"""The benchmark's networks in PyTorch, with the layers and parameter counts of their usual definitions.

All take images [N, C, H, W] and give logits.
"""

from __future__ import annotations

from torch import nn

from options import Shape
from torch_models.alexnet import alexnet
from torch_models.inception import Inception3
from torch_models.resnet import ResNet50, SmallResNet
from torch_models.small import lenet, trivial
from torch_models.vgg import vgg16


def build(name: str, shape: Shape) -> nn.Module:
    """Build a network by its name in `options.MODELS`. Raises KeyError when there is none of that name."""
    builders = {
        "trivial": lambda: trivial(shape.side, shape.channels, shape.classes),
        "lenet": lambda: lenet(shape.side, shape.channels, shape.classes),
        "resnet20": lambda: SmallResNet(3, shape.classes),
        "resnet56": lambda: SmallResNet(9, shape.classes),
        "alexnet": lambda: alexnet(shape.classes),
        "vgg16": lambda: vgg16(shape.classes),
        "resnet50": lambda: ResNet50(shape.classes),
        "inception3": lambda: Inception3(shape.classes),
    }
    return builders[name]()
