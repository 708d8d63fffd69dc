"""The TensorFlow ops: loads them, calls them on lists of tensors, and defines their gradients.

Call names. All ranks must issue the same calls on a team. The core detects different names, and matches calls by name
if their order differs; it also compares types and shapes.

- Eager calls have the same name in each step: a number in the op's attribute would create a new kernel per step.
- A call in a graph also has its number among calls of the same name in that graph, because a TF1 session may run two of
  them in either order. Each graph numbers from 0, so a `tf.function` that only one rank traces again keeps its names.
- Calls by name in a `tf.function` have no program order either: each starts when its inputs are there.
- In a loop, the kernel adds the iteration and the names of the loops, because a TF1 session may run several iterations
  at once.

Thread rule: any thread may call everything.
"""

from __future__ import annotations

import ctypes
import functools
import threading
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

import numpy as np
import tensorflow as tf

from dl_comm._arrays.arguments import ADASUM, NO_FACTORS
from dl_comm._arrays.groups import CONTROL_TEAM, Group, averaging_team, checked_place, is_routed, unless_world
from dl_comm._arrays.groups import given as given_group
from dl_comm._arrays.tensor_names import Name, by_structure
from dl_comm._arrays.tensor_names import labels as labels_of
from dl_comm._arrays.towers import as_towers, in_towers, is_single
from dl_comm._base.buckets import bucket_bytes, split
from dl_comm._base.checks import checked_by_name, checked_flag, checked_name, checked_root, refuse_masked, seconds
from dl_comm._base.cuda import preload
from dl_comm._base.errors import ArgumentError, DTypeError, StateError, noting_refusals, translate
from dl_comm._base.made import Variant, made
from dl_comm._base.private_names import check
from dl_comm._base.table import Allreduce, Barrier, Broadcast, Call, Reduce
from dl_comm._libraries import load

_AVERAGED = frozenset(
    (tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.int8, tf.uint8, tf.int32, tf.int64),
)
_OTHERS = (tf.bool, tf.int16, tf.uint16, tf.uint32, tf.uint64, tf.complex64, tf.complex128)
ALL_TYPES = _AVERAGED.union(_OTHERS)

_LIKE_INPUTS = (Allreduce.code, Broadcast.code, Barrier.code, Reduce.code)

# The default of torch's DistributedDataParallel.
BUCKET_BYTES = 25 << 20

_counters: weakref.WeakKeyDictionary[tf.Graph, Counter[tuple[str, int | str]]] = weakref.WeakKeyDictionary()
_counters_lock = threading.Lock()

_Function = TypeVar("_Function", bound=Callable[..., Any])


def no_autograph(function: _Function) -> _Function:
    """Exclude a function from AutoGraph, which rewrites the Python code that a `tf.function` calls."""
    # The function gets only the mark by which AutoGraph knows it: TensorFlow's wrapper takes longer than a small call.
    marks = vars(tf.autograph.experimental.do_not_convert(function))
    vars(function).update((name, mark) for name, mark in marks.items() if name != "__wrapped__")
    return function


def op_of(kind: type[Call], variant: Variant) -> Callable[[Callable[..., Any]], Any]:
    """A decorator: makes the public function of a call from one that runs it, see `_made`."""
    return lambda run: no_autograph(cast(Any, made(kind, variant)(run)))


@functools.cache
def library() -> Any:
    """Load the op library for the installed TensorFlow; builds it if needed.

    Raises ImportError when the build fails, or when the library has loaded another core.
    """
    path = _path()
    loaded = tf.load_op_library(path)
    load.check_one_core(path, _core_id_of(path))
    if _has_gpus():
        preload()
    return loaded


