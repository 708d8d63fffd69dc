"""Allreduce and broadcast of torch tensors, outside an optimizer.

All functions are collective: every rank calls them, in the same order, with tensors of the same shapes and types. They
call `dl_comm.init()` when needed, except `gradients` and `broadcast`, the torch implementation of the functions of the
same name in `dl_comm`, which then raise StateError. Any thread may call them; they wait without the GIL.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, overload

import torch

from dl_comm._arrays.agreement import failing_together
from dl_comm._arrays.arguments import checked_rank
from dl_comm._arrays.groups import CONTROL_TEAM, Group, averaging_team, checked_place, is_of_all, unless_world, world
from dl_comm._arrays.groups import given as given_group
from dl_comm._arrays.objects import all_gather_object, object_of_root
from dl_comm._arrays.objects import broadcast_object as broadcast_any_object
from dl_comm._arrays.tensor_names import Name, agreed_order, by_name, labels
from dl_comm._arrays.towers import as_towers, in_towers, is_single
from dl_comm._base.array_types import Object
from dl_comm._base.checks import checked_flag, checked_name, checked_root, refuse_masked, seconds
from dl_comm._base.errors import ArgumentError, DTypeError, noting_refusals
from dl_comm._base.made import Variant, made
from dl_comm._base.table import Broadcast
from dl_comm._job.start import ensure_initialized
from dl_comm.torch import _collectives, _ops
from dl_comm.torch._arguments import matching, refuse_lazy, tensors_of
from dl_comm.torch._gradient import contiguous_copy, overlaps
from dl_comm.torch._names import kept_names, names_of
from dl_comm.torch._reducer import parameters_broadcast

_COMPLEX = (torch.complex64, torch.complex128)


@noting_refusals
def gradients(
    tensors: Any,
    team: int = 0,
    *,
    group: Group | None = None,
    name: str | None = None,
    timeout: float | None = None,
) -> Any:
    """Return the means of `tensors` over all ranks, in their order; for a list of towers, one list per tower.

    For one tensor or number instead of a list, return its mean.

    `group`: the ranks that take part, instead of a team; a group has no schedule.
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
    if is_single(tensors):
        given, wrap = _tensors_of(tensors)
        return wrap(gradients(given, team, group=group, name=name, timeout=timeout))
    team = checked_place(group, team)
    checked_name(name)
    towers, flat = as_towers(tensors)
    means = _ops.average_new(_tensors(flat), team, name or "gradients", towers=towers or 1, timeout=seconds(timeout))
    return means if towers is None else in_towers(means, towers)


@made(
    Broadcast,
    Variant(
        note="For an expanded tensor, whose elements share memory, the result is a new tensor. After an error the "
        "tensors are unchanged. Differentiable with ``in_place=False``.",
        library="torch",
    ),
)
def broadcast(tensors: Any, root: int, in_place: bool, common: tuple[Any, ...]) -> Any:
    group, _, _, async_op, _ = common
    given, wrap = _tensors_of(tensors)
    name, timeout, by_name = matching(common)
    _ops.refuse_tangents(given)
    if not checked_flag("in_place", in_place):
        if not async_op:
            return wrap(_collectives.broadcast_new(given, root, group, name, timeout, by_name))
        given = [contiguous_copy(tensor.detach().clone()) for tensor in given]
    if checked_flag("async_op", async_op):
        into = [tensor.detach() for tensor in given]
        return _collectives.broadcast_into(into, root, group, name, timeout, by_name, True, lambda: wrap(given))
    # The op refuses tensors that are not strided.
    into = [
        tensor.detach().clone(memory_format=torch.contiguous_format)
        if tensor.layout is torch.strided and overlaps(tensor)
        else tensor.detach()
        for tensor in given
    ]
    dense = [contiguous_copy(tensor) if tensor.layout is torch.strided else tensor for tensor in into]
    if is_of_all(group) and not by_name and all(tensor.dtype in _ops.DTYPES for tensor in dense):
        _ops.broadcast_in_place(dense, checked_root(root), name or "broadcast", timeout=timeout)
    else:
        _collectives.broadcast_into(dense, root, group, name, timeout, by_name)
    _copy_back(dense, into)
    return wrap(
        [
            copy if tensor.layout is torch.strided and overlaps(tensor) else tensor
            for tensor, copy in zip(given, into, strict=True)
        ]
    )


@overload
def average(value: torch.Tensor, name: str | None = None, *, group: Group | None = None) -> torch.Tensor: ...


@overload
def average(value: float, name: str | None = None, *, group: Group | None = None) -> float: ...


