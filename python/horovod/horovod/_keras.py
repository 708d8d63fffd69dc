"""What `horovod.keras` and `horovod.tensorflow.keras` share: optimizers and callbacks of Keras 3 and of ``tf_keras``.

Keras 3 may run on TensorFlow or torch. An optimizer stays the same object, with its state; its class becomes a subclass
of its former class with the same name, so that a saved model does not need this package.

Thread rule: as Keras, one thread trains a model.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from horovod.common._gradients import Reducer
from horovod.common._names import Average, Sum
from horovod.common.elastic import VariablesState


def keras_module() -> ModuleType:
    """``tf_keras`` with ``TF_USE_LEGACY_KERAS=1``, else Keras 3."""
    if os.environ.get("TF_USE_LEGACY_KERAS", "0").strip().lower() in ("1", "true"):
        return importlib.import_module("tf_keras")
    return importlib.import_module("keras")


def _is_on_torch() -> bool:
    return getattr(keras_module(), "config", None) is not None and keras_module().config.backend() == "torch"


def unconverted(function: Callable[..., Any]) -> Callable[..., Any]:
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
        return list(grouped_allreduce(given, name=name, **{**self.options, "compression": compression}))


class _Distributed:
    """What the optimizers of both Kerases have. The class precedes Keras's in the list of bases."""

    _hvd_make: Callable[[], Any]
    """Makes the reducer."""
    _hvd_passes = 1
    _hvd_average = False

    @functools.cached_property
    def _hvd_reduce(self) -> Any:
        return type(self)._hvd_make()

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
            reduced = self._hvd_reduce(list(grads), self._hvd_applied)
            grads = [grad if grad is None or factor == 1 else grad * factor for grad in reduced]
        return super()._clip_gradients(grads)  # type: ignore[misc]


