"""The optimizer that reduces gradients over all ranks: by name, some neighbours at a time, while backward works.

Thread rule: as torch optimizers, one thread at a time.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from horovod.common._arguments import takes
from horovod.common._job import current
from horovod.common._names import Adasum, Average, Sum
from horovod.torch._reducer import Reducer
from horovod.torch.mpi_ops import grouped_allreduce_

_ATTRIBUTE = "_horovod"


class _Distributed(torch.optim.Optimizer):
    """The methods that ``DistributedOptimizer`` adds to an optimizer."""

    def synchronize(self) -> None:
        """Waits until all gradients are reduced, also those of parameters without one. Collective.

        After ``backward()`` of the whole model they are. Needed before gradients are read or changed if the pass used
        only a part of the model. Raises HorovodInternalError if a reduction failed.
        """
        self.__dict__[_ATTRIBUTE].finish(explicit=True)

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """In this context, ``step()`` uses the gradients as they are."""
        reducer = self.__dict__[_ATTRIBUTE]
        reducer.synchronizes = False
        try:
            yield
        finally:
            reducer.synchronizes = True

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Sets how many backward passes add up gradients before their reduction."""
        self.__dict__[_ATTRIBUTE].set_passes(passes)

    @property
    def _parameter_names(self) -> Any:
        return self.__dict__[_ATTRIBUTE].names

    @property
    def backward_passes_per_step(self) -> int:
        """The number of backward passes of a step."""
        return int(self.__dict__[_ATTRIBUTE].backward_passes_per_step)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients, as the original optimizer does, after those in flight have ended."""
        reducer: Reducer = self.__dict__[_ATTRIBUTE]
        if reducer.in_flight:
            reducer.finish()
        reducer.left = dict.fromkeys(reducer.left, reducer.backward_passes_per_step)
        reducer.end_step()
        super().zero_grad(set_to_none)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # GradScaler.step() reads it before it looks for infinite gradients.
        reducer: Reducer = self.__dict__[_ATTRIBUTE]
        if reducer.synchronizes:
            reducer.finish()
        return bool(self.__dict__.get("_step_supports_amp_scaling", False))

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """A copy or pickle is the original optimizer."""
        return _new, (type(self).__mro__[2],), self.__getstate__()


def _new(kind: type[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    return kind.__new__(kind)


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
    reducer: Reducer = optimizer.__dict__[_ATTRIBUTE]
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if not reducer.is_active or not reducer.synchronizes or isinstance(closure, _Closure):
        return None
    if closure is None:
        if reducer.explicit:
            warnings.warn(
                "optimizer.step() called without optimizer.skip_synchronize() after optimizer.synchronize(): changes "
                "to the gradients since then stay as they are on this rank",
                stacklevel=4,
            )
        reducer.finish()
        return None
    wrapped = _Closure(reducer, closure)
    if "closure" in kwargs:
        return args, {**kwargs, "closure": wrapped}
    return (args[0], wrapped, *args[2:]), kwargs


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    optimizer.__dict__[_ATTRIBUTE].end_step()


class _Closure:
    """The closure of a step, with reduced gradients and the mean of the losses, so that all ranks decide the same."""

    def __init__(self, reducer: Reducer, closure: Callable[[], Any]) -> None:
        self._reducer, self._closure = reducer, closure

    def __call__(self) -> Any:
        self._reducer.end_step()
        loss = self._closure()
        self._reducer.finish()
        if isinstance(loss, torch.Tensor):
            loss = loss.detach().clone()
            (loss,) = grouped_allreduce_([loss], op=Average, name="loss", process_set=self._reducer.process_set)
        return loss


class Delta(torch.optim.Optimizer):
    """The methods of a ``DistributedOptimizer`` with ``op=Adasum``: it reduces the changes of the parameters."""

    def synchronize(self) -> None:
        """Does nothing: gradients stay those of the rank."""

    def skip_synchronize(self) -> Any:
        """Raises AssertionError: every step is collective."""
        raise AssertionError("an optimizer with op=hvd.Adasum has no step without communication")

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Does nothing: gradients add up until ``step()``."""


def _reduce_changes(optimizer: torch.optim.Optimizer, compression: Any) -> None:
    """Makes the steps of an optimizer end with the reduction of the changes of its parameters, by Adasum."""
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

    def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        pairs[:] = [(each, each.detach().clone()) for group in optimizer.param_groups for each in group["params"]]

    @torch.no_grad()
    def after(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        small = [compression.compress((after - before).contiguous()) for after, before in pairs]
        grouped_allreduce_([tensor for tensor, _ in small], op=Adasum, name="adasum")
        for (after, before), (tensor, context) in zip(pairs, small, strict=True):
            after.copy_(before + compression.decompress(tensor, context))
        pairs.clear()

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)


@functools.cache
def _class(mixin: Any, base: Any) -> Any:
    """A class with the methods of both, one for each pair."""
    return type(base.__name__, (mixin, base), {"__module__": base.__module__, "__doc__": base.__doc__})


