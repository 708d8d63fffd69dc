"""Allreduce and broadcast of torch tensors, outside an optimizer.

All functions are collective: every rank calls them, in the same order, with tensors of the same shapes and types. They
call `dl_comm.init()` when needed, except `gradients` and `broadcast`, the torch implementation of the functions of the
same name in `dl_comm`, which then raise StateError. Any thread may call them; they wait without the GIL.
"""

from __future__ import annotations

import numbers
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, overload

import torch

import dl_comm
from dl_comm import ArgumentError, CommError, DTypeError
from dl_comm._collectives import as_towers, in_towers
from dl_comm._groups import is_routed
from dl_comm._process import CONTROL_TEAM, checked_name, checked_root, checked_team, ensure_initialized, seconds
from dl_comm.torch import _collectives, _ops
from dl_comm.torch._gradient import contiguous_copy, overlaps
from dl_comm.torch._reducer import parameters_broadcast

_COMPLEX = (torch.complex64, torch.complex128)


def gradients(
    tensors: Sequence[Any], team: int = 0, *, name: str | None = None, timeout: float | None = None
) -> list[Any]:
    """Return the means of `tensors` over all ranks, in their order; for a list of towers, one list per tower.

    `name` must be the same on all ranks. On a team with a schedule it distinguishes lists of equal shapes. `timeout`
    replaces the team's deadline, in seconds (0: no limit).

    The results are new contiguous tensors of the same shapes, dtypes and device. Supported dtypes: float16, bfloat16,
    float32, float64, int8, uint8, int32 and int64; a mean of integers rounds toward zero. All tensors of a call are on
    one device. On a GPU the results are ready for the next work on torch's current stream. Differentiable, and
    supported by `torch.compile`: the gradient of a mean is the mean of the ranks' gradients, so backward is collective
    too.

    Raises `dl_comm.ArgumentError` (a ValueError), `DTypeError` (a TypeError), `StateError` (before `init`) and
    `MismatchError` (the ranks issued different collectives); the next call works.
    """
    team = checked_team(team)
    checked_name(name)
    towers, flat = as_towers(tensors)
    means = _ops.average_new(_tensors(flat), team, name or "gradients", towers=towers or 1, timeout=seconds(timeout))
    return means if towers is None else in_towers(means, towers)


def broadcast(
    tensors: Sequence[torch.Tensor],
    root: int = 0,
    *,
    timeout: float | None = None,
    group: dl_comm.Group | None = None,
    async_op: bool = False,
    in_place: bool = True,
) -> Any:
    """Copy the values of `tensors` on rank `root` to all ranks, in place, and return the tensors.

    For an expanded tensor, whose elements share memory, the result is a new tensor. dtypes (and bool), `timeout` and
    errors as in `gradients`; after an error the tensors are unchanged.

    `group`: the ranks that take part; `root` is a rank of the group. `async_op`: return a `Work` of the tensors, which
    must be contiguous, at once. `in_place=False`: return new tensors; differentiable.
    """
    given = _tensors(tensors)
    _ops.refuse_tangents(given)
    if not in_place:
        if async_op:
            raise ArgumentError("broadcast with async_op works in place")
        return _collectives.broadcast_new(given, root, group, timeout)
    if async_op:
        into = [tensor.detach() for tensor in given]
        return _collectives.broadcast_into(into, root, group, timeout, True, given)
    # The op refuses tensors that are not strided.
    into = [
        tensor.detach().clone(memory_format=torch.contiguous_format)
        if tensor.layout is torch.strided and overlaps(tensor)
        else tensor.detach()
        for tensor in given
    ]
    dense = [contiguous_copy(tensor) if tensor.layout is torch.strided else tensor for tensor in into]
    if group is None and not is_routed():
        _ops.broadcast_in_place(dense, checked_root(root), "broadcast", timeout=seconds(timeout))
    else:
        _collectives.broadcast_into(dense, root, group, timeout, False, dense)
    _copy_back(dense, into)
    return [
        copy if tensor.layout is torch.strided and overlaps(tensor) else tensor
        for tensor, copy in zip(given, into, strict=True)
    ]