class _OfTfKeras(_Distributed):
    """Reduces where it computes gradients; `apply_gradients` takes what is reduced already."""

    _HAS_AGGREGATE_GRAD = True

    @functools.cached_property
    def _agg_helper(self) -> Any:
        from horovod.tensorflow.gradient_aggregation import LocalGradientAggregationHelper

        return LocalGradientAggregationHelper(self._hvd_reduce, self._hvd_passes, self._hvd_average)

    def _allreduce(self, grads: Sequence[Any], variables: Sequence[Any]) -> Any:
        return self._agg_helper.compute_gradients(list(grads), list(variables))

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

    def get_gradients(self, loss: Any, params: Any) -> Any:
        return self._allreduce(super().get_gradients(loss, params), params)  # type: ignore[misc]

    def apply_gradients(self, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        pairs = list(grads_and_vars)
        apply = super().apply_gradients  # type: ignore[misc]
        if self._hvd_passes == 1:
            return apply(pairs, *args, **kwargs)
        import tensorflow as tf

        if hasattr(self, "build"):  # outside of the branch
            with tf.init_scope():
                self.build([variable for _, variable in pairs])

        def applied() -> Any:
            apply(pairs, *args, **kwargs)
            return tf.constant(0)  # as the other branch

        def skipped() -> Any:
            self.iterations.assign_add(1)  # type: ignore[attr-defined]
            return tf.constant(0)

        return self._agg_helper.apply_gradients(applied, skipped, [grad for grad, _ in pairs])


def distributed_optimizer(
    optimizer: Any,
    name: str | None,
    op: int,
    backward_passes_per_step: int,
    average_aggregated_gradients: bool,
    **options: Any,
) -> Any:
    """Makes an optimizer reduce its gradients over the ranks before it applies them, and returns it.

    Args:
        optimizer: One of Keras 3 or ``tf_keras``.
        name: What the ranks match; the same on all ranks.
        device_dense: Where the ops of tensors run.
        device_sparse: Where those of ``tf.IndexedSlices`` run.
        compression: How the values travel.
        sparse_as_dense: Whether ``tf.IndexedSlices`` become tensors first.
        gradient_predivide_factor: The part of the division of an average that comes before the sum.
        op: ``Average`` or ``Sum``.
        num_groups: Deprecated: as ``groups``.
        groups: A number of groups of gradients, or lists of variables; each group is one call.
        backward_passes_per_step: Passes of which the gradients are added up on each rank first; Keras 3 has its
            ``gradient_accumulation_steps`` then.
        average_aggregated_gradients: Divide the sums of several passes by their number.
        process_set: The ranks; others keep their gradients.
        scale_local_gradients: Divide the gradients of local variables (``register_local_var``) by the number of ranks.

    Raises:
        ValueError: Another operator, or options that do not fit each other.
    """
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
    names |= {"_hvd_make": staticmethod(make), "_hvd_passes": backward_passes_per_step}
    names["_hvd_average"] = average_aggregated_gradients
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


def load_model(wrap: Callable[[Any], Any], filepath: Any, custom: dict[str, Any]) -> Any:
    """Loads a model of which the optimizer becomes a ``DistributedOptimizer``; ``custom``: further objects."""
    model = keras_module().models.load_model(filepath, custom_objects=custom)
    if getattr(model, "optimizer", None) is not None and not isinstance(model.optimizer, _Distributed):
        wrap(model.optimizer)
        model.train_function = None  # it was traced without
    return model


# Values and variables.


def collective(which: str, value: Any, **options: Any) -> Any:
    """The result of a collective of `horovod.tensorflow` or `horovod.torch` on a value: a tensor, else an array."""
    if _is_on_torch():
        import numpy as np
        import torch

        import horovod.torch

        return getattr(horovod.torch, which)(torch.from_numpy(np.array(value)), **options).numpy()
    import tensorflow as tf

    import horovod.tensorflow

    found = getattr(horovod.tensorflow, which)(tf.constant(value), **options)
    return found if tf.executing_eagerly() else tf.compat.v1.keras.backend.get_session().run(found)


def broadcast(variables: Sequence[Any], root_rank: int) -> None:
    """Replaces the values of Keras's variables, in a TF1 graph of all, by those of one rank."""
    if _is_on_torch():
        from horovod.torch import broadcast_parameters

        broadcast_parameters([variable.value.data for variable in variables], root_rank)
    else:
        import tensorflow as tf

        from horovod.tensorflow import broadcast_global_variables, broadcast_variables

        if tf.executing_eagerly():
            broadcast_variables(variables, root_rank)
        else:
            tf.compat.v1.keras.backend.get_session().run(broadcast_global_variables(root_rank))


def variables_of(optimizer: Any) -> list[Any]:
    """The variables of an optimizer: a property with Keras 3, else a method."""
    found = optimizer.variables
    return list(found() if callable(found) else found)


class KerasState(VariablesState):
    """A model and its optimizer, and objects as attributes.

    Args:
        model: A built model of Keras 3, on TensorFlow or torch, or of ``tf_keras``.
        optimizer: Its optimizer; by default the one that it was compiled with. Outside of a TF1 graph its variables are
            made here, so that all ranks have them.
        kwargs: Objects, as of ``ObjectState``.

    Raises:
        ValueError: The model is not built, or has no optimizer.
    """

    def __init__(self, model: Any, optimizer: Any = None, **kwargs: Any) -> None:
        if not model.built:
            raise ValueError("the model is not built: call model.build(input_shape), or the model with a batch")
        self.model, self.optimizer = model, optimizer or getattr(model, "optimizer", None)
        if self.optimizer is None:
            raise ValueError("no optimizer: pass one, or compile the model with one")
        session = None
        if not _is_on_torch():
            import tensorflow as tf

            session = None if tf.executing_eagerly() else tf.compat.v1.keras.backend.get_session
        if session is None:
            make = getattr(self.optimizer, "build", None) or self.optimizer._create_all_weights
            make(model.trainable_variables)
        super().__init__(
            lambda: [*self.model.variables, *variables_of(self.optimizer)],
            lambda: broadcast(self._variables(), 0),
            session,
            **kwargs,
        )
