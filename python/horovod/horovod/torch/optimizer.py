"""The optimizer that reduces gradients over all ranks: by name, some neighbours at a time, while backward works.

Thread rule: as torch optimizers, one thread at a time.
"""

from __future__ import annotations

import functools
import warnings
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from horovod.common._environment import number
from horovod.common._job import current, is_started
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.common.util import split_list
from horovod.torch.compression import Compression
from horovod.torch.functions import broadcast_object
from horovod.torch.mpi_ops import (
    Adasum,
    Average,
    Sum,
    allreduce_async_,
    grouped_allreduce_,
    grouped_allreduce_async_,
    sparse_allreduce_async,
    synchronize,
)

_ATTRIBUTE = "_horovod"
Parameters = tuple[torch.Tensor, ...]


class _Reducer:
    """The gradients of an optimizer: which are in flight, which are still to come in this step.

    At the end of a backward pass it waits for all that the last step had. If some have not come (the pass uses only a
    part of the model), `step()` or `synchronize()` reduces zeros for them; nobody waits before.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        names: dict[torch.Tensor, str],
        compression: Any,
        passes: int,
        op: int,
        predivide: float,
        groups: int | list[list[torch.Tensor]] | None,
        sparse_as_dense: bool,
        process_set: ProcessSet,
    ) -> None:
        self.optimizer = weakref.ref(optimizer)
        self.names, self.compression, self.passes, self.op = names, compression, passes, op
        self.factors = (1.0 / predivide, predivide) if op == Average else (1.0, 1.0)
        self.sparse_as_dense, self.process_set = sparse_as_dense, process_set
        self.is_active = bool(process_set.included())
        self.left: dict[torch.Tensor, int] = {}  # passes until the gradient of a parameter is complete
        self.in_flight: dict[Parameters, Callable[[], None]] = {}
        self.reduced: set[torch.Tensor] = set()  # in this step
        self.unused: set[torch.Tensor] = set()  # without a gradient in the last step
        self.group_of: dict[torch.Tensor, Parameters] = {}  # those that are reduced in one call
        self.explicit = False  # the script has called synchronize() in this step
        self.synchronizes = True
        self._queued = False
        if self.is_active:
            if groups:
                self._make_groups(groups)
            self.register()

    def _make_groups(self, groups: int | list[list[torch.Tensor]]) -> None:
        """Makes the groups that the script asks for. All ranks have the order of the first. Collective."""
        by_name = {self.names[each]: each for each in self._parameters() if each.requires_grad}
        root = (self.process_set.ranks or [0])[0]
        order: list[str] = broadcast_object(list(by_name), root, process_set=self.process_set)
        learning = [by_name[name] for name in order]
        parts: Sequence[Sequence[torch.Tensor]] = split_list(learning, groups) if isinstance(groups, int) else groups
        known = set(learning)
        for part in parts:
            members = tuple(parameter for parameter in part if parameter in known)
            self.group_of.update(dict.fromkeys(members, members))
        self.group_of.update((each, (each,)) for each in learning if each not in self.group_of)

    def _parameters(self) -> Iterator[torch.Tensor]:
        optimizer = self.optimizer()
        for group in optimizer.param_groups if optimizer is not None else ():
            yield from group["params"]

    def register(self) -> None:
        """Follows the parameters that require gradients now."""
        new = [each for each in self._parameters() if each.requires_grad and each not in self.left]
        for parameter in new:
            self.left[parameter] = self.passes
            self.names.setdefault(parameter, f"added.{len(self.names)}")
            hook = functools.partial(_on_gradient, weakref.ref(self))
            parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        # Backward has the last ones first.
        for members in _fused([each for each in reversed(new) if each not in self.group_of]):
            self.group_of.update(dict.fromkeys(members, members))

    def set_passes(self, passes: int) -> None:
        self.passes = passes
        self.left = dict.fromkeys(self.left, passes)

    def on_gradient(self, parameter: torch.Tensor) -> None:
        """A backward pass has a gradient."""
        if not is_started():
            return  # after `shutdown`, as in one process
        if not self._queued:
            self._queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._at_end)
        if self.left[parameter] <= 0 or self.op != Average and parameter in self.reduced:
            raise AssertionError(
                f"backward has computed the gradient of {self.names[parameter]} more than backward_passes_per_step = "
                f"{self.passes} times before step(): make more passes per step, to add up gradients on this rank first"
            )
        self.left[parameter] -= 1
        self.reduced.discard(parameter)
        if self.left[parameter] == 0:
            members = self.group_of[parameter]
            if all(self.left[member] == 0 for member in members if member.requires_grad):
                self._start(members)

    def _at_end(self) -> None:
        """The end of a backward pass."""
        self._queued = False
        if all(
            left == 0 or parameter in self.unused or not parameter.requires_grad
            for parameter, left in self.left.items()
        ):
            self.finish()

    def _start(self, members: Parameters) -> None:
        """Starts the reduction of some gradients; a missing one is zero."""
        names = [self.names[parameter] for parameter in members]
        name = names[0]
        if len(names) > 1:  # ranks with other groups must not match
            name += f"+{len(names) - 1}.{zlib.crc32(repr(names).encode()):x}"
        dense: list[tuple[torch.Tensor, torch.Tensor, Any]] = []
        waits: list[Callable[[], None]] = []
        for parameter in members:
            if not parameter.requires_grad and parameter.grad is None:
                continue  # frozen since
            self.left[parameter] = 0
            self.reduced.add(parameter)
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
            grad = parameter.grad.detach()
            if grad.is_sparse and not self.sparse_as_dense:
                result = sparse_allreduce_async(grad, self.names[parameter], self.op, self.process_set)
                waits.append(functools.partial(_put, parameter, result))
                continue
            small, context = self.compression.compress(grad.to_dense() if grad.is_sparse else grad)
            dense.append((parameter, small.contiguous(), context))
        tensors = [tensor for _, tensor, _ in dense]
        common = (None, name, self.op, *self.factors, self.process_set)
        if len(members) == 1 and tensors:
            handle = allreduce_async_(tensors[0], *common)
        elif tensors:
            handle = grouped_allreduce_async_(tensors, *common)

        def wait() -> None:
            if dense:
                synchronize(handle)
            for parameter, tensor, context in dense:
                _put(parameter, lambda t=tensor, c=context: self.compression.decompress(t, c))  # type: ignore[misc]
            for each in waits:
                each()

        self.in_flight[members] = wait

    def finish(self, explicit: bool = False) -> None:
        """Reduces the gradients that are still to come, and waits for all. Collective."""
        if not self.is_active:
            return
        self.register()
        missing = [
            parameter
            for parameter in self.left
            if parameter not in self.reduced and (parameter.requires_grad or parameter.grad is not None)
        ]
        without = {parameter for parameter in missing if parameter.grad is None}
        for members in dict.fromkeys(self.group_of[parameter] for parameter in missing):
            self._start(members)
        in_flight, self.in_flight = self.in_flight, {}
        errors = []
        for wait in in_flight.values():
            try:
                wait()
            except RuntimeError as error:
                errors.append(error)
        self.left = dict.fromkeys(self.left, self.passes)
        self.explicit |= explicit
        if missing:
            self.unused = without
        if errors:
            self.end_step()
            raise errors[0]

    def end_step(self) -> None:
        """After a step, or when its gradients are dropped: the next has other gradients."""
        self.reduced.clear()
        self.explicit = False
        self._queued = False  # also after a backward pass that has failed


_FIRST_BYTES, _GROUP_BYTES = 1 << 20, 25 << 20
"""The most bytes of the first group, which should start early, and of the others. As in torch's DDP."""