@overload
def average(value: torch.Tensor, name: str | None = None) -> torch.Tensor: ...


@overload
def average(value: float, name: str | None = None) -> float: ...


def average(value: torch.Tensor | float, name: str | None = None) -> torch.Tensor | float:
    """Return the mean of a metric over all ranks: a new tensor for a tensor, a float for a number.

    Means of integers and bools are float64, without rounding. `name` must be the same on all ranks; error messages
    contain it.
    """
    ensure_initialized()
    checked_name(name)
    call_name, label = f"average.{name or ''}", name or ""
    if isinstance(value, torch.Tensor):
        (tensor,) = _tensors([value])
        if not (tensor.is_floating_point() or tensor.is_complex()):
            tensor = tensor.to(torch.float64)
        return _ops.average_new([tensor], CONTROL_TEAM, call_name, label)[0]
    if not isinstance(value, numbers.Real):
        raise DTypeError(f"average needs a tensor or a number, not a {type(value).__name__}")
    boxed = torch.tensor([float(value)], dtype=torch.float64)
    _ops.average_in_place([boxed], CONTROL_TEAM, call_name, label)
    return float(boxed)


def broadcast_parameters(
    parameters: torch.nn.Module | Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]], root: int = 0
) -> None:
    """Broadcast parameters from rank `root`, in place.

    `parameters`: a module (its parameters and buffers), a state dict, or (name, tensor) pairs as from
    `module.named_parameters()`. Raises DTypeError for an entry that is not a tensor; otherwise as `gradients`.
    """
    if isinstance(parameters, torch.nn.Module):
        named = [*parameters.named_parameters(), *parameters.named_buffers()]
    elif isinstance(parameters, Mapping):
        named = list(parameters.items())
    else:
        named = [_pair(entry) for entry in parameters]
    for name, tensor in named:
        if not isinstance(tensor, torch.Tensor):
            raise DTypeError(f"{name} is of type {type(tensor).__name__}, not a tensor")
    ensure_initialized()
    _broadcast_named(named, root, "broadcast_parameters")
    parameters_broadcast(tensor for _, tensor in named)


def broadcast_object(value: Any, root: int = 0) -> Any:
    """Return rank `root`'s object on every rank. The value on other ranks is ignored. The object is pickled.

    If pickling fails, rank `root` raises pickle's exception, and the other ranks raise a CommError with its text.
    """
    ensure_initialized()
    return _from_root(lambda: value, checked_root(root), "broadcast_object")


def _from_root(make: Callable[[], Any], root: int, call_name: str) -> Any:
    """Return the object that `make` returns on rank `root`. An exception there raises one on every rank."""
    mine = dl_comm.get_rank() == root
    value, failure, data = None, None, b""
    if mine:
        try:
            value = make()
            data = pickle.dumps(value)
        except Exception as error:
            failure = error
            data = f"{type(error).__name__}: {error}".encode(errors="replace")
    header = torch.tensor([len(data), failure is not None], dtype=torch.int64)
    _ops.broadcast_in_place([header], root, f"{call_name}.length")
    length, failed = header.tolist()
    content = torch.frombuffer(bytearray(data), dtype=torch.uint8) if mine else torch.empty(length, dtype=torch.uint8)
    _ops.broadcast_in_place([content], root, call_name)
    if failure is not None:
        raise failure
    text = content.numpy().tobytes()
    if failed:
        raise CommError(f"rank {root} could not pickle the object of {call_name}: {text.decode(errors='replace')}")
    return value if mine else pickle.loads(text)


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root: int = 0) -> None:
    """Broadcast the state of rank `root`'s optimizer: hyperparameters and per-parameter state.

    A rank creates state that it lacks, and drops state that rank `root` lacks. Values other than tensors are pickled,
    with errors as in `broadcast_object`. Raises ValueError when the parameter groups differ in number or size.
    """
    ensure_initialized()
    root = checked_root(root)
    mine = dl_comm.get_rank() == root
    tensors: list[tuple[str, torch.Tensor]] = []

    def outline_of_root() -> Any:
        return _without_tensors(optimizer.state_dict(), "optimizer", tensors)

    outline = _from_root(outline_of_root, root, "broadcast_optimizer_state.outline")
    state = optimizer.state_dict() if mine else _with_tensors(outline, tensors)
    if tensors:
        _broadcast_named(tensors, root, "broadcast_optimizer_state")
    if not mine:
        optimizer.load_state_dict(state)


