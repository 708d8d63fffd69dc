"""What the collectives share: the forms in which scripts call them, checks of tensors, gradients, operators, factors.

Thread rule: any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

import dl_comm.torch
from horovod.common._arguments import takes
from horovod.common._calls import Call
from horovod.common._names import ProcessSet
from horovod.common.compression import NoneCompressor

core: Any = dl_comm.torch
"""Whose overloads do not know options of names."""
Tensors = Sequence[torch.Tensor]


class Form(NamedTuple):
    """A call of a collective, which takes a list of tensors in every form.

    Attributes:
        kind: The collective, which begins the name of the call.
        name: The script's name, or None.
        process_set: The ranks.
        unwrap: Makes the result from a list of tensors.
        is_async: Whether to start the call and return its handle.
        in_place: Whether its tensors become the results.
    """

    kind: str
    name: str | None
    process_set: ProcessSet
    unwrap: Callable[[Any], Any]
    is_async: bool = False
    in_place: bool = False

    def of_gradient(self) -> Form:
        """The call of the gradient, on a list, under a name of its own."""
        return Form(f"{self.kind}.gradient", self.name, self.process_set, as_it_is)

    def make(self, function: Callable[..., Any], given: Any, result: Callable[[Any], Any], **options: Any) -> Any:
        """Calls a collective of the core, or starts it; ``result`` makes the list of results from the core's."""
        unwrap = self.unwrap
        done = (lambda found: unwrap(result(found))) if self.is_async else result
        return Call(self.kind, self.name, self.process_set).make(
            function, given, is_async=self.is_async, result=done, **options
        )

    def run(
        self, make: Callable[[list[torch.Tensor]], Any], x: Tensors, gradient: Any, compression: Any = NoneCompressor
    ) -> Any:
        """Returns what the script gets. The blocking form with new results is differentiable and compresses tensors.

        Args:
            make: Makes or starts the call, by `make`, on checked tensors.
            x: The tensors.
            gradient: The gradients of the compressed tensors from those of the results, which are contiguous.
            compression: How the tensors travel.
        """
        if self.is_async or self.in_place:
            found = make(checked(x))
            return found if self.is_async else self.unwrap(found)
        pairs = [compression.compress(each) for each in x]
        small, contexts = [each for each, _ in pairs], [context for _, context in pairs]
        if torch.is_grad_enabled() and any(getattr(each, "requires_grad", False) for each in small):
            results = _Function.apply(make, gradient, *small)
        else:
            results = make(checked(small))
        if compression is NoneCompressor:
            return self.unwrap(list(results))
        return self.unwrap([*map(compression.decompress, results, contexts)])


def form(run: Callable[..., Any], called: str, arguments: str, **defaults: Any) -> Callable[..., Any]:
    """A public function of a collective.

    Args:
        run: Makes the call, from a `Form`, the list of tensors, and the arguments.
        called: The name of the function: ``grouped_...`` of lists, ``..._async``, ``..._`` in place.
        arguments: Those that follow the tensors; ``compression`` is that of the blocking form with new results.
        defaults: Defaults other than those of all functions.
    """
    kind, is_async, in_place = called.rstrip("_").removesuffix("_async"), "_async" in called, called.endswith("_")
    is_grouped = called.startswith("grouped_")
    if is_async or in_place:
        arguments = arguments.replace("compression ", "")

    first, unwrap = ("tensors", as_it_is) if is_grouped else ("tensor", _first)

    def call(name: str | None, process_set: ProcessSet, **options: Any) -> Any:
        given = options.pop(first)
        made = Form(kind, name, process_set, unwrap, is_async, in_place)
        return run(made, given if is_grouped else [given], **options)

    function = takes(f"{first} {arguments}", called, **defaults)(call)
    function.__module__ = run.__module__
    if is_async:
        function.__doc__ = f"Starts ``{called.replace('_async', '')}``; returns a handle."
    elif in_place:
        function.__doc__ = f"Replaces tensors by the results of ``{kind}``, and returns them. Not differentiable."
    else:
        function.__doc__ = run.__doc__ if not is_grouped else f"As ``{kind[8:]}``, of a list of tensors, by one call."
    return function


def as_it_is(found: Any) -> Any:
    """The result of a call on a list."""
    return found


def _first(found: Any) -> Any:
    return found[0]


def checked(given: Iterable[Any]) -> list[torch.Tensor]:
    """Returns the tensors of a call, detached from the graph."""
    found = []
    for tensor in given:
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"expected a tensor, not a {type(tensor).__name__}")
        if tensor.layout is not torch.strided or not tensor.is_contiguous():
            raise ValueError("Tensor is required to be contiguous.")
        found.append(tensor.detach() if tensor.requires_grad else tensor)
    if not found:
        raise ValueError("the list has no tensors")
    return found


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, make: Callable[..., Any], gradient: Callable[..., Any], *tensors: torch.Tensor) -> Any:
        ctx.gradient = gradient
        return tuple(make(checked(tensors)))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return None, None, *ctx.gradient([grad.contiguous() for grad in grads])
