"""The table of collectives and messages: what each takes and gives, its code, its types, its documentation.

A binding says how to run a call, and `made` makes its public function with the arguments, defaults and text of the
table, so they are the same in every binding. An option of all collectives is one entry of ``OPTIONS``, its name in
``COMMON``, and for type checkers one entry of `array_types.Common`.

Needs neither the core nor a framework. Thread rule: any thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, overload

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from dl_comm._arrays.work import Status, Work
    from dl_comm._base.array_types import (
        Arrays,
        Common,
        Copied,
        Exchanged,
        Named,
        Operator,
        Ragged,
        Scaled,
        ScaledBlocks,
        Scattered,
        Values,
    )

OPERATORS = {
    "sum": 0,
    "mean": 1,
    "min": 2,
    "max": 3,
    "product": 4,
    "bit_and": 5,
    "bit_or": 6,
    "bit_xor": 7,
    "adasum": 9,
}
"""The operators of the reductions, with their codes in dl_comm.h."""
SCALED = {"sum": 8, "mean": 10, "min": 11, "max": 12, "product": 13}
"""The codes of the operators that take factors, with factors."""


class Option(NamedTuple):
    """An argument of a call."""

    annotation: str
    default: str
    """As Python text; empty: it must be given."""
    text: str


_GIVEN = Option("Any", "", "")
OPTIONS = {
    "x": _GIVEN,
    "tensors": _GIVEN,
    "op": Option(
        "Operator",
        "'sum'",
        "``'sum'``, ``'mean'``, ``'min'``, ``'max'``, ``'product'``, ``'bit_and'``, ``'bit_or'``, ``'bit_xor'`` or "
        "``'adasum'`` (allreduce only). `docs/collectives.md` lists the element types of each; means of integers round "
        "toward zero.",
    ),
    "root": Option("int", "0", "The rank of the group that has the values."),
    "dest": Option("int", "", "The receiver, a rank of the group."),
    "source": Option("int | None", "None", "The sender, a rank of the group; None: any."),
    "tag": Option("int | None", "None", "The tag of the message; None: any."),
    "send_tag": Option("int", "0", "The tag of the message that is sent, a number from 0."),
    "recv_tag": Option("int | None", "None", "The tag of the message that is received; None: any."),
    "group": Option("Group | None", "None", "The ranks that take part; None: all."),
    "name": Option("str | None", "None", "A name that must be the same on all ranks; error messages contain it."),
    "timeout": Option("float | None", "None", "The deadline in seconds (0: no limit), instead of the group's."),
    "by_name": Option(
        "bool",
        "False",
        "Match the call of this name, wherever the ranks make it and whatever else they wait for; calls of one name "
        "keep their order. All ranks give it, or none. If the calls of a name differ, or a rank lacks one at the "
        "deadline, this call fails and no other.",
    ),
    "out": Option("Any", "None", "Contiguous arrays for the results, of their shapes and the types of ``x``."),
    "prescale": Option(
        "float",
        "1.0",
        "A factor of every input of a sum, mean, minimum, maximum or product. Integers are multiplied in float64 and "
        "rounded toward zero.",
    ),
    "postscale": Option("float", "1.0", "The same of the result."),
    "counts": Option(
        "Sequence[Any] | None",
        "None",
        "The extents of the first axis of each rank's block, if they differ; the same on all ranks. Of a list of "
        "arrays, a list for each.",
    ),
    "ragged": Option(
        "bool", "False", "The extents of the first axis differ between the ranks, and travel inside the call."
    ),
    "return_counts": Option(
        "bool",
        "False",
        "Return a tuple of the result and the extents of the first axes of its blocks, in the order of the ranks: a "
        "list, or one for each array of a list.",
    ),
    "send_counts": Option(
        "Sequence[Any] | None",
        "None",
        "The extents of the first axes of the blocks that this rank sends, if they differ. Of a list of arrays, a list "
        "for each.",
    ),
    "receive_counts": Option(
        "Sequence[Any] | None",
        "None",
        "The same of those that it receives; None with ``send_counts``: they travel inside the call. All ranks give "
        "it, or none does.",
    ),
    "in_place": Option("bool", "True", "Write the values into the arrays; False: return new ones."),
    "async_op": Option(
        "bool", "False", "Return a ``Work`` at once. Until it has ended, nobody else may use the arrays."
    ),
}
COMMON = ("group", "name", "timeout", "out", "async_op", "by_name")
"""What all calls take, but for ``out``: that is of those with results."""
_MOVING = ("group", "name", "timeout", "out")


_ERRORS = {
    "ArgumentError": "An argument is invalid, or an array is not contiguous.",
    "DTypeError": "``x`` is no array, tensor or number, or the call does not take its element type.",
    "MismatchError": "The ranks issued different collectives. Nothing was written, and the next call works.",
    "TimeoutError": "The ranks in the message missed the deadline; the group refuses further calls.",
    "PeerLostError": "A rank of the group has ended; the group refuses further calls.",
    "StateError": "``init`` was not called, or ``finalize`` was.",
}
_MESSAGE_ERRORS = {
    **{name: _ERRORS[name] for name in ("ArgumentError", "DTypeError", "StateError")},
    "TimeoutError": "The deadline passed. It does not end the group.",
    "PeerLostError": "The other rank has ended.",
}
_WORK = "; with ``async_op`` a ``Work`` of it"
_SPLIT = "Its first axis is a multiple of the number of ranks, unless there are counts."


class Call:
    """A collective or message. Its classes are the types of what `made` makes, and of the methods of ``Group``."""

    code: ClassVar[int] = 0
    """That of dl_comm.h; 0 for messages."""
    name: ClassVar[str]
    positional: ClassVar[tuple[str, ...]]
    keywords: ClassVar[tuple[str, ...]]
    summary: ClassVar[str]
    """Its first sentence is the first line of the documentation."""
    own: ClassVar[Mapping[str, Option]] = {}
    """Arguments that have another type or default here than in ``OPTIONS``."""
    texts: ClassVar[Mapping[str, str]] = {}
    """Of the arguments that mean something of their own here."""
    returns: ClassVar[str]
    example: ClassVar[str]
    """For NumPy, two ranks. With ``torch`` or ``tf`` instead of ``np`` it is right, too."""
    errors: ClassVar[Mapping[str, str]] = _ERRORS


class Allreduce(Call):
    """The reduction of the arrays of all ranks, on every rank."""

    code = 1
    name = "allreduce"
    positional = ("x", "op")
    keywords = (*_MOVING, "prescale", "postscale", "async_op", "by_name")
    summary = "Reduces arrays element by element over the ranks; every rank gets the result. Collective."
    texts = {
        "x": "An array or tensor of any shape, a number, or a list of arrays, which is one call. Shapes and types are "
        "the same on all ranks.",
        "out": "Contiguous arrays for the results, like ``x``; ``out=x`` works in place.",
    }
    returns = "``out``, or new arrays or a number, of the shapes and types of ``x``" + _WORK + "."
    example = """
        x = np.ones((4, 3)) * dl_comm.rank()
        y = dl_comm.allreduce(x, "mean")    # (4, 3): the mean of all ranks' x
        dl_comm.allreduce(x, "max", out=x)  # in place
    """
    if TYPE_CHECKING:

        @overload
        def __call__(
            self, x: Values, op: Operator = ..., *, async_op: Literal[False] = ..., **options: Unpack[Scaled]
        ) -> Values: ...

        @overload
        def __call__(
            self, x: Values, op: Operator = ..., *, async_op: Literal[True], **options: Unpack[Scaled]
        ) -> Work[Values]: ...

        @overload
        def __call__(
            self, x: Values, op: Operator = ..., *, async_op: bool = ..., **options: Unpack[Scaled]
        ) -> Values | Work[Values]: ...

        def __call__(self, x: Any, op: Any = "sum", **options: Any) -> Any: ...


class Broadcast(Call):
    """The values of one rank, on all ranks, in place."""

    code = 2
    name = "broadcast"
    positional = ("tensors", "root")
    keywords = ("group", "name", "timeout", "in_place", "async_op", "by_name")
    summary = "Copies the values of rank ``root`` to all ranks. Collective."
    texts = {
        "tensors": "An array or tensor of any shape and element type, a number, or a list of arrays, which is one "
        "call. Shapes and types are the same on all ranks.",
    }
    returns = "``tensors``, overwritten, or new arrays; a new number for a number" + _WORK + "."
    example = """
        weights = np.ones((10, 4)) * dl_comm.rank()
        dl_comm.broadcast(weights)        # (10, 4): every rank has those of rank 0
        epoch = dl_comm.broadcast(epoch)  # a number
    """
    errors = {**_ERRORS, "DTypeError": "An entry is no array, tensor or number, or has an unsupported type."}
    if TYPE_CHECKING:

        @overload
        def __call__(
            self, tensors: Values, root: int = ..., *, async_op: Literal[False] = ..., **options: Unpack[Copied]
        ) -> Values: ...

        @overload
        def __call__(
            self, tensors: Values, root: int = ..., *, async_op: Literal[True], **options: Unpack[Copied]
        ) -> Work[Values]: ...

        @overload
        def __call__(
            self, tensors: Values, root: int = ..., *, async_op: bool = ..., **options: Unpack[Copied]
        ) -> Values | Work[Values]: ...

        def __call__(self, tensors: Any, root: int = 0, **options: Any) -> Any: ...


class Barrier(Call):
    """The end of a call that every rank has made."""

    code = 3
    name = "barrier"
    positional = ()
    keywords = ("timeout", "group", "name")
    summary = "Returns when every rank has called it. Collective."
    returns = "Nothing."
    example = """
        if dl_comm.rank() == 0:
            folder.mkdir()
        dl_comm.barrier()  # now every rank may write into it
    """
    errors = {name: _ERRORS[name] for name in ("ArgumentError", "TimeoutError", "PeerLostError", "StateError")}
    if TYPE_CHECKING:

        def __call__(self, **options: Unpack[Named]) -> None: ...


class Reduce(Call):
    """The reduction of the arrays of all ranks, on one rank."""

    code = 4
    name = "reduce"
    positional = ("x", "root", "op")
    keywords = (*_MOVING, "async_op", "by_name")
    summary = (
        "Reduces arrays element by element over the ranks; rank ``root`` of the group gets the result. Collective."
    )
    texts = {
        "x": "An array or tensor of any shape, a number, or a list of arrays, which is one call. Shapes and types are "
        "the same on all ranks.",
        "root": "The rank of the group that gets the result.",
        "out": "Contiguous arrays for the results, like ``x``; used on the root only.",
    }
    returns = (
        "On the root ``out``, or new arrays or a number, of the shapes and types of ``x``. On the other ranks None."
    )
    example = """
        total = dl_comm.reduce(np.ones((2, 3)))  # (2, 3) on rank 0, None elsewhere
        if dl_comm.rank() == 0:
            print(total)
    """
    if TYPE_CHECKING:

        @overload
        def __call__(
            self,
            x: Values,
            root: int = ...,
            op: Operator = ...,
            *,
            async_op: Literal[False] = ...,
            **options: Unpack[Common],
        ) -> Values | None: ...

        @overload
        def __call__(
            self, x: Values, root: int = ..., op: Operator = ..., *, async_op: Literal[True], **options: Unpack[Common]
        ) -> Work[Values | None]: ...

        @overload
        def __call__(
            self, x: Values, root: int = ..., op: Operator = ..., *, async_op: bool = ..., **options: Unpack[Common]
        ) -> Values | None | Work[Values | None]: ...

        def __call__(self, x: Any, root: int = 0, op: Any = "sum", **options: Any) -> Any: ...


class AllGather(Call):
    """The arrays of all ranks, joined along the first axis, on every rank."""

    code = 5
    name = "all_gather"
    positional = ("x",)
    keywords = (*_MOVING, "counts", "ragged", "return_counts", "async_op", "by_name")
    summary = (
        "Joins the arrays of all ranks along the first axis, in the order of the ranks; every rank gets the result. "
        "Collective."
    )
    texts = {
        "x": "An array or tensor of the shape ``(n, *rest)``, or a list of them, which is one call. A number or an "
        "array without axes counts as an array of one element. ``rest`` and the types are the same on all ranks, and "
        "``n`` unless ``counts`` or ``ragged`` is given.",
    }
    returns = "``out`` or new arrays of the shape ``(sum of n, *rest)``" + _WORK + "."
    example = """
        dl_comm.all_gather(np.ones((2, 3)))  # (2 * size, 3)
        dl_comm.all_gather(dl_comm.rank())   # array([0, 1, ...])
        dl_comm.all_gather(np.ones((dl_comm.rank() + 1, 3)), ragged=True)  # other lengths on other ranks
    """
    if TYPE_CHECKING:

        @overload
        def __call__(
            self, x: Any, *, return_counts: Literal[True], async_op: bool = ..., **options: Unpack[Ragged]
        ) -> Any: ...

        @overload
        def __call__(self, x: Arrays, *, async_op: Literal[False] = ..., **options: Unpack[Ragged]) -> Arrays: ...

        @overload
        def __call__(self, x: Arrays, *, async_op: Literal[True], **options: Unpack[Ragged]) -> Work[Arrays]: ...

        @overload
        def __call__(self, x: Arrays, *, async_op: bool = ..., **options: Unpack[Ragged]) -> Arrays | Work[Arrays]: ...

        @overload
        def __call__(self, x: complex, *, async_op: bool = ..., **options: Unpack[Ragged]) -> Any: ...

        def __call__(self, x: Any, **options: Any) -> Any: ...


class Gather(Call):
    """The arrays of all ranks, joined along the first axis, on one rank."""

    code = 6
    name = "gather"
    positional = ("x", "root")
    keywords = tuple(name for name in AllGather.keywords if name != "return_counts")
    summary = (
        "Joins the arrays of all ranks along the first axis, in the order of the ranks; rank ``root`` of the group "
        "gets the result. Collective."
    )
    texts = {
        **AllGather.texts,
        "root": "The rank of the group that gets the result.",
        "out": "Contiguous arrays for the results, of their shapes and the types of ``x``; used on the root only.",
    }
    returns = "On the root ``out`` or new arrays of the shape ``(sum of n, *rest)``. On the other ranks None."
    example = """
        errors = dl_comm.gather(np.ones(5))  # (5 * size,) on rank 0, None elsewhere
        if dl_comm.rank() == 0:
            print(errors)
    """
    if TYPE_CHECKING:

        @overload
        def __call__(
            self, x: Arrays, root: int = ..., *, async_op: Literal[False] = ..., **options: Unpack[Ragged]
        ) -> Arrays | None: ...

        @overload
        def __call__(
            self, x: Arrays, root: int = ..., *, async_op: Literal[True], **options: Unpack[Ragged]
        ) -> Work[Arrays | None]: ...

        @overload
        def __call__(
            self, x: Arrays, root: int = ..., *, async_op: bool = ..., **options: Unpack[Ragged]
        ) -> Arrays | None | Work[Arrays | None]: ...

        @overload
        def __call__(self, x: complex, root: int = ..., *, async_op: bool = ..., **options: Unpack[Ragged]) -> Any: ...

        def __call__(self, x: Any, root: int = 0, **options: Any) -> Any: ...


class Scatter(Call):
    """The block of this rank of the arrays of one rank."""

    code = 7
    name = "scatter"
    positional = ("x", "root")
    keywords = (*_MOVING, "counts", "async_op", "by_name")
    summary = "Cuts the arrays of rank ``root`` along the first axis into a block for each rank. Collective."
    texts = {
        "x": "On the root an array or tensor of the shape ``(n, *rest)``, or a list of them, which is one call. "
        + _SPLIT
        + " With ``out`` the other ranks may pass None; without it, arrays of the root's shapes and types, of which "
        "the values are not used (``np.broadcast_to(x, shape)``, ``torch.empty(1).expand(shape)`` need no memory).",
        "out": "Contiguous arrays for this rank's blocks.",
    }
    returns = "``out`` or new arrays of the shape ``(n / size, *rest)``" + _WORK + "."
    example = """
        everything = np.ones((2 * dl_comm.size(), 3))  # of the other ranks only the shape counts
        block = dl_comm.scatter(everything)            # (2, 3): rows of this rank of rank 0's
        dl_comm.scatter(everything if dl_comm.rank() == 0 else None, out=block)
    """
    if TYPE_CHECKING:

        @overload
        def __call__(
            self, x: Any, root: int = ..., *, out: Arrays, async_op: Literal[False] = ..., **options: Unpack[Scattered]
        ) -> Arrays: ...

        @overload
        def __call__(
            self, x: Any, root: int = ..., *, out: Arrays, async_op: Literal[True], **options: Unpack[Scattered]
        ) -> Work[Arrays]: ...

        @overload
        def __call__(
            self, x: Any, root: int = ..., *, out: Arrays, async_op: bool = ..., **options: Unpack[Scattered]
        ) -> Arrays | Work[Arrays]: ...

        @overload
        def __call__(
            self,
            x: Arrays,
            root: int = ...,
            *,
            out: None = ...,
            async_op: Literal[False] = ...,
            **options: Unpack[Scattered],
        ) -> Arrays: ...

        @overload
        def __call__(
            self, x: Arrays, root: int = ..., *, out: None = ..., async_op: Literal[True], **options: Unpack[Scattered]
        ) -> Work[Arrays]: ...

        @overload
        def __call__(
            self, x: Arrays, root: int = ..., *, out: None = ..., async_op: bool = ..., **options: Unpack[Scattered]
        ) -> Arrays | Work[Arrays]: ...

        def __call__(self, x: Any, root: int = 0, **options: Any) -> Any: ...


class ReduceScatter(Call):
    """The block of this rank of the reduction."""

    code = 8
    name = "reduce_scatter"
    positional = ("x", "op")
    keywords = (*_MOVING, "counts", "prescale", "postscale", "async_op", "by_name")
    summary = (
        "Reduces arrays over the ranks and cuts the result along the first axis into a block for each rank. Collective."
    )
    texts = {
        "x": "An array or tensor of the shape ``(n, *rest)``, or a list of them, which is one call. Shapes and types "
        "are the same on all ranks. " + _SPLIT,
    }
    returns = "``out`` or new arrays of the shape ``(n / size, *rest)``, the blocks of this rank" + _WORK + "."
    example = """
        x = np.ones((2 * dl_comm.size(), 3))
        y = dl_comm.reduce_scatter(x)  # (2, 3): rows of this rank of the sum
        dl_comm.reduce_scatter(x, "mean", counts=[3, 1])  # 2 ranks: 3 rows for rank 0, one for rank 1
        dl_comm.reduce_scatter([x, x], counts=[[3, 1], [0, 4]])  # two arrays in one call
    """
    if TYPE_CHECKING:

        @overload
        def __call__(
            self, x: Arrays, op: Operator = ..., *, async_op: Literal[False] = ..., **options: Unpack[ScaledBlocks]
        ) -> Arrays: ...

        @overload
        def __call__(
            self, x: Arrays, op: Operator = ..., *, async_op: Literal[True], **options: Unpack[ScaledBlocks]
        ) -> Work[Arrays]: ...

        @overload
        def __call__(
            self, x: Arrays, op: Operator = ..., *, async_op: bool = ..., **options: Unpack[ScaledBlocks]
        ) -> Arrays | Work[Arrays]: ...

        def __call__(self, x: Any, op: Any = "sum", **options: Any) -> Any: ...


class AllToAll(Call):
    """The blocks that all ranks send to this one."""

    code = 9
    name = "all_to_all"
    positional = ("x",)
    keywords = (*_MOVING, "send_counts", "receive_counts", "return_counts", "async_op", "by_name")
    summary = (
        "Sends block r of every array, along the first axis, to rank r; the result has a block from each rank, in "
        "their order. Collective."
    )
    texts = {
        "x": "An array or tensor of the shape ``(n, *rest)``, or a list of them, which is one call. ``rest`` and the "
        "types are the same on all ranks. " + _SPLIT,
    }
    returns = "``out`` or new arrays of the shape ``(n, *rest)``, or ``(sum(receive_counts), *rest)``" + _WORK + "."
    example = """
        x = np.ones(2) * dl_comm.rank()
        dl_comm.all_to_all(x)                      # on both of 2 ranks: array([0., 1.])
        dl_comm.all_to_all(x, send_counts=[0, 2])  # everything to rank 1
        y, counts = dl_comm.all_to_all(x, send_counts=[1, 1], return_counts=True)  # counts: [1, 1]
    """
    if TYPE_CHECKING:

        @overload
        def __call__(
            self, x: Any, *, return_counts: Literal[True], async_op: bool = ..., **options: Unpack[Exchanged]
        ) -> Any: ...

        @overload
        def __call__(self, x: Arrays, *, async_op: Literal[False] = ..., **options: Unpack[Exchanged]) -> Arrays: ...

        @overload
        def __call__(self, x: Arrays, *, async_op: Literal[True], **options: Unpack[Exchanged]) -> Work[Arrays]: ...

        @overload
        def __call__(
            self, x: Arrays, *, async_op: bool = ..., **options: Unpack[Exchanged]
        ) -> Arrays | Work[Arrays]: ...

        def __call__(self, x: Any, **options: Any) -> Any: ...


_MESSAGE = {
    "name": "Stands in error messages of this rank.",
    "timeout": "The deadline in seconds (0: no limit), instead of the group's. Missing it does not end the group.",
    "async_op": "Return a ``Work`` at once. Until it has ended, nobody else may use the arrays.",
}


class Send(Call):
    """A message to one rank."""

    name = "send"
    positional = ("x", "dest", "tag")
    keywords = ("group", "name", "timeout", "async_op")
    summary = (
        "Sends arrays to rank ``dest`` of the group. Messages of up to 4 KiB do not wait for the receiver, which keeps "
        "them in its memory until they are received, however many; longer ones wait until it has them."
    )
    own = {"tag": OPTIONS["send_tag"]}
    texts = {
        **_MESSAGE,
        "x": "An array or tensor of any shape, a number, or a list of arrays, which are one message.",
        "tag": "A number from 0 that the receiver may ask for.",
    }
    returns = "Nothing" + _WORK + "."
    example = """
        if dl_comm.rank() == 0:
            dl_comm.send(np.ones((2, 3)), dest=1, tag=7)
        elif dl_comm.rank() == 1:
            dl_comm.recv(out := np.ones((2, 3)), source=0, tag=7)
    """
    errors = _MESSAGE_ERRORS
    if TYPE_CHECKING:

        def __call__(
            self, x: Any, dest: int, tag: int = 0, *, async_op: bool = ..., **options: Unpack[Named]
        ) -> Any: ...


class Recv(Call):
    """A message from another rank."""

    name = "recv"
    positional = ("out", "source", "tag")
    keywords = Send.keywords
    summary = "Receives a message into arrays."
    own = {"out": _GIVEN}
    texts = {
        **_MESSAGE,
        "out": "A contiguous array or tensor, or a list of them. Types are those that were sent. A shorter message "
        "leaves the rest as it is; a longer one is an error.",
    }
    returns = "A ``Status``: source, tag and length in bytes" + _WORK + "."
    example = """
        out = np.ones((2, 3))
        status = dl_comm.recv(out)  # from any rank
        print(status.source, status.tag, status.bytes)
    """
    errors = _MESSAGE_ERRORS
    if TYPE_CHECKING:

        def __call__(
            self,
            out: Any,
            source: int | None = None,
            tag: int | None = None,
            *,
            async_op: bool = ...,
            **options: Unpack[Named],
        ) -> Any: ...


class SendRecv(Call):
    """A message to one rank, and one from another."""

    name = "sendrecv"
    positional = ("x", "dest", "out", "source")
    keywords = ("send_tag", "recv_tag", "group", "name", "timeout")
    summary = "Sends ``x`` to rank ``dest`` and receives into ``out`` at the same time."
    own = {"out": _GIVEN}
    texts = {**_MESSAGE, "x": Send.texts["x"], "out": Recv.texts["out"]}
    returns = "A ``Status`` of the message received: source, tag and length in bytes."
    example = """
        here, size = dl_comm.rank(), dl_comm.size()
        from_left = np.ones(3)
        dl_comm.sendrecv(np.ones(3) * here, (here + 1) % size, from_left, (here - 1) % size)
    """
    errors = _MESSAGE_ERRORS
    if TYPE_CHECKING:

        def __call__(
            self,
            x: Any,
            dest: int,
            out: Any,
            source: int | None = None,
            *,
            send_tag: int = 0,
            recv_tag: int | None = None,
            **options: Unpack[Named],
        ) -> Status: ...


COLLECTIVES = (Allreduce, Broadcast, Barrier, Reduce, AllGather, Gather, Scatter, ReduceScatter, AllToAll)
"""In the order of their codes, from 1."""
CALLS = (*COLLECTIVES, Send, Recv, SendRecv)
