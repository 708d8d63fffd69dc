"""The program of test_fuzz_bindings.py: ``python fuzz_bindings.py numpy|torch|tensorflow EXAMPLES``, on one rank.

Hypothesis generates the arguments, equal in every run.
"""

from __future__ import annotations

import faulthandler
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dl_comm as mc

# Documented errors: CommError and its subclasses; for paths also Python's errors, and those of reading a file.
PATHS = (mc.timeline.start, mc.dump, mc.rank0_path, mc.rank_path, mc.read_on_rank0)
OF_PATHS = (mc.CommError, TypeError, ValueError, OSError)

DTYPES = (
    "float16 float32 float64 int8 uint8 int16 int32 int64 uint32 uint64 bool complex64 object S3 U2 M8[s] V4 >f4 >i8"
)

numbers = st.one_of(
    st.integers(-3, 5),
    st.sampled_from([2**31 - 1, 2**31, -(2**31) - 1, 2**63, 2**64, -(2**200), 63, 64, 256, 257]),
    st.floats(),
    st.booleans(),
    st.none(),
    st.complex_numbers(),
    st.just(np.float32(1)),
    st.just(np.int64(1)),
)
texts = st.one_of(st.none(), st.text(max_size=8), st.sampled_from(["", "a\0b", "\ud800", "é" * 300, "x" * 5000]))
anything = st.recursive(
    st.one_of(numbers, texts, st.binary(max_size=4), st.just(object()), st.just(print)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=2), inner, max_size=2)),
    max_leaves=4,
)
timeouts = st.one_of(st.none(), numbers, texts)


@st.composite
def arrays(draw: st.DrawFn) -> Any:
    """A NumPy array of any type and layout."""
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    dtype = np.dtype(draw(st.sampled_from(DTYPES.split())))
    array = np.zeros(shape, dtype)
    kind = draw(
        st.sampled_from(["plain", "plain", "fortran", "step", "read-only", "misaligned", "broadcast", "masked"])
    )
    if kind == "fortran":
        return np.asfortranarray(array)
    if kind == "step":
        return np.zeros([*shape, 4], dtype)[..., ::-2]
    if kind == "read-only":
        array.setflags(write=False)
    if kind == "misaligned" and not dtype.hasobject:
        return np.zeros(array.nbytes + 1, np.uint8)[1:].view(dtype) if array.nbytes else array
    if kind == "broadcast":
        return np.broadcast_to(array, [2, *array.shape])
    if kind == "masked":
        return np.ma.masked_array(array)
    return array


def torch_tensors() -> st.SearchStrategy[Any]:
    """Tensors of torch of any type, layout and available device."""
    import torch

    dtypes = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.int16, torch.int64]
    dtypes += [torch.bool, torch.complex64, torch.float8_e4m3fn]

    @st.composite
    def tensors(draw: st.DrawFn) -> Any:
        shape = draw(st.lists(st.integers(0, 4), max_size=3))
        tensor = torch.zeros(shape, dtype=draw(st.sampled_from(dtypes)))
        kind = draw(st.sampled_from(["plain", "plain", "transposed", "step", "expanded", "sparse", "meta", "grad"]))
        if kind == "transposed":
            return tensor.T if tensor.dim() == 2 else tensor
        if kind == "step":
            return torch.zeros([*shape, 4], dtype=tensor.dtype)[..., ::2]
        if kind == "expanded":
            return tensor.expand(2, *shape)
        if kind == "sparse" and tensor.dtype == torch.float32:
            return tensor.to_sparse()
        if kind == "meta":
            return tensor.to("meta")
        return tensor.requires_grad_() if kind == "grad" and tensor.is_floating_point() else tensor

    return tensors()