def _fused(parameters: list[torch.Tensor]) -> list[Parameters]:
    """Groups of neighbours on one device. ``HOROVOD_FUSION_THRESHOLD``: the most bytes of one; 0: each by itself."""
    limit = number("HOROVOD_FUSION_THRESHOLD")
    most = _GROUP_BYTES if limit is None else min(limit, _GROUP_BYTES)
    groups: list[Parameters] = []
    free, device = 0, None
    for parameter in parameters:
        length = parameter.numel() * parameter.element_size()
        if groups and length <= free and parameter.device == device:
            groups[-1] += (parameter,)
            free -= length
        else:
            free, device = min(most, most if groups else _FIRST_BYTES) - length, parameter.device
            groups.append((parameter,))
    return groups


def _put(parameter: torch.Tensor, result: Callable[[], torch.Tensor]) -> None:
    """Makes a result the gradient of a parameter."""
    reduced, grad = result(), parameter.grad
    assert grad is not None
    if grad.is_sparse:
        parameter.grad = reduced if reduced.is_sparse else reduced.to_sparse(grad.sparse_dim())
    elif reduced.data_ptr() != grad.data_ptr() or reduced.dtype != grad.dtype:
        with torch.no_grad():
            grad.copy_(reduced)


def _on_gradient(reducer: weakref.ref[_Reducer], parameter: torch.Tensor) -> None:
    found = reducer()
    if found is not None:
        found.on_gradient(parameter)


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
    def _parameter_names(self) -> dict[torch.Tensor, str]:
        names: dict[torch.Tensor, str] = self.__dict__[_ATTRIBUTE].names
        return names

    @property
    def backward_passes_per_step(self) -> int:
        """The number of backward passes of a step."""
        return int(self.__dict__[_ATTRIBUTE].passes)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients, as the original optimizer does, after those in flight have ended."""
        reducer: _Reducer = self.__dict__[_ATTRIBUTE]
        if reducer.in_flight:
            reducer.finish()
        reducer.left = dict.fromkeys(reducer.left, reducer.passes)
        reducer.end_step()
        super().zero_grad(set_to_none)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # GradScaler.step() reads it before it looks for infinite gradients.
        reducer: _Reducer = self.__dict__[_ATTRIBUTE]
        if reducer.synchronizes:
            reducer.finish()
        return bool(self.__dict__.get("_step_supports_amp_scaling", False))

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """A copy or pickle is the original optimizer."""
        return _new, (type(self).__mro__[2],), self.__getstate__()


def _new(kind: type[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    return kind.__new__(kind)


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
    reducer: _Reducer = optimizer.__dict__[_ATTRIBUTE]
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
    return (
        (args[:1], {**kwargs, "closure": wrapped}) if "closure" in kwargs else ((args[0], wrapped, *args[2:]), kwargs)
    )


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    optimizer.__dict__[_ATTRIBUTE].end_step()


class _Closure:
    """The closure of a step, with reduced gradients and the mean of the losses, so that all ranks decide the same."""

    def __init__(self, reducer: _Reducer, closure: Callable[[], Any]) -> None:
        self._reducer, self._closure = reducer, closure

    def __call__(self) -> Any:
        self._reducer.end_step()
        loss = self._closure()
        self._reducer.finish()
        if isinstance(loss, torch.Tensor):
            loss = loss.detach().clone()
            (loss,) = grouped_allreduce_([loss], op=Average, name="loss", process_set=self._reducer.process_set)
        return loss


class _AdasumState:
    """What the delta optimizer keeps: the values before a step."""

    def __init__(self, compression: Any) -> None:
        self.compression = compression
        self.before: list[tuple[torch.Tensor, torch.Tensor]] = []


class _Delta(torch.optim.Optimizer):
    """The methods of a ``DistributedOptimizer`` with ``op=Adasum``: it reduces the changes of the parameters."""

    def synchronize(self) -> None:
        """Does nothing: gradients stay those of the rank."""

    def skip_synchronize(self) -> Any:
        """Raises AssertionError: every step is collective."""
        raise AssertionError("an optimizer with op=hvd.Adasum has no step without communication")

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Does nothing: gradients add up until ``step()``."""


