"""One bucket of gradients: its call, its memory, and what it does with the means; `_buckets` says which bucket when.

Thread rule: that of the averager, one thread at a time.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Sequence
from time import perf_counter
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

import dl_comm
from dl_comm import StateError
from dl_comm.torch import _ops
from dl_comm.torch._arrangement import Named
from dl_comm.torch._gradient import Gradient, move, standing
from dl_comm.torch._views import NO_MEMORY, Views, can_hold


class Owed:
    """Means that the steps have yet to apply: those of steps before, which the step that got them could not.

    Only a team whose schedule lets averages end later makes them; see `dl_comm.config_team`.
    """

    def __init__(self) -> None:
        self._means = WeakTensorKeyDictionary()

    def add(self, parameter: torch.Tensor, mean: torch.Tensor) -> None:
        """Keep a mean for the next step."""
        before = self._means.get(parameter)  # type: ignore[no-untyped-call]
        self._means[parameter] = mean if before is None else before + mean

    def pay(self) -> None:
        """Add what is kept to the gradients."""
        for parameter, mean in list(self._means.items()):  # type: ignore[no-untyped-call]
            parameter.grad = mean if parameter.grad is None else parameter.grad.add_(mean)
        self._means.clear()


# What follows the flags in `used`: the number of steps modulo this, one-hot, whose mean shows whether all agree.
STEPS = 3


class Bucket:
    """Parameters that one call averages, and the state of that call in this round (from one step to the next)."""

    def __init__(self, index: int, named: Named, first: int = 0, begun: bool = False, as_views: bool = False) -> None:
        """Make bucket number `index` of these parameters, of which the first is number `first` of all.

        `begun`: backward has worked on them already; `as_views`: their gradients lie in shared memory if they can.
        """
        self.index = index
        self.first = first
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        self.lent = False  # the team may keep what the last call was given
        self._late = begun
        self._on_gpu = self.parameters[0].device.type != "cpu"  # as are all of a bucket
        self._labels = "\n".join([*self.names, "(which parameters have a gradient)"])
        self._steps = 0
        # One tensor elsewhere makes the core copy all that are averaged with it, so it is all or none.
        self._as_views = as_views and not begun and all(map(can_hold, self.parameters))
        self._memory: Views | None = None
        self.reset()
        if begun:
            self._standing.clear()

    def reset(self) -> None:
        """Begin a round; a call that is under way is left to end by itself."""
        self.passes = [0] * len(self.parameters)
        self.waiting = len(self.parameters)
        self.waited = 0.0  # seconds
        self._call: int | None = None
        self._note: int | None = None  # of `_used`, where it goes by itself
        self._streams: set[Any] = set()  # on which backward has made the gradients
        self._sent: list[Gradient] = []
        self._used = torch.empty(0)
        places = [None] * len(self.parameters) if self._memory is None else self._memory.tensors
        each = enumerate(zip(self.parameters, places, strict=True))
        # A gradient in its place is averaged there, whoever else refers to it.
        self._standing = {i: None if p.grad is place else standing(p) for i, (p, place) in each}

    def came(self) -> None:
        """Take note that backward has made a gradient, on the stream that is current."""
        if self._on_gpu:
            self._streams.add(torch.cuda.current_stream(self.parameters[0].device))

    def settle(self, i: int) -> None:
        """Move the gradient of parameter `i`, which backward has made or added to, to its place in shared memory.

        Not to be called while the team is given the gradients' memory for good: see `dl_comm.config_team`.
        """
        parameter = self.parameters[i]
        memory = self._views()
        if memory is None or parameter.grad is None or parameter.grad is self._standing.get(i):
            return
        place = memory.place(i, parameter.grad)
        if place is not None:
            move(parameter, place)

    def start(self, team: int, call_name: str, owner: int, sparse_as_dense: bool, steps: int) -> None:
        """Start the average of the gradients that are there, with zeros for the others, after so many steps."""
        if self._on_gpu:
            current = torch.cuda.current_stream(self.parameters[0].device)
            for stream in self._streams - {current}:
                current.wait_stream(stream)
        # A bucket that is there for this step only has no next call to leave anything to.
        self.lent = lent = not self._late and _ops.carries(team, owner)
        memory = self._views() if not lent else self._memory
        self._sent = []
        for i, (name, parameter) in enumerate(zip(self.names, self.parameters, strict=True)):
            place = None if memory is None else memory.place(i, parameter.grad)
            self._sent.append(Gradient(name, parameter, self._standing.get(i), sparse_as_dense, place, lent))
        self._steps = steps
        flags = [not gradient.absent for gradient in self._sent]
        flags.extend(steps % STEPS == i for i in range(STEPS))
        self._used = torch.tensor(flags, dtype=torch.float32)
        if lent:
            # The team keeps what it is given past this step, and gives other memory for it: gradients that come back to
            # one place would overwrite it. So they lie where autograd puts them as long as the schedule wants that.
            self._memory = None
        elif memory is not None:
            self._used = memory.used.copy_(self._used)
        options = (_ops.PART if self.index > 0 else 0) | (_ops.KEEP if self.lent else 0)
        wires = [*self._wires(), self._used]
        if self._on_gpu and not lent:
            # Read on the host, which would have to wait for the GPU: it goes by itself.
            wires.pop()
        elif self._on_gpu:
            wires[-1] = self._used = self._used.to(wires[0].device)
        with self._beside():
            self._call = _ops.average_start(wires, team, call_name, self._labels, options, owner)
        if self._on_gpu and not lent:
            label = "(which parameters have a gradient)"
            self._note = _ops.start_note(self._used, team, f"{call_name}.used", label, owner)

    def finish(self, discarding: bool, owed: Owed) -> None:
        """Wait for the average, if it was started, and put it where the gradients are.

        When the team gives the mean of an earlier step, that goes there, or, when there is no step to take it
        (`discarding`: the gradients may be gone, or this fails), is owed to the next one.

        Raises StateError when gradients were changed meanwhile, or, on all ranks, when they differ in their steps.
        """
        call, self._call = self._call, None
        if call is None:
            return
        note, self._note = self._note, None
        before: list[torch.Tensor] = []
        own, share = 1.0, 0.0
        try:
            since = perf_counter()
            try:
                before, own, share = _ops.wait(call)
            finally:
                if note is not None:
                    _ops.wait_note(note)
            self.waited = perf_counter() - since
            for gradient in self._sent:
                gradient.expect_unchanged(discarding)
        except Exception:
            self._memory = None
            self._owe(before, share, owed)
            if self.lent:
                self._replace(None for _ in self._sent)
            raise
        if not before:
            torch.autograd.graph.increment_version(self._wires())
            *shares, at_0, at_1, at_2 = self._used.tolist()
            for gradient, used in zip(self._sent, shares, strict=True):
                gradient.finish(used > 0)
            # The means are the same on all ranks, and so is what they find.
            if max(at_0, at_1, at_2) < 1 - 0.5 / dl_comm.get_nranks():
                raise StateError(
                    f"the ranks have made different numbers of steps with this optimizer (this one {self._steps}), so "
                    "that their parameters differ: call step() on all ranks or on none (decide by "
                    "dl_comm.torch.average(loss), which is the same on all, not by this rank's loss)"
                )
        elif discarding:
            self._owe(before, share, owed)
            self._replace(None for _ in self._sent)
        else:
            wires = [*self._wires(), self._used]
            if share != 1.0:
                torch._foreach_mul_(before, share)
            if own > 0.0:
                torch._foreach_add_(before, wires, alpha=own)
            self._replace(self._means(before))

    def drain(self, team: int, call_name: str, owner: int, owed: Owed) -> None:
        """Get what the last call has left to the next one, which will not come."""
        if not self.lent:
            return
        blanks = zip(self.names, self.parameters, strict=True)
        self._sent = [Gradient(name, _blank(parameter), None, False) for name, parameter in blanks]
        wires = [*self._wires(), torch.zeros(len(self._sent) + STEPS, device=self.parameters[0].device)]
        _ops.wait(_ops.average_start(wires, team, call_name, self._labels, _ops.PART, owner))
        self._owe(wires, 1.0, owed)
        self.lent = False

    def drop(self) -> None:
        """Do not wait for a call that is under way; the gradients that it will write to are no more the parameters'."""
        call, self._call = self._call, None
        note, self._note = self._note, None
        if note is not None:
            _ops.forget_note(note)
        if call is not None:
            if self._on_gpu:
                beside = _stream_beside(self.parameters[0].device)
                for wire in self._wires():
                    wire.record_stream(beside)  # their memory is not another tensor's before the average has ended
            _ops.forget(call)
            self._memory = None
            for gradient in self._sent:
                gradient.abandon()

    def _beside(self) -> contextlib.AbstractContextManager[Any]:
        """On a GPU: a stream beside backward's, on which the average of what backward has made so far starts.

        Whoever starts a call has its stream wait for the result: backward's must not.
        """
        if not self._on_gpu:
            return contextlib.nullcontext()
        device = self.parameters[0].device
        beside = _stream_beside(device)
        beside.wait_stream(torch.cuda.current_stream(device))
        return torch.cuda.stream(beside)

    def _views(self) -> Views | None:
        if self._memory is None and self._as_views:
            try:
                self._memory = Views(self.parameters, len(self.parameters) + STEPS)
            except NO_MEMORY:
                self._as_views = False  # the gradients lie where autograd puts them: slower, that is all
        return self._memory

    def _means(self, results: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """The means of the parameters of which some rank had a gradient."""
        used = results[-1].tolist()[:-STEPS]
        each = zip(self._sent, results[:-1], used, strict=True)
        return [gradient.tensor(mean) if is_used > 0 else None for gradient, mean, is_used in each]

    def _owe(self, before: Sequence[torch.Tensor], share: float, owed: Owed) -> None:
        if before and share > 0.0:
            for parameter, mean in zip(self.parameters, self._means(before), strict=True):
                if mean is not None:
                    owed.add(parameter, mean if share == 1.0 else mean * share)

    def _replace(self, means: Iterable[torch.Tensor | None]) -> None:
        for gradient, mean in zip(self._sent, means, strict=True):
            gradient.replace(mean)

    def _wires(self) -> list[torch.Tensor]:
        return [gradient.wire for gradient in self._sent]


@functools.cache
def _stream_beside(device: torch.device) -> Any:
    """The stream of this GPU on which averages start."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _blank(parameter: torch.Tensor) -> torch.Tensor:
    """A parameter of the same kind without a gradient."""
    return torch.empty_like(parameter, memory_format=torch.contiguous_format)
