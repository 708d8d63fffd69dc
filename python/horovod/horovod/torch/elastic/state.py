"""The state of an elastic training with torch.

    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0)
    state.sync()
    state.commit()

Thread rule: the training thread; ``sync`` is collective.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from horovod.common._names import rank
from horovod.common.elastic import ObjectState, Saved, broadcast_object
from horovod.torch.elastic.sampler import ElasticSampler
from horovod.torch.functions import broadcast_optimizer_state, broadcast_parameters


class StateHandler(Saved):
    """How values of a type are saved, restored and broadcast. A script's own go into ``set_handler_registry``.

    Args:
        value: The value.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def set_value(self, value: Any) -> None:
        """Takes another value, and saves it."""
        self.value = value
        self.save()


class _StateDictHandler(StateHandler):
    """A value with ``state_dict`` and ``load_state_dict``."""

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self.save()

    def save(self) -> None:
        """Keeps a copy of the value's state."""
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        """Loads the copy: one of it, as a value may keep what it loads."""
        self.value.load_state_dict(copy.deepcopy(self._saved))

    def sync(self) -> None:
        """Takes the state of rank 0, and saves it."""
        self._broadcast()
        self.save()

    def _broadcast(self) -> None:
        self.value.load_state_dict(broadcast_object(self.value.state_dict()))


class ModelStateHandler(_StateDictHandler):
    """A module."""

    def _broadcast(self) -> None:
        broadcast_parameters(self.value.state_dict(), root_rank=0)


class OptimizerStateHandler(_StateDictHandler):
    """An optimizer."""

    def _broadcast(self) -> None:
        broadcast_optimizer_state(self.value, root_rank=0)


class SamplerStateHandler(_StateDictHandler):
    """An ``ElasticSampler``."""


_registry: list[tuple[type, type[StateHandler]]] = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
]


def get_handler_registry() -> list[tuple[type, type[StateHandler]]]:
    """The types that a ``TorchState`` knows, each with its handler; the first that fits is taken."""
    return _registry


def set_handler_registry(registry: list[tuple[type, type[StateHandler]]]) -> None:
    """Replaces the result of ``get_handler_registry``."""
    global _registry
    _registry = registry


class TorchState(ObjectState):
    """Modules, optimizers, samplers and other objects, as attributes.

    Args:
        model: A module.
        optimizer: An optimizer, or a ``DistributedOptimizer``.
        kwargs: More of them; objects without a handler as of ``ObjectState``.
    """

    _handlers: dict[str, StateHandler] = {}  # noqa: RUF012 - an instance has its own

    def __init__(
        self, model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None, **kwargs: Any
    ) -> None:
        given = {**kwargs, "model": model, "optimizer": optimizer}
        kinds = {name: [make for kind, make in _registry if isinstance(value, kind)] for name, value in given.items()}
        handlers = {name: makes[0](given.pop(name)) for name, makes in kinds.items() if makes}
        super().__init__(broadcast_object, rank, **given)
        for name, handler in handlers.items():
            setattr(self, name, handler.value)
        self._handlers = handlers

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._handlers:
            self._handlers[name].set_value(value)
        super().__setattr__(name, value)

    def save(self) -> None:
        """Keeps copies of everything."""
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        """Returns to the copies."""
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        """Takes everything from rank 0, and saves it."""
        for handler in self._handlers.values():
            handler.sync()
        super().sync()