def tensorflow_tensors() -> st.SearchStrategy[Any]:
    """Tensors and variables of TensorFlow of many types."""
    import tensorflow as tf

    dtypes = [tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.int8, tf.int64, tf.bool, tf.complex64, tf.string]

    @st.composite
    def tensors(draw: st.DrawFn) -> Any:
        shape, dtype = draw(st.lists(st.integers(0, 4), max_size=3)), draw(st.sampled_from(dtypes))
        tensor = tf.fill(shape, "a") if dtype == tf.string else tf.zeros(shape, dtype)
        kind = draw(st.sampled_from(["plain", "plain", "variable", "slices", "ragged", "symbolic"]))
        if kind == "variable":
            return tf.Variable(tensor)
        if kind == "slices" and shape and dtype == tf.float32:
            return tf.IndexedSlices(tensor, tf.zeros(shape[0], tf.int32), tf.constant([5, *shape[1:]]))
        if kind == "ragged":
            return tf.ragged.constant([[1.0], [2.0, 3.0]])
        return tf.TensorSpec(shape, dtype) if kind == "symbolic" else tensor

    return tensors()


def lists_of(tensors: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Arguments in place of a list: lists, towers, lists with an array twice, and invalid values."""
    flat = st.lists(st.one_of(tensors, tensors, tensors, anything), max_size=3)
    twice = tensors.map(lambda tensor: [tensor, tensor])
    return st.one_of(
        st.lists(tensors, min_size=1, max_size=3), flat, st.lists(flat, max_size=2), twice, tensors, anything
    )


def functions(
    tensors: st.SearchStrategy[Any],
) -> dict[Callable[..., Any], st.SearchStrategy[tuple[Any, dict[str, Any]]]]:
    """Every function of the package, except those on files or the whole process, with its arguments."""
    lists = lists_of(tensors)

    def of(*arguments: st.SearchStrategy[Any], **options: st.SearchStrategy[Any]) -> Any:
        return st.tuples(st.tuples(*arguments), st.fixed_dictionaries({}, optional=options))

    # Teams 0 to 2, and invalid numbers; every further valid number would create a team with threads.
    team = st.one_of(st.integers(-3, 2), st.sampled_from([64, 2**31, 2**70, None, "0", 1.0, float("nan"), True]))
    return {
        mc.gradients: of(lists, team=team, name=texts, timeout=timeouts),
        mc.broadcast: of(lists, root=st.one_of(st.integers(-2, 2), anything), timeout=timeouts),
        mc.average: of(st.one_of(tensors, anything)),
        mc.average_metrics: of(st.one_of(st.dictionaries(texts, st.one_of(numbers, tensors), max_size=3), anything)),
        mc.check_buffers_match: of(lists, verbose=st.one_of(st.integers(0, 1), anything)),
        mc.barrier: of(timeout=timeouts),
        mc.set_timeout: of(timeouts, team=st.one_of(team, st.none())),
        mc.get_waited: of(team=team),
        mc.create_team: of(team, nthreads=st.one_of(st.integers(-1, 2), st.just(2**40), texts), prec_level=numbers),
        mc.config_team: of(
            team, numbers, numbers, numbers, verbosity=st.integers(-1, 0), perf_freq=numbers, cooldown=texts
        ),
        mc.init: of(nthread_per_team=st.one_of(st.integers(-1, 2), texts), nteams=st.one_of(st.integers(-1, 2), texts)),
        mc.timeline.start: of(
            st.one_of(
                texts.map(lambda text: f"/dev/null/x{text}"), anything.filter(lambda x: not isinstance(x, (str, bytes)))
            )
        ),
        mc.dump: of(st.one_of(texts.map(lambda text: f"/dev/null/x{text}"), st.integers(), st.floats())),
        mc.rank0_path: of(anything),
        mc.rank_path: of(anything),
        mc.read_on_rank0: of(st.one_of(texts.map(lambda text: f"/dev/null/x{text}"), st.none())),
    }


def collectives(
    tensors: st.SearchStrategy[Any], framework: str
) -> dict[Callable[..., Any], st.SearchStrategy[tuple[Any, dict[str, Any]]]]:
    """Every collective on a group, and the messages, with its arguments."""
    value = st.one_of(tensors, tensors, lists_of(tensors))
    calls: dict[Callable[..., Any], st.SearchStrategy[tuple[Any, dict[str, Any]]]] = {}

    def add(function: Callable[..., Any], *required: st.SearchStrategy[Any], **own: st.SearchStrategy[Any]) -> None:
        # One argument or two are invalid at a time: of several the first ends the call.
        options = {"group": groups, "name": texts, "timeout": timeouts, **own}
        if framework != "tensorflow":
            options.setdefault("async_op", st.booleans())
        few = st.dictionaries(st.sampled_from(sorted(options)), st.none(), max_size=2).flatmap(
            lambda chosen: st.fixed_dictionaries({name: options[name] for name in chosen})
        )
        calls[function] = st.tuples(st.tuples(*required), few)

    groups = st.one_of(st.none(), st.builds(mc.Group), anything)
    operators = st.one_of(st.sampled_from(["sum", "mean", "max", "bit_and", "adasum"]), anything)
    counts = st.one_of(st.lists(st.integers(-1, 4), max_size=2), anything)
    roots, factors = st.one_of(st.just(0), anything), st.one_of(st.just(2.0), anything)
    out = {} if framework == "tensorflow" else {"out": st.one_of(value, anything)}
    scaled = {"prescale": factors, "postscale": factors}
    add(mc.allreduce, value, op=operators, **scaled, **out)
    add(mc.reduce, value, op=operators, root=roots, **out)
    add(mc.all_gather, value, counts=counts, ragged=st.booleans(), **out)
    add(mc.gather, value, counts=counts, ragged=st.booleans(), root=roots, **out)
    if framework == "tensorflow":
        import dl_comm.tensorflow

        add(dl_comm.tensorflow.scatter, value, counts=counts, root=roots)
    else:
        calls[mc.scatter] = st.tuples(
            st.tuples(value, roots),
            st.fixed_dictionaries({"out": out["out"]}, optional={"counts": counts, "name": texts, "group": groups}),
        )
    add(mc.reduce_scatter, value, op=operators, counts=counts, **scaled, **out)
    add(mc.all_to_all, value, send_counts=counts, receive_counts=counts, **out)
    add(mc.broadcast, value, root=roots)
    if framework != "tensorflow":
        short = {"timeout": st.one_of(st.just(0.01), timeouts.filter(_is_no_limit)), "async_op": st.just(True)}
        add(mc.send, value, roots, **short)
        add(mc.recv, value, roots, **short)
        calls |= servers(value, tensors, framework)
    for listed in [calls.pop(mc.broadcast)]:
        calls[mc.broadcast] = listed.map(lambda call: (call[0], {k: v for k, v in call[1].items() if k != "name"}))
    return calls


def servers(
    value: st.SearchStrategy[Any], tensors: st.SearchStrategy[Any], framework: str
) -> dict[Callable[..., Any], st.SearchStrategy[tuple[Any, dict[str, Any]]]]:
    """A parameter server, and its operations."""
    like: list[Any] = [np.zeros((2, 3), np.float32), np.zeros(4)]
    if framework == "torch":
        import torch

        like = [torch.from_numpy(each) for each in like]
    kept = mc.ParameterServer(like)
    several = st.one_of(st.just(like), value)
    options = {"tensor": st.one_of(st.integers(-1, 2), anything), "async_op": st.booleans(), "timeout": timeouts}
    rules = st.one_of(st.sampled_from(["add", "copy", "zero"]), anything)
    factors = st.one_of(st.none(), numbers)

    def of(*arguments: st.SearchStrategy[Any], **optional: st.SearchStrategy[Any]) -> Any:
        return st.tuples(st.tuples(*arguments), st.fixed_dictionaries({}, optional=optional))

    def a_server(tensors: Any, **options: Any) -> None:
        with mc.ParameterServer(tensors, **options) as made:
            made.send(made.receive())

    return {
        a_server: of(several, group=st.one_of(st.none(), anything), rules=anything, timeout=timeouts),
        kept.send: of(several, rules, scale=factors, **options),
        kept.receive: of(st.one_of(st.none(), several), **options),
        kept.shard: of(anything, rank=anything),
        kept.integrate: of(st.just(lambda fetched, own: None), tensors=st.one_of(st.none(), several)),
    }


def _is_no_limit(timeout: Any) -> bool:
    """Whether a message with this deadline may wait for ever; a message to itself that nobody receives would."""
    return not isinstance(timeout, (int, float, np.number)) or not timeout >= 0


def others() -> dict[Callable[..., Any], st.SearchStrategy[tuple[Any, dict[str, Any]]]]:
    """What takes no tensors."""
    mixed = st.one_of(numbers, anything)

    def of(*arguments: st.SearchStrategy[Any], **options: st.SearchStrategy[Any]) -> Any:
        return st.tuples(st.tuples(*arguments), st.fixed_dictionaries({}, optional=options))

    training = mc.training
    return {
        mc.Group: of(
            ranks=st.one_of(st.just([0]), st.lists(anything, max_size=2), anything),
            name=mixed,
            threads=st.one_of(st.integers(-1, 2), anything.filter(lambda x: not isinstance(x, int))),
            timeout=timeouts,
            algorithm=st.one_of(st.just("ring"), anything),
            gpu_path=mixed,
        ),
        mc.split: of(mixed, key=mixed, group=mixed, name=mixed),
        mc.barrier: of(timeout=timeouts, group=mixed),
        mc.StatsWriter: of(mixed, prefix=mixed),
        waited: of(mixed),
        mc.average_metrics: of(st.just({"a": 1.0}), weight=mixed),
        mc.any_rank: of(mixed, group=mixed),
        mc.check_replicas: of(mixed, anything, group=mixed),
        mc.set_random_states: of(mixed, group=mixed),
        mc.get_logger: of(mixed, ranks=mixed),
        mc.broadcast_object: of(anything, root=mixed, group=mixed),
        mc.gather_object: of(anything, root=mixed, group=mixed),
        mc.all_gather_object: of(anything, group=mixed),
        mc.shared_zeros: of(st.one_of(st.just(3), anything), dtype=st.one_of(st.just("f4"), anything)),
        mc.join: of(group=mixed, timeout=st.one_of(st.just(5), mixed)),
        training.max_steps: of(mixed, mixed, mixed, nranks=mixed),
        training.steps_per_epoch: of(mixed, mixed, nranks=mixed),
        training.epoch_of: of(mixed, mixed, mixed, nranks=mixed),
        training.shard: of(mixed, rank=mixed, nranks=mixed, even=mixed),
        training.seed_rank: of(mixed, rank=mixed),
        training.scaled_lr: of(mixed, nranks=mixed, rule=mixed),
        training.Constant: of(mixed),
        training.Cosine: of(mixed, mixed, end=mixed),
        training.Polynomial: of(mixed, mixed, end=mixed, power=mixed),
        training.Exponential: of(mixed, mixed, mixed),
        training.Piecewise: of(mixed, mixed),
        training.WarmUp: of(mixed, st.one_of(st.just(training.Constant(0.1)), mixed), start=mixed),
    }


def waited(timeout: Any) -> None:
    """Waits for a started call."""
    mc.allreduce(np.ones(2), async_op=True).wait(timeout)


def attempt(function: Callable[..., Any], arguments: st.SearchStrategy[Any], examples: int) -> None:
    """Calls ``function`` with ``examples`` generated arguments."""
    documented = OF_PATHS if function in PATHS else mc.CommError

    @settings(
        max_examples=examples, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck)
    )
    @given(arguments)
    def one(call: tuple[Any, dict[str, Any]]) -> None:
        given_arguments, options = call
        outcome = ""
        try:
            function(*given_arguments, **options)
        except documented as error:
            outcome = str(error)
        assert "internal error, please report" not in outcome

    one()


def main(binding: str, examples: int) -> None:
    """Calls every function with many arguments, and checks after each that dl_comm still works."""
    faulthandler.dump_traceback_later(90, exit=True)
    mc.init(1, 3)
    tensors = {"numpy": arrays, "torch": torch_tensors, "tensorflow": tensorflow_tensors}[binding]()
    calls = [*functions(tensors).items(), *collectives(tensors, binding).items()]
    if binding == "numpy":
        calls += others().items()
    for function, arguments in calls:
        attempt(function, arguments, examples)
        values = np.arange(5, dtype=np.float32)
        mc.broadcast([values])
        assert mc.average(3.0) == 3.0, function
        assert np.array_equal(mc.average(values.copy()), values), function
        print(function.__name__, "done", flush=True)
    print("every call came back")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
