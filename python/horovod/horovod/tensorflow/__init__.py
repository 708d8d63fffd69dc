"""Horovod for TensorFlow, on dl_comm.

    import horovod.tensorflow as hvd

    hvd.init()
    tape = hvd.DistributedGradientTape(tape)
    hvd.broadcast_variables(model.variables, root_rank=0)

Importing it loads TensorFlow. A TF1 optimizer and one of Keras are wrapped by ``DistributedOptimizer``.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from horovod.common._arguments import takes
from horovod.common._names import Adasum, Average
from horovod.common.util import check_extension, gpu_available, split_list
from horovod.tensorflow import elastic, mpi_ops
from horovod.tensorflow.compression import Compression
from horovod.tensorflow.functions import allgather_object, broadcast_object, broadcast_object_fn, broadcast_variables
from horovod.tensorflow.gradient_aggregation import LocalGradientAggregationHelper, Reducer
from horovod.tensorflow.mpi_ops import *  # noqa: F403 (its __all__)
from horovod.tensorflow.mpi_ops import unconverted
from horovod.tensorflow.util import _cache, _executing_eagerly, _make_subgraph, refs_to_vars, vars_to_refs

__all__ = [*mpi_ops.__all__, "BroadcastGlobalVariablesHook", "Compression", "elastic", "split_list"]
__all__ += ["DistributedGradientTape", "DistributedOptimizer", "PartialDistributedGradientTape"]
__all__ += ["SyncBatchNormalization"]  # noqa: F405 - by __getattr__
__all__ += ["broadcast_global_variables", "broadcast_object", "broadcast_object_fn", "broadcast_variables"]
__all__ += ["LocalGradientAggregationHelper", "_cache", "_executing_eagerly", "_make_subgraph", "allgather_object"]
__all__ += ["check_extension", "gpu_available", "refs_to_vars", "vars_to_refs"]


def __getattr__(name: str) -> Any:
    if name == "SyncBatchNormalization":  # which loads Keras
        from horovod.tensorflow.sync_batch_norm import SyncBatchNormalization

        return SyncBatchNormalization
    raise AttributeError(f"module 'horovod.tensorflow' has no attribute {name!r}")


def broadcast_global_variables(root_rank: int) -> tf.Operation:
    """The operation that replaces the values of all global variables of a TF1 graph by those of one rank.

    Raises RuntimeError in eager mode, which has no list of them.
    """
    if tf.executing_eagerly():
        raise RuntimeError("eager mode has no global variables: use hvd.broadcast_variables(model.variables, ...)")
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]
    """Broadcasts all global variables after a TF1 session has initialized or restored them. All ranks have the hook.

    Args:
        root_rank: The rank that has the values.
        device: Where the op runs.
    """

    def __init__(self, root_rank: int, device: str = "") -> None:
        self.root_rank, self.device = root_rank, device
        self.bcast_op: Any = None

    def begin(self) -> None:
        """Adds the op to the graph."""
        if self.bcast_op is None or self.bcast_op.graph is not tf.compat.v1.get_default_graph():
            with tf.device(self.device):
                self.bcast_op = broadcast_global_variables(self.root_rank)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Runs it."""
        session.run(self.bcast_op)


class _DistributedOptimizer(tf.compat.v1.train.Optimizer):  # type: ignore[misc]
    """A TF1 optimizer that delegates to another one, but reduces the gradients of ``compute_gradients``."""

    def __init__(self, optimizer: Any, use_locking: bool, reduce: Reducer, passes: int, average: bool) -> None:
        super().__init__(name=reduce.name, use_locking=use_locking)
        if passes > 1 and tf.executing_eagerly():
            raise ValueError("backward_passes_per_step > 1 of a TF1 optimizer needs a graph")
        self._optimizer, self.register_local_var = optimizer, reduce.add_local
        self._agg_helper = LocalGradientAggregationHelper(reduce, passes, average)
        self.get_slot, self.get_slot_names, self.variables = (
            optimizer.get_slot,
            optimizer.get_slot_names,
            optimizer.variables,
        )

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """Computes the gradients with the wrapped optimizer, and reduces them."""
        pairs = self._optimizer.compute_gradients(*args, **kwargs)
        grads, variables = [grad for grad, _ in pairs], [variable for _, variable in pairs]
        return list(zip(self._agg_helper.compute_gradients(grads, variables), variables, strict=True))

    def apply_gradients(self, grads_and_vars: Any, global_step: Any = None, name: str | None = None) -> Any:
        """Applies gradients with the wrapped optimizer, after as many passes as there are in a step."""
        pairs = list(grads_and_vars)

        def apply() -> Any:
            return self._optimizer.apply_gradients(pairs, global_step=global_step, name=name)

        def skip() -> Any:
            return tf.no_op() if global_step is None else tf.group(global_step.assign_add(1))

        return self._agg_helper.apply_gradients(apply, skip, [grad for grad, _ in pairs])


_OF_REDUCER = "device_dense device_sparse compression sparse_as_dense"
_OF_TAPE = f"gradtape {_OF_REDUCER} op gradient_predivide_factor num_groups groups process_set"


