"""The collectives of the plugin's Python interface, for arrays and tensors of any framework."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Sequence
from typing import Any, overload

import numpy as np

from dl_comm import _dl_comm
from dl_comm._api.binding import binding_of
from dl_comm._arrays.agreement import failing_together
from dl_comm._arrays.arguments import arrays_of, results_like, returned
from dl_comm._arrays.collectives import all_gather, broadcast_in
from dl_comm._arrays.cuda_arrays import broadcast_into, in_core, is_on_gpu
from dl_comm._arrays.groups import CONTROL_TEAM, Group, averaging_team, checked_place, is_of_all, unless_world
from dl_comm._arrays.groups import given as given_group
from dl_comm._arrays.memory import new_result_like
from dl_comm._arrays.towers import as_towers, in_towers, is_single, listed
from dl_comm._base.array_types import Arrays
from dl_comm._base.checks import checked_flag, checked_name, checked_root, checked_team, seconds
from dl_comm._base.errors import ArgumentError, DTypeError, noting_refusals
from dl_comm._base.made import Variant, made
from dl_comm._base.table import Broadcast

_ARRAYS = {np.ndarray}
# Element types that the plugin's broadcast lacks, by NumPy's letters.
_WITHOUT_MEAN = {np.dtype(kind).char for kind in ("i2", "u2", "u4", "u8", np.ulonglong, np.uintc, "c8", "c16")}


@noting_refusals
def gradients(
    tensors: Any,
    team: int = 0,
    *,
    group: Group | None = None,
    name: str | None = None,
    timeout: float | None = None,
    out: Any = None,
) -> Any:
    """The mean of every tensor over all ranks, or over those of a group. Collective.

    Args:
        tensors: A list of NumPy arrays (C-contiguous), TensorFlow tensors or variables, torch tensors, or GPU arrays
            with DLPack or ``__cuda_array_interface__`` (JAX, CuPy, Numba; no towers). Types: float16, bfloat16,
            float32, float64, int8, uint8, int32 or int64. Shapes and types must be the same on all ranks. A process
            with several replicas of the model passes a list of such lists, one per replica (tower), with equal shapes
            and types: the mean is over all towers of all ranks. Or one array, tensor or number.
        team: The number of the team.
        group: The ranks that take part, instead of a team; a group has no schedule.
        name: A name that must be the same on all ranks; error messages contain it. On a team with a schedule it
            distinguishes lists of equal types and shapes, for example of two networks.
        timeout: The deadline of this call in seconds (0: no limit), instead of the team's.
        out: NumPy and GPU arrays only: arrays for the means, with the shapes and types of ``tensors``, in one list (or
            one list per tower, or one array). ``out=tensors`` averages in place.

    Returns:
        ``out``, or a list of new arrays or tensors in the same order (for towers: one list per tower; for one array,
        tensor or number: its mean). Means of
        integers round toward zero; float16 and bfloat16 are summed in float32. In a TensorFlow graph: the results of
        operations; the graph may be built before ``init``. On a team with a schedule: see ``config_team``.

    Raises:
        ArgumentError: The list is empty, contains None or a masked array, an array is not contiguous, ``out`` does not
            match the tensors, or the team does not exist.
        DTypeError: An element type has no mean, or an entry is not an array or tensor.
        MismatchError: The ranks issued different collectives. Nothing was written, and the next call works.
        TimeoutError: The ranks in the message missed the deadline; the team refuses further calls.
        PeerLostError: A rank has ended; the team refuses further calls.
        StateError: ``init`` was not called, or ``finalize`` was.
    """
    if is_single(tensors):
        is_number = isinstance(tensors, np.generic) or not hasattr(tensors, "shape")
        boxed, wrap = arrays_of(tensors, "tensors") if is_number else ([tensors], _first)
        return wrap(gradients(boxed, team, group=group, name=name, timeout=timeout, out=None if out is None else [out]))
    limit = seconds(timeout)
    team = checked_team(team) if group is None else checked_place(group, team)
    if name is not None:
        checked_name(name)
    # Fast path: the checks below cost more than a small call.
    all_numpy = _all_numpy(tensors)
    towers: int | None = None
    flat: Any = tensors
    if not all_numpy:
        towers, flat = as_towers(tensors)
    framework = None if all_numpy else binding_of(flat)
    if framework is not None:
        if out is not None:
            raise ArgumentError("out is for NumPy and GPU arrays; framework tensors get new tensors")
        given = flat if towers is None else in_towers(flat, towers)
        return list(framework.gradients(given, max(team, 0), group=group, name=name, timeout=timeout))
    if not all_numpy and any(map(is_on_gpu, flat)):
        if towers is not None:
            raise ArgumentError("GPU arrays have no towers: pass one list, and run one process per GPU")
        arrays, _ = arrays_of(flat, "tensors")
        results = results_like(out, arrays, [array.shape for array in arrays])
        _dl_comm.average_on(*in_core(arrays, results), team, name, limit)
        return returned(out, results, list)()
    means: list[Any]
    if out is None:
        _refuse_masked(flat)
        means = [new_result_like(array) if isinstance(array, np.ndarray) else array for array in flat]
    elif out is tensors and all_numpy:
        means = flat
    else:
        out_towers, means = as_towers(out, "out")
        _refuse_masked([*flat, *means])
        if (out_towers, len(means)) != (towers, len(flat)):
            raise ArgumentError(f"out has {len(means)} arrays; expected {len(flat)}, as tensors")
    _dl_comm.average(flat, means, team, name, towers or 1, limit)
    return means if towers is None else in_towers(means, towers)


def _first(arrays: list[Any]) -> Any:
    return arrays[0]


def _all_numpy(tensors: Any) -> bool:
    return type(tensors) is list and set(map(type, tensors)) == _ARRAYS


def _have_means(arrays: list[Any]) -> bool:
    """Whether the plugin's broadcast takes them."""
    return not any(array.dtype.char in _WITHOUT_MEAN for array in arrays)