def _broadcast_named(named: Sequence[tuple[str, torch.Tensor]], root: int, call_name: str) -> None:
    if not named:
        return
    for name, tensor in named:
        if tensor.layout is torch.strided and overlaps(tensor):
            raise ArgumentError(f"{name} is expanded: its elements share memory and cannot be set; pass its .clone()")
    with torch.no_grad():
        tensors = _tensors([tensor.detach() for _, tensor in named])
        dense = [contiguous_copy(tensor) if tensor.layout is torch.strided else tensor for tensor in tensors]
        # One call per device type, in the same order on all ranks; device indices may differ.
        for kind in sorted({tensor.device.type for tensor in dense}):
            these = [i for i, tensor in enumerate(dense) if tensor.device.type == kind]
            labels = "\n".join(named[i][0] for i in these)
            _ops.broadcast_in_place([_known(dense[i]) for i in these], root, call_name, labels)
        _copy_back(dense, tensors)


@torch.no_grad()
def _copy_back(copies: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
    for copy, tensor in zip(copies, tensors, strict=True):
        if copy is not tensor:
            tensor.copy_(copy)


def _known(tensor: torch.Tensor) -> torch.Tensor:
    """View a contiguous tensor as a type that the core supports: complex as pairs, other types as bytes."""
    if tensor.layout is not torch.strided or tensor.dtype in _ops.DTYPES:
        return tensor
    return torch.view_as_real(tensor) if tensor.dtype in _COMPLEX else tensor.reshape(-1).view(torch.uint8)


def _tensors(values: Sequence[Any]) -> list[torch.Tensor]:
    if isinstance(values, torch.Tensor) or not hasattr(values, "__iter__"):
        raise DTypeError(f"expected a list of tensors, not a {type(values).__name__}; wrap it: [tensor]")
    tensors = list(values)
    for i, tensor in enumerate(tensors):
        if tensor is None:
            raise ArgumentError(f"tensor {i} is None; pass only the tensors that exist, the same on all ranks")
        if not isinstance(tensor, torch.Tensor):
            raise DTypeError(f"entry {i} of the list is of type {type(tensor).__name__}, not a tensor")
        if tensor.is_meta:
            raise ArgumentError(f"tensor {i} is on the meta device and has no values")
    return tensors


def _pair(entry: Any) -> tuple[str, torch.Tensor]:
    if not isinstance(entry, tuple) or len(entry) != 2:
        raise DTypeError(
            f"expected a module, a mapping or pairs of name and tensor, not {type(entry).__name__} entries"
        )
    return str(entry[0]), entry[1]


class _Slot:
    """Placeholder for a tensor in a state: its shape, dtype and device type (each rank uses its own device)."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape = tuple(tensor.shape)
        self.dtype = tensor.dtype
        self.device = tensor.device.type


def _without_tensors(value: Any, path: str, tensors: list[tuple[str, torch.Tensor]]) -> Any:
    if isinstance(value, torch.Tensor):
        tensors.append((path, value))
        return _Slot(value)
    if isinstance(value, dict):
        return {key: _without_tensors(item, f"{path}.{key}", tensors) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_without_tensors(item, f"{path}.{i}", tensors) for i, item in enumerate(value))
    return value


def _with_tensors(value: Any, tensors: list[tuple[str, torch.Tensor]]) -> Any:
    if isinstance(value, _Slot):
        tensors.append(("", torch.empty(value.shape, dtype=value.dtype, device=value.device)))
        return tensors[-1][1]
    if isinstance(value, dict):
        return {key: _with_tensors(item, tensors) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_with_tensors(item, tensors) for item in value)
    return value