def _before_delta(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    state: _AdasumState = optimizer.__dict__[_ATTRIBUTE]
    state.before = [(each, each.detach().clone()) for group in optimizer.param_groups for each in group["params"]]


@torch.no_grad()
def _after_delta(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    state: _AdasumState = optimizer.__dict__[_ATTRIBUTE]
    pairs, state.before = state.before, []
    small = [state.compression.compress((after - before).contiguous()) for after, before in pairs]
    grouped_allreduce_([tensor for tensor, _ in small], op=Adasum, name="adasum")
    for (after, before), (tensor, context) in zip(pairs, small, strict=True):
        after.copy_(before + state.compression.decompress(tensor, context))


def _class(mixin: Any, base: Any) -> Any:
    """A class with the methods of both, one for each pair."""
    if (mixin, base) not in _classes:
        space = {"__module__": base.__module__, "__doc__": base.__doc__}
        _classes[mixin, base] = type(base.__name__, (mixin, base), space)
    return _classes[mixin, base]


_classes: dict[tuple[Any, Any], Any] = {}


def _names(optimizer: torch.optim.Optimizer, given: Iterable[tuple[str, torch.Tensor]] | None) -> dict[Any, str]:
    """The names of the parameters. Raises ValueError if they are not unique, or one has none."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if given is None:
        return {
            parameter: f"allreduce.noname.{i}.{j}"
            for i, group in enumerate(optimizer.param_groups)
            for j, parameter in enumerate(group["params"])
        }
    listed = list(given)
    if not all(isinstance(entry, tuple) for entry in listed):
        raise ValueError("named_parameters takes pairs of name and parameter, as from model.named_parameters()")
    twice = [name for name, count in Counter(name for name, _ in listed).items() if count > 1]
    if twice:
        raise ValueError(f"names in named_parameters must be unique; several parameters have: {', '.join(twice)}")
    names = {parameter: name for name, parameter in listed}
    missing = [i for i, parameter in enumerate(parameters) if parameter not in names]
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


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | list[list[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
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
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if num_groups != 0:
        warnings.warn("num_groups is deprecated: use groups", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    if backward_passes_per_step <= 0:
        raise ValueError("backward_passes_per_step must be > 0")
    if op not in (Average, Sum, Adasum):
        raise ValueError(f"invalid op: {op!r} (expected hvd.Average, Sum or Adasum)")
    if isinstance(optimizer, (_Distributed, _Delta)):
        raise ValueError("the optimizer is a DistributedOptimizer already")
    names = _names(optimizer, named_parameters)
    _check_groups(groups)
    if op == Adasum and current().size > 1:
        if process_set.process_set_id != 0:
            raise NotImplementedError("op=hvd.Adasum reduces over all ranks only")
        optimizer.__dict__[_ATTRIBUTE] = _AdasumState(compression)
        optimizer.register_step_pre_hook(_before_delta)
        optimizer.register_step_post_hook(_after_delta)
        optimizer.__class__ = _class(_Delta, type(optimizer))
        return optimizer
    optimizer.__dict__[_ATTRIBUTE] = _Reducer(
        optimizer,
        names,
        compression,
        backward_passes_per_step,
        Average if op == Adasum else op,
        gradient_predivide_factor,
        groups,
        sparse_as_dense,
        process_set,
    )
    optimizer.register_step_pre_hook(_before_step)
    optimizer.register_step_post_hook(_after_step)
    optimizer.__class__ = _class(_Distributed, type(optimizer))
    return optimizer
