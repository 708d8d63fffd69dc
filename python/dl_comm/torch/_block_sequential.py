"""An `nn.Sequential` in flat blocks, whose gradients are averaged block by block during backward.

The layers are cut into blocks of about equal sizes. The parameters of a block are views of one tensor, their gradients
views of another, so a block is one tensor for the allreduce. Its last elements are flags, which parameters have a
gradient: ranks may differ in that.

These rules keep all ranks in step: blocks start from the last to the first, a block when its last gradient is ready and
all later blocks have started, the rest at the end of backward, which waits for all.

Thread rule: as a torch module; one backward pass at a time.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any, Literal, cast

import torch

from dl_comm._arrays import groups
from dl_comm._arrays.groups import Group, given
from dl_comm._base.checks import checked_flag, checked_int
from dl_comm._base.errors import ArgumentError, DTypeError, StateError
from dl_comm._job.ranks import local_size
from dl_comm._job.start import ensure_initialized
from dl_comm.torch import _backward
from dl_comm.torch._arguments import KeptGroup, refuse_lazy
from dl_comm.torch._bucket_plan import Named
from dl_comm.torch._collectives import allreduce
from dl_comm.torch._compiler import uncompiled
from dl_comm.torch._functions import broadcast_parameters
from dl_comm.torch._reducer import own
from dl_comm.torch._shared_grads import ALLOC_ERRORS, shared_flat
from dl_comm.torch._work import Work

_Op = Literal["mean", "sum"]


class BlockSequential(torch.nn.Sequential):
    """`torch.nn.Sequential` with its parameters in flat blocks, whose gradients are averaged during backward.

        model = dl_comm.torch.nn.BlockSequential([nn.Linear(784, 100), nn.Tanh(), nn.Linear(100, 10)], 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        criterion(model(x), y).backward()  # the gradients are means over the ranks now

    The gradients of one block are averaged while the block before it is in backward. When `backward()` returns, all are
    means, to read, clip and change. Any torch optimizer works; a `DistributedOptimizer` refuses the parameters, because
    it would average them again. All ranks make the same backward passes. A parameter without a gradient on some ranks
    counts as zero there; if no rank has one, it stays None. A second backward adds to the gradients and averages again;
    with `op="sum"` it is refused: accumulate in `no_sync()`.

    The parameters and the keys of the state dict are those of a `Sequential` of the same modules. Gradients lie in the
    block until the next backward pass: clone those that you keep for longer. A copy averages its own gradients.
    Second derivatives through `p.grad`, and sparse gradients, are refused.

    Args:
        modules: The layers: modules, a `Sequential`, or an OrderedDict of names and modules. Their parameters have one
            floating-point dtype and one device.
        blocks: The number of blocks, at most that of parameters.
        op: What the gradients become: the "mean" over the ranks, or the "sum".
        group: The ranks; None: all.
        broadcast: Take the parameters and buffers of rank 0 of the group now. Collective.

    Raises:
        DTypeError: An entry is not a module, or the parameters are not of one floating-point dtype.
        ArgumentError: The parameters have several devices, share memory, or are averaged by something else; or another
            argument is out of range.
        MismatchError: The parameters differ between ranks.

    `backward()` raises the errors of an allreduce, DTypeError for a sparse gradient, and StateError when the previous
    pass failed, a hook changed a gradient during its allreduce, or the gradients are sums already. `zero_grad()` of
    this module then starts over.

    Source: `nn.BlockSequential` of TorchMPI (Facebook, 2017).
    """

    def __init__(
        self,
        modules: Iterable[torch.nn.Module] | OrderedDict[str, torch.nn.Module],
        blocks: int,
        *,
        op: _Op = "mean",
        group: Group | None = None,
        broadcast: bool = True,
    ) -> None:
        named = _named_modules(modules)
        blocks = checked_int("blocks", blocks, 1)
        if op not in ("mean", "sum"):
            raise ArgumentError(f"invalid op: {op!r} (expected 'mean' or 'sum')")
        ensure_initialized()
        given(group)
        super().__init__(named)
        self._num_blocks, self._op, self._ranks = blocks, op, KeptGroup(group)
        self._build()
        if checked_flag("broadcast", broadcast):
            broadcast_parameters(self, group=group)

    @property
    def parameter_blocks(self) -> list[torch.Tensor]:
        """The parameters: one flat tensor for each block, whose memory they share. To read or change them at once."""
        self._averager.check(self)
        return [block.values for block in self._averager.blocks]

    @property
    def gradient_blocks(self) -> list[torch.Tensor]:
        """The gradients after `backward()`, as `parameter_blocks`; zeros where `p.grad` is None."""
        return [block.gradients for block in self._averager.blocks]

    def synchronize(self) -> None:
        """Average the gradients as they are: those of passes in `no_sync()`, or set by hand. Collective.

        After `backward()` there is no need for it; with `op="sum"` it raises StateError then. Else as `backward()`.
        """
        self._averager.check(self)
        self._averager.synchronize()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """In this context, backward passes only accumulate; the next pass outside averages the sum."""
        before, self._averager.local = self._averager.local, True
        try:
            yield
        finally:
            self._averager.local = before

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients. After a failed backward pass, call it on all ranks of the group."""
        super().zero_grad(set_to_none)
        self._averager.restart()

    def forward(self, input: Any) -> Any:
        """Apply the layers in order. Raises StateError when parameters were added or replaced."""
        if not torch.compiler.is_compiling():
            self._averager.check(self)
        return super().forward(input)  # type: ignore[no-untyped-call]

    def extra_repr(self) -> str:
        """Return what `print` shows of the module besides its layers."""
        return f"blocks={self._num_blocks}, op={self._op!r}"

    def __getitem__(self, index: Any) -> Any:
        """Return a layer; for a slice, a `torch.nn.Sequential` of the same layers."""
        if isinstance(index, slice):
            return torch.nn.Sequential(OrderedDict(list(self._modules.items())[index]))
        return super().__getitem__(index)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        # It converts or moves each parameter.
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._build()
        return self

    def _build(self) -> None:
        self.__dict__.pop("_averager", None)  # it owns the parameters
        self._averager = _Averager(list(self.named_parameters()), self._num_blocks, self._op, self._ranks)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_averager"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._build()


def _named_modules(modules: Any) -> OrderedDict[str, torch.nn.Module]:
    if isinstance(modules, torch.nn.Sequential):
        modules = modules._modules
    if isinstance(modules, torch.nn.Module) or not hasattr(modules, "__iter__"):
        raise DTypeError(f"modules is a {type(modules).__name__}; give a list of modules, or an OrderedDict")
    pairs = modules.items() if isinstance(modules, dict) else ((str(i), each) for i, each in enumerate(modules))
    named = OrderedDict(pairs)
    for name, module in named.items():
        if not isinstance(module, torch.nn.Module):
            raise DTypeError(f"modules: entry {name} is a {type(module).__name__}, not a torch module")
    return named


class _Block:
    """Parameters in one flat tensor, their gradients in another, and the state of the call of a backward pass."""

    def __init__(self, named: Named) -> None:
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        self.count = sum(parameter.numel() for parameter in self.parameters)
        like = self.parameters[0]
        with torch.no_grad():
            self.values = torch.empty(self.count, dtype=like.dtype, device=like.device)
            for parameter, view in zip(self.parameters, self._views_of(self.values), strict=True):
                parameter.data = view.copy_(parameter)
        self.places = [parameter.data_ptr() for parameter in self.parameters]
        self._memory: torch.Tensor | None = None  # the gradients, and the flags
        self._views: list[torch.Tensor] = []
        self._versions: list[int] = []
        self._absent: list[int] = []
        self.waiting: set[int] = set()  # trainable parameters whose gradient is not ready in this pass
        self.trainable = True
        self.sums: set[int] = set()  # parameters whose gradients are sums over the ranks, of `op="sum"`
        self.work: Work[Any] | None = None

    def _views_of(self, flat: torch.Tensor) -> list[torch.Tensor]:
        parts = torch.split(flat, [parameter.numel() for parameter in self.parameters])
        return [part.view(parameter.shape) for part, parameter in zip(parts, self.parameters, strict=True)]

    def _allocate(self) -> torch.Tensor:
        """The gradients and the flags. Made at first use, in memory that the ranks of a host share if possible."""
        if self._memory is None:
            count = self.count + len(self.parameters)
            if self.values.device.type == "cpu" and local_size() > 1:
                with contextlib.suppress(*ALLOC_ERRORS):
                    self._memory = shared_flat(count, self.values.dtype)
            if self._memory is None:
                self._memory = self.values.new_zeros(count)
            # Each view has its own version counter: a change of one gradient is seen in that one only.
            self._views = [view.data for view in self._views_of(self._memory[: self.count])]
        return self._memory

    @property
    def gradients(self) -> torch.Tensor:
        return self._allocate()[: self.count]

    def begin(self) -> None:
        """Begin a backward pass."""
        self.waiting = {i for i, parameter in enumerate(self.parameters) if parameter.requires_grad}
        self.trainable = bool(self.waiting)

    def refuse_sum(self, i: int) -> None:
        """Raise StateError if the gradient of parameter `i` is a sum over the ranks, or has one as a summand."""
        if i in self.sums and self.parameters[i].grad is self._views[i]:
            raise StateError(
                f"the gradient of {self.names[i]} is a sum over the ranks, which would be summed again: with op='sum', "
                "clear the gradients before each backward, by the module's zero_grad() or with set_to_none=True, and "
                "accumulate in no_sync()"
            )

    @torch.no_grad()
    def store(self, i: int) -> None:
        """Move the gradient of parameter `i` to the block, or zeros if there is none."""
        self._allocate()
        self.refuse_sum(i)
        parameter, view = self.parameters[i], self._views[i]
        gradient = parameter.grad
        if gradient is None:
            view.zero_()
        elif gradient is not view:
            parameter.grad = view.copy_(gradient)
        if gradient is not view:
            self.sums.discard(i)

    @torch.no_grad()
    def start(self, call: Callable[[torch.Tensor], Work[Any]]) -> None:
        """Start the allreduce."""
        memory = self._allocate()
        for i in range(len(self.parameters)):
            self.store(i)
        self._absent = [i for i, parameter in enumerate(self.parameters) if parameter.grad is None]
        flags = [parameter.grad is not None for parameter in self.parameters]
        memory[self.count :].copy_(torch.tensor(flags, dtype=memory.dtype, device="cpu"))
        self._versions = [view._version for view in self._views]
        self.work = call(memory)

    @torch.no_grad()
    def finish(self, op: str) -> None:
        """Wait for the allreduce. The gradients are means or sums then."""
        work, self.work = self.work, None
        if work is None:
            return
        work.wait()
        changed = [
            name
            for name, view, version in zip(self.names, self._views, self._versions, strict=True)
            if view._version != version
        ]
        torch.autograd.graph.increment_version(self._views)
        if changed:
            raise StateError(
                f"the gradient of {changed[0]} was changed during its allreduce, and is invalid: change gradients "
                "after backward()"
            )
        if self._absent:  # else there is nothing to read, which would wait for a GPU
            assert self._memory is not None
            used = self._memory[self.count :].tolist()
            for i in self._absent:
                if used[i] > 0:
                    self.parameters[i].grad = self._views[i]
        if op == "sum":
            self.sums = set(range(len(self.parameters)))

    def abandon(self) -> None:
        """Give up the call in flight, and the memory that it writes to."""
        self.work = None
        self._memory = None
        self._views = []
        self.sums.clear()


class _Averager:
    """The blocks of a module. Hooks of the parameters hold weak references to it, and are removed with it."""

    def __init__(self, named: Named, count: int, op: _Op, ranks: KeptGroup) -> None:
        _check_parameters(named, count)
        own(self, named)
        self._op, self._ranks = op, ranks
        self.blocks = [_Block(part) for part in _cut(named, count)]
        self.local = False
        self._next = -1  # the block to start next; they start from the last
        self._pass_end: Any = None  # weak reference to the end of the current backward pass; None outside of one
        self._joins = groups.joins  # joins of the ranks, after which the parameters were equal
        hooks: list[Any] = []
        this = weakref.ref(self)
        for b, block in enumerate(self.blocks):
            for i, parameter in enumerate(block.parameters):
                trainable = parameter.requires_grad
                parameter.requires_grad_(True)  # torch requires this for hooks; the parameter may be unfrozen later
                hook = functools.partial(_on_gradient, this, b, i)
                hooks.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
                parameter.requires_grad_(trainable)
        weakref.finalize(self, _remove, hooks).atexit = False

    def check(self, module: torch.nn.Module) -> None:
        """Raise StateError if the parameters of the module are not those of the blocks, or lie elsewhere."""
        found = list(module.parameters())
        expected = [(parameter, place) for block in self.blocks for parameter, place in self._places(block)]
        if len(found) == len(expected) and all(
            one is other and one.data_ptr() == place for one, (other, place) in zip(found, expected, strict=True)
        ):
            return
        raise StateError(
            "parameters of the BlockSequential were added, replaced or moved, and their gradients would not be "
            "averaged: make a new BlockSequential of the modules, convert or move the whole module, and load state "
            "without assign=True"
        )

    @staticmethod
    def _places(block: _Block) -> Iterable[tuple[torch.Tensor, int]]:
        return zip(block.parameters, block.places, strict=True)

    @uncompiled
    def on_gradient(self, b: int, i: int) -> None:
        """Record that backward finished the gradient of parameter `i` of block `b`; start blocks that are ready."""
        block = self.blocks[b]
        gradient = block.parameters[i].grad
        if gradient is None:
            return
        if gradient.layout is not torch.strided:
            raise DTypeError(f"the gradient of {block.names[i]} is sparse: make the layer with sparse=False")
        if gradient.requires_grad:
            raise StateError(
                f"the gradient of {block.names[i]} has a graph (create_graph=True), which a BlockSequential would cut: "
                "use a Sequential and a DistributedOptimizer, or torch.autograd.grad"
            )
        if not self._in_pass():
            self._refuse_failed_pass()
        elif block.work is not None:
            raise StateError(
                f"one backward reached {block.names[i]} twice (a checkpointed layer that the model uses twice), during "
                "its allreduce: checkpoint with use_reentrant=False"
            )
        if self.local:
            block.refuse_sum(i)
            return
        if not self._in_pass():
            self._pass_end = _backward.join(self)
            self._begin()
        block.store(i)
        block.waiting.discard(i)
        self._start_blocks(lambda block: not block.waiting)

    @uncompiled
    def before_end(self) -> None:
        """Start the rest at the end of backward."""
        self._start_blocks(lambda _: True)

    @uncompiled
    def at_end(self) -> None:
        """Wait for all blocks at the end of backward."""
        self._pass_end = None
        failures = []
        for block in reversed(self.blocks):
            try:
                block.finish(self._op)
            except Exception as failure:
                failures.append(failure)
                block.abandon()
        if failures:
            raise failures[0]

    def synchronize(self) -> None:
        """Average the gradients as they are."""
        self._refuse_failed_pass()
        for block in self.blocks:
            for i in range(len(block.parameters)):
                block.refuse_sum(i)
        self._begin()
        try:
            self.before_end()
        except BaseException:
            self.restart(abandon=True)
            raise
        self.at_end()

    def restart(self, abandon: bool = False) -> None:
        """Start over with cleared gradients, also if the last backward pass failed."""
        if abandon or self._pass_end is not None:
            self._pass_end = None
            for block in self.blocks:
                block.abandon()
        for block in self.blocks:
            block.sums.clear()

    def parameters_broadcast(self, places: Container[int]) -> None:
        """After a `join`: go on, if the tensors at these addresses, now equal on all ranks, are the parameters."""
        if all(place in places for block in self.blocks for place in block.places):
            self._joins = groups.joins

    def _in_pass(self) -> bool:
        return self._pass_end is not None and self._pass_end() is not None

    def _refuse_failed_pass(self) -> None:
        if self._pass_end is not None:
            raise StateError(
                "the previous backward pass failed, and other ranks may wait for its allreduces: call zero_grad() of "
                "the BlockSequential on all ranks"
            )

    def _begin(self) -> None:
        if self._joins != groups.joins and self._ranks.group is None:
            raise StateError(
                "the ranks have joined, and may have made different numbers of steps: make their parameters equal with "
                "broadcast_parameters(model, last), where last = dl_comm.join()"
            )
        for block in self.blocks:
            block.begin()
        self._next = len(self.blocks) - 1

    def _start_blocks(self, may_start: Callable[[_Block], bool]) -> None:
        while self._next >= 0 and may_start(self.blocks[self._next]):
            block = self.blocks[self._next]
            name = f"gradients of BlockSequential, block {self._next}"
            self._next -= 1
            if block.trainable:
                block.start(functools.partial(self._call, name))

    def _call(self, name: str, memory: torch.Tensor) -> Work[Any]:
        started = allreduce(memory, self._op, out=memory, async_op=True, group=self._ranks.group, name=name)
        return cast("Work[Any]", started)


def _on_gradient(averager: weakref.ref[_Averager], b: int, i: int, _: torch.Tensor) -> None:
    live = averager()
    if live is not None:
        live.on_gradient(b, i)


def _remove(hooks: list[Any]) -> None:
    for hook in hooks:
        hook.remove()


def _check_parameters(named: Named, count: int) -> None:
    if len(named) < count:
        raise ArgumentError(
            f"blocks is {count}, and the modules have {len(named)} parameters: give at least one to each"
        )
    memory: dict[int, str] = {}
    first, like = named[0]
    for name, parameter in named:
        refuse_lazy(parameter, name)
        if not parameter.is_floating_point() or parameter.dtype != like.dtype:
            raise DTypeError(
                f"{name} is of {parameter.dtype}, and {first} of {like.dtype}: the parameters of a BlockSequential "
                "have one floating-point dtype; convert them, or make one for the layers of each"
            )
        if parameter.device != like.device or parameter.layout is not torch.strided:
            raise ArgumentError(
                f"{name} is {parameter.layout} on {parameter.device}, and {first} {like.layout} on {like.device}: the "
                "parameters of a BlockSequential are dense, on one device"
            )
        place = parameter.data_ptr()
        if place and memory.setdefault(place, name) != name:
            raise ArgumentError(f"{memory[place]} and {name} share memory: use the same parameter in both places")


def _cut(named: Named, count: int) -> list[Named]:
    """Cut parameters into contiguous parts of about equal sizes, none of them empty."""
    total = sum(parameter.numel() for _, parameter in named)
    parts: list[list[tuple[str, torch.Tensor]]] = [[] for _ in range(count)]
    before, current = 0, -1
    for i, (name, parameter) in enumerate(named):
        wanted = int((before + parameter.numel() / 2) * count / total) if total else 0
        # The parameters after this one must be enough for the parts after its part.
        current = min(max(wanted, current, count - (len(named) - i)), current + 1, count - 1)
        parts[current].append((name, parameter))
        before += parameter.numel()
    return list(parts)