def run(op: str, *arguments: Any, on_host: bool = False) -> Any:
    """Run an op, or add it to the graph. In eager mode, raise the error of dl_comm that it reports.

    `on_host`: the core supports the call in host memory only; TensorFlow copies the tensors there.
    """
    try:
        return _function(op, on_host)(*arguments)
    except (tf.errors.OpError, TypeError) as error:
        given = [value for argument in arguments if isinstance(argument, list) for value in argument]
        refused = [value for value in given if value.dtype.base_dtype not in ALL_TYPES]
        known = _type_error(refused[0].dtype, "sent to other ranks", refused[0]) if refused else translate(error)
        if known is error:
            raise
        raise known from None
    except RuntimeError as error:
        # Ctrl-C ends the wait of an eager call, but TensorFlow raises this instead.
        if "KeyboardInterrupt" in str(error):
            raise KeyboardInterrupt from error
        raise


@functools.cache
def _function(op: str, on_host: bool) -> Callable[..., Any]:
    function = cast(Callable[..., Any], getattr(library(), op))
    # Without CUDA, the core supports all calls in host memory only.
    if not _has_gpus() or (tf.test.is_built_with_cuda() and not on_host):
        return function

    def placed(*arguments: Any) -> Any:
        with tf.device("CPU:0"):
            return function(*arguments)

    return placed


@functools.lru_cache(512)
def settings(name: str, labels: str, *numbers: float) -> str:
    """Return the settings of an op, as in settings.h."""
    return "\0".join((" ".join(str(+number) for number in numbers), name, labels))


def settings_of(op: Any) -> tuple[list[float], str]:
    """Return the numbers and the name in the settings of an op."""
    numbers, name, _ = tf.compat.as_str(op.get_attr("settings")).split("\0", 2)
    return [float(number) for number in numbers.split()], name


def core_id() -> int:
    """Return the id of the core that the ops use; all bindings in one process must have the same."""
    library()
    return _core_id_of(_path())


@no_autograph
@noting_refusals
def gradients(
    tensors: Any,
    team: int = 0,
    *,
    group: Group | None = None,
    name: str | None = None,
    timeout: float | None = None,
) -> Any:
    """Average every tensor over all ranks, and over the towers if it is a list of such lists.

    Args:
        tensors: `tf.Tensor`, `tf.Variable`, `tf.IndexedSlices` (converted to dense) or values that TensorFlow converts
            to tensors. Types: float16, bfloat16, float32, float64, int8, uint8, int32 or int64. Number, types and
            shapes must be the same on all ranks. Or one instead of a list. Means of integers round toward zero;
            float16 and bfloat16 are summed in float32.
        team: The team to use.
        group: The ranks that take part, instead of a team; a group has no schedule.
        name: A name that must be the same on all ranks; calls of the same name in one graph are numbered. On a team
            with a schedule it distinguishes lists of equal types and shapes.
        timeout: The deadline of the op in seconds (0: no limit), instead of the team's.

    A `tf.function` runs its calls in program order. A TF1 session does not: independent calls of one team may run in a
    different order on each rank. Then the core reconciles them by signature, which takes one more message; one list of
    all tensors is faster.

    Returns:
        New dense tensors, in order, with the static shapes of the inputs: a list; for towers, one list per tower. Their
        gradient is the mean of the ranks' gradients; integers have none. On a team with a schedule: see
        `dl_comm.config_team`.

    Raises:
        dl_comm.ArgumentError: The list is empty or contains None, or the team is negative.
        dl_comm.DTypeError: `tensors` is not a list, or an element type has no mean.
        dl_comm.StateError: The call is inside an XLA-compiled function.
        dl_comm.CommError: The call failed; a graph raises `tf.errors`, see `dl_comm.error_of`.
    """
    if is_single(tensors):
        return gradients([tensors], team, group=group, name=name, timeout=timeout)[0]
    checked_name(name)
    towers, given = as_towers(listed(tensors))
    place = checked_place(group, team)
    means = _gradients(given, place, name or "gradients", towers=towers or 1, timeout=seconds(timeout))
    return means if towers is None else in_towers(means, towers)


