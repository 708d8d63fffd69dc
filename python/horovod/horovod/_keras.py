"""What `horovod.keras` and `horovod.tensorflow.keras` share: optimizers and callbacks of Keras 3 and of ``tf_keras``.

Keras 3 may run on TensorFlow or torch. An optimizer stays the same object, with its state; its class becomes a subclass
of its former class with the same name, so that a saved model does not need this package.

Thread rule: as Keras, one thread trains a model.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any, TypeVar

from horovod.common import _job
from horovod.common._gradients import Reducer
from horovod.common.exceptions import translated

Average, Sum = 0, 1


def keras_module() -> ModuleType:
    """``tf_keras`` with ``TF_USE_LEGACY_KERAS=1``, else Keras 3."""
    if os.environ.get("TF_USE_LEGACY_KERAS", "0").strip().lower() in ("1", "true"):
        return importlib.import_module("tf_keras")
    return importlib.import_module("keras")


def _is_on_torch() -> bool:
    return getattr(keras_module(), "config", None) is not None and keras_module().config.backend() == "torch"


_Function = TypeVar("_Function", bound=Callable[..., Any])


def unconverted(function: _Function) -> _Function:
    """Leaves a function as it is in a ``tf.function``, which else rewrites it."""
    if _is_on_torch():
        return function
    from horovod.tensorflow.mpi_ops import unconverted as marked

    return marked(function)


# Optimizers.


class _OnTorch(Reducer):
    """Reduces gradients that are torch tensors."""

    def reduce(self, grads: list[Any], name: str) -> list[Any]:
        from horovod.torch import Compression, grouped_allreduce

        # Of `horovod.tensorflow` or of `horovod.torch`.
        names = {"FP16Compressor": Compression.fp16, "BF16Compressor": Compression.bf16}
        compression = names.get(getattr(self.compression, "__name__", ""), Compression.none)
        given = [grad.contiguous() for grad in grads]
        return grouped_allreduce(given, name=name, compression=compression, **self.options)


class _Distributed:
    """What the optimizers of both Kerases have. The class precedes Keras's in the list of bases."""

    _hvd_make: Callable[[], Any]
    """Makes the reducer."""
    _hvd_passes = 1
    _hvd_average = False
    _hvd_made: Any = None

    @property
    def _hvd_reduce(self) -> Any:
        if self._hvd_made is None:
            self._hvd_made = type(self)._hvd_make()
        return self._hvd_made

    def register_local_var(self, var: Any) -> None:
        """Leaves the gradients of a variable to this rank."""
        self._hvd_reduce.add_local(var)


class _OfKeras3(_Distributed):
    """Reduces in `apply`; accumulated gradients where Keras clips them, which is once in each step."""

    _hvd_applied: Sequence[Any] = ()

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> Any:
        grads = list(grads)
        known = list(self._trainable_variables if trainable_variables is None else trainable_variables)  # type: ignore[attr-defined]
        if self.gradient_accumulation_steps:  # type: ignore[attr-defined]
            self._hvd_applied = tuple(each for grad, each in zip(grads, known, strict=False) if grad is not None)
        else:
            grads = self._hvd_reduce(grads, known)
        return super().apply(grads, trainable_variables)  # type: ignore[misc]

    def _clip_gradients(self, grads: Sequence[Any]) -> Any:
        if self.gradient_accumulation_steps:  # type: ignore[attr-defined]
            factor = 1 if self._hvd_average else self._hvd_passes  # Keras has divided by their number
            grads = [
                grad if grad is None or factor == 1 else grad * factor
                for grad in self._hvd_reduce(list(grads), self._hvd_applied)
            ]
        return super()._clip_gradients(grads)  # type: ignore[misc]