def _refuse_masked(arrays: list[Any]) -> None:
    for index, array in enumerate(arrays):
        if isinstance(array, np.ma.MaskedArray):
            raise ArgumentError(
                f"array {index} is masked, and masks may differ between ranks: average array.filled(0) and the mask"
            )


@made(
    Broadcast,
    Variant(
        note="GPU arrays take no options but ``timeout``. TensorFlow's tensors are immutable: the results are new "
        "tensors; in place, those of ``tensors`` that are variables get them (in a TF1 graph the caller assigns them)."
    ),
)
def broadcast(tensors: Any, root: int, in_place: bool, common: tuple[Any, ...]) -> Any:
    group, name, timeout, async_op, by_name = common
    if (
        in_place is True
        and async_op is False is by_name
        and _all_numpy(tensors)
        and is_of_all(group)
        and _have_means(tensors)
    ):
        # The checks below cost more than a small call.
        checked_name(name)
        _dl_comm.broadcast(tensors, checked_root(root), name, seconds(timeout))
        return tensors
    limit, single, in_place = seconds(timeout), is_single(tensors), checked_flag("in_place", in_place)
    given = [tensors] if single else listed(tensors, "broadcast")
    framework = binding_of(given)
    if framework is not None:
        options = {"group": group, "name": name, "timeout": timeout, "in_place": in_place, "by_name": by_name}
        if checked_flag("async_op", async_op):
            if framework.ARE_IMMUTABLE:
                raise ArgumentError("broadcast of TensorFlow tensors returns new tensors; it takes no async_op")
            options["async_op"] = True
        return framework.broadcast(tensors if single else given, root, **options)
    _refuse_masked(given)
    wrap: Callable[[list[Any]], Any] = list
    on_gpu = any(map(is_on_gpu, given))
    if single or on_gpu:
        given, wrap = arrays_of(tensors if single else given, "tensors")
    if on_gpu:
        into = broadcast_into(given, in_place)
        return broadcast_in(given, root, group, name, timeout, async_op, by_name, wrap, into)
    if not in_place:
        given = [array.copy() if isinstance(array, np.ndarray) else array for array in given]
    if (
        not (async_op or by_name)
        and is_of_all(group)
        and all(isinstance(each, np.ndarray) for each in given)
        and _have_means(given)
    ):
        checked_name(name)
        _dl_comm.broadcast(given, checked_root(root), name, limit)
        return wrap(given)
    return broadcast_in(given, root, group, name, timeout, async_op, by_name, wrap)


@overload
def average(value: float | np.generic, *, group: Group | None = ...) -> float: ...


@overload
def average(value: np.ndarray[Any, Any], *, group: Group | None = ...) -> np.ndarray[Any, Any]: ...


@overload
def average(value: Arrays, *, group: Group | None = ...) -> Arrays: ...


def average(value: Any, *, group: Group | None = None) -> Any:
    """The mean of a metric over the ranks, without a graph or a team. Collective.

    Args:
        value: A NumPy array (overwritten and returned), a TensorFlow or torch tensor (returns a new tensor), or a
            number (returns a float). Means of integers and bools are new float64 arrays and tensors, without rounding.
        group: The ranks that take part; None: all.

    Raises:
        ArgumentError: The array is not contiguous, read-only or masked.
        DTypeError: ``value`` is not a number, array or tensor, or its elements are not numbers.
        MismatchError: The ranks issued different collectives.
        StateError: ``init`` was not called, or ``finalize`` was.
    """
    framework = None if isinstance(value, np.ndarray) else binding_of([value])
    if framework is not None:
        return framework.average(value, group=group)
    group = unless_world(group)
    team = averaging_team(group, CONTROL_TEAM)
    with failing_together("average", group):
        array = _metric(value)
    _dl_comm.average([array], [array], team)
    return array if isinstance(value, np.ndarray) else float(array[0])