@unconverted
@takes(
    f"optimizer name use_locking {_OF_REDUCER} backward_passes_per_step op gradient_predivide_factor "
    "average_aggregated_gradients num_groups groups process_set scale_local_gradients",
    op=Average,
)
def DistributedOptimizer(optimizer: Any, use_locking: bool, **options: Any) -> Any:  # noqa: N802 (a class to callers)
    """Wraps an optimizer so that it reduces the gradients over the ranks before it applies them.

    Args:
        optimizer: A ``tf.compat.v1.train.Optimizer``, or one of Keras, which ``horovod.tensorflow.keras`` wraps.
        name: What begins the names of the calls; the same on all ranks.
        use_locking: As of the TF1 optimizer.
        device_dense: Where the ops of tensors run.
        device_sparse: Where those of ``tf.IndexedSlices`` run.
        compression: How the values travel.
        sparse_as_dense: Whether ``tf.IndexedSlices`` become tensors first.
        backward_passes_per_step: Passes of which the gradients are added up on each rank first.
        op: ``Average``, ``Sum`` or ``Adasum``, the last for TF1 optimizers only: of the gradients, not of the changes
            of the variables.
        gradient_predivide_factor: The part of the division of an average that comes before the sum.
        average_aggregated_gradients: Divide the sums of several passes by their number.
        num_groups: Deprecated: as ``groups``.
        groups: A number of groups of gradients, or lists of variables; each group is one call.
        process_set: The ranks; others keep their gradients.
        scale_local_gradients: Divide the gradients of local variables (``register_local_var``) by the number of ranks.

    Raises:
        ValueError: Options do not fit each other.
    """
    passes, average = options["backward_passes_per_step"], options["average_aggregated_gradients"]
    if not isinstance(optimizer, tf.compat.v1.train.Optimizer):
        if options["op"] == Adasum:
            raise ValueError("Adasum is for TF1 optimizers only")
        from horovod.tensorflow.keras import DistributedOptimizer as KerasOptimizer

        return KerasOptimizer(optimizer, **options)
    if options["op"] == Adasum and average:
        raise ValueError("Adasum and average_aggregated_gradients exclude each other")
    name = options["name"] or f"Distributed{type(optimizer).__name__}"
    own = ("backward_passes_per_step", "average_aggregated_gradients")
    reduce = Reducer(**{key: value for key, value in options.items() if key not in own} | {"name": name})
    return _DistributedOptimizer(optimizer, use_locking, reduce, passes, average)


class _DistributedTape(tf.GradientTape):  # type: ignore[misc]
    """A tape that goes on where another one is, and reduces the gradients."""

    def __init__(self, tape: tf.GradientTape, reduce: Reducer) -> None:
        self.__dict__.update(tape.__dict__)
        self._reduce_gradients, self.register_local_source = reduce, reduce.add_local

    def gradient(
        self, target: Any, sources: Any, output_gradients: Any = None, use_generic_names: bool = False, **kwargs: Any
    ) -> Any:
        """The reduced gradients, as of ``tf.GradientTape``.

        ``use_generic_names``: the ranks match them by their place alone.
        """
        grads = super().gradient(target, sources, output_gradients, **kwargs)
        reduced = self._reduce_gradients(tf.nest.flatten(grads), tf.nest.flatten(sources), use_generic_names)
        return tf.nest.pack_sequence_as(sources, reduced) if tf.nest.is_nested(sources) else reduced[0]

    def get_local_and_global_gradients(
        self, target: Any, sources: Any, output_gradients: Any = None, use_generic_names: bool = False
    ) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
        """Pairs of source and gradient: those of local sources, and the reduced ones."""
        grads = self.gradient(target, sources, output_gradients, use_generic_names)
        pairs = list(zip(sources, grads, strict=True))
        local = self._reduce_gradients.is_local
        return [pair for pair in pairs if local(pair[0])], [pair for pair in pairs if not local(pair[0])]


@unconverted
@takes(f"{_OF_TAPE} scale_local_gradients", op=Average)
def DistributedGradientTape(gradtape: tf.GradientTape, **options: Any) -> Any:  # noqa: N802 (a class to callers)
    """Wraps a ``tf.GradientTape`` so that ``gradient`` reduces the gradients over the ranks.

        with tf.GradientTape() as tape:
            loss = ...
        grads = hvd.DistributedGradientTape(tape).gradient(loss, variables)

    The arguments are those of ``DistributedOptimizer``; ``register_local_source(variable)`` leaves the gradients of a
    variable to each rank.

    Raises:
        ValueError: Options do not fit each other.
    """
    return _DistributedTape(gradtape, Reducer("DistributedGradientTape", **options))


@unconverted
@takes(f"{_OF_TAPE} local_layers scale_local_gradients", op=Average)
def PartialDistributedGradientTape(local_layers: Any, **options: Any) -> Any:  # noqa: N802 (a class to callers)
    """As ``DistributedGradientTape``, but leaves the gradients of some layers to each rank.

    The arguments are those of ``DistributedGradientTape``; ``local_layers`` is a Keras layer, or several.

    Raises:
        ValueError: They are no layers, or options do not fit each other.
    """
    from horovod._keras import local_variables

    variables, tape = local_variables(local_layers), DistributedGradientTape(**options)
    for variable in variables:
        tape.register_local_source(variable)
    return tape