class _OfTfKeras(_Distributed):
    """Reduces where it computes gradients; `apply_gradients` takes what is reduced already."""

    _HAS_AGGREGATE_GRAD = True
    _hvd_helper: Any = None

    @property
    def _agg_helper(self) -> Any:
        if self._hvd_helper is None and self._hvd_passes > 1:
            from horovod.tensorflow.gradient_aggregation import LocalGradientAggregationHelper

            self._hvd_helper = LocalGradientAggregationHelper(self._hvd_reduce, self._hvd_passes, self._hvd_average)
        return self._hvd_helper

    def _allreduce(self, grads: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        reduce = self._hvd_reduce if self._agg_helper is None else self._agg_helper.compute_gradients
        reduced: list[Any] = reduce(list(grads), list(variables))
        return reduced

    def compute_gradients(self, loss: Any, var_list: Any, tape: Any = None) -> list[tuple[Any, Any]]:
        return self._compute_gradients(loss, var_list, None, tape)

    def _compute_gradients(
        self, loss: Any, var_list: Any, grad_loss: Any = None, tape: Any = None
    ) -> list[tuple[Any, Any]]:
        import tensorflow as tf

        tape = tape or tf.GradientTape()
        if hasattr(super(), "_compute_gradients"):  # an optimizer of tf_keras.optimizers.legacy
            pairs = super()._compute_gradients(loss, var_list, grad_loss, tape=tape)  # type: ignore[misc]
        else:
            pairs = super().compute_gradients(loss, var_list, tape=tape)  # type: ignore[misc]
        grads, variables = [grad for grad, _ in pairs], [variable for _, variable in pairs]
        return list(zip(self._allreduce(grads, variables), variables, strict=True))

    def get_gradients(self, loss: Any, params: Any) -> list[Any]:
        return self._allreduce(super().get_gradients(loss, params), params)  # type: ignore[misc]

    def apply_gradients(self, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        pairs = list(grads_and_vars)
        apply = super().apply_gradients  # type: ignore[misc]
        if self._agg_helper is None:
            return apply(pairs, *args, **kwargs)
        import tensorflow as tf

        if hasattr(self, "build"):  # outside of the branch
            with tf.init_scope():
                self.build([variable for _, variable in pairs])

        def both(call: Callable[[], Any]) -> Callable[[], Any]:
            def run() -> Any:
                call()
                return tf.constant(0)

            return run

        return self._agg_helper.apply_gradients(
            both(lambda: apply(pairs, *args, **kwargs)),
            both(lambda: self.iterations.assign_add(1)),  # type: ignore[attr-defined]
            [grad for grad, _ in pairs],
        )


def distributed_optimizer(
    optimizer: Any,
    name: str | None,
    op: int,
    backward_passes_per_step: int,
    average_aggregated_gradients: bool,
    **options: Any,
) -> Any:
    """Makes an optimizer reduce its gradients, and returns it; the arguments are those of ``DistributedOptimizer``."""
    if op not in (Average, Sum):
        raise ValueError("op is hvd.Average or hvd.Sum with Keras")
    if isinstance(optimizer, _Distributed):
        raise ValueError("the optimizer is a DistributedOptimizer already")
    base, on_torch = type(optimizer), _is_on_torch()
    is_of_3 = any(each.__module__.partition(".")[0] == "keras" for each in base.__mro__)

    def make() -> Reducer:
        kind: type[Reducer] = _OnTorch
        if not is_of_3 or not on_torch:
            from horovod.tensorflow.gradient_aggregation import Reducer as kind
        return kind(name or f"Distributed{base.__name__}", op=op, **options)

    names: dict[str, Any] = {each: getattr(base, each) for each in ("__module__", "__qualname__", "__doc__")}
    names.update(
        _hvd_make=staticmethod(make),
        _hvd_passes=backward_passes_per_step,
        _hvd_average=average_aggregated_gradients,
    )
    kind: type[Any] = _OfKeras3 if is_of_3 else _OfTfKeras
    optimizer.__class__ = type(base.__name__, (kind, base), names)
    if is_of_3 and backward_passes_per_step > 1:
        optimizer.gradient_accumulation_steps = backward_passes_per_step
    _ = optimizer._hvd_reduce  # raises for wrong options
    return optimizer


def local_variables(layers: Any) -> list[Any]:
    """The trainable variables of a layer, or of several. Raises ValueError if they are none."""
    kind = keras_module().layers.Layer
    listed: Sequence[Any] = [] if layers is None else [layers] if isinstance(layers, kind) else list(layers)
    if not all(isinstance(layer, kind) for layer in listed):
        raise ValueError("local_layers are Keras layers")
    return [variable for layer in listed for variable in layer.trainable_weights]


def load_model(wrap: Callable[[Any], Any], filepath: Any, custom: Iterable[Any]) -> Any:
    """Loads a model of which the optimizer becomes a ``DistributedOptimizer``; ``custom``: dicts of further objects."""
    objects = {name: each for entries in custom for name, each in entries.items()}
    model = keras_module().models.load_model(filepath, custom_objects=objects)
    if getattr(model, "optimizer", None) is not None and not isinstance(model.optimizer, _Distributed):
        wrap(model.optimizer)
        model.train_function = None  # it was traced without
    return model


# Values and variables.


def collective(which: str, value: Any, *args: Any, **options: Any) -> Any:
    """The result of a collective of `horovod.tensorflow` or `horovod.torch` on a value: a tensor, else an array."""
    if _is_on_torch():
        import numpy as np
        import torch

        import horovod.torch

        return getattr(horovod.torch, which)(torch.from_numpy(np.array(value)), *args, **options).numpy()
    import tensorflow as tf

    import horovod.tensorflow

    found = getattr(horovod.tensorflow, which)(tf.constant(value), *args, **options)
    return found if tf.executing_eagerly() else tf.compat.v1.keras.backend.get_session().run(found)


def broadcast(variables: Sequence[Any], root_rank: int) -> None:
    """Replaces the values of Keras's variables by those of one rank."""
    if _is_on_torch():
        from horovod.torch import broadcast_parameters

        broadcast_parameters([variable.value.data for variable in variables], root_rank)
    else:
        from horovod.tensorflow import broadcast_variables

        broadcast_variables(variables, root_rank)


# Callbacks, as mix-ins that precede the Callback of a Keras.


class BroadcastGlobalVariables:
    """Broadcasts the model and its optimizer after the first batch, when all variables exist."""

    def __init__(self, root_rank: int, device: str = "", local_variables: Any = None) -> None:
        super().__init__()
        listed = [local_variables] if hasattr(local_variables, "assign") else list(local_variables or ())
        if not all(hasattr(each, "assign") for each in listed):
            raise ValueError("local_variables are variables")
        self.root_rank, self.device, self.broadcast_done = root_rank, device, False
        self._local = {id(each): each for each in listed}

    def register_local_var(self, var: Any) -> None:
        """Leaves the value of a variable to this rank."""
        self._local[id(var)] = var

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        """After the first batch: broadcasts."""
        if self.broadcast_done:
            return
        model, optimizer = self.model, getattr(self.model, "optimizer", None)  # type: ignore[attr-defined]
        own = [] if optimizer is None else optimizer.variables
        own = list(own() if callable(own) else own)
        self.broadcast_done = True
        if not _is_on_torch() and not _is_eager():
            import tensorflow as tf

            from horovod.tensorflow import broadcast_global_variables

            tf.compat.v1.keras.backend.get_session().run(broadcast_global_variables(self.root_rank))
            return
        broadcast([each for each in [*model.weights, *own] if id(each) not in self._local], self.root_rank)


def _is_eager() -> bool:
    import tensorflow as tf

    return bool(tf.executing_eagerly())


class MetricAverage:
    """Averages the logs of an epoch over the ranks, for later callbacks in the list."""

    def __init__(self, device: str = "") -> None:
        super().__init__()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Replaces the values in ``logs`` by their means."""
        if logs:
            with translated():
                logs.update(_job.current().world.average_metrics({name: float(logs[name]) for name in sorted(logs)}))


class LearningRateSchedule:
    """Multiplies the initial learning rate by a factor from ``start_epoch`` on, before ``end_epoch``."""

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise ValueError("initial_lr is required")
        self.initial_lr, self.start_epoch, self.end_epoch, self.staircase = (
            initial_lr,
            start_epoch,
            end_epoch,
            staircase,
        )
        self.momentum_correction, self.steps_per_epoch, self.current_epoch = momentum_correction, steps_per_epoch, 0
        self.multiplier: Callable[[float], float] = (
            multiplier if callable(multiplier) else lambda epoch: multiplier ** (epoch - start_epoch)
        )
        self._momentum: float | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Finds the number of steps in an epoch."""
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = self.params.get("steps")  # type: ignore[attr-defined]
            if not self.steps_per_epoch:
                raise ValueError(f"{type(self).__name__} needs steps_per_epoch: the data do not say it")

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Notes the epoch."""
        self.current_epoch = epoch

    def on_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Sets the learning rate: of each batch, with ``staircase`` of each epoch."""
        end = self.end_epoch
        if self.current_epoch < self.start_epoch or end is not None and self.current_epoch >= end:
            return
        if self.staircase and batch:
            return
        epoch = self.current_epoch + (0.0 if self.staircase else batch / (self.steps_per_epoch or 1))
        optimizer = self.model.optimizer  # type: ignore[attr-defined]
        old, new = float(optimizer.learning_rate), self.initial_lr * self.multiplier(epoch)
        optimizer.learning_rate.assign(new)
        momentum = getattr(optimizer, "momentum", None)
        # A momentum that is a number is part of the traced step.
        if self.momentum_correction and hasattr(momentum, "assign") and old:
            self._momentum = float(momentum)  # type: ignore[arg-type]
            momentum.assign(self._momentum * new / old)  # type: ignore[union-attr]

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        """Takes back the correction of the momentum."""
        if self._momentum is not None:
            self.model.optimizer.momentum.assign(self._momentum)  # type: ignore[attr-defined]
            self._momentum = None

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds the learning rate to the logs, as ``lr``."""
        if logs is not None:
            logs["lr"] = float(self.model.optimizer.learning_rate)  # type: ignore[attr-defined]


class LearningRateWarmup(LearningRateSchedule):
    """Raises the learning rate from ``initial_lr / size`` to ``initial_lr``, in the first epochs."""

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            size = _job.current().size
            # A round number at the end of each epoch.
            epoch += 1.0 / (self.steps_per_epoch or 1)
            return (epoch * (size - 1) / warmup_epochs + 1) / size

        super().__init__(initial_lr, multiplier, 0, warmup_epochs, False, momentum_correction, steps_per_epoch)
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds the learning rate to the logs; prints a line after the last epoch of the warm-up."""
        super().on_epoch_end(epoch, logs)
        if epoch == (self.end_epoch or 0) - 1 and self.verbose > 0 and _job.current().rank == 0:
            rate = float(self.model.optimizer.learning_rate)  # type: ignore[attr-defined]
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {rate:g}.")
