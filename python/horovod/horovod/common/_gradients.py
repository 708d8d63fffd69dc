"""The reduction of the gradients of an optimizer or a tape over the ranks, for every framework.

Thread rule: as optimizers, one thread at a time.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from horovod.common._environment import number
from horovod.common._names import Average, ProcessSet, global_process_set
from horovod.common.util import split_list

_FIRST_BYTES, _PART_BYTES = 1 << 20, 25 << 20
"""The most bytes of the first part, which should start early, and of the others. As in torch's DDP."""
_Item = TypeVar("_Item")


def neighbours(
    items: Sequence[_Item], length: Callable[[_Item], int], place: Callable[[_Item], Any] = lambda _: None
) -> list[list[_Item]]:
    """Cuts a list into parts of neighbours in one place, of which each is one call.

    ``length`` is in bytes. ``HOROVOD_FUSION_THRESHOLD``: the most bytes of a part; 0: each item by itself.
    """
    limit = number("HOROVOD_FUSION_THRESHOLD")
    most = _PART_BYTES if limit is None else min(limit, _PART_BYTES)
    parts: list[list[_Item]] = []
    free = 0
    for item in items:
        if parts and length(item) <= free and place(item) == place(parts[-1][-1]):
            parts[-1].append(item)
            free -= length(item)
        else:
            free = min(most, most if parts else _FIRST_BYTES) - length(item)
            parts.append([item])
    return parts


@dataclass(eq=False)
class Reducer:
    """Reduces gradients over the ranks, but those of local variables. Each framework has a subclass.

    Args:
        name: What the ranks match; the same on all ranks.
        device_dense: Where the ops of tensors run.
        device_sparse: Where those of ``tf.IndexedSlices`` run.
        compression: How the values travel.
        sparse_as_dense: Whether ``tf.IndexedSlices`` become tensors first.
        op: The operator.
        gradient_predivide_factor: The part of the division of an average that comes before the sum.
        num_groups: Deprecated: as ``groups``.
        groups: A number of groups, or lists of variables, of which each is one call; None: as it is fastest.
        process_set: The ranks; others keep their gradients.
        scale_local_gradients: Whether to divide the gradients of local variables by the number of ranks, so that they
            have the weight that they have in a mean over all.

    Raises:
        ValueError: Options do not fit each other.
    """

    name: str
    device_dense: str
    device_sparse: str
    compression: Any
    sparse_as_dense: bool
    op: int
    gradient_predivide_factor: float
    num_groups: int = 0
    groups: Any = None
    process_set: ProcessSet = global_process_set
    scale_local_gradients: bool = True

    def __post_init__(self) -> None:
        if self.num_groups:
            warnings.warn("num_groups is deprecated: use groups", DeprecationWarning, stacklevel=6)
            self.groups = self.num_groups if self.groups is None else self.groups
        if self.gradient_predivide_factor != 1.0 and self.op != Average:
            raise ValueError("gradient_predivide_factor needs op=hvd.Average")
        if self.groups is not None and not isinstance(self.groups, list) and not self.groups > 0:
            raise ValueError("groups is a positive number of groups, or a list of lists of variables")
        self._local: dict[int, Any] = {}

    @property
    def options(self) -> dict[str, Any]:
        """Those of an allreduce."""
        factors = {"prescale_factor": 1.0 / self.gradient_predivide_factor}
        factors["postscale_factor"] = self.gradient_predivide_factor
        return {"compression": self.compression, "op": self.op, "process_set": self.process_set, **factors}

    def add_local(self, variable: Any) -> None:
        """Leaves the gradients of a variable to this rank."""
        self._local[id(variable)] = variable

    def is_local(self, variable: Any) -> bool:
        """Whether a variable is local."""
        return id(variable) in self._local

    def dense(self, grad: Any) -> Any:
        """The gradient as the call takes it."""
        return grad

    def reduce(self, grads: list[Any], name: str) -> Sequence[Any]:
        """The reduced gradients, by one call."""
        raise NotImplementedError

    def divided(self, grad: Any, number: int) -> Any:
        """A gradient divided by a number."""
        return grad / number

    def __call__(self, grads: Sequence[Any], variables: Sequence[Any], generic_names: bool = False) -> list[Any]:
        """Returns the reduced gradients; None stays. ``generic_names``: names without that of the reducer."""
        results, size = [self.dense(grad) for grad in grads], self.process_set.size() or 1
        if size == 1 or not self.process_set.included():
            return results
        reduced = [i for i, grad in enumerate(results) if grad is not None and not self.is_local(variables[i])]
        for part in self._parts(reduced, results, variables):
            found = self.reduce([results[i] for i in part], f"{'grad' if generic_names else self.name}.{part[0]}")
            for i, grad in zip(part, found, strict=True):
                results[i] = grad
        for i, grad in enumerate(results):
            if self.scale_local_gradients and grad is not None and self.is_local(variables[i]):
                results[i] = self.divided(grad, size)
        return results

    def _parts(self, indices: list[int], grads: list[Any], variables: Sequence[Any]) -> Iterable[list[int]]:
        """The indices of the gradients of each call."""
        if isinstance(self.groups, list):
            of_group = {id(variable): number for number, group in enumerate(self.groups) for variable in group}
            parts: dict[Any, list[int]] = {}
            for i in indices:
                parts.setdefault(of_group.get(id(variables[i]), (i,)), []).append(i)
            return parts.values()
        if self.groups:
            return [list(part) for part in split_list(indices, self.groups) if part]
        return self.fused(indices, grads) if indices else []

    def fused(self, indices: list[int], grads: list[Any]) -> Iterable[list[int]]:
        """The indices of the gradients of each call, if the script does not say."""
        return [indices]
