"""Averages and broadcasts of torch tensors, outside an optimizer.

All functions here are collective: every rank calls them, in the same order, with tensors of the same shapes and types.
They bring dl_comm up when that has not been done, except `gradients` and `broadcast`, the torch side of the functions
of the same name in `dl_comm`, which raise an error then. They may be called from any thread and wait without the GIL.
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
from dl_comm._process import CONTROL_TEAM, checked_name, checked_root, checked_team, ensure_initialized, seconds
from dl_comm.torch import _ops
from dl_comm.torch._gradient import contiguous_copy, overlaps

_COMPLEX = (torch.complex64, torch.complex128)


def gradients(
    tensors: Sequence[Any], team: int = 0, *, name: str | None = None, timeout: float | None = None
) -> list[Any]:
    """Return the means of `tensors` over all ranks, in their order; of a list of towers, a list for each.

    `name` is checked to be the same on all ranks; on a team with a schedule it tells lists of equal shapes apart.
    `timeout` is the longest that the call may take, in seconds (0 for no limit), instead of the team's.

    The results are new, contiguous tensors of the same shapes and dtypes, on the same device: float16, bfloat16,
    float32, float64, int8, uint8, int32 or int64, where a mean of integers rounds toward zero. All tensors of a call
    are on one device; on a GPU the results are there for what torch's current stream does next. Differentiable, and
    understood by `torch.compile`: the gradient of a mean is the mean of the ranks' gradients, which makes backward
    collective too.

    Raises `dl_comm.ArgumentError` (a ValueError), `DTypeError` (a TypeError), `StateError` (before `init`) and
    `MismatchError` (the ranks called different things); the next call works.
    """
    team = checked_team(team)
    checked_name(name)
    towers, flat = as_towers(tensors)
    means = _ops.average_new(_tensors(flat), team, name or "gradients", towers=towers or 1, timeout=seconds(timeout))
    return means if towers is None else in_towers(means, towers)


def broadcast(tensors: Sequence[torch.Tensor], root: int = 0, *, timeout: float | None = None) -> list[torch.Tensor]:
    """Give `tensors` the values that they have on rank `root`, in place, and return them.

    In place of an expanded tensor, whose elements share memory, a new one is returned. dtypes, `timeout` and errors as
    in `gradients`, and bool; after an error the tensors are unchanged.
    """
    given = _tensors(tensors)
    # The operation refuses what is not strided.
    into = [
        tensor.detach().clone(memory_format=torch.contiguous_format)
        if tensor.layout is torch.strided and overlaps(tensor)
        else tensor.detach()
        for tensor in given
    ]
    dense = [contiguous_copy(tensor) if tensor.layout is torch.strided else tensor for tensor in into]
    _ops.broadcast_in_place(dense, checked_root(root), "broadcast", timeout=seconds(timeout))
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
    """Return the mean of a metric over all ranks: of a tensor a new tensor, of a number a float.

    Means of integers and bools are float64, which rounds nothing. `name` is checked to be the same on all ranks, and
    stands in error messages.
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
    """Give every rank the parameters of rank `root`, in place.

    `parameters` is a module (its parameters and buffers), a state dict, or (name, tensor) pairs such as those of
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


def broadcast_object(value: Any, root: int = 0) -> Any:
    """Return the object that rank `root` gives; what the other ranks give is ignored. The object is pickled.

    When it cannot be pickled, rank `root` gets pickle's exception, and the other ranks a CommError with its text.
    """
    ensure_initialized()
    return _from_root(lambda: value, checked_root(root), "broadcast_object")


def _from_root(make: Callable[[], Any], root: int, call_name: str) -> Any:
    """The object that `make` gives on rank `root`. An exception there becomes one on every rank."""
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
    """Give every rank the state of the optimizer of rank `root`: hyperparameters and what belongs to the parameters.

    State that a rank does not have yet is made, state that rank `root` does not have is dropped. Values other than
    tensors are pickled, with errors as in `broadcast_object`. Raises ValueError when the parameter groups differ in
    number or size.
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
            raise ArgumentError(f"{name} is expanded, its elements share memory and cannot be set: give it .clone()")
    with torch.no_grad():
        tensors = _tensors([tensor.detach() for _, tensor in named])
        dense = [contiguous_copy(tensor) if tensor.layout is torch.strided else tensor for tensor in tensors]
        # A call is on one device; the ranks come to the kinds of devices in the same order, whatever their numbers.
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
    """Return the contiguous tensor as one of a type that the core has: complex as pairs, other types as bytes."""
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
    """Where a tensor stands in a state: its shape, dtype, and kind of device, of which each rank has its own."""

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