@op_of(
    Broadcast,
    Variant(
        without=("async_op",),
        library="tf",
        returns="New tensors, with the static shapes of ``tensors``: one, or a list.",
        note="The tensors of rank ``root`` as new tensors, and with ``in_place`` as values of the variables among "
        "``tensors``. In a TF1 graph nothing is assigned: the script assigns the results, as those of the Cray plugin "
        "do. The gradient is the sum of the ranks' gradients on the root, and zeros elsewhere. After an error no "
        "variable has changed.",
    ),
)
def broadcast(tensors: Any, root: int, in_place: bool, common: tuple[Any, ...]) -> Any:
    group, name, timeout, by_name = common
    by_name, single = checked_by_name(by_name, name), is_single(tensors)
    given = listed([tensors] if single else tensors)
    if group is None and is_routed():
        group = given_group(None, Broadcast.code)
    results = broadcast_new(given, root, name or "broadcast", timeout, group, by_name)
    if checked_flag("in_place", in_place) and tf.compat.v1.executing_eagerly_outside_functions():
        for value, result in zip(given, results, strict=True):
            if hasattr(value, "assign"):  # TensorFlow's variables and Keras's
                value.assign(result)
    return results[0] if single else results


@no_autograph
def broadcast_new(
    given: list[Any],
    root: int,
    name: str,
    timeout: float | None = None,
    group: Group | None = None,
    by_name: bool = False,
) -> list[tf.Tensor]:
    """As `broadcast`, without assigning variables."""
    checked_name(name)
    values = [as_tensor(value, ALL_TYPES, "broadcast") for value in given]
    root, limit, group = checked_root(root), seconds(timeout), unless_world(group)
    if group is not None or by_name:
        where = (name, number_of(group), limit)
        return list(collective(Broadcast.code, values, *where, root=root, named=given, by_name=by_name))
    refuse_xla()
    eager = tf.executing_eagerly()
    order, names = order_of(given, eager)
    text = settings(call_name(name, CONTROL_TEAM), names, root, eager, limit)
    return in_order(order, values, lambda ordered: run("dl_comm_broadcast", ordered, text))


def collective(
    code: int,
    tensors: Sequence[tf.Tensor],
    name: str,
    group: int,
    timeout: float = -1.0,
    operator: int = 0,
    factors: tuple[float, float] = NO_FACTORS,
    root: int = 0,
    counts: Sequence[tf.Tensor] = (),
    named: Sequence[Any] = (),
    by_name: bool = False,
) -> Any:
    """Add or run a collective of dl_comm.h, `code`, on the group with the number `group`.

    Args:
        code: The collective.
        tensors: The tensors of this rank, checked.
        name: The name of the call, without a number.
        group: As in `Group.number`; 0 for all ranks.
        timeout: The deadline in seconds; 0: no limit; negative: the group's.
        operator: As in dl_comm.h.
        factors: Those of an operator with factors.
        root: The root.
        counts: As int64 tensors: the extents of the blocks, if they differ.
        named: What the tensors were converted from, whose names stand in messages.
        by_name: Whether the call matches that of its name, wherever the ranks make it.

    Returns:
        The list of results; for a barrier in a graph, the operation.
    """
    eager = tf.executing_eagerly()
    if not eager:
        refuse_xla()
        name = call_name(name, f"group {group}")
    order, names = order_of(named, eager)
    text = settings(name, names, code, operator, group, root, factors[0], factors[1], eager + 2 * by_name, timeout)
    on_host = operator == ADASUM
    op, more = ("dl_comm_collective", ()) if code in _LIKE_INPUTS else ("dl_comm_block_collective", (counts,))

    def call(ordered: Sequence[tf.Tensor]) -> Any:
        results = run(op, ordered, *more, text, on_host=on_host)
        if by_name and not eager:
            _run_in_any_order(results)
        return results

    return call(tensors) if order is None else in_order(order, tensors, call)


def _run_in_any_order(results: Sequence[tf.Tensor]) -> None:
    """Excludes an op from the program order of its `tf.function`: it waits for no other op but those of its inputs."""
    graph = results[0].graph
    manager = getattr(graph, "experimental_acd_manager", None)
    if manager is not None:  # else a graph of TF1, which has no such order
        manager.run_independently(results[0].op)


