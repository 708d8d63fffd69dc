"""Collectives on torch tensors and numbers, on all ranks or on a group; send and receive.

Names, arguments and meaning are those of the functions of `dl_comm` for NumPy arrays. Without `out` and `async_op` the
functions are differentiable, and `torch.compile` takes them.

Thread rule: any thread may call every function; they wait without the GIL. The ranks of the group must all call the
collective ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from dl_comm import ArgumentError, DTypeError, Group, Status, _groups
from dl_comm._process import checked_name, seconds
from dl_comm.torch import _autograd as _autograd
from dl_comm.torch import _ops
from dl_comm.torch._work import Work

_ANY = -1


class _Collective(NamedTuple):
    """The ops of a collective; see torch_ops/collectives.cc."""

    new: Callable[..., Any]
    no_grad: Callable[..., Any]
    out: Callable[..., Any]
    start: Callable[..., Any]


def _collective(name: str) -> _Collective:
    return _Collective(*(getattr(_ops.ops, name + suffix).default for suffix in ("", "_no_grad", "_out", "_start")))


_ALLREDUCE = _collective("allreduce")
_BROADCAST = _collective("broadcast")
_REDUCE = _collective("reduce")
_ALL_GATHER = _collective("all_gather")
_GATHER = _collective("gather")
_SCATTER = _collective("scatter")
_REDUCE_SCATTER = _collective("reduce_scatter")
_ALL_TO_ALL = _collective("all_to_all")
_SEND, _RECEIVE = _ops.ops.send_start.default, _ops.ops.recv_start.default


def allreduce(
    x: Any,
    op: str = "sum",
    *,
    group: Group | None = None,
    name: str | None = None,
    timeout: float | None = None,
    out: Any = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
    async_op: bool = False,
) -> Any:
    """Reduce tensors element by element over the ranks; every rank gets the result. Collective.

    Args:
        x: A tensor, a number, or a list of tensors, which is one call. Shapes and types are the same on all ranks.
        op: `"sum"`, `"mean"`, `"min"`, `"max"`, `"product"`, `"bit_and"`, `"bit_or"`, `"bit_xor"` or `"adasum"`.
            `docs/collectives.md` lists the element types of each; means of integers round toward zero.
        group: The ranks that take part; None: all.
        name: A name that must be the same on all ranks; error messages contain it.
        timeout: The deadline in seconds (0: no limit), instead of the group's.
        out: Contiguous tensors for the results, like `x`; `out=x` works in place. Not differentiable.
        prescale: A factor of every input of a sum of floating-point numbers.
        postscale: A factor of the sum.
        async_op: Return a `Work` at once. Until it has ended, nobody else may use the tensors. Not differentiable.

    Returns:
        `out`, or new contiguous tensors or a number of the type of `x`; with `async_op` a `Work` of it.

    Raises:
        ArgumentError: An argument is invalid; or `out` or `async_op` with tensors that require gradients.
        DTypeError: `x` is not a tensor or number, or `op` does not take its element type.
        MismatchError: The ranks issued different collectives. Nothing was written, and the next call works.
        TimeoutError: The ranks in the message missed the deadline; the group refuses further calls.
        PeerLostError: A rank of the group has ended; the group refuses further calls.
        StateError: `init` was not called, or `finalize` was.
    """
    arguments = (*_place(group), _operator(op), float(prescale), float(postscale), _name(name), seconds(timeout))
    return _run(_ALLREDUCE, x, out, async_op, arguments)


def reduce(
    x: Any,
    root: int = 0,
    op: str = "sum",
    *,
    group: Group | None = None,
    name: str | None = None,
    timeout: float | None = None,
    out: Any = None,
    async_op: bool = False,
) -> Any:
    """Reduce tensors over the ranks; rank `root` of the group gets the result. Collective.

    Arguments and errors are those of `allreduce` (without `"adasum"`); `out` is used on the root only.

    Returns:
        On the root as `allreduce`. On the other ranks None; if `x` requires gradients, an empty tensor, which carries
        the graph: add its sum to the loss, because backward is collective too.
    """
    arguments = (*_place(group), _operator(op), 1.0, 1.0, _rank(root), _name(name), seconds(timeout))
    return _run(_REDUCE, x, out, async_op, arguments, root)


def all_gather(
    x: Any,
    *,
    group: Group | None = None,
    name: str | None = None,
    timeout: float | None = None,
    out: Any = None,
    counts: Sequence[int] | None = None,
    ragged: bool = False,
    async_op: bool = False,
) -> Any:
    """Join the tensors of all ranks along the first axis, in the order of the ranks; every rank gets the result.

    Collective.

    Args:
        x: As for `allreduce`. A number or a tensor without axes counts as a tensor of one element.
        group: As for `allreduce`.
        name: As for `allreduce`.
        timeout: As for `allreduce`.
        out: As for `allreduce`.
        counts: The extents of the first axis of every rank's tensor, if they differ; the same on all ranks. One tensor.
        ragged: The extents differ, and the ranks exchange them first (not in a compiled graph).
        async_op: As for `allreduce`.

    Returns:
        `out` or new tensors, of which the first axis has the sum of the extents; with `async_op` a `Work` of it.
    """
    rows = _extents(x, counts, ragged, group, name)
    return _run(_ALL_GATHER, x, out, async_op, (*_place(group), rows, _name(name), seconds(timeout)), joins=True)


def gather(
    x: Any,
    root: int = 0,
    *,
    group: Group | None = None,
    name: str | None = None,
    timeout: float | None = None,
    out: Any = None,
    counts: Sequence[int] | None = None,
    ragged: bool = False,
    async_op: bool = False,
) -> Any:
    """As `all_gather`, but only rank `root` of the group gets the result; the others as in `reduce`. Collective."""
    rows = _extents(x, counts, ragged, group, name)
    arguments = (*_place(group), _rank(root), rows, _name(name), seconds(timeout))
    return _run(_GATHER, x, out, async_op, arguments, root, joins=True)


def scatter(
    x: Any,
    root: int = 0,
    *,
    out: Any = None,
    group: Group | None = None,
    name: str | None = None,
    timeout: float | None = None,
    counts: Sequence[int] | None = None,
    async_op: bool = False,
) -> Any:
    """Cut the tensors of rank `root` along the first axis into a block for each rank. Collective.

    Args:
        x: On the root as for `allreduce`. With `out` the other ranks pass None; without it, tensors of the root's
            shapes and types, of which the values are not used (`torch.empty(1).expand(shape)` needs no memory). If the
            root's require gradients, those of all ranks must.
        root: The rank of the group that has the tensors.
        out: The tensors for this rank's blocks.
        group: As for `allreduce`.
        name: As for `allreduce`.
        timeout: As for `allreduce`.
        counts: The extents of the blocks' first axes, if they differ; the same on all ranks. One tensor.
        async_op: As for `allreduce`.

    Returns:
        `out`, or new tensors; with `async_op` a `Work` of it.
    """
    arguments = (*_place(group), _rank(root), _counts(counts), _name(name), seconds(timeout))
    if x is None:
        if out is None:
            raise ArgumentError("scatter needs out, or tensors of the root's shapes on all ranks")
        x = []
    return _run(_SCATTER, x, out, async_op, arguments)


def reduce_scatter(
    x: Any,
    op: str = "sum",
    *,
    group: Group | None = None,
    name: str | None = None,
    timeout: float | None = None,
    out: Any = None,
    counts: Sequence[int] | None = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
    async_op: bool = False,
) -> Any:
    """Reduce tensors over the ranks and cut the result along the first axis into a block for each rank. Collective.

    Args:
        x: As for `allreduce`, without numbers. The first axis is a multiple of the number of ranks, unless `counts` is
            given.
        op: As for `allreduce`, without `"adasum"`.
        group: As for `allreduce`.
        name: As for `allreduce`.
        timeout: As for `allreduce`.
        out: As for `allreduce`.
        counts: The extents of the blocks' first axes, if they differ; the same on all ranks. One tensor.
        prescale: As for `allreduce`.
        postscale: As for `allreduce`.
        async_op: As for `allreduce`.

    Returns:
        `out` or new tensors with this rank's blocks; with `async_op` a `Work` of it.
    """
    factors = (float(prescale), float(postscale))
    arguments = (*_place(group), _operator(op), *factors, _counts(counts), _name(name), seconds(timeout))
    return _run(_REDUCE_SCATTER, x, out, async_op, arguments)


def all_to_all(
    x: Any,
    *,
    group: Group | None = None,
    name: str | None = None,
    timeout: float | None = None,
    out: Any = None,
    send_counts: Sequence[int] | None = None,
    receive_counts: Sequence[int] | None = None,
    async_op: bool = False,
) -> Any:
    """Send block r of every tensor, along the first axis, to rank r; the result has a block from each rank. Collective.

    Args:
        x: As for `allreduce`, without numbers. The first axis is a multiple of the number of ranks, unless
            `send_counts` is given.
        group: As for `allreduce`.
        name: As for `allreduce`.
        timeout: As for `allreduce`.
        out: As for `allreduce`.
        send_counts: The extents of the first axes of the blocks that this rank sends, if they differ. One tensor.
        receive_counts: The same of those that it receives; None with `send_counts`: the ranks exchange them first (not
            in a compiled graph). All ranks give it, or none does.
        async_op: As for `allreduce`.

    Returns:
        `out` or new tensors; with `async_op` a `Work` of it.
    """
    sent, received = _counts(send_counts), _counts(receive_counts)
    if send_counts is not None and receive_counts is None:
        exchanged = all_to_all(torch.tensor(sent), group=group, name=f"{name or 'all_to_all'}: counts", timeout=timeout)
        received = exchanged.tolist()
    arguments = (*_place(group), sent, received, _name(name), seconds(timeout))
    return _run(_ALL_TO_ALL, x, out, async_op, arguments)


def broadcast_new(tensors: list[torch.Tensor], root: int, group: Group | None, timeout: float | None) -> Any:
    """Return rank `root`'s tensors as new tensors; differentiable."""
    return list(_ops.call(_BROADCAST.new, tensors, *_place(group), _rank(root), "", seconds(timeout)))


