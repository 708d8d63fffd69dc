"""The state of an elastic training: what all ranks have alike, can save, and take back.

    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, epoch=0)
    state.sync()  # everything as rank 0 has it
    state.commit()  # a later state.restore() returns to this

States, samplers and callbacks work. What makes a job elastic does not yet: ``run`` raises NotImplementedError.

Thread rule: the training thread; ``sync`` is collective.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import numpy as np

from horovod.common import _objects
from horovod.common._names import rank
from horovod.common.process_sets import global_process_set


def broadcast_object(obj: Any) -> Any:
    """The object of rank 0."""
    return _objects.broadcast_object(obj, 0, global_process_set)


def run_fn(*args: Any, **kwargs: Any) -> NoReturn:
    """Raises NotImplementedError."""
    raise NotImplementedError(
        "dl_comm's horovod has no elastic training yet: call the function itself after state.sync(), "
        "with hvd.init() and a fixed number of ranks"
    )


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """The decorator of an elastic training function. The function raises NotImplementedError when it is called."""
    return run_fn


class Saved:
    """What can be saved, taken back, and made as it is on rank 0."""

    def save(self) -> None:
        """Keeps a copy in memory."""
        raise NotImplementedError(f"{type(self).__name__}.save")

    def restore(self) -> None:
        """Returns to the copy."""
        raise NotImplementedError(f"{type(self).__name__}.restore")

    def sync(self) -> None:
        """Takes what rank 0 has, and saves it."""
        raise NotImplementedError(f"{type(self).__name__}.sync")


class State(Saved):
    """What a training tracks. A class of a script defines ``save``, ``restore`` and ``sync``, perhaps ``reset``.

    Args:
        bcast_object: Returns its argument as rank 0 has it.
        get_rank: Returns the rank of this process.
    """

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int]) -> None:
        self._bcast_object, self._rank = bcast_object, get_rank
        self._reset_callbacks: list[Callable[[], None]] = []

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], None]]) -> None:
        """Adds functions that ``on_reset`` calls."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """The ranks have changed: calls ``reset``, then the callbacks."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def commit(self) -> None:
        """Saves the state. Not collective."""
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raises HostsUpdatedInterrupt when hosts have come or go: never yet."""

    def reset(self) -> None:
        """Prepares the state for other ranks, before ``sync``."""


class ObjectState(State):
    """Objects that pickle and ``copy.deepcopy`` take, as attributes.

    Differs from Horovod's: copies are deep, so that a list that has grown since is restored, too; ``sync`` broadcasts
    what rank 0 has now, not what it saved last.

    Args:
        bcast_object: Returns its argument as rank 0 has it.
        get_rank: Returns the rank of this process.
        kwargs: The objects. ``epoch=0`` becomes ``state.epoch``.
    """

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int], **kwargs: Any) -> None:
        super().__init__(bcast_object, get_rank)
        self._take(kwargs)

    def _objects(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._saved_state}

    def _take(self, objects: dict[str, Any]) -> None:
        """Sets and saves them. The script may hold them, too, so they stay the same objects."""
        self._saved_state = copy.deepcopy(objects)
        for name, value in objects.items():
            setattr(self, name, value)

    def save(self) -> None:
        """Keeps copies of the objects."""
        self._saved_state = copy.deepcopy(self._objects())

    def restore(self) -> None:
        """Sets the objects as they were saved."""
        for name, value in copy.deepcopy(self._saved_state).items():
            setattr(self, name, value)

    def sync(self) -> None:
        """Takes the objects of rank 0, and saves them."""
        # Also without objects: another rank may have some.
        self._take(self._bcast_object(self._objects()))


class VariablesState(ObjectState):
    """An ``ObjectState`` with variables of TensorFlow or Keras.

    Args:
        variables: Returns them.
        broadcast: Gives them the values of rank 0.
        session: Returns the session of a TF1 graph; None without a graph.
        kwargs: Objects, as of ``ObjectState``.
    """

    def __init__(
        self,
        variables: Callable[[], list[Any]],
        broadcast: Callable[[], Any],
        session: Callable[[], Any] | None,
        **kwargs: Any,
    ) -> None:
        super().__init__(broadcast_object, rank, **kwargs)
        self._variables, self._broadcast, self._session = variables, broadcast, session
        self._values = self._read()

    def _read(self) -> list[Any]:
        if self._session is not None:
            return list(self._session().run(self._variables()))
        return [np.array(variable.numpy()) for variable in self._variables()]

    def save(self) -> None:
        """Keeps copies of the variables and objects."""
        self._values = self._read()
        super().save()

    def restore(self) -> None:
        """Sets the variables and objects as they were saved.

        Raises ValueError if there are other variables than at the last ``save``.
        """
        variables = self._variables()
        if len(variables) != len(self._values):
            raise ValueError(
                f"{len(variables)} variables, {len(self._values)} were saved: save() after the model is built"
            )
        for variable, value in zip(variables, self._values, strict=True):
            if self._session is None:
                variable.assign(value)
            else:
                variable.load(value, self._session())
        super().restore()

    def sync(self) -> None:
        """Takes the variables and objects of rank 0, and saves them."""
        self._broadcast()
        self._values = self._read()
        super().sync()