def extent(tensor: tf.Tensor) -> tf.Tensor:
    """Return the extent of the first axis, an int64 vector of one element; 1 for a scalar."""
    return tf.concat([tf.shape(tensor, tf.int64), [1]], 0)[:1]


def number_of(group: Group | None, code: int = 0) -> int:
    """Return the number of a group for the ops; 0 for all ranks. Raises ArgumentError when it was freed.

    `code`: the collective, for the selector; 0 for a message.
    """
    if group is None and not is_routed():
        return 0
    group = given_group(group, code)
    _ = group.handle  # raises if it was freed
    return group.number


@no_autograph
def average(value: Any, *, name: str | None = None, group: Group | None = None) -> tf.Tensor:
    """Average one tensor over the ranks, for metrics.

    Converts Python numbers, and integer and bool tensors and arrays, to float64: means of counts are not rounded.
    `group`: the ranks that take part; None: all. Raises as `gradients`.
    """
    if isinstance(value, (bool, int, float)):
        value = np.float64(value)
    tensor = value if isinstance(value, tf.Tensor) else _converted(value, "averaged")
    if tensor.dtype.is_integer or tensor.dtype.is_bool:
        tensor = tf.cast(tensor, tf.float64)
    _, labels = order_of([value], tf.executing_eagerly())
    return _gradients([tensor], averaging_team(group, CONTROL_TEAM), name or "average", labels)[0]


@no_autograph
def average_non_none(
    grads: Sequence[Any],
    variables: Sequence[Any],
    team: int,
    owner: int,
    name: str = "DistributedOptimizer",
    places: Mapping[str, int] | None = None,
) -> list[Any]:
    """Average the gradients that are not None, for the optimizer `owner`; None entries stay.

    All ranks must have None for the same variables. `variables`, one per gradient, give the names by which the ranks
    match the gradients. `places`: the order of the variables on all ranks, by the keys of `variable_names`; empty: by
    position. Without it, they have the order in which a TF1 graph has made them, or that of their keys.

    In a graph, one call per bucket overlaps communication with backward. Buckets start with the last variables, whose
    gradients are ready first. A bucket starts when its gradients are ready and the previous bucket is done. The bucket
    size is `DL_COMM_BUCKET_MB` when the graph is built, 25 MiB by default; the first bucket has at most 1 MiB. Only the
    last bucket counts as time waited. The bucket size does not change the result.
    """
    results = [None if grad is None else as_tensor(grad, _AVERAGED, "averaged") for grad in grads]
    eager = tf.executing_eagerly()
    names = variable_names(variables)
    order = (
        _order(variables, names, eager)
        if places is None
        else sorted(
            range(len(names)), key=lambda i: (places.get(names[i].key, len(places)), names[i].key if places else "")
        )
    )
    compared = [str(each) for each in names] if places is not None and not places else names
    present = [i for i in order if results[i] is not None]
    # In eager mode, all gradients are ready.
    buckets = [present] * bool(present) if eager else _buckets(results, present)
    before: list[Any] = []
    for number, bucket in enumerate(buckets):
        # Without dependencies, a TF1 session would start them in a different order on each rank.
        with tf.control_dependencies(before):
            means = _gradients(
                [results[i] for i in bucket],
                team,
                name,
                labels=labels_of(compared[i] for i in bucket),
                owner=owner,
                part=number > 0,
                timed=number == len(buckets) - 1,
            )
        before = means[:1]
        for i, mean in zip(bucket, means, strict=True):
            results[i] = mean
    return results


def _buckets(grads: Sequence[Any], present: list[int]) -> list[list[int]]:
    size = bucket_bytes() or BUCKET_BYTES
    return list(split(present[::-1], lambda i: (grads[i].shape.num_elements() or 0) * grads[i].dtype.size, size))


