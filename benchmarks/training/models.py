"""The trained models; their networks are in torch_networks.py and tensorflow_side.py. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Model:
    """A model.

    Attributes:
        name: Its name in tables and on the command line.
        framework: "torch" or "tensorflow".
        network: The name of its network in that framework's module.
        batch: Samples of a step on one rank: a step on one rank takes about 50 ms, or 500 ms in the largest model.
        steps: Timed steps of a trial.
        what: A short description.
    """

    name: str
    framework: str
    network: str
    batch: int
    steps: int
    what: str


MODELS = {
    model.name: model
    for model in (
        Model("mlp", "torch", "mlp", 384, 20, "784-1024-1024-10"),
        Model("resnet", "torch", "resnet", 16, 20, "three residual blocks, 32x32 pixels"),
        Model("transformer-3m", "torch", "transformer_small", 2, 20, "4 blocks of width 256, 64 tokens"),
        Model("transformer-29m", "torch", "transformer_large", 4, 6, "8 blocks of width 512, 64 tokens"),
        Model("tf-mlp", "tensorflow", "mlp", 1024, 20, "784-1024-1024-10"),
        Model("tf-cnn", "tensorflow", "convnet", 768, 20, "two convolutions, 28x28 pixels"),
    )
}
"""The models by name."""
