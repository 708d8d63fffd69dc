"""The ops: loading them, calling them on lists of tensors, and their gradients.

What a call is named: all ranks must submit the same calls to a team, and the name lets the core see when they do not,
and line them up when their order differs. Types and shapes are compared anyway. An eager call is named after what it
does, always the same, since a number in an op attribute would make TensorFlow build a new kernel for every step. A call
in a graph also has its number among the like calls of that graph, because a TF1 session may run two of them in either
order. The numbers begin anew in every graph, so that a `tf.function` that only one rank traces again keeps its names.
In a loop the kernel adds the iteration, since a TF1 session may run several iterations at once, and the names of the
loops.

Thread rule: everything here may be called from any thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar, cast

import numpy as np
import tensorflow as tf

from dl_comm import _load
from dl_comm._buckets import bucket_bytes, split
from dl_comm._collectives import as_towers, in_towers
from dl_comm._cuda import preload
from dl_comm._errors import ArgumentError, DTypeError, StateError
from dl_comm._process import CONTROL_TEAM, checked_name, checked_root, checked_team, seconds

_AVERAGED = frozenset(
    (tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.int8, tf.uint8, tf.int32, tf.int64),
)
_BROADCAST = _AVERAGED | {tf.bool}
# Types that the core does not know are broadcast as their bytes.
_AS_BYTES = frozenset((tf.int16, tf.uint16, tf.uint32, tf.uint64, tf.complex64, tf.complex128))

# As torch's DistributedDataParallel has it.
BUCKET_BYTES = 25 << 20

_counters: weakref.WeakKeyDictionary[tf.Graph, Counter[tuple[str, int]]] = weakref.WeakKeyDictionary()
_counters_lock = threading.Lock()

_Function = TypeVar("_Function", bound=Callable[..., Any])


def no_autograph(function: _Function) -> _Function:
    """Keep AutoGraph, which rewrites the Python that a `tf.function` calls, away from a function that has no need."""
    return cast(_Function, tf.autograph.experimental.do_not_convert(function))


@functools.cache
def library() -> Any:
    """Load the op library of the installed TensorFlow, building it first if it must be.

    Raises ImportError when it cannot be built or has a core of its own.
    """
    path = _path()
    loaded = tf.load_op_library(path)
    _load.check_one_core(path, _core_id_of(path))
    if _has_gpus():
        preload()
    return loaded


def core_id() -> int:
    """Give the number of the core that the ops use; all of dl_comm in one process have the same."""
    library()
    return _core_id_of(_path())


@no_autograph
def gradients(
    tensors: Iterable[Any], team: int = 0, *, name: str | None = None, timeout: float | None = None
) -> list[Any]:
    """Average every tensor over all ranks, and over the towers when it is a list of such lists.

    Args:
        tensors: `tf.Tensor`, `tf.Variable`, `tf.IndexedSlices` (made dense) or what TensorFlow can make a tensor of:
            float16, bfloat16, float32, float64, int8, uint8, int32 or int64, any shape. All ranks give the same number,
            types and shapes. Means of integers round toward zero; float16 and bfloat16 are added up in float32.
        team: The thread team that does the work.
        name: What the ranks must agree on besides types and shapes; like calls of one graph are numbered. On a team
            with a schedule it tells lists of the same types and shapes apart.
        timeout: The longest that the op may take, in seconds (0 for no limit), instead of the team's.

    A `tf.function` runs its calls in the order of the program. A TF1 session does not: two calls of one team that do
    not depend on each other run in another order on every rank. The ranks line such calls up by what they are, which
    takes a message more; one list of all tensors is quicker.

    Returns:
        New dense tensors, in order, with the static shapes of the inputs; of towers, a list for each. Their gradient is
        the average of the gradients over the ranks; integers have none. On a team with a schedule
        (`dl_comm.config_team`): what the schedule says.

    Raises:
        dl_comm.ArgumentError: The list is empty or has a None in it, or the team is negative.
        dl_comm.DTypeError: Not a list, or an element type that has no mean.
        dl_comm.StateError: The call is inside an XLA-compiled function.
        tf.errors.OpError: When the op runs; see `dl_comm.tensorflow`.
    """
    checked_name(name)
    towers, given = as_towers(listed(tensors))
    means = _gradients(given, checked_team(team), name or "gradients", towers=towers or 1, timeout=seconds(timeout))
    return means if towers is None else in_towers(means, towers)


@no_autograph
def broadcast(
    tensors: Iterable[Any], root: int = 0, *, name: str | None = None, timeout: float | None = None
) -> list[tf.Tensor]:
    """Give the tensors of rank `root`, as new tensors, and assign them to those that are variables.

    In a TF1 graph nothing is assigned: the script assigns the results, as those of the Cray plugin do. Takes what
    `gradients` takes, and bool and every other number type as well. The op has no gradient.

    Returns:
        The tensors of the root, in order, with the static shapes of the inputs.

    Raises what `gradients` raises; then no variable has changed.
    """
    checked_name(name)
    given = listed(tensors)
    results = broadcast_new(given, root, name or "broadcast", timeout)
    if tf.compat.v1.executing_eagerly_outside_functions():
        for value, result in zip(given, results, strict=True):
            if hasattr(value, "assign"):  # TensorFlow's variables and Keras's
                value.assign(result)
    return results


@no_autograph
def broadcast_new(given: list[Any], root: int, name: str, timeout: float | None = None) -> list[tf.Tensor]:
    """Do what `broadcast` does, but assign nothing."""
    values = [_tensor(value, _BROADCAST | _AS_BYTES, "broadcast") for value in given]
    _refuse_xla()
    with _placement(on_host=False):
        results = library().dl_comm_broadcast(
            [tf.bitcast(value, tf.uint8) if value.dtype in _AS_BYTES else value for value in values],
            root=checked_root(root),
            timeout=seconds(timeout),
            call_name=_call_name(name, CONTROL_TEAM),
            labels=_labels(given),
        )
    return [
        tf.bitcast(result, value.dtype) if value.dtype in _AS_BYTES else result
        for result, value in zip(results, values, strict=True)
    ]


@no_autograph
def average(value: Any, *, name: str | None = None) -> tf.Tensor:
    """Average one tensor over all ranks, on the team of broadcasts: for metrics.

    Python numbers, and tensors and arrays of integers and bools, become float64, so that the mean of a count is not
    rounded. Raises as `gradients` does.
    """
    if isinstance(value, (bool, int, float)):
        value = np.float64(value)
    tensor = tf.convert_to_tensor(value)
    if tensor.dtype.is_integer or tensor.dtype.is_bool:
        tensor = tf.cast(tensor, tf.float64)
    return _gradients([tensor], CONTROL_TEAM, name or "average", labels=_labels([value]))[0]


@no_autograph
def average_non_none(
    grads: Sequence[Any], variables: Sequence[Any], team: int, owner: int, name: str = "DistributedOptimizer"
) -> list[Any]:
    """Average the gradients that are not None, for the optimizer `owner`, and keep each None in its place.

    All ranks must have None in the same places. `variables`, one for each gradient, name them in error messages.

    In a graph the gradients of the last variables, which backward has first, are averaged first, a bucket at a time,
    each as soon as it is there and the one before is done: backward and communication overlap. A bucket has as many MiB
    as `DL_COMM_BUCKET_MB` says when the graph is made, 25 by default; the first has 1 at most. Only the last one counts
    as waiting. Where buckets are cut changes no bit.
    """
    results = [None if grad is None else _tensor(grad, _AVERAGED, "averaged") for grad in grads]
    present = [i for i, grad in enumerate(results) if grad is not None]
    buckets = _buckets(results, present)
    before: list[Any] = []
    for number, bucket in enumerate(buckets):
        # A TF1 session would start them in another order on every rank.
        with tf.control_dependencies(before):
            means = _gradients(
                [results[i] for i in bucket],
                team,
                name,
                labels=_labels([grads[i] if variables[i] is None else variables[i] for i in bucket]),
                owner=owner,
                part=number > 0,
                timed=number == len(buckets) - 1,
            )
        before = means[:1]
        for i, mean in zip(bucket, means, strict=True):
            results[i] = mean
    return results


def _buckets(grads: Sequence[Any], present: list[int]) -> list[list[int]]:
    if tf.executing_eagerly():
        # All are there.
        return [present] if present else []
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
    tensors = [_tensor(value, _AVERAGED, "averaged") for value in given]
    _refuse_xla()
    owner = _scope() if owner is None else owner
    with _placement(on_host=towers > 1 or _may_return_early(team, owner)):
        return list(
            library().dl_comm_gradients(
                tensors,
                team=team,
                towers=towers,
                timeout=timeout,
                owner=owner,
                part=part,
                timed=timed,
                call_name=_call_name(base, team),
                labels=_labels(given[: len(given) // towers]) if labels is None else labels,
            )
        )


def _gradient_of_gradients(op: Any, *upstream: Any) -> list[Any]:
    # Every rank's loss depends on every rank's tensors with weight 1/size, so that the gradient of the sum of the
    # losses is the mean of the gradients.
    floating = [i for i, output in enumerate(op.outputs) if output.dtype.is_floating]
    results: list[Any] = [None] * len(op.outputs)
    if floating:
        grads = [tf.zeros_like(op.outputs[i]) if upstream[i] is None else upstream[i] for i in floating]
        name = f"{tf.compat.as_str(op.get_attr('call_name'))}/gradient"
        means = _gradients(grads, op.get_attr("team"), name, towers=op.get_attr("towers"))
        for i, mean in zip(floating, means, strict=True):
            results[i] = mean
    return results


tf.RegisterGradient("DlCommGradients")(_gradient_of_gradients)
tf.no_gradient("DlCommBroadcast")
tf.no_gradient("DlCommCoreId")


def _placement(on_host: bool) -> AbstractContextManager[Any]:
    """Give where an op belongs: wherever TensorFlow puts it, or in host memory, to which TensorFlow copies its tensors.

    `on_host`: The core takes such a call in host memory only. So it does all calls where the GPUs are not CUDA's.
    """
    if _has_gpus() and (on_host or not tf.test.is_built_with_cuda()):
        return cast(AbstractContextManager[Any], tf.device("CPU:0"))
    return contextlib.nullcontext()


@functools.cache
def _has_gpus() -> bool:
    return bool(tf.config.list_physical_devices("GPU"))


def _may_return_early(team: int, owner: int) -> bool:
    """Whether coming averages may return what calls before them have started: the team has such a schedule."""
    return _has_gpus() and bool(_may_return_early_function()(team, owner))


@functools.cache
def _path() -> str:
    return _load.ops_library("tensorflow")


def _core_id_of(path: str) -> int:
    function = ctypes.CDLL(path).dl_comm_ops_core_id
    function.restype = ctypes.c_size_t
    return int(function())


@functools.cache
def _may_return_early_function() -> Any:
    library()  # TensorFlow finds no ops in a library that it is not the first to load
    function = ctypes.CDLL(_path()).dl_comm_ops_may_return_early
    function.argtypes = (ctypes.c_int32, ctypes.c_uint64)
    function.restype = ctypes.c_bool
    return function


def listed(tensors: Iterable[Any]) -> list[Any]:
    """Give a list of tensors or variables. Raises DTypeError for another type, ArgumentError for none and None."""
    if tf.is_tensor(tensors) or not isinstance(tensors, Iterable):
        raise DTypeError(f"dl_comm takes a list of tensors, not {type(tensors).__name__}")
    values = list(tensors)
    if not values:
        raise ArgumentError("dl_comm needs at least one tensor, the list is empty")
    for i, value in enumerate(values):
        if value is None:
            raise ArgumentError(f"tensor {i} of {len(values)} is None: a variable that the loss does not depend on?")
    return values


def _tensor(value: Any, dtypes: frozenset[tf.DType], verb: str) -> tf.Tensor:
    tensor = tf.convert_to_tensor(value)
    if tensor.dtype.base_dtype not in dtypes:
        raise DTypeError(f"a tensor of {tensor.dtype.name} cannot be {verb}: {value!r}")
    return tensor


def _labels(values: Sequence[Any]) -> str:
    labels = [_label(value) for value in values]
    return "\n".join(labels) if any(labels) else ""


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
    """Tell the `tf.function`s apart in which a call may be: their equal lists are not to get each other's means."""
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    name = getattr(graph, "name", "")
    return 2**32 + zlib.crc32(name.encode()) if name else 0


def _call_name(base: str, team: int) -> str:
    if tf.executing_eagerly():
        return base
    with _counters_lock:
        counter = _counters.setdefault(tf.compat.v1.get_default_graph(), Counter())
        number = counter[base, team]
        counter[base, team] += 1
    return base if number == 0 else f"{base}:{number}"


def _refuse_xla() -> None:
    # TensorFlow marks the graphs of a function that XLA compiles, and those inside it, with a control flow context.
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    while graph is not None:
        context = graph._get_control_flow_context()
        while context is not None:
            if context.IsXLAContext():
                raise StateError(
                    "dl_comm cannot run inside a function that XLA compiles: use tf.function(jit_compile=False), "
                    "in Keras model.compile(..., jit_compile=False) or dl_comm.keras.BroadcastCallback, which sets it"
                )
            context = context.outer_context
        graph = getattr(graph, "outer_graph", None)