def broadcast_into(
    tensors: list[torch.Tensor], root: int, group: Group | None, timeout: float | None, async_op: bool, result: Any
) -> Any:
    """Copy rank `root`'s contiguous tensors to all ranks of the group, in place; return `result`, or a `Work` of it."""
    arguments = (*_place(group), _rank(root), "", seconds(timeout))
    if async_op:
        number = _ops.call(_BROADCAST.start, tensors, tensors, *arguments)[1]
        torch.autograd.graph.increment_version(tensors)
        return Work(number, lambda _: result)
    _ops.call(_BROADCAST.out, tensors, tensors, *arguments)
    torch.autograd.graph.increment_version(tensors)
    return result


def send(
    x: Any,
    dest: int,
    tag: int = 0,
    *,
    group: Group | None = None,
    name: str | None = None,
    timeout: float | None = None,
    async_op: bool = False,
) -> Any:
    """Send tensors in host memory to rank `dest` of the group. Not differentiable.

    Args:
        x: A tensor or a list of tensors, which are one message.
        dest: The receiver.
        tag: A number from 0 that the receiver may ask for.
        group: As for `allreduce`.
        name: Stands in error messages of this rank.
        timeout: As for `allreduce`. A message that misses its deadline does not end the group.
        async_op: Return a `Work` at once.

    Short messages do not wait for the receiver; longer ones until it has them.
    """
    tensors, _ = _tensors(x)
    _refuse_gradients(tensors, "send")
    arguments = (_place(group)[0], _rank(dest, "dest"), _tag(tag), _name(name), seconds(timeout))
    work: Work[None] = Work(_ops.call(_SEND, tensors, *arguments), lambda _: None)
    return work if async_op else work.wait()


