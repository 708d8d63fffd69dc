"""Gradients on their way: buckets of parameters that are averaged together while the rest of backward runs.

The rules that keep all ranks in step, whatever order autograd works in:
- buckets hold the parameters in the order in which the first backward of rank 0 has finished them, and at first in
  reverse order of registration, which is near to that (`_arrangement`);
- a bucket's average starts when its last gradient is there and all earlier buckets have been started;
- each bucket carries a vector that says which parameters have a gradient, so that ranks may differ in that;
- a round of averages ends with the backward pass that has started it (`_backward`), or with the last one of
  `passes`; on a schedule whose averages end later, and on a rank whose backward had no gradient, with `step()`.

Thread rule: as autograd calls the hooks of CPU parameters, one thread at a time.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

import dl_comm
from dl_comm import ArgumentError, StateError
from dl_comm._process import new_owner
from dl_comm.torch import _backward, _ops
from dl_comm.torch._arrangement import Arrangement, Named, by_device
from dl_comm.torch._bucket import Bucket, Owed
from dl_comm.torch._gradient import knows_uses

# Who averages which parameter; neither is kept alive.
_owners = WeakTensorKeyDictionary()


@dataclass(frozen=True)
class Communication:
    """What the averages of an optimizer's last step took, in seconds, on this rank."""

    exposed: float
    """In which the end of backward, or `step()`, waited for averages: what they cost the step."""
    busy: float
    """In which at least one average was under way, from its start to its end; most of it is behind backward."""