def _metric(value: Any) -> np.ndarray:
    """The array that is averaged for a metric."""
    if isinstance(value, np.ndarray):
        _refuse_masked([value])
        return value.astype(np.float64) if value.dtype.kind in "biu" else value
    if isinstance(value, (bool, int, float, np.generic)) and not np.iscomplexobj(value):
        try:
            return np.array([value], dtype=np.float64)
        except (TypeError, ValueError) as error:
            raise DTypeError(f"average needs a number, not {value!r}") from error
    raise DTypeError(f"average needs a number, an array or a tensor, not a {type(value).__name__}")


def equal_on_all_ranks(tensors: Any, *, group: Group | None = None) -> bool:
    """Whether arrays have the same bits on all ranks. Collective.

        if not dl_comm.equal_on_all_ranks(weights):
            raise SystemExit("the ranks have different weights")

    Args:
        tensors: An array or tensor, or a list of them, in host memory or on a GPU; the same number on all ranks.
        group: The ranks that take part; None: all.

    Returns:
        The same on every rank. Arrays of other shapes or element types are not equal.

    Raises:
        ArgumentError: The list is empty or contains None or a masked array, or a tensor is not dense.
        DTypeError: An entry is no array or tensor.
        MismatchError: The ranks issued different collectives.
        StateError: ``init`` was not called, or ``finalize`` was.
    """
    members = given_group(group)
    with failing_together("equal_on_all_ranks", members):
        given = [tensors] if is_single(tensors) else listed(tensors, "equal_on_all_ranks")
        digest = hashlib.blake2b(b"".join(map(mark_of, given)), digest_size=32).digest()
    own = np.frombuffer(digest, np.uint8)[None]
    found = all_gather(own, group=members, name="equal_on_all_ranks")
    return bool((found == own).all())


def mark_of(tensor: Any) -> bytes:
    """What tells an array from others: shape, element type and a digest of the bits.

    Raises as ``equal_on_all_ranks``.
    """
    _refuse_masked([tensor])
    array = np.ascontiguousarray(_host_array(tensor))
    if array.dtype.hasobject:
        raise DTypeError(f"only numbers can be compared, not a {type(tensor).__name__}")
    title = f"{tuple(tensor.shape)} {tensor.dtype}\0" if hasattr(tensor, "dtype") else f"{array.shape} {array.dtype}\0"
    return title.encode() + hashlib.blake2b(array.reshape(-1).view(np.uint8).data, digest_size=32).digest()


def check_buffers_match(arrays: Sequence[Any], verbose: int = 0) -> int:
    """Whether the arrays have the same bits on all ranks. Collective.

    Args:
        arrays: A list of NumPy arrays or of framework tensors, the same shapes and types on all ranks.
        verbose: 1: every rank that differs from rank 0 prints the first array that differs.

    Returns:
        0 if all arrays are equal, else 1; the same on every rank.

    Raises:
        ArgumentError: The list is empty or contains None, or a tensor is not dense.
        MismatchError: The lists have different shapes or element types.
        StateError: ``init`` was not called, or ``finalize`` was.
    """
    arrays = [_host_array(array) for array in listed(arrays, "check_buffers_match")]
    _refuse_masked(arrays)
    return 0 if _dl_comm.buffers_match(arrays, bool(verbose)) else 1


def _host_array(tensor: Any) -> Any:
    """The tensor's bits as a NumPy array, without a copy if possible."""
    if hasattr(tensor, "detach"):  # torch: as bytes, because NumPy lacks some of its types
        if tensor.is_meta or str(tensor.layout) != "torch.strided":
            raise ArgumentError("a tensor is not dense, or has no values; check_buffers_match compares dense ones")
        # An empty tensor counts as contiguous with any strides, but `view` checks them.
        tensor = tensor.detach().cpu().contiguous() if tensor.numel() else tensor.new_empty(tensor.shape, device="cpu")
        return (tensor if tensor.dim() else tensor.reshape(1)).view(sys.modules["torch"].uint8).numpy()
    if isinstance(tensor, np.generic):  # a TensorFlow session returns these for scalars
        return np.asarray(tensor)
    return np.ascontiguousarray(tensor.numpy()) if hasattr(tensor, "numpy") else tensor
