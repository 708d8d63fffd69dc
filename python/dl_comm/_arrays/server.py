"""A parameter server of arrays: tensors that any rank reads and updates at any time, as `dl_comm.ParameterServer`.

Thread rule: any thread may call every method.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Protocol

import numpy as np

from dl_comm import _dl_comm
from dl_comm._arrays.agreement import failing_together
from dl_comm._arrays.arguments import host_arrays_of, is_half, nothing
from dl_comm._arrays.groups import Group, given
from dl_comm._arrays.messages import recv, send
from dl_comm._arrays.objects import all_gather_object
from dl_comm._arrays.work import Work, limit
from dl_comm._base.checks import checked_flag, checked_float, checked_int, checked_text
from dl_comm._base.errors import ArgumentError, CommError, DTypeError, MismatchError, StateError

RULES = {"zero": 0, "copy": 1, "add": 2}
_SCALED = 3
_REQUEST = 0
_MAX_ANSWER = 2**20
"""Each request has a tag for its answer, so that a late one does not answer the next."""
_END = -1
_TEXT_BYTES = 1000

Rule = Callable[[Any, Any], object]
"""A rule in Python: changes a part of a shard in place. Gets the part and the update's elements for it."""


class Kind(Protocol):
    """What a server needs to know of the tensors of a framework."""

    def listed(self, x: Any, argument: str) -> tuple[list[Any], Callable[[list[Any]], Any]]:
        """The tensors of an argument, and what makes a result of the same kind from tensors."""

    def outgoing(self, tensors: list[Any]) -> tuple[list[Any], list[Any]]:
        """Memory of tensors that are sent, as the core takes it, and what must live meanwhile."""

    def incoming(self, tensors: list[Any]) -> tuple[list[Any], list[Any], list[Callable[[], object]]]:
        """Memory for tensors that are received, what must live meanwhile, and what is then done."""

    def empty_like(self, tensor: Any) -> Any:
        """A new tensor for a result."""

    def sizes(self, tensor: Any) -> tuple[int, int]:
        """Bytes of an element, and of one in the memory of the server."""

    def raw(self, tensor: Any) -> np.ndarray[Any, Any]:
        """The bytes of a tensor."""

    def of_raw(self, raw: np.ndarray[Any, Any], like: Any, stored: bool) -> Any:
        """The elements in ``raw``, of the type of ``like``, or of the type in which the server stores it."""


class ArrayKind:
    """NumPy arrays."""

    def listed(self, x: Any, argument: str) -> tuple[list[Any], Callable[[list[Any]], Any]]:
        return host_arrays_of(x, argument)

    def outgoing(self, arrays: list[Any]) -> tuple[list[Any], list[Any]]:
        return arrays, arrays

    def incoming(self, arrays: list[Any]) -> tuple[list[Any], list[Any], list[Callable[[], object]]]:
        return arrays, arrays, []

    def empty_like(self, array: Any) -> Any:
        return np.empty(array.shape, array.dtype)

    def sizes(self, array: Any) -> tuple[int, int]:
        size = array.dtype.itemsize
        return size, 4 if is_half(array.dtype) else size

    def raw(self, array: Any) -> np.ndarray[Any, Any]:
        return np.ascontiguousarray(array).reshape(-1).view(np.uint8)

    def of_raw(self, raw: np.ndarray[Any, Any], like: Any, stored: bool) -> Any:
        return raw.view(np.float32 if stored and is_half(like.dtype) else like.dtype)


def checked_rules(rules: Mapping[str, Rule] | None) -> dict[str, Rule]:
    """Rules in the order of their names, which the ranks send as numbers."""
    if rules is not None and not isinstance(rules, Mapping):
        raise DTypeError(f"rules is a {type(rules).__name__}; give a dictionary of functions by name")
    for name, rule in (rules or {}).items():
        if checked_text("rules", name) in RULES or not callable(rule):
            raise ArgumentError(f"rules: {name!r} is a name of the server, or its value is no function")
    return dict(sorted((rules or {}).items()))