def average(
    value: torch.Tensor | float, name: str | None = None, *, group: Group | None = None
) -> torch.Tensor | float:
    """Return the mean of a metric over the ranks: a new tensor for a tensor, a float for a number.

    Means of integers and bools are float64, without rounding. `name` must be the same on all ranks; error messages
    contain it. `group`: the ranks that take part; None: all.
    """
    ensure_initialized()
    group = unless_world(group)
    team = averaging_team(group, CONTROL_TEAM)
    if not isinstance(value, torch.Tensor | numbers.Real):
        with failing_together("average", group):
            raise DTypeError(f"average needs a tensor or a number, not a {type(value).__name__}")
    checked_name(name)
    call_name, label = f"average.{name or ''}", name or ""
    if isinstance(value, torch.Tensor):
        (tensor,) = _tensors([value])
        if not (tensor.is_floating_point() or tensor.is_complex()):
            tensor = tensor.to(torch.float64)
        return _ops.average_new([tensor], team, call_name, label)[0]
    boxed = torch.tensor([float(value)], dtype=torch.float64)
    _ops.average_in_place([boxed], team, call_name, label)
    return float(boxed)


def broadcast_parameters(
    parameters: torch.nn.Module | Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
    root: int = 0,
    *,
    group: Group | None = None,
) -> None:
    """Broadcast parameters from rank `root`, in place.

    `parameters`: a module (its parameters and buffers), a state dict, or (name, tensor) pairs as from
    `module.named_parameters()`. The ranks match tensors by name, in whatever order they have them. Raises DTypeError
    for an entry that is not a tensor, and MismatchError if the names differ; otherwise as `gradients`.

    `group`: the ranks that take part; `root` is a rank of the group. None: all.
    """
    ensure_initialized()
    group = unless_world(group)
    with failing_together("broadcast_parameters", None if group is None else given_group(group)):
        named = _checked_names(parameters)
    broadcast_in_order(by_name(named), root, group)


def broadcast_in_order(named: Sequence[tuple[str, torch.Tensor]], root: int = 0, group: Group | None = None) -> None:
    """Broadcast parameters, which all ranks list in this order, as `broadcast_parameters`."""
    ensure_initialized()
    _broadcast_named(named, root, "broadcast_parameters", unless_world(group))
    parameters_broadcast(tensor for _, tensor in named)


def _checked_names(parameters: Any) -> list[tuple[str, torch.Tensor]]:
    named: list[tuple[str, Any]]
    if isinstance(parameters, torch.nn.Module):
        named = [*parameters.named_parameters(), *parameters.named_buffers()]
    elif isinstance(parameters, Mapping):
        named = [(str(name), tensor) for name, tensor in parameters.items()]
    else:
        named = [_pair(entry) for entry in parameters]
    for name, tensor in named:
        if not isinstance(tensor, torch.Tensor):
            raise DTypeError(f"{name} is of type {type(tensor).__name__}, not a tensor")
        refuse_lazy(tensor, name)
        if tensor.is_meta:
            raise ArgumentError(f"{name} is on the meta device and has no values")
        if tensor.layout is torch.strided and overlaps(tensor):
            raise ArgumentError(f"{name} is expanded: its elements share memory and cannot be set; pass its .clone()")
    return named


def broadcast_object(value: Object, root: int = 0, *, group: Group | None = None) -> Object:
    """Return rank `root`'s object on every rank. The value on other ranks is ignored. The object is pickled.

    `group`: the ranks that take part; `root` is a rank of the group. If pickling fails, rank `root` raises pickle's
    exception, and the other ranks raise a CommError with its text.
    """
    ensure_initialized()
    return broadcast_any_object(value, root, group=world() if group is None else group)


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root: int = 0, *, group: Group | None = None) -> None:
    """Broadcast the state of rank `root`'s optimizer: hyperparameters and per-parameter state.

    Parameters are matched by name, as by `DistributedOptimizer`. A rank creates state that it lacks, and drops state
    that rank `root` lacks; all have the types and bits of rank `root`. Values other than tensors are pickled, with
    errors as in `broadcast_object`. Raises ArgumentError when the parameter groups differ between ranks.

    `group`: the ranks that take part; `root` is a rank of the group. None: those of the `DistributedOptimizer`, else
    all.
    """
    ensure_initialized()
    if group is None and (kept := kept_names(optimizer)) is not None:
        group = kept.group
    members = None if unless_world(group) is None else given_group(group)
    group = world() if members is None else members
    with failing_together("broadcast_optimizer_state", group):
        root = checked_rank(root, group)
        names = names_of(optimizer, "broadcast_optimizer_state", members)
        names.find(optimizer)
    names.agree()
    places = _places(optimizer)
    order = [id(parameter) for _, parameter in names.named(optimizer)]
    groups = all_gather_object([places[each][0] for each in order], group=group)
    if any(each != groups[0] for each in groups):
        raise ArgumentError(
            "the ranks have different parameter groups: make the same groups of the same parameters on all ranks"
        )
    mine = group.rank == root
    tensors: list[tuple[str, torch.Tensor]] = []

    def outline_of_root() -> Any:
        state = _without_tensors(optimizer.state_dict(), "optimizer", tensors)
        return state, [places[each][1] for each in order]

    state, order_of_root = object_of_root(outline_of_root, root, group, "broadcast_optimizer_state.outline")
    if not mine:
        with failing_together("broadcast_optimizer_state", members):
            state = _with_tensors(state, tensors)
    if tensors:
        _broadcast_named(tensors, root, "broadcast_optimizer_state", members)
    if not mine:
        own = dict(zip(order_of_root, (places[each][1] for each in order), strict=True))
        state["state"] = {own.get(place, place): values for place, values in state["state"].items()}
        for saved, present in zip(state["param_groups"], optimizer.state_dict()["param_groups"], strict=True):
            saved["params"] = present["params"]
        optimizer.load_state_dict(state)
        _restore_types(optimizer, state["state"], places)


