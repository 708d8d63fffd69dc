"""Which gradients of an optimizer are in flight, and which are still to come.

Thread rule: as autograd's hooks of CPU parameters, one thread at a time.
"""

from __future__ import annotations

import functools
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from horovod.common._gradients import neighbours
from horovod.common._job import is_started
from horovod.common._names import Average, ProcessSet
from horovod.common.util import split_list
from horovod.torch.functions import broadcast_object
from horovod.torch.mpi_ops import allreduce_async_, grouped_allreduce_async_, sparse_allreduce_async, synchronize

Parameters = tuple[torch.Tensor, ...]


@dataclass(eq=False)
class Reducer:
    """The gradients of an optimizer: which are in flight, which are still to come in this step.

    At the end of a backward pass it waits for all that the last step had. If some have not come (the pass uses only a
    part of the model), `step()` or `synchronize()` reduces zeros for them; nobody waits before.
    """

    optimizer: weakref.ref[torch.optim.Optimizer]
    names: dict[torch.Tensor, str]
    compression: Any
    backward_passes_per_step: int
    op: int
    gradient_predivide_factor: float
    groups: int | list[list[torch.Tensor]] | None
    sparse_as_dense: bool
    process_set: ProcessSet

    def __post_init__(self) -> None:
        predivide = self.gradient_predivide_factor if self.op == Average else 1.0
        self.factors = 1.0 / predivide, predivide
        self.is_active = bool(self.process_set.included())
        self.left: dict[torch.Tensor, int] = {}  # passes until the gradient of a parameter is complete
        self.in_flight: dict[Parameters, Callable[[], None]] = {}
        self.reduced: set[torch.Tensor] = set()  # in this step
        self.unused: set[torch.Tensor] = set()  # without a gradient in the last step
        self.group_of: dict[torch.Tensor, Parameters] = {}  # those that are reduced in one call
        self.explicit = False  # the script has called synchronize() in this step
        self.synchronizes = True
        self._queued = False
        if self.is_active:
            if self.groups:
                self._make_groups(self.groups)
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
            self.left[parameter] = self.backward_passes_per_step
            self.names.setdefault(parameter, f"added.{len(self.names)}")
            hook = functools.partial(_on_gradient, weakref.ref(self))
            parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        # Backward has the last ones first.
        for members in _fused([each for each in reversed(new) if each not in self.group_of]):
            self.group_of.update(dict.fromkeys(members, members))

    def set_passes(self, passes: int) -> None:
        self.backward_passes_per_step = passes
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
                f"{self.backward_passes_per_step} times before step(): make more passes per step, to add up gradients "
                "on this rank first"
            )
        self.left[parameter] -= 1
        self.reduced.discard(parameter)
        self.unused.discard(parameter)
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
        self.left = dict.fromkeys(self.left, self.backward_passes_per_step)
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


def _fused(parameters: list[torch.Tensor]) -> list[Parameters]:
    """Groups of neighbours on one device."""
    parts = neighbours(parameters, lambda each: each.numel() * each.element_size(), lambda each: each.device)
    return [tuple(part) for part in parts]


def _put(parameter: torch.Tensor, result: Callable[[], torch.Tensor]) -> None:
    """Makes a result the gradient of a parameter."""
    reduced, grad = result(), parameter.grad
    assert grad is not None
    if grad.is_sparse:
        parameter.grad = reduced if reduced.is_sparse else reduced.to_sparse(grad.sparse_dim())
    elif reduced.data_ptr() != grad.data_ptr() or reduced.dtype != grad.dtype:
        with torch.no_grad():
            grad.copy_(reduced)


def _on_gradient(reducer: weakref.ref[Reducer], parameter: torch.Tensor) -> None:
    found = reducer()
    if found is not None:
        found.on_gradient(parameter)