def recv(
    out: Any,
    source: int | None = None,
    tag: int | None = None,
    *,
    group: Group | None = None,
    name: str | None = None,
    timeout: float | None = None,
    async_op: bool = False,
) -> Any:
    """Receive a message into tensors in host memory.

    Args:
        out: A contiguous tensor or a list of them. A shorter message leaves the rest as it is; a longer one is an
            error.
        source: The sender; None: any rank of the group.
        tag: The tag of the message; None: any.
        group: As for `allreduce`.
        name: Stands in error messages of this rank.
        timeout: As for `allreduce`. A receive that misses its deadline does not end the group.
        async_op: Return a `Work` of the status at once.

    Returns:
        A `Status`: source, tag and length in bytes.
    """
    tensors, _ = _tensors(out, "out")
    _refuse_gradients(tensors, "recv")
    peer = _ANY if source is None else _rank(source, "source")
    arguments = (_place(group)[0], peer, _ANY if tag is None else _tag(tag), _name(name), seconds(timeout))
    work = Work(_ops.call(_RECEIVE, tensors, *arguments), lambda handle: Status(*handle.status()))
    torch.autograd.graph.increment_version(tensors)
    return work if async_op else work.wait()


def sendrecv(
    x: Any,
    dest: int,
    out: Any,
    source: int | None = None,
    *,
    send_tag: int = 0,
    recv_tag: int | None = None,
    group: Group | None = None,
    name: str | None = None,
    timeout: float | None = None,
) -> Status:
    """Send `x` to rank `dest` and receive into `out` at the same time; see `send` and `recv`."""
    received = recv(out, source, recv_tag, group=group, name=name, timeout=timeout, async_op=True)
    send(x, dest, send_tag, group=group, name=name, timeout=timeout)
    status: Status = received.wait()
    return status