@no_autograph
def _gradients(
    given: list[Any],
    team: int,
    base: str,
    labels: str | None = None,
    towers: int = 1,
    owner: int | None = None,
    timeout: float = -1.0,
    part: bool = False,
    timed: bool = True,
) -> list[tf.Tensor]:
    tensors = [as_tensor(value, _AVERAGED, "averaged") for value in given]
    refuse_xla()
    owner = _scope() if owner is None else owner
    eager = tf.executing_eagerly()
    order = None
    if labels is None:
        order, labels = order_of(given[: len(given) // towers], eager)
        if order is not None:
            order = [tower + i for tower in range(0, len(given), len(order)) for i in order]
    text = settings(call_name(base, team), labels, team, towers, owner, part, timed, eager, timeout)
    on_host = towers > 1 or _may_return_early(team, owner)
    return in_order(order, tensors, lambda ordered: run("dl_comm_gradients", ordered, text, on_host=on_host))


def _gradient_of_gradients(op: Any, *upstream: Any) -> list[Any]:
    # Each rank's loss depends on each rank's tensors with weight 1/size. So the gradient of the sum of all losses is
    # the mean of the gradients.
    floating = [i for i, output in enumerate(op.outputs) if output.dtype.is_floating]
    results: list[Any] = [None] * len(op.outputs)
    if floating:
        grads = [tf.zeros_like(op.outputs[i]) if upstream[i] is None else upstream[i] for i in floating]
        (team, towers, *_), name = settings_of(op)
        means = _gradients(grads, int(team), f"{name}/gradient", towers=int(towers))
        for i, mean in zip(floating, means, strict=True):
            results[i] = mean
    return results


tf.RegisterGradient("DlCommGradients")(_gradient_of_gradients)
tf.no_gradient("DlCommCoreId")


@functools.cache
def _has_gpus() -> bool:
    return bool(tf.config.list_physical_devices("GPU"))


def _may_return_early(team: int, owner: int) -> bool:
    """Whether later calls may return the mean of earlier calls, because the team has such a schedule."""
    return _has_gpus() and bool(_may_return_early_function()(team, owner))


@functools.cache
def _path() -> str:
    return load.ops_library("tensorflow")


def _core_id_of(path: str) -> int:
    function = ctypes.CDLL(path).dl_comm_ops_core_id
    function.restype = ctypes.c_size_t
    return int(function())


@functools.cache
def _may_return_early_function() -> Any:
    library()  # TensorFlow must load the library first: otherwise it finds no ops in it
    function = ctypes.CDLL(_path()).dl_comm_ops_may_return_early
    function.argtypes = (ctypes.c_int32, ctypes.c_uint64)
    function.restype = ctypes.c_bool
    return function


def listed(tensors: Iterable[Any]) -> list[Any]:
    """Convert to a list of tensors or variables. Raises DTypeError for another type, ArgumentError for [] and None."""
    if not isinstance(tensors, (list, tuple)) and (tf.is_tensor(tensors) or not isinstance(tensors, Iterable)):
        raise DTypeError(f"dl_comm takes a list of tensors, not {type(tensors).__name__}")
    values = list(tensors)
    if not values:
        raise ArgumentError("the list is empty; dl_comm needs at least one tensor")
    for i, value in enumerate(values):
        if value is None:
            raise ArgumentError(f"tensor {i} of {len(values)} is None: perhaps the loss does not depend on a variable")
    return values


def as_tensor(value: Any, dtypes: frozenset[tf.DType], verb: str) -> tf.Tensor:
    """Convert to a dense tensor. Raises DTypeError when its type is not one of `dtypes`."""
    tensor = value if isinstance(value, tf.Tensor) else _converted(value, verb)
    if tensor.dtype.base_dtype not in dtypes:
        raise _type_error(tensor.dtype, verb, value)
    return tensor


def _converted(value: Any, verb: str) -> tf.Tensor:
    refuse_masked(value, "a tensor")
    try:
        return tf.convert_to_tensor(value)
    except (TypeError, ValueError, OverflowError, AttributeError) as error:
        raise DTypeError(f"a {type(value).__name__} cannot be {verb}: {error}") from error


def _type_error(dtype: tf.DType, verb: str, value: Any) -> DTypeError:
    error: DTypeError = DTypeError(f"a tensor of {dtype.name} cannot be {verb}: {value!r}")
    return error


def order_of(values: Sequence[Any], eager: bool) -> tuple[list[int] | None, str]:
    """Return the order of a call's tensors, which is the same on all ranks, and their names as the core takes them.

    Variables are in the order of their names, which the ranks compare. Other tensors have no names that do not depend
    on the process, and are in the order of the list (None).
    """
    if values and all(map(_is_variable, values)):
        return _order_by_name(tuple(map(_label, values)))
    # Asking an eager tensor, which has no name, takes longer than a small call.
    return None, labels_of("" if eager and isinstance(value, tf.Tensor) else _label(value) for value in values)


@functools.lru_cache(256)
def _order_by_name(paths: tuple[str, ...]) -> tuple[list[int] | None, str]:
    keys = by_structure(paths)
    order = sorted(range(len(paths)), key=keys.__getitem__)
    text = labels_of(Name(paths[i], keys[i]) for i in order)
    return (None if order == list(range(len(order))) else order), text


def in_order(order: list[int] | None, tensors: Sequence[tf.Tensor], call: Callable[[list[Any]], Any]) -> list[Any]:
    """Return the results of a call with the tensors in the order `order`, in that of `tensors`."""
    if order is None:
        return list(call(list(tensors)))
    results: list[Any] = [None] * len(order)
    for i, result in zip(order, call([tensors[i] for i in order]), strict=True):
        results[i] = result
    return results


def variable_names(variables: Sequence[Any]) -> list[Name]:
    """Return the names of variables, with what the ranks compare: the path without numbers that Keras gives."""
    return _variable_names(tuple(map(_label, variables)))


@functools.lru_cache(256)
def _variable_names(paths: tuple[str, ...]) -> list[Name]:
    return [Name(path, key) for path, key in zip(paths, by_structure(paths), strict=True)]


def _order(variables: Sequence[Any], names: Sequence[Name], eager: bool) -> list[int]:
    if not eager:
        made = {id(variable): i for i, variable in enumerate(tf.compat.v1.global_variables())}
        if all(id(variable) in made for variable in variables):
            return sorted(range(len(variables)), key=lambda i: made[id(variables[i])])
    return sorted(range(len(variables)), key=lambda i: names[i].key)


def _is_variable(value: Any) -> bool:
    return not isinstance(value, tf.Tensor) and hasattr(value, "assign")


def _label(value: Any) -> str:
    for owner, attribute in ((value, "path"), (getattr(value, "op", None), "name"), (value, "name")):
        try:
            label = getattr(owner, attribute)
        except (AttributeError, ValueError):  # an eager tensor has no name
            continue
        if isinstance(label, str):
            return label
    return ""


def _scope() -> int:
    """An id of the current `tf.function`: equal lists of different functions must not get each other's means."""
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    name = getattr(graph, "name", "")
    return 2**32 + zlib.crc32(name.encode()) if name else 0


def call_name(base: str, channel: int | str) -> str:
    """Return the name of the next call: numbered in a graph, for each team or group (`channel`)."""
    if tf.executing_eagerly():
        return base
    with _counters_lock:
        counter = _counters.setdefault(tf.compat.v1.get_default_graph(), Counter())
        number = counter[base, channel]
        counter[base, channel] += 1
    return base if number == 0 else f"{base}:{number}"


def refuse_xla() -> None:
    """Raise StateError inside a function that XLA compiles."""
    check("tensorflow")
    # TensorFlow marks the graphs of XLA-compiled functions, and graphs inside them, with a control flow context.
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    while graph is not None:
        context = graph._get_control_flow_context()
        while context is not None:
            if context.IsXLAContext():
                raise StateError(
                    "dl_comm cannot run inside an XLA-compiled function: use tf.function(jit_compile=False), or in "
                    "Keras model.compile(..., jit_compile=False) or dl_comm.keras.BroadcastCallback, which disables XLA"
                )
            context = context.outer_context
        graph = getattr(graph, "outer_graph", None)