def _names(optimizer: torch.optim.Optimizer, given: Iterable[tuple[str, torch.Tensor]] | None) -> dict[Any, str]:
    """The names of the parameters. Raises ValueError if they are not unique, or one has none."""
    places = [(i, j, each) for i, group in enumerate(optimizer.param_groups) for j, each in enumerate(group["params"])]
    listed = [(f"allreduce.noname.{i}.{j}", each) for i, j, each in places] if given is None else list(given)
    if not all(isinstance(entry, tuple) for entry in listed):
        raise ValueError("named_parameters takes pairs of name and parameter, as from model.named_parameters()")
    twice = [name for name, count in Counter(name for name, _ in listed).items() if count > 1]
    if twice:
        raise ValueError(f"names in named_parameters must be unique; several parameters have: {', '.join(twice)}")
    names = {parameter: name for name, parameter in listed}
    missing = [number for number, (_, _, parameter) in enumerate(places) if parameter not in names]
    if missing:
        raise ValueError(f"named_parameters lacks {len(missing)} of the optimizer's parameters: numbers {missing}")
    return names


def _check_groups(groups: Any) -> None:
    if groups is None or isinstance(groups, int) and groups >= 0:
        return
    if not isinstance(groups, list):
        raise ValueError("groups should be a non-negative integer or a list of list of torch.Tensor.")
    listed = [parameter for group in groups for parameter in group]
    if not all(isinstance(parameter, torch.Tensor) for parameter in listed):
        raise ValueError("groups must consist of torch.Tensor.")
    if len(set(map(id, listed))) < len(listed):
        raise ValueError("A parameter can only appear once in groups.")


@takes(
    "optimizer named_parameters=None compression backward_passes_per_step op gradient_predivide_factor num_groups "
    "groups sparse_as_dense process_set",
    op=Average,
)
def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: torch.optim.Optimizer, named_parameters: Any, op: int, num_groups: int, groups: Any, **options: Any
) -> Any:
    """Makes an optimizer reduce gradients over the ranks, and returns it.

    It stays the same object and an instance of its class. Gradients are reduced by the names of their parameters while
    backward works; a backward pass that reaches all parameters of the last step returns when all gradients are
    reduced: read, clip and scale them without more. A pass that reaches others is complete after ``synchronize()`` or
    ``step()``, which reduce zeros for parameters without a gradient. A rank that is not in ``process_set`` trains
    alone.

    Args:
        optimizer: Any torch optimizer.
        named_parameters: Names of all its parameters; None: numbers.
        compression: How gradients travel: ``Compression.none``, ``fp16`` or ``bf16``.
        backward_passes_per_step: How many backward passes add up gradients before their reduction.
        op: ``Average``, ``Sum``, or ``Adasum``, which reduces the changes of the parameters instead.
        gradient_predivide_factor: With ``Average``: divides before the sum, and multiplies after it.
        num_groups: Deprecated; as ``groups``.
        groups: Gradients that are reduced in one call: a number of groups, or lists of parameters; making the optimizer
            is collective then. None or 0: neighbours, up to 25 MiB or ``HOROVOD_FUSION_THRESHOLD`` bytes.
        sparse_as_dense: Whether to reduce sparse gradients as dense ones. Otherwise the ranks gather their entries.
        process_set: The ranks that reduce.

    Raises:
        ValueError: An argument is invalid, or names are missing or not unique.
        HorovodInternalError: From ``backward()``, ``synchronize()`` or ``step()``: a reduction failed.
    """
    if options["gradient_predivide_factor"] != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if num_groups:
        warnings.warn("num_groups is deprecated: use groups", DeprecationWarning, stacklevel=3)
        groups = num_groups if groups is None else groups
    if options["backward_passes_per_step"] <= 0:
        raise ValueError("backward_passes_per_step must be > 0")
    if op not in (Average, Sum, Adasum):
        raise ValueError(f"invalid op: {op!r} (expected hvd.Average, Sum or Adasum)")
    if isinstance(optimizer, (_Distributed, Delta)):
        raise ValueError("the optimizer is a DistributedOptimizer already")
    base: Any = type(optimizer)
    names = _names(optimizer, named_parameters)
    _check_groups(groups)
    if op == Adasum and current().size > 1:
        if options["process_set"].process_set_id != 0:
            raise NotImplementedError("op=hvd.Adasum reduces over all ranks only")
        _reduce_changes(optimizer, options["compression"])
        optimizer.__class__ = _class(Delta, base)
        return optimizer
    op = Average if op == Adasum else op
    optimizer.__dict__[_ATTRIBUTE] = Reducer(weakref.ref(optimizer), names, op=op, groups=groups, **options)
    optimizer.register_step_pre_hook(_before_step)
    optimizer.register_step_post_hook(_after_step)
    optimizer.__class__ = _class(_Distributed, base)
    return optimizer