def _run(
    ops: _Collective,
    x: Any,
    out: Any,
    async_op: bool,
    arguments: tuple[Any, ...],
    root: int | None = None,
    joins: bool = False,
) -> Any:
    """Run or start a call. With `root`, only that rank has a result. `joins`: a number gives a tensor."""
    tensors, wrap = _tensors(x)
    if joins and wrap is _item:
        wrap = _first
    if root is not None and arguments[1] != root:
        out = None
        if not _learns(tensors):
            wrap = _nothing
    if out is None and not async_op:
        op = ops.new if _learns(tensors) or torch.compiler.is_compiling() else ops.no_grad
        return wrap(_ops.call(op, tensors, *arguments))
    given = [] if out is None else tensors if out is x else _tensors(out, "out")[0]
    _refuse_gradients(tensors, "a call with out or async_op")
    if given is not tensors:
        _refuse_gradients(given, "a call with out")
    if async_op:
        results, number = _ops.call(ops.start, tensors, given, *arguments)
        if out is not None:
            torch.autograd.graph.increment_version(given)
            return Work(number, lambda _: out)
        return Work(number, lambda _: wrap(results))
    _ops.call(ops.out, tensors, given, *arguments)
    torch.autograd.graph.increment_version(given)
    return out


def _tensors(x: Any, argument: str = "x") -> tuple[list[torch.Tensor], Callable[[Any], Any]]:
    """Return the tensors of an argument, and what makes a result of the same kind from tensors."""
    if isinstance(x, torch.Tensor):
        return [x], _first
    if isinstance(x, (list, tuple)):
        for index, tensor in enumerate(x):
            if not isinstance(tensor, torch.Tensor):
                raise DTypeError(f"entry {index} of {argument} is a {type(tensor).__name__}, not a tensor")
        return list(x), list
    if isinstance(x, (bool, int, float, complex, np.generic)) and argument == "x":
        number = x.item() if isinstance(x, np.generic) else x
        for kind, dtype in _NUMBERS.items():
            if isinstance(number, kind):
                return [torch.tensor(number, dtype=dtype)], _item
    raise DTypeError(
        f"{argument} is a {type(x).__name__}; give a tensor, a list of them{', or a number' * (argument == 'x')}"
    )


_NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}


def _first(tensors: Any) -> Any:
    return tensors[0]


def _item(tensors: Any) -> Any:
    return tensors[0].item()


def _nothing(tensors: Any) -> None:
    return None


def _learns(tensors: list[torch.Tensor]) -> bool:
    for tensor in tensors:
        if tensor.requires_grad:
            return torch.is_grad_enabled()
    return False


def _refuse_gradients(tensors: list[torch.Tensor], what: str) -> None:
    if _learns(tensors):
        raise ArgumentError(f"{what} is not differentiable, and a tensor requires gradients: .detach() it")


def _place(group: Group | None) -> tuple[int, int, int]:
    """Return the number of a group, this process's rank there, and the number of its ranks."""
    if group is None:
        group = _groups._world
        if group is None:
            if torch.compiler.is_compiling():
                return 0, *_ops.group(0)
            group = _groups.world()
        return 0, group.rank, group.size
    if not isinstance(group, Group):
        raise ArgumentError(f"invalid group: {group!r} (expected a dl_comm.Group, or None for all ranks)")
    return group.number, group.rank, group.size


def _name(name: str | None) -> str:
    if name is None:
        return ""
    checked_name(name)
    return name


def _operator(op: Any) -> str:
    if not isinstance(op, str):
        raise ArgumentError(f"invalid op: {op!r} (expected a string, such as 'sum')")
    return op


def _rank(rank: Any, argument: str = "root") -> int:
    if isinstance(rank, bool) or not isinstance(rank, (int, np.integer)) or rank < 0:
        raise ArgumentError(f"invalid {argument}: {rank!r} (expected a rank of the group)")
    return int(rank)


def _tag(tag: Any) -> int:
    if isinstance(tag, bool) or not isinstance(tag, (int, np.integer)) or not 0 <= tag < 2**31:
        raise ArgumentError(f"invalid tag: {tag!r} (expected an integer from 0 to {2**31 - 1})")
    return int(tag)


def _counts(counts: Sequence[int] | None) -> list[int]:
    if counts is None:
        return []
    listed = [int(count) for count in counts]
    if not listed:
        raise ArgumentError("invalid counts: [] (expected extents, one for each rank)")
    return listed


def _extents(x: Any, counts: Sequence[int] | None, ragged: bool, group: Group | None, name: str | None) -> list[int]:
    """Return the extents of all ranks' tensors, if they differ."""
    if counts is not None or not ragged:
        return _counts(counts)
    tensors, _ = _tensors(x)
    if len(tensors) != 1:
        raise ArgumentError(f"blocks of different lengths need one tensor, not {len(tensors)}")
    extent = tensors[0].shape[0] if tensors[0].dim() else 1
    found: list[int] = all_gather(torch.tensor([extent]), group=group, name=f"{name or 'gather'}: extents").tolist()
    return found
