"""The benchmark's networks in Keras: those that Keras has, and the rest with the layers of their usual definitions.

All take images [N, H, W, C] and give logits. Keras's ResNet-50 and Inception v3 differ a little from those of
`torch_models`: biases in all convolutions of the first, no scales in the normalisations of the second.
"""

from __future__ import annotations

from typing import Any

import keras
from keras import layers, ops

from options import Shape


def build(name: str, shape: Shape) -> Any:
    """Build a network by its name in `options.MODELS`. Raises KeyError when there is none of that name."""
    applications = {
        "vgg16": keras.applications.VGG16,
        "resnet50": keras.applications.ResNet50,
        "inception3": keras.applications.InceptionV3,
    }
    size = (shape.side, shape.side, shape.channels)
    if name in applications:
        return applications[name](weights=None, input_shape=size, classes=shape.classes, classifier_activation=None)
    functions = {
        "trivial": _trivial,
        "lenet": _lenet,
        "alexnet": _alexnet,
        "resnet20": _resnet(3),
        "resnet56": _resnet(9),
    }
    images = keras.Input(size)
    return keras.Model(images, layers.Dense(shape.classes)(functions[name](images)), name=name)


def _trivial(x: Any) -> Any:
    for units in (1, 4096):
        x = layers.Dense(units, "relu")(layers.Flatten()(x))
    return x


def _lenet(x: Any) -> Any:
    x = layers.ZeroPadding2D((32 - x.shape[1]) // 2)(x)
    for channels in (6, 16):
        x = layers.MaxPool2D(2)(layers.Conv2D(channels, 5, activation="relu")(x))
    x = layers.Flatten()(x)
    for units in (120, 84):
        x = layers.Dense(units, "relu")(x)
    return x


def _alexnet(x: Any) -> Any:
    x = layers.Conv2D(64, 11, 4, activation="relu")(layers.ZeroPadding2D(2)(x))
    x = layers.MaxPool2D(3, 2)(x)
    x = layers.Conv2D(192, 5, padding="same", activation="relu")(x)
    x = layers.MaxPool2D(3, 2)(x)
    for channels in (384, 256, 256):
        x = layers.Conv2D(channels, 3, padding="same", activation="relu")(x)
    x = layers.Flatten()(layers.MaxPool2D(3, 2)(x))
    for _ in range(2):
        x = layers.Dense(4096, "relu")(layers.Dropout(0.5)(x))
    return x


def _resnet(blocks: int) -> Any:
    """Make a residual network for CIFAR-10 with `blocks` blocks for each of three sizes of the image."""

    def normed(x: Any, channels: int, stride: int = 1) -> Any:
        convolution = layers.Conv2D(channels, 3, stride, padding="same", use_bias=False, kernel_initializer="he_normal")
        return layers.BatchNormalization(momentum=0.9, epsilon=1e-5)(convolution(x))

    def block(x: Any, channels: int) -> Any:
        stride = channels // x.shape[-1]
        main = normed(ops.relu(normed(x, channels, stride)), channels)
        if stride > 1:  # every second pixel, new channels zero
            x = ops.pad(x[:, ::stride, ::stride], [(0, 0), (0, 0), (0, 0), (0, channels - x.shape[-1])])
        return ops.relu(main + x)

    def network(x: Any) -> Any:
        x = ops.relu(normed(x, 16))
        for channels in (16, 32, 64):
            for _ in range(blocks):
                x = block(x, channels)
        return layers.GlobalAveragePooling2D()(x)

    return network
