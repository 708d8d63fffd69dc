"""Gradients on their way: buckets of parameters that are averaged together while the rest of backward runs.

The rules that keep all ranks in step, whatever order autograd works in:
- buckets hold the parameters in the order in which the first backward of rank 0 has finished them, and at first in
  reverse order of registration, which is near to that (`_arrangement`);
- a bucket's average starts when its last gradient is there and all earlier buckets have been started;
- each bucket carries a vector that says which parameters have a gradient, so that ranks may differ in that.

Thread rule: as autograd calls the hooks of CPU parameters, one thread at a time.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

import dl_comm
from dl_comm import ArgumentError, StateError
from dl_comm._process import new_owner
from dl_comm.torch import _ops
from dl_comm.torch._arrangement import Arrangement, Named, by_device
from dl_comm.torch._gradient import Gradient, knows_uses, move, standing
from dl_comm.torch._views import NO_MEMORY, Views, can_hold

# Who averages which parameter; neither is kept alive.
_owners = WeakTensorKeyDictionary()


@dataclass(frozen=True)
class Communication:
    """What the averages of an optimizer's last step took, in seconds, on this rank."""

    exposed: float
    """In which `synchronize()`, `step()` or `zero_grad()` waited for averages: what they cost the step."""
    busy: float
    """In which at least one average was under way, from its start to its end; most of it is behind backward."""


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

    def start(self, team: int, call_name: str, owner: int, sparse_as_dense: bool) -> None:
        """Start the average of the gradients that are there, with zeros for the others."""
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
        self._used = torch.tensor([float(not gradient.absent) for gradient in self._sent])
        if lent:
            # The team keeps what it is given past this step, and gives other memory for it: gradients that come back to
            # one place would overwrite it. So they lie where autograd puts them as long as the schedule wants that.
            self._memory = None
        elif memory is not None:
            self._used = memory.used.copy_(self._used)
        flags = (_ops.PART if self.index > 0 else 0) | (_ops.KEEP if self.lent else 0)
        wires = [*self._wires(), self._used]
        if self._on_gpu and not lent:
            # Read on the host, which would have to wait for the GPU: it goes by itself.
            wires.pop()
        elif self._on_gpu:
            wires[-1] = self._used = self._used.to(wires[0].device)
        with self._beside():
            self._call = _ops.average_start(wires, team, call_name, self._labels, flags, owner)
        if self._on_gpu and not lent:
            label = "(which parameters have a gradient)"
            self._note = _ops.start_note(self._used, team, f"{call_name}.used", label, owner)

    def finish(self, discarding: bool, owed: Owed) -> None:
        """Wait for the average, if it was started, and put it where the gradients are.

        When the team gives the mean of an earlier step, that goes there, or, when there is no step to take it
        (`discarding`: the gradients may be gone, or this fails), is owed to the next one.

        Raises StateError when gradients were changed meanwhile.
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
            for gradient, used in zip(self._sent, self._used.tolist(), strict=True):
                gradient.finish(used > 0)
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
        wires = [*self._wires(), torch.zeros(len(self._sent), device=self.parameters[0].device)]
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
                self._memory = Views(self.parameters)
            except NO_MEMORY:
                self._as_views = False  # the gradients lie where autograd puts them: slower, that is all
        return self._memory

    def _means(self, results: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """The means of the parameters of which some rank had a gradient."""
        used = results[-1].tolist()
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


class Averager:
    """Averages the gradients of a list of parameters over all ranks, during backward.

    It holds the parameters; their hooks hold it weakly and go when it goes.
    """

    def __init__(
        self, team: int, name: str, bucket_bytes: int | None, passes: int, sparse_as_dense: bool, as_views: bool
    ) -> None:
        """Average on `team` after `passes` backward passes; `name` must be the same on all ranks.

        `bucket_bytes`: None finds a size. `as_views`: gradients lie in memory that the ranks of a host share.
        """
        self.team = team
        self.averaged = False  # since the last gradient came
        self.busy = False  # gradients have come since the last round ended
        self.skip = False  # the next step takes the gradients as they are
        self.names: dict[int, str] = {}  # of the parameters, by id
        self._name = name
        self._arrangement = Arrangement(bucket_bytes)
        self._wants_views = as_views
        self._as_views = False  # where it spares copies
        self._views_now = False  # in this round
        self._passes = passes
        self._sparse_as_dense = sparse_as_dense
        self.communication = Communication(0.0, 0.0)
        self._began = self._ended = 0.0  # when the first and the last gradient of this round came
        self._plan: Named = []
        self._frozen: Named = []
        self._buckets: list[Bucket] = []
        self._hooks: list[Any] = []
        self._next = 0  # the bucket to start next
        self.owner = new_owner(self, team)
        self._owed = Owed()
        self._strays: list[tuple[str, torch.Tensor]] = []  # frozen parameters that got a gradient in this round
        self._local = False
        weakref.finalize(self, _end, self._hooks, self._buckets, self._arrangement).atexit = False

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def watch(self, named: Named, frozen: Named) -> None:
        """Average the parameters `named` from the next round on; leaves a round that is under way as it is.

        `frozen` are the optimizer's other parameters, which should get no gradients.
        """
        if self.busy or (_same(named, self._plan) and _same(frozen, self._frozen)):
            return
        self._lay_out(list(named), list(frozen))

    def _lay_out(self, named: Named, frozen: Named) -> None:
        """Make buckets of the parameters, unless they are there, and watch for gradients."""
        # Between hosts averages go through the slots, and one rank has none: a copy would be for nothing.
        self._as_views = self._wants_views and knows_uses() and dl_comm.hosts() == 1 and dl_comm.get_nranks() > 1
        parts = self._arrangement.deal(named)
        these = [pair for part in parts for pair in part]
        there = [(name, p) for bucket in self._buckets for name, p in zip(bucket.names, bucket.parameters, strict=True)]
        sizes = [len(bucket.parameters) for bucket in self._buckets]
        if _same(these, there) and _same(frozen, self._frozen) and [len(part) for part in parts] == sizes:
            self._plan = named
            return
        for bucket in self._buckets:
            bucket.drain(self.team, f"{self._name}.{bucket.index}", self.owner, self._owed)
        _close(self._hooks, self._buckets)
        self._plan, self._frozen = named, frozen
        me = weakref.ref(self)
        first = 0
        for index, part in enumerate(parts):
            self._buckets.append(Bucket(index, part, first, as_views=self._as_views))
            first += len(part)
            for i, (_, parameter) in enumerate(part):
                hook = functools.partial(_on_gradient, me, index, i)
                self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
        for name, parameter in frozen:
            if parameter.is_floating_point() or parameter.is_complex():
                parameter.requires_grad_(True)  # torch takes no hook otherwise
                hook = functools.partial(_on_stray, me, name)
                self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
                parameter.requires_grad_(False)

    def expect_free(self, named: Named) -> None:
        """Raise ArgumentError when another averager, still in use, has one of these parameters."""
        taken = _taken(self, named)
        if taken is not None:
            gc.collect()  # a forgotten optimizer may be part of a cycle
            taken = _taken(self, named)
        if taken is not None:
            raise ArgumentError(
                f"another DistributedOptimizer averages {taken} already: give each parameter to one, or drop (del) the "
                "other optimizer and its learning rate schedulers first"
            )

    def claim(self, named: Named) -> None:
        """Keep these parameters for this averager. Raises as `expect_free`."""
        self.expect_free(named)
        for _, parameter in named:
            _owners[parameter] = weakref.ref(self)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def begin(self) -> None:
        """Begin a round with the gradients that stand now; leaves one that is under way as it is."""
        if not self.busy:
            self._reset()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def synchronize(self, named: Named, frozen: Named, discarding: bool = False) -> None:
        """Average what has not been started yet, wait for all, and begin a new round, as `watch` does.

        Raises StateError when gradients were changed after their average started (`discarding`: they may be gone), or a
        parameter that is frozen has got one.
        """
        planned = {id(parameter) for _, parameter in self._plan}
        # Parameters that were unfrozen or added, on all ranks, after this round's plan was made.
        late = [(name, parameter) for name, parameter in named if id(parameter) not in planned]
        buckets = list(self._buckets)
        for part in by_device(late):
            buckets.append(Bucket(len(buckets), part, len(self._plan), begun=True))
        strays = [name for name, parameter in self._strays if not parameter.requires_grad]
        self._strays.clear()
        failure: Exception | None = None
        moved = False
        try:
            with torch.no_grad():
                for bucket in buckets[self._next :]:
                    self._start(bucket)
                for bucket in buckets:
                    try:
                        bucket.finish(discarding, self._owed)
                    except Exception as error:
                        failure = failure or error
                exposed = sum(bucket.waited for bucket in buckets)
                self.communication = Communication(exposed, _ops.busy(self.owner))
                try:
                    moved = self._arrangement.hear()
                except Exception as error:
                    failure = failure or error
                self._arrangement.took(self._ended - self._began + exposed)
        finally:
            for bucket in buckets:
                bucket.drop()
            self._reset()
        if moved:
            self._lay_out(self._plan, self._frozen)
        if (discarding or isinstance(failure, StateError)) and any(bucket.lent for bucket in buckets):
            # What the calls have left is of gradients that are thrown away, or were changed under way.
            _ops.discard(self.team, self.owner)
        if failure is None and strays and not discarding:
            # Other ranks may not have one: there is no telling, so it cannot be averaged.
            failure = StateError(
                f"{strays[0]} got a gradient, but was frozen before backward and is frozen now: its gradient is that "
                "of this rank alone. Unfreeze parameters until step() is done, or clear the gradient"
            )
        if failure is not None:
            raise failure
        if not discarding:
            with torch.no_grad():
                self._owed.pay()
        self.averaged = True
        self.watch(named, frozen)

    @contextlib.contextmanager
    def local(self) -> Iterator[None]:
        """Leave the gradients of backward passes in this context to the next pass outside it."""
        before, self._local = self._local, True
        try:
            yield
        finally:
            self._local = before

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def gradient_came(self, index: int, i: int) -> None:
        """Take note that backward has finished the gradient of parameter `i` of bucket `index`."""
        bucket = self._buckets[index]
        self._ended = perf_counter()
        if not self.busy:
            self._began = self._ended
            self._views_now = self._as_views and not _ops.carries(self.team, self.owner)
        if index < self._next or bucket.passes[i] >= self._passes:
            self._reset()
            raise StateError(
                f"backward changed the gradient of {bucket.names[i]} while it was averaged, the gradients are invalid "
                "now: call the optimizer's step(), synchronize() or zero_grad() after each backward, give "
                "DistributedOptimizer backward_passes_per_step, or use no_sync(); where one backward comes by it twice "
                "(a checkpointed layer that the model uses twice), checkpoint with use_reentrant=False"
            )
        self.averaged = False
        if self._views_now:
            bucket.settle(i)
        if self._local:
            return
        self.busy = True
        bucket.came()
        self._arrangement.came(bucket.first + i)
        bucket.passes[i] += 1
        if bucket.passes[i] < self._passes:
            return
        bucket.waiting -= 1
        try:
            while self._next < len(self._buckets) and self._buckets[self._next].waiting == 0:
                self._start(self._buckets[self._next])
        except BaseException:
            self._reset()
            raise

    def stray_came(self, name: str, parameter: torch.Tensor) -> None:
        """Take note that a parameter that was frozen has got a gradient."""
        self._strays.append((name, parameter))

    def _start(self, bucket: Bucket) -> None:
        with torch.no_grad():
            bucket.start(self.team, f"{self._name}.{bucket.index}", self.owner, self._sparse_as_dense)
        self._next = bucket.index + 1
        if self._next == len(self._buckets):
            self._arrangement.tell(self.team, self._name, self.owner)

    def _reset(self) -> None:
        for bucket in self._buckets:
            bucket.drop()
            bucket.reset()
        self._arrangement.drop()
        self._next = 0
        self.busy = False


def _on_gradient(averager: weakref.ref[Averager], index: int, i: int, _: torch.Tensor) -> None:
    me = averager()
    if me is not None:
        me.gradient_came(index, i)


def _on_stray(averager: weakref.ref[Averager], name: str, parameter: torch.Tensor) -> None:
    me = averager()
    if me is not None:
        me.stray_came(name, parameter)


def _taken(averager: Averager, named: Named) -> str | None:
    for name, parameter in named:
        owner = _owners.get(parameter)  # type: ignore[no-untyped-call]
        if owner is not None and owner() not in (None, averager):
            return name
    return None


def _close(hooks: list[Any], buckets: list[Bucket]) -> None:
    while hooks:
        hooks.pop().remove()
    while buckets:
        buckets.pop().drop()


def _end(hooks: list[Any], buckets: list[Bucket], arrangement: Arrangement) -> None:
    _close(hooks, buckets)
    arrangement.drop()


def _same(these: Named, those: Named) -> bool:
    return len(these) == len(those) and all(a is b for (_, a), (_, b) in zip(these, those, strict=True))