class Server:
    """The methods of ``dl_comm.ParameterServer``, for tensors of one kind."""

    def __init__(
        self,
        kind: Kind,
        tensors: Any,
        group: Group | None,
        rules: Mapping[str, Rule] | None,
        timeout: float | None,
    ) -> None:
        self._kind = kind
        self.group = given(group)
        with failing_together("ParameterServer", self.group):
            self._tensors, self._wrap = kind.listed(tensors, "tensors")
            named = checked_rules(rules)
            memory, _kept = kind.outgoing(self._tensors)
        by_rank = all_gather_object(list(named), group=self.group)
        if any(names != by_rank[0] for names in by_rank):
            raise MismatchError(f"rules: the ranks have different names: {', '.join(map(str, by_rank))}")
        self._handle = _dl_comm.create_parameter_server(self.group.handle, memory, limit(timeout))
        self._is_closed = False
        self._last: Work[Any] | None = None
        self._fetched: list[Any] | None = None
        self._fetching: Work[Any] | None = None
        self._custom = _CustomRules(self, named) if named else None

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return self.group.rank

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.group.size

    def shard(self, tensor: int = 0, rank: int | None = None) -> slice:
        """The elements that a rank owns, of a tensor as one row.

        Args:
            tensor: Its position in the list.
            rank: None: this rank.
        """
        length = self._length(self._one(tensor))
        owner = self.rank if rank is None else checked_int("rank", rank, 0, self.size - 1)
        each, more = divmod(length, self.size)
        starts = [each * of + min(more, of) for of in (owner, owner + 1)]
        return slice(*starts)

    def send(
        self,
        updates: Any = None,
        rule: str = "add",
        *,
        scale: float | None = None,
        tensor: int | None = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Work[None] | None:
        """Sends an update. Any rank, at any time, without the others.

        Args:
            updates: Tensors like those of the server. For ``rule="zero"``: None.
            rule: What it does to the server's elements: ``"add"``, ``"copy"``, ``"zero"``, or one of ``rules``.
            scale: With ``"add"``: a factor of the update; integers are multiplied in float64, then truncated.
            tensor: The position of the only tensor that is updated; ``updates`` is one tensor then. None: all.
            async_op: Return a ``Work`` at once. The update must not change until it has ended.
            timeout: The deadline in seconds, 0 for no limit; None: the group's.

        Returns:
            None, when the update is applied; or the ``Work``.

        Raises:
            ArgumentError: Another number of tensors or elements, or an unknown rule. Nothing has changed.
            DTypeError: Another type, or one without sums.
            CommError: A lost rank or a deadline: the server has ended on all ranks.
        """
        first, listed = self._selected(tensor)
        name, custom = rule, None
        if type(rule) is not str or rule not in RULES:
            name, custom = checked_text("rule", rule), self._custom
            if custom is None or name not in custom.rules:
                known = [*RULES, *(custom.rules if custom else ())]
                raise ArgumentError(f"invalid rule: {name!r} (expected one of {', '.join(map(repr, known))})")
        if scale is not None and name != "add":
            raise ArgumentError(f"scale is a factor of rule='add', not of {name!r}")
        given_updates = [] if name == "zero" else self._like(updates, listed, tensor, "updates")
        if name == "zero" and updates is not None:
            raise ArgumentError("updates: rule='zero' takes none")
        if custom is not None:
            if checked_flag("async_op", async_op):
                raise ArgumentError(f"async_op: {name!r} is a rule in Python, whose sends wait for their owners")
            self._drain()
            custom.send(name, given_updates, first, timeout)
            return None
        memory, kept = self._kind.outgoing(given_updates)
        code, factor = (RULES[name], 1.0) if scale is None else (_SCALED, checked_float("scale", scale))
        operation = (True, first, len(listed), memory, code, factor, limit(timeout))
        started: Work[None] | None = self._run(operation, kept, async_op, nothing)
        return started

    def receive(
        self,
        out: Any = None,
        *,
        tensor: int | None = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Receives the values of the server. Any rank, at any time, without the others.

        Args:
            out: Tensors that get them, like those of the server; None: new ones.
            tensor: The position of the only tensor that is received; None: all.
            async_op: Return a ``Work`` of the result at once. ``out`` must not be used until it has ended.
            timeout: As in ``send``.

        Returns:
            The tensors, in the form of those that the server was made with; one with ``tensor``. Or the ``Work``.

        Raises:
            ArgumentError, DTypeError, CommError: As ``send``.
        """
        first, listed = self._selected(tensor)
        wrap = self._wrap if tensor is None else _only
        results = [self._kind.empty_like(each) for each in listed] if out is None else None
        if results is None:
            results = self._like(out, listed, tensor, "out")
        memory, kept, ends = self._kind.incoming(results)

        def result() -> Any:
            while ends:
                ends.pop()()
            return wrap(results) if out is None else out

        return self._run((False, first, len(listed), memory, 0, 1.0, limit(timeout)), kept, async_op, result)

    def prefetch(self, *, timeout: float | None = None) -> Work[Any]:
        """Starts to receive the values into memory of the server, for ``integrate``."""
        if self._fetching is not None:
            self._fetching.wait()
        if self._fetched is None:
            self._fetched = [self._kind.empty_like(each) for each in self._tensors]
        self._fetching = self.receive(self._fetched, async_op=True, timeout=timeout)
        return self._fetching

    def integrate(self, function: Callable[[Any, Any], object], tensors: Any = None) -> None:
        """Waits for the last ``prefetch`` (or makes one), then calls ``function(prefetched, tensor)`` for each tensor.

        Args:
            function: Changes ``tensor`` in place, and may change ``prefetched``.
            tensors: Those of this rank; None: those that the server was made with.
        """
        own = self._tensors if tensors is None else self._like(tensors, self._tensors, None, "tensors")
        work = self.prefetch() if self._fetching is None else self._fetching
        work.wait()
        self._fetching = None
        for fetched, each in zip(self._fetched or [], own, strict=True):
            function(fetched, each)

    def close(self, *, timeout: float | None = None) -> None:
        """Ends the server when the operations of all ranks have ended. Collective. A second call does nothing.

        Without it a rank that ends, or frees the server, makes the others' next operations fail.
        """
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self._handle.close(limit(timeout))
        finally:
            if self._custom is not None:
                self._custom.close()

    def __enter__(self) -> Any:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an error the others are not waited for: they may be elsewhere.
        if kind is None:
            self.close()

    def _length(self, tensor: Any) -> int:
        return int(np.prod(tuple(tensor.shape), dtype=np.int64))

    def _one(self, tensor: Any) -> Any:
        return self._tensors[checked_int("tensor", tensor, 0, len(self._tensors) - 1)]

    def _selected(self, tensor: int | None) -> tuple[int, list[Any]]:
        if self._is_closed:
            raise StateError("the parameter server was closed")
        if tensor is None:
            return 0, self._tensors
        one = self._one(tensor)
        return int(tensor), [one]

    def _like(self, x: Any, listed: list[Any], tensor: int | None, argument: str) -> list[Any]:
        """The tensors of ``x``, which have the shapes of ``listed``; the core compares types."""
        tensors, _ = self._kind.listed(x, argument)
        if [each.shape for each in tensors] == [each.shape for each in listed]:
            return tensors
        if len(tensors) != len(listed):
            raise ArgumentError(f"{argument} has {len(tensors)} tensors; the server has {len(listed)}")
        for index, (each, own) in enumerate(zip(tensors, listed, strict=True)):
            if each.shape != own.shape:
                raise ArgumentError(
                    f"{argument}: tensor {index if tensor is None else tensor} has the shape {tuple(each.shape)}; "
                    f"that of the server has {tuple(own.shape)}"
                )
        return tensors

    def _run(self, operation: Any, kept: list[Any], async_op: bool, result: Callable[[], Any]) -> Any:
        if async_op is not False and checked_flag("async_op", async_op):
            work: Work[Any] = Work(self._handle.start(operation, kept), lambda _: result())
            self._last = work
            return work
        self._handle.run(operation)
        return result()

    def _drain(self) -> None:
        """Waits for the operations that were started."""
        if self._last is not None:
            self._last.wait()
            self._last = None


def _only(tensors: list[Any]) -> Any:
    return tensors[0]


def _memory(address: int, count: int) -> np.ndarray[Any, Any]:
    """``count`` bytes at an address."""
    memory: Any = (ctypes.c_uint8 * count).from_address(address)
    return np.frombuffer(memory, np.uint8)


class _CustomRules:
    """Rules in Python: a thread of each rank applies them to the rank's own shards, by messages, on one host too."""

    def __init__(self, server: Server, rules: dict[str, Rule]) -> None:
        self.rules, self._server = rules, server
        self._names = list(rules)
        name = f"rules of a parameter server: {', '.join(self._names)}"
        self._group = Group(server.group.ranks, name)
        self._lock, self._tag = threading.Lock(), 0
        self._thread = threading.Thread(target=self._serve, name="dl_comm rules", daemon=True)
        self._thread.start()

    def send(self, name: str, updates: list[Any], first: int, timeout: float | None) -> None:
        """Sends every shard of the updates to its owner, and waits until all are applied."""
        kind, server, failures = self._server._kind, self._server, []
        with self._lock:
            for index, update in enumerate(updates, first):
                raw, (each, _) = kind.raw(update), kind.sizes(update)
                for owner in range(server.size):
                    part = server.shard(index, owner)
                    self._tag = self._tag % _MAX_ANSWER + 1
                    header = np.array([self._names.index(name), index, self._tag])
                    data = [header, raw[part.start * each : part.stop * each]]
                    send(data, owner, _REQUEST, group=self._group, timeout=timeout)
                    answer = np.zeros(_TEXT_BYTES, np.uint8)
                    status = recv(answer, owner, self._tag, group=self._group, timeout=timeout)
                    text = answer[: status.bytes].tobytes().decode(errors="replace")
                    if text != "done":
                        failures.append(f"rank {owner}: {text}")
        if failures:
            raise ArgumentError(f"the rule {name!r} failed on {'; '.join(failures)}")

    def _serve(self) -> None:
        server = self._server
        lengths = [server.shard(index, 0).stop for index in range(len(server._tensors))]  # rank 0's are the longest
        longest = max(n * server._kind.sizes(each)[0] for n, each in zip(lengths, server._tensors, strict=True))
        header, data = np.zeros(3, np.int64), np.zeros(longest, np.uint8)
        while True:
            try:
                status = recv([header, data], None, _REQUEST, group=self._group, timeout=0)
            except CommError:
                return  # the group has ended, and who sends learns of it
            if header[0] == _END:
                return
            answer = self._apply(int(header[0]), int(header[1]), data[: status.bytes - header.nbytes])
            try:
                send(np.frombuffer(answer, np.uint8), status.source, int(header[2]), group=self._group)
            except CommError:
                return

    def _apply(self, rule: int, tensor: int, data: np.ndarray[Any, Any]) -> bytes:
        """Applies an update to this rank's shard, and returns what is answered."""
        server = self._server
        like, part = server._tensors[tensor], server.shard(tensor)
        function, kind = self.rules[self._names[rule]], server._kind
        update = kind.of_raw(data, like, False)

        def change(address: int, first: int, count: int) -> None:
            block = kind.of_raw(_memory(address, count * kind.sizes(like)[1]), like, True)
            function(block, update[first - part.start : first - part.start + count])

        try:
            server._handle.modify(tensor, 0.0, change)
        except Exception as error:  # whatever the rule raises goes to the sender
            return f"{type(error).__name__}: {error}".encode()[:_TEXT_BYTES]
        return b"done"

    def close(self) -> None:
        with contextlib.suppress(CommError):  # then the thread has ended, too
            send([np.array([_END, 0, 0]), np.zeros(0, np.uint8)], self._server.rank, _REQUEST, group=self._group)
        self._thread.join()
        self._group.free()
