"""Random programs of collectives and messages, checked against a model in NumPy.

A program is a list of steps that all ranks draw from one seed. Each rank has a memory for each element type; calls
read and write parts of it. So they may use what calls in flight use: calls of one group take effect in their order.
Every rank decides for itself which of its calls it waits for at once, and in which order it starts calls with names
that share no memory. The model holds the memory of all ranks and runs the steps one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np

import dl_comm
from frameworks import COMPLEX, FLOATS, INTEGERS, Framework, dtype_of, same

TYPES = [*FLOATS, "int8", "uint8", "int32", "int64", "complex64", "bool"]
ROWS = [1, 2, 3, 16, 100]
LARGEST = 64
"""Beyond this magnitude of numbers the memory is filled again: the model has no rounding errors."""
MOST_IN_FLIGHT = 12

COMBINE: dict[str, Callable[[Any, Any], Any]] = {
    "sum": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "bit_and": np.bitwise_and,
    "bit_or": np.bitwise_or,
    "bit_xor": np.bitwise_xor,
}


def operators(dtype: str) -> list[str]:
    """The operators that a type has here."""
    if dtype in COMPLEX:
        return ["sum"]
    if dtype == "bool":
        return ["bit_and", "bit_or", "bit_xor"]
    more = ["bit_and", "bit_or", "bit_xor"] if dtype in INTEGERS else []
    return ["sum", "min", "max", *more, *(["mean"] if dtype in ("float32", "float64") else [])]


def combined(op: str, inputs: list[Any]) -> Any:
    """The reduction of arrays: float16 and bfloat16 are added in float32 and rounded once."""
    dtype = inputs[0].dtype
    if op == "mean":
        return (reduce(np.add, inputs) / dtype.type(len(inputs))).astype(dtype)
    wide = np.float32 if dtype.itemsize == 2 and dtype.kind not in "iub" else dtype
    return reduce(COMBINE[op], [each.astype(wide) for each in inputs]).astype(dtype)


@dataclass(frozen=True)
class Part:
    """Elements of the memory of a type, as rows."""

    dtype: str
    start: int
    shape: tuple[int, ...]

    @property
    def stop(self) -> int:
        """The end."""
        return self.start + int(np.prod(self.shape))

    def of(self, memory: dict[str, Any]) -> Any:
        """The view of a memory."""
        return memory[self.dtype][self.start : self.stop].reshape(self.shape)

    def overlaps(self, other: Part) -> bool:
        """Whether both have an element."""
        return self.dtype == other.dtype and self.start < other.stop and other.start < self.stop


@dataclass(frozen=True)
class Step:
    """A call: on ``read`` and ``written``, which are equal for a call in place."""

    collective: str
    group: int
    read: Part
    written: Part
    op: str
    root: int
    name: str | None


class Program:
    """A program and its run on this rank.

    Args:
        framework: What runs the calls.
        seed: The same on all ranks.
        length: The elements of a memory.
    """

    def __init__(self, framework: Framework, seed: int, length: int) -> None:
        self.framework, self.length = framework, length
        self.rank, self.size = dl_comm.rank(), dl_comm.size()
        self.common, self.own = np.random.default_rng(seed), np.random.default_rng([seed, self.rank])
        members = [list(range(self.size)), list(reversed(range(self.size)))]
        members += [[self.size - 1, 0]] if self.size > 2 else []
        self.members = members
        self.groups = [dl_comm.Group(ranks, f"g{n}") if self.rank in ranks else None for n, ranks in enumerate(members)]
        self.has_out, self.is_async = framework.supports("out"), framework.supports("async")
        self.flight: list[tuple[Step, Any]] = []
        self.model: list[dict[str, Any]] = []
        self.steps = 0
        self.fill()

    def fill(self) -> None:
        """New memory, on all ranks."""
        self.wait()
        self.model = [{dtype: self.values(dtype) for dtype in TYPES} for _ in range(self.size)]
        made = {dtype: self.framework.make(array) for dtype, array in self.model[self.rank].items()}
        self.memory = made if self.has_out else {dtype: np.array(x) for dtype, x in self.model[self.rank].items()}

    def values(self, dtype: str) -> Any:
        """Small numbers."""
        numbers = self.common.integers(0 if dtype in ("uint8", "bool") else -3, 4, self.length)
        return (numbers > 0) if dtype == "bool" else numbers.astype(dtype_of(dtype))

    def rows(self) -> int:
        """A number of rows: few, or enough that a call takes a part of the memory."""
        return [*ROWS, self.length // 60][int(self.common.integers(len(ROWS) + 1))]

    def part(self, dtype: str, rows: int, columns: tuple[int, ...]) -> Part:
        """A random part with this shape."""
        shape = (rows, *columns)
        return Part(dtype, int(self.common.integers(0, self.length - int(np.prod(shape)) + 1)), shape)

    def draw(self, name: str | None = None) -> Step:
        """A random step."""
        kinds = ["allreduce", "broadcast", "reduce", "all_gather", "gather", "reduce_scatter", "scatter", "all_to_all"]
        collective = kinds[int(self.common.integers(len(kinds)))]
        reduces = collective in ("allreduce", "reduce", "reduce_scatter")
        dtype = TYPES[int(self.common.integers(len(TYPES)))]
        ops = operators(dtype)
        op = ops[int(self.common.integers(len(ops)))] if reduces else ""
        group = int(self.common.integers(len(self.members)))
        size = len(self.members[group])
        rows = self.rows()
        columns = ((), (2,), (1, 3))[int(self.common.integers(3))]
        read = rows * size if collective in ("reduce_scatter", "scatter", "all_to_all") else rows
        written = rows * size if collective in ("all_gather", "gather", "all_to_all") else rows
        if collective == "broadcast" or (collective in ("allreduce", "reduce") and self.common.integers(2)):
            source = target = self.part(dtype, rows, columns)
        else:
            source, target = self.part(dtype, read, columns), self.part(dtype, written, columns)
            while source.overlaps(target):
                source, target = self.part(dtype, read, columns), self.part(dtype, written, columns)
        return Step(collective, group, source, target, op, int(self.common.integers(size)), name)

    def apply(self, step: Step) -> None:
        """Runs a step in the model."""
        members = self.members[step.group]
        inputs = [np.array(step.read.of(self.model[rank])) for rank in members]
        blocks = [np.split(each, len(members)) for each in inputs] if len(inputs[0]) % len(members) == 0 else []
        for index, rank in enumerate(members):
            at_root = index == step.root
            match step.collective:
                case "allreduce":
                    result = combined(step.op, inputs)
                case "reduce":
                    result = combined(step.op, inputs) if at_root else None
                case "broadcast":
                    result = inputs[step.root]
                case "all_gather":
                    result = np.concatenate(inputs)
                case "gather":
                    result = np.concatenate(inputs) if at_root else None
                case "reduce_scatter":
                    result = combined(step.op, [each[index] for each in blocks])
                case "scatter":
                    result = blocks[step.root][index]
                case _:
                    result = np.concatenate([each[index] for each in blocks])
            if result is not None:
                step.written.of(self.model[rank])[...] = result

    def start(self, step: Step, waits: bool) -> None:
        """Starts a step on this rank, if it is a member; ``waits``: and waits for it."""
        group = self.groups[step.group]
        if group is None:
            return
        at_root = group.rank == step.root
        options: dict[str, Any] = {"group": group, "name": step.name}
        started = self.is_async and not waits
        if started:
            options["async_op"] = True
        x, out = step.read.of(self.memory), step.written.of(self.memory)
        if not self.has_out:
            x = self.framework.make(x)
        elif step.collective != "broadcast" and (step.collective not in ("reduce", "gather") or at_root):
            options["out"] = out
        comm = self.framework.comm
        match step.collective:
            case "broadcast":
                del options["name"]
                result = comm.broadcast([x], step.root, **options)
            case "allreduce" | "reduce_scatter":
                result = getattr(comm, step.collective)(x, step.op, **options)
            case "reduce":
                result = comm.reduce(x, step.root, step.op, **options)
            case "gather":
                result = comm.gather(x, step.root, **options)
            case "scatter":
                result = comm.scatter(x if at_root or not self.has_out else None, step.root, **options)
            case _:
                result = getattr(comm, step.collective)(x, **options)
        if started:
            self.flight.append((step, result))
        elif not self.has_out and (step.collective not in ("reduce", "gather") or at_root):
            out[...] = self.framework.array(result[0] if step.collective == "broadcast" else result)

    def wait(self) -> None:
        """Waits for the calls in flight, in an order of this rank."""
        for index in self.own.permutation(len(self.flight)):
            self.flight[index][1].wait()
        self.flight.clear()

    def check(self) -> None:
        """Compares the memory with the model's."""
        self.wait()
        for dtype, memory in self.memory.items():
            found = self.framework.array(memory) if self.has_out else memory
            same(found, self.model[self.rank][dtype])

    def run(self, steps: int) -> None:
        """Runs this many steps."""
        for number in range(steps):
            self.steps = number
            kind = int(self.common.integers(12))
            if kind == 0 and self.is_async:
                self.in_any_order(number)
            elif kind == 1 and self.has_out:
                self.ring()
            else:
                step = self.draw()
                parts = (step.read, step.written)
                # Calls of different groups have no order.
                others = [each for each, _ in self.flight if each.group != step.group]
                if any(one.overlaps(part) for each in others for one in (each.read, each.written) for part in parts):
                    self.wait()
                self.start(step, bool(self.own.integers(2)))
                self.apply(step)
            if len(self.flight) > MOST_IN_FLIGHT or self.common.integers(6) == 0:
                self.check()
            largest = max(np.abs(memory["float16"].astype(np.float64)).max() for memory in self.model)
            wide = max(np.abs(memory[dtype].astype(np.complex128)).max() for memory in self.model for dtype in TYPES)
            if largest > LARGEST or wide > 2**20 or number % 10 == 9:
                self.check()
                self.fill()
        self.check()

    def in_any_order(self, number: int) -> None:
        """Calls of one group with names, on memory that they do not share, in another order on each rank."""
        self.wait()
        steps: list[Step] = []
        while len(steps) < 4:
            step = self.draw(f"step {number}, call {len(steps)}")
            parts = (step.read, step.written)
            clash = any(one.overlaps(part) for each in steps for one in (each.read, each.written) for part in parts)
            if not clash and step.collective != "broadcast" and (not steps or step.group == steps[0].group):
                steps.append(step)
        for index in self.own.permutation(len(steps)):
            # The other ranks may start others first.
            self.start(steps[index], waits=False)
        for step in steps:
            self.apply(step)

    def ring(self) -> None:
        """Every rank sends to the next one."""
        self.wait()
        dtype = TYPES[int(self.common.integers(len(TYPES)))]
        rows = self.rows()
        source, target = self.part(dtype, rows, ()), self.part(dtype, rows, ())
        while source.overlaps(target):
            source, target = self.part(dtype, rows, ()), self.part(dtype, rows, ())
        right, left = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        self.framework.comm.sendrecv(source.of(self.memory), right, target.of(self.memory), left)
        data = [np.array(source.of(memory)) for memory in self.model]
        for rank, memory in enumerate(self.model):
            target.of(memory)[...] = data[(rank - 1) % self.size]

    def free(self) -> None:
        """Frees the groups."""
        for group in self.groups:
            if group is not None:
                group.free()