def _places(optimizer: torch.optim.Optimizer) -> dict[int, tuple[int, int]]:
    """The number of the group, and the index in a state dict, of each parameter by its id."""
    packed = optimizer.state_dict()["param_groups"]
    return {
        id(parameter): (g, index)
        for g, (group, saved) in enumerate(zip(optimizer.param_groups, packed, strict=True))
        for parameter, index in zip(group["params"], saved["params"], strict=True)
    }


def _restore_types(optimizer: torch.optim.Optimizer, state: Any, places: dict[int, tuple[int, int]]) -> None:
    """Undo what `load_state_dict` does to floating-point state: it converts it to the type of the parameter."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            values = state.get(places[id(parameter)][1])
            if values is not None and parameter in optimizer.state:
                optimizer.state[parameter] = _typed_as(values, optimizer.state[parameter])


def _typed_as(value: Any, loaded: Any) -> Any:
    if isinstance(value, torch.Tensor) and isinstance(loaded, torch.Tensor):
        return loaded if loaded.dtype == value.dtype else value.to(loaded.device)
    if isinstance(value, dict) and isinstance(loaded, dict):
        for key in value.keys() & loaded.keys():
            loaded[key] = _typed_as(value[key], loaded[key])
    elif type(value) in (list, tuple) and type(loaded) is type(value) and len(value) == len(loaded):
        return type(value)(map(_typed_as, value, loaded))
    return loaded


def _broadcast_named(named: Sequence[tuple[str, torch.Tensor]], root: int, call_name: str, group: Group | None) -> None:
    if not named:
        return
    keys = [name.key for name, _ in named if isinstance(name, Name)]
    if group is not None and keys:
        # A call on a group does not compare names.
        agreed_order(keys, call_name, are_given=True, group=group)
    with torch.no_grad():
        tensors = _tensors([tensor.detach() for _, tensor in named])
        dense = [contiguous_copy(tensor) if tensor.layout is torch.strided else tensor for tensor in tensors]
        # One call per device type, in the same order on all ranks; device indices may differ.
        for kind in sorted({tensor.device.type for tensor in dense}):
            these = [i for i, tensor in enumerate(dense) if tensor.device.type == kind]
            names = labels(named[i][0] for i in these)
            known = [_known(dense[i]) for i in these]
            if group is None:
                _ops.broadcast_in_place(known, root, call_name, names)
            else:
                _collectives.broadcast_into(known, root, group)
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


def _tensors_of(x: Any) -> tuple[list[torch.Tensor], Callable[[Any], Any]]:
    """Return the tensors of an argument, and what makes a result of the same kind from tensors."""
    if not isinstance(x, list) and is_single(x):
        given, wrap = tensors_of(x, "tensors")
        return _tensors(given), wrap
    return _tensors(x), _as_it_is


def _as_it_is(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return tensors


def _tensors(values: Sequence[Any]) -> list[torch.Tensor]:
    if isinstance(values, torch.Tensor) or not hasattr(values, "__iter__"):
        raise DTypeError(f"expected a list of tensors, not a {type(values).__name__}; wrap it: [tensor]")
    tensors = list(values)
    for i, tensor in enumerate(tensors):
        if tensor is None:
            raise ArgumentError(f"tensor {i} is None; pass only the tensors that exist, the same on all ranks")
        if not isinstance(tensor, torch.Tensor):
            refuse_masked(tensor, f"entry {i} of the list")
            raise DTypeError(f"entry {i} of the list is of type {type(tensor).__name__}, not a tensor")
        refuse_lazy(tensor, f"tensor {i}")
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
        if value.is_meta or value.layout is not torch.strided:
            raise ArgumentError(f"{path} is not dense, or has no values")
        tensors.append((path, value.detach().contiguous()))
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