class Averager:
    """Averages the gradients of a list of parameters over all ranks, during backward.

    It holds the parameters; their hooks hold it weakly and go when it goes.
    """

    def __init__(
        self,
        parameters: Callable[[], tuple[Named, Named]],
        team: int,
        name: str,
        bucket_bytes: int | None,
        passes: int,
        sparse_as_dense: bool,
        as_views: bool,
    ) -> None:
        """Average on `team` after `passes` backward passes; `name` must be the same on all ranks.

        `parameters` gives those to average, as they are now, and the frozen ones, which should get no gradients.
        `bucket_bytes`: None finds a size. `as_views`: gradients lie in memory that the ranks of a host share.
        """
        self.team = team
        self.averaged = False  # since the last gradient came or the last step was made
        self.busy = False  # gradients have come since the last round ended
        self.skip = False  # the next step takes the gradients as they are
        self.steps = 0  # that took averaged gradients
        self.parameters = parameters
        self.broadcasts = True  # parameters that come later
        self._name = name
        self._arrangement = Arrangement(bucket_bytes)
        self._wants_views = as_views
        self._as_views = False  # where it spares copies
        self._deferred = False  # a schedule lets the averages of this round end after backward
        self._passes = passes
        self._passed = 0  # backward passes of this round that have ended
        self._end: Any = None  # a reference to the end of the backward pass that has begun; None when it has ended
        self._sparse_as_dense = sparse_as_dense
        self.communication = Communication(0.0, 0.0)
        self._began = self._ended = 0.0  # when the first and the last gradient of this round came
        self._plan: Named = []
        self._frozen: Named = []
        self._buckets: list[Bucket] = []
        self._without: list[torch.Tensor] = []  # parameters that had no gradient at the end of the last round
        self._round: list[Bucket] = []  # all buckets of this round, once all are started
        self._hooks: list[Any] = []
        self._next = 0  # the bucket to start next
        self.owner = new_owner(self, team)
        self._owed = Owed()
        self._strays: list[tuple[str, torch.Tensor]] = []  # frozen parameters that got a gradient in this round
        self._local = False
        weakref.finalize(self, _end, self._hooks, self._buckets, self._arrangement).atexit = False

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def watch(self) -> None:
        """Average the parameters that there are from the next round on; leaves a round that is under way as it is."""
        named, frozen = self.parameters()
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

    def expect_free(self) -> None:
        """Raise ArgumentError when another averager, still in use, has one of the parameters."""
        named, _ = self.parameters()
        taken = _taken(self, named)
        if taken is not None:
            gc.collect()  # a forgotten optimizer may be part of a cycle
            taken = _taken(self, named)
        if taken is not None:
            raise ArgumentError(
                f"another DistributedOptimizer averages {taken} already: give each parameter to one, or drop (del) the "
                "other optimizer and its learning rate schedulers first"
            )

    def claim(self) -> None:
        """Keep the parameters for this averager. Raises as `expect_free`."""
        self.expect_free()
        for _, parameter in self.parameters()[0]:
            _owners[parameter] = weakref.ref(self)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def begin(self) -> None:
        """Begin a round with the gradients that stand now; leaves one that is under way as it is."""
        if not self.busy:
            self._reset()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def before_end(self) -> None:
        """Start what the backward pass that ends has not started, if it was the round's last one."""
        if self._passed + 1 == self._passes:
            self._start_rest()

    def _start_rest(self) -> None:
        named, _ = self.parameters()
        planned = {id(parameter) for _, parameter in self._plan}
        # Parameters that were unfrozen or added, on all ranks, after this round's plan was made.
        late = [(name, parameter) for name, parameter in named if id(parameter) not in planned]
        self._round = list(self._buckets)
        for part in by_device(late):
            self._round.append(Bucket(len(self._round), part, len(self._plan), begun=True))
        try:
            for bucket in self._round[self._next :]:
                self._start(bucket)
        except BaseException:
            self._reset()
            raise

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def at_end(self) -> None:
        """Wait for the averages, and begin a new round, if the backward pass that ends was the round's last one."""
        self._end = None
        self._passed += 1
        if self._passed == self._passes:
            self.synchronize()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def synchronize(self, discarding: bool = False) -> None:
        """Average what has not been started yet, wait for all, and begin a new round, as `watch` does.

        Raises StateError when gradients were changed after their average started (`discarding`: they may be gone), or a
        parameter that is frozen has got one.
        """
        if not self._round:
            self._start_rest()
        buckets = self._round
        strays = [name for name, parameter in self._strays if not parameter.requires_grad]
        self._strays.clear()
        failure: Exception | None = None
        moved = False
        try:
            with torch.no_grad():
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
        self._without = [parameter for _, parameter in self._plan if parameter.grad is None]
        self.watch()

    def synchronize_rest(self) -> None:
        """Average unless that was done, and no gradient was set by hand since where there was none."""
        if not self.averaged or any(parameter.grad is not None for parameter in self._without):
            self.synchronize()

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
        self._came()
        if index < self._next:
            deferred = self._deferred
            self._reset()
            raise StateError(
                f"backward changed the gradient of {bucket.names[i]} while it was averaged, the gradients are invalid "
                "now: "
                + (
                    f"on team {self.team}, whose schedule lets averages end after backward, call step() or zero_grad() "
                    "after each backward, give DistributedOptimizer backward_passes_per_step, or use no_sync()"
                    if deferred
                    else "one backward came by it twice (a checkpointed layer that the model uses twice): checkpoint "
                    "with use_reentrant=False"
                )
            )
        if self._as_views and not self._deferred:
            bucket.settle(i)
        if self._local:
            return
        self._join_backward()
        bucket.came()
        self._arrangement.came(bucket.first + i)
        bucket.passes[i] += 1
        if bucket.passes[i] != self._passes:
            return
        bucket.waiting -= 1
        try:
            while self._next < len(self._buckets) and self._buckets[self._next].waiting == 0:
                self._start(self._buckets[self._next])
        except BaseException:
            self._reset()
            raise

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def stray_came(self, name: str, parameter: torch.Tensor) -> None:
        """Take note that a parameter that was frozen has got a gradient."""
        self._came()
        self._strays.append((name, parameter))
        if not self._local:
            self._join_backward()

    def _came(self) -> None:
        self.averaged = False
        self._ended = perf_counter()
        if not self.busy:
            self._began = self._ended
            self._deferred = _ops.carries(self.team, self.owner)

    def _join_backward(self) -> None:
        """Begin a round, unless one is under way, that ends with this backward pass."""
        self.busy = True
        if self._deferred or (self._end is not None and self._end() is not None):
            return
        if self._end is not None:
            self._reset()
            raise StateError(
                "the backward pass before this one failed, and the other ranks may wait for its averages: call the "
                "optimizer's zero_grad() after a backward pass that failed"
            )
        self._end = _backward.join(self)

    def _start(self, bucket: Bucket) -> None:
        with torch.no_grad():
            bucket.start(self.team, f"{self._name}.{bucket.index}", self.owner, self._sparse_as_dense, self.steps)
        self._next = bucket.index + 1
        if self._next == len(self._buckets):
            self._arrangement.tell(self.team, self._name, self.owner)

    def _reset(self) -> None:
        for bucket in self._round[len(self._buckets) :]:
            bucket.drop()
        for bucket in self._buckets:
            bucket.drop()
            bucket.reset()
        self._arrangement.drop()
        self._round = []
        self._next = self._passed = 0
        self._end = None
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
