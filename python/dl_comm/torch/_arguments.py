"""The arguments of the collectives on torch tensors: checked, and as the ops take them. No communication.

Thread rule: any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from dl_comm._arrays import groups
from dl_comm._arrays.groups import Group
from dl_comm._base.checks import (
    checked_by_name,
    checked_ints,
    checked_name,
    for_each,
    refuse_masked,
    refuse_missing,
    seconds,
)
from dl_comm._base.errors import ArgumentError, DTypeError
from dl_comm._job import state
from dl_comm.torch import _ops
from dl_comm.torch._compiler import constant


def tensors_of(x: Any, argument: str = "x") -> tuple[list[torch.Tensor], Callable[[Any], Any]]:
    """Return the tensors of an argument, and what makes a result of the same kind from tensors."""
    if isinstance(x, torch.Tensor):
        refuse_lazy(x, argument)
        return [x], first
    if isinstance(x, (list, tuple)):
        refuse_missing(x, argument)
        for index, tensor in enumerate(x):
            if not isinstance(tensor, torch.Tensor):
                refuse_masked(tensor, f"{argument}: entry {index}")
                raise DTypeError(f"entry {index} of {argument} is a {type(tensor).__name__}, not a tensor")
            refuse_lazy(tensor, f"entry {index} of {argument}")
        return list(x), list
    refuse_masked(x, argument)
    if isinstance(x, (bool, int, float, complex, np.generic)) and argument != "out":
        number = x.item() if isinstance(x, np.generic) else x
        for kind, dtype in _NUMBERS.items():
            if isinstance(number, kind):
                try:
                    return [torch.tensor(number, dtype=dtype)], item
                except (RuntimeError, OverflowError) as error:
                    raise DTypeError(f"{argument} is {number}, which has more than 64 bits") from error
    raise DTypeError(
        f"{argument} is a {type(x).__name__}; give a tensor, a list of them{', or a number' * (argument != 'out')}"
    )


_NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}


HALVES = (torch.float16, torch.bfloat16)
"""The types whose sums have a wider accumulator."""

# Types that the core does not know, by those of the same size in which they move.
_CARRIERS: dict[torch.dtype, torch.dtype] = {
    dtype: torch.uint8 if dtype.itemsize == 1 else torch.int32
    for name, dtype in vars(torch).items()
    if isinstance(dtype, torch.dtype) and name.startswith(("float8_", "float4_", "complex32", "bcomplex32"))
}


def carried(tensors: list[torch.Tensor]) -> tuple[list[torch.Tensor], str]:
    """Return tensors as types in which they move, and the types that the core does not know, for the call's name."""
    unknown = sorted({str(tensor.dtype) for tensor in tensors if tensor.dtype in _CARRIERS})
    if not unknown or _ops.learns(tensors):
        return tensors, ""
    views = [tensor.resolve_conj().view(_CARRIERS.get(tensor.dtype, tensor.dtype)) for tensor in tensors]
    return views, f" of {', '.join(unknown)}"


def refuse_lazy(tensor: torch.Tensor, name: str) -> None:
    """Raise ArgumentError for a parameter of a lazy module that has no shape yet."""
    if not torch.compiler.is_compiling() and torch.nn.parameter.is_lazy(tensor):
        raise ArgumentError(f"{name} is a parameter of a lazy module and has no shape yet: run a forward pass first")


def first(tensors: Any) -> Any:
    """Return the result of a call on one tensor."""
    return tensors[0]


def item(tensors: Any) -> Any:
    """Return the result of a call on a number."""
    return tensors[0].item()


def nothing(tensors: Any) -> None:
    """Return the result of a rank that has none."""
    return


def refuse_gradients(tensors: list[torch.Tensor], what: str) -> None:
    """Raise ArgumentError if a result of these tensors would have a gradient."""
    if _ops.learns(tensors):
        raise ArgumentError(f"{what} is not differentiable, and a tensor requires gradients: .detach() it")


def place(group: Group | None, collective: int = 0, x: Any = None, async_op: bool = False) -> tuple[int, int, int]:
    """Return the number of a group, this process's rank there, and the number of its ranks.

    For the selector: `collective` is its code in dl_comm.h, 0 for a message, and `x` its tensors.
    """
    if group is None:
        if groups.is_routed():
            found: tuple[int, int, int] = _routed(groups.route_changes, collective, device_of(x), async_op)
            return found
        group = state.current.world
        if group is None:
            if torch.compiler.is_compiling():
                return 0, *_ops.group(0)
            group = groups.world()
        return 0, group.rank, group.size
    if not isinstance(group, Group):
        raise ArgumentError(f"invalid group: {group!r} (expected a dl_comm.Group, or None for all ranks)")
    return group.number, group.rank, group.size


class KeptGroup:
    """The group of a module, None for all ranks. Copies of the module share it."""

    def __init__(self, group: Group | None) -> None:
        self.group = group

    def __deepcopy__(self, memo: Any) -> KeptGroup:
        return self


def device_of(x: Any) -> str:
    """Return what the selector calls the device of tensors."""
    first = x[0] if isinstance(x, (list, tuple)) and x else x
    return "gpu" if isinstance(first, torch.Tensor) and first.device.type != "cpu" else "cpu"


@constant
def _routed(changes: int, collective: int, device: str, async_op: bool) -> tuple[int, int, int]:
    """Return what `place` returns for the group that the selector chooses. `changes` is for the compiler."""
    group = groups.given(None, collective, device=device, async_op=async_op)
    return group.number, group.rank, group.size


def call_name(name: str | None) -> str:
    """Return the name of a call as the ops take it."""
    if name is None:
        return ""
    checked_name(name)
    return name


def matching(common: tuple[Any, ...]) -> tuple[str, float, bool]:
    """Return name, deadline and `by_name` of a call as the ops take them. `common`: as `made` passes it."""
    name, timeout, by_name = common[1], common[2], common[-1]
    return call_name(name), seconds(timeout), checked_by_name(by_name, name)


def operator_name(op: Any) -> str:
    """Return the operator; the op knows which there are."""
    if not isinstance(op, str):
        raise ArgumentError(f"invalid op: {op!r} (expected a string, such as 'sum')")
    return op


def checked_rank(rank: Any, argument: str = "root") -> int:
    """Return a rank of a group; the op knows how many there are."""
    if isinstance(rank, bool) or not isinstance(rank, (int, np.integer)) or rank < 0:
        raise ArgumentError(f"invalid {argument}: {rank!r} (expected a rank of the group)")
    return int(rank)


def checked_tag(tag: Any) -> int:
    """Return a tag."""
    if isinstance(tag, bool) or not isinstance(tag, (int, np.integer)) or not 0 <= tag < 2**31:
        raise ArgumentError(f"invalid tag: {tag!r} (expected an integer from 0 to {2**31 - 1})")
    return int(tag)


def listed_counts(counts: Sequence[Any] | None, x: Any) -> list[int]:
    """Return the counts of the tensors `x` as the ops take them: those of the first tensor first."""
    if counts is None:
        return []
    each = for_each("counts", counts, len(x) if isinstance(x, (list, tuple)) else 1)
    listed = [count for one in each for count in checked_ints("counts", one, -(2**62), 2**62)]
    if not listed:
        raise ArgumentError("invalid counts: [] (expected extents, one for each rank)")
    return listed
