"""Gradients on their way: buckets of parameters that are averaged together while the rest of backward runs.

The rules that keep all ranks in step, whatever order autograd works in:
- buckets hold the parameters in the order in which the first backward of rank 0 has finished them, and at first in
  reverse order of registration, which is near to that (`_bucket_plan`);
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
from dl_comm.torch._bucket import Bucket, CarriedMeans
from dl_comm.torch._bucket_plan import BucketPlan, Named, group_by_device
from dl_comm.torch._gradient import can_count_references

# Who averages which parameter; neither is kept alive.
_owners = WeakTensorKeyDictionary()


@dataclass(frozen=True)
class Communication:
    """What the averages of an optimizer's last step took, in seconds, on this rank."""

    exposed: float
    """In which the end of backward, or `step()`, waited for averages: what they cost the step."""
    total: float
    """In which at least one average was under way, from its start to its end; most of it is behind backward."""


class Reducer:
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
        self.in_round = False  # gradients have come since the last round ended
        self.skip = False  # the next step takes the gradients as they are
        self.steps = 0  # that took averaged gradients
        self.parameters = parameters
        self.broadcasts = True  # parameters that come later
        self._name = name
        self._bucket_plan = BucketPlan(bucket_bytes)
        self._views_requested = as_views
        self._as_views = False  # where it spares copies
        self._deferred = False  # a schedule lets the averages of this round end after backward
        self._passes = passes
        self._passes_done = 0  # backward passes of this round that have ended
        self._pass_end: Any = None  # a reference to the end of the backward pass that has begun; None when it has ended
        self._sparse_as_dense = sparse_as_dense
        self.communication = Communication(0.0, 0.0)
        self._first_gradient = self._last_gradient = 0.0  # when the first and the last gradient of this round came
        self._planned: Named = []
        self._frozen: Named = []
        self._buckets: list[Bucket] = []
        self._without_gradient: list[torch.Tensor] = []  # parameters that had no gradient at the end of the last round
        self._round: list[Bucket] = []  # all buckets of this round, once all are started
        self._hooks: list[Any] = []
        self._next_bucket = 0  # the bucket to start next
        self.owner = new_owner(self, team)
        self._carried = CarriedMeans()
        self._frozen_with_grad: list[tuple[str, torch.Tensor]] = []  # in this round
        self._local = False
        weakref.finalize(self, _finalize, self._hooks, self._buckets, self._bucket_plan).atexit = False

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def register(self) -> None:
        """Average the parameters that there are from the next round on; leaves a round that is under way as it is."""
        named, frozen = self.parameters()
        if self.in_round or (_same(named, self._planned) and _same(frozen, self._frozen)):
            return
        self._build_buckets(list(named), list(frozen))

    def _build_buckets(self, named: Named, frozen: Named) -> None:
        """Make buckets of the parameters, unless they are there, and watch for gradients."""
        # Between hosts averages go through the slots, and one rank has none: a copy would be for nothing.
        self._as_views = (
            self._views_requested and can_count_references() and dl_comm.num_hosts() == 1 and dl_comm.get_nranks() > 1
        )
        parts = self._bucket_plan.assign(named)
        planned = [pair for part in parts for pair in part]
        present = [
            (name, p) for bucket in self._buckets for name, p in zip(bucket.names, bucket.parameters, strict=True)
        ]
        sizes = [len(bucket.parameters) for bucket in self._buckets]
        if _same(planned, present) and _same(frozen, self._frozen) and [len(part) for part in parts] == sizes:
            self._planned = named
            return
        for bucket in self._buckets:
            bucket.collect_carried(self.team, f"{self._name}.{bucket.index}", self.owner, self._carried)
        _close(self._hooks, self._buckets)
        self._planned, self._frozen = named, frozen
        self_ref = weakref.ref(self)
        first = 0
        for index, part in enumerate(parts):
            self._buckets.append(Bucket(index, part, first, as_views=self._as_views))
            first += len(part)
            for i, (_, parameter) in enumerate(part):
                hook = functools.partial(_on_gradient, self_ref, index, i)
                self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
        for name, parameter in frozen:
            if parameter.is_floating_point() or parameter.is_complex():
                parameter.requires_grad_(True)  # torch takes no hook otherwise
                hook = functools.partial(_on_frozen_gradient, self_ref, name)
                self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
                parameter.requires_grad_(False)

    def check_unowned(self) -> None:
        """Raise ArgumentError when another reducer, still in use, has one of the parameters."""
        named, _ = self.parameters()
        owned = _owned_elsewhere(self, named)
        if owned is not None:
            gc.collect()  # a forgotten optimizer may be part of a cycle
            owned = _owned_elsewhere(self, named)
        if owned is not None:
            raise ArgumentError(
                f"another DistributedOptimizer averages {owned} already: give each parameter to one, or drop (del) the "
                "other optimizer and its learning rate schedulers first"
            )

    def take_ownership(self) -> None:
        """Keep the parameters for this reducer. Raises as `check_unowned`."""
        self.check_unowned()
        for _, parameter in self.parameters()[0]:
            _owners[parameter] = weakref.ref(self)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def begin(self) -> None:
        """Begin a round with the gradients that stand now; leaves one that is under way as it is."""
        if not self.in_round:
            self._reset()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def before_end(self) -> None:
        """Start what the backward pass that ends has not started, if it was the round's last one."""
        if self._passes_done + 1 == self._passes:
            self._start_rest()

    def _start_rest(self) -> None:
        named, _ = self.parameters()
        planned = {id(parameter) for _, parameter in self._planned}
        # Parameters that were unfrozen or added, on all ranks, after this round's plan was made.
        late = [(name, parameter) for name, parameter in named if id(parameter) not in planned]
        self._round = list(self._buckets)
        for part in group_by_device(late):
            self._round.append(Bucket(len(self._round), part, len(self._planned), single_use=True))
        try:
            for bucket in self._round[self._next_bucket :]:
                self._start(bucket)
        except BaseException:
            self._reset()
            raise

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def at_end(self) -> None:
        """Wait for the averages, and begin a new round, if the backward pass that ends was the round's last one."""
        self._pass_end = None
        self._passes_done += 1
        if self._passes_done == self._passes:
            self.synchronize()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def synchronize(self, discard: bool = False) -> None:
        """Average what has not been started yet, wait for all, and begin a new round, as `register` does.

        Raises StateError when gradients were changed after their average started (`discard`: they may be gone), or a
        parameter that is frozen has got one.
        """
        if not self._round:
            self._start_rest()
        buckets = self._round
        frozen_with_grad = [name for name, parameter in self._frozen_with_grad if not parameter.requires_grad]
        self._frozen_with_grad.clear()
        failure: Exception | None = None
        replanned = False
        try:
            with torch.no_grad():
                for bucket in buckets:
                    try:
                        bucket.finish(discard, self._carried)
                    except Exception as error:
                        failure = failure or error
                exposed = sum(bucket.waited for bucket in buckets)
                self.communication = Communication(exposed, _ops.comm_seconds(self.owner))
                try:
                    replanned = self._bucket_plan.finish_exchange()
                except Exception as error:
                    failure = failure or error
                self._bucket_plan.record_time(self._last_gradient - self._first_gradient + exposed)
        finally:
            self._reset()
        if replanned:
            self._build_buckets(self._planned, self._frozen)
        if (discard or isinstance(failure, StateError)) and any(bucket.donated for bucket in buckets):
            # What the calls have left is of gradients that are thrown away, or were changed under way.
            _ops.discard_carried(self.team, self.owner)
        if failure is None and frozen_with_grad and not discard:
            # Other ranks may not have one: there is no telling, so it cannot be averaged.
            failure = StateError(
                f"{frozen_with_grad[0]} got a gradient, but was frozen before backward and is frozen now: "
                "its gradient is that of this rank alone. Unfreeze parameters until step() is done, or clear the "
                "gradient"
            )
        if failure is not None:
            raise failure
        if not discard:
            with torch.no_grad():
                self._carried.apply()
        self.averaged = True
        self._without_gradient = [parameter for _, parameter in self._planned if parameter.grad is None]
        self.register()

    def synchronize_rest(self) -> None:
        """Average unless that was done, and no gradient was set by hand since where there was none."""
        if not self.averaged or any(parameter.grad is not None for parameter in self._without_gradient):
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
    def on_gradient_ready(self, index: int, i: int) -> None:
        """Take note that backward has finished the gradient of parameter `i` of bucket `index`."""
        bucket = self._buckets[index]
        self._record_gradient()
        if index < self._next_bucket:
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
            bucket.move_to_view(i)
        if self._local:
            return
        self._join_backward()
        bucket.record_stream()
        self._bucket_plan.gradient_ready(bucket.first + i)
        bucket.passes[i] += 1
        if bucket.passes[i] != self._passes:
            return
        bucket.waiting -= 1
        try:
            while self._next_bucket < len(self._buckets) and self._buckets[self._next_bucket].waiting == 0:
                self._start(self._buckets[self._next_bucket])
        except BaseException:
            self._reset()
            raise

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def on_frozen_gradient(self, name: str, parameter: torch.Tensor) -> None:
        """Take note that a parameter that was frozen has got a gradient."""
        self._record_gradient()
        self._frozen_with_grad.append((name, parameter))
        if not self._local:
            self._join_backward()

    def _record_gradient(self) -> None:
        self.averaged = False
        self._last_gradient = perf_counter()
        if not self.in_round:
            self._first_gradient = self._last_gradient
            self._deferred = _ops.may_return_early(self.team, self.owner)

    def _join_backward(self) -> None:
        """Begin a round, unless one is under way, that ends with this backward pass."""
        self.in_round = True
        if self._deferred or (self._pass_end is not None and self._pass_end() is not None):
            return
        if self._pass_end is not None:
            self._reset()
            raise StateError(
                "the backward pass before this one failed, and the other ranks may wait for its averages: call the "
                "optimizer's zero_grad() after a backward pass that failed"
            )
        self._pass_end = _backward.join(self)

    def _start(self, bucket: Bucket) -> None:
        with torch.no_grad():
            bucket.start(self.team, f"{self._name}.{bucket.index}", self.owner, self._sparse_as_dense, self.steps)
        self._next_bucket = bucket.index + 1
        if self._next_bucket == len(self._buckets):
            self._bucket_plan.start_exchange(self.team, self._name, self.owner)

    def _reset(self) -> None:
        for bucket in self._round[len(self._buckets) :]:
            bucket.detach()
        for bucket in self._buckets:
            bucket.detach()
            bucket.reset()
        self._bucket_plan.detach_exchange()
        self._round = []
        self._next_bucket = self._passes_done = 0
        self._pass_end = None
        self.in_round = False


def _on_gradient(reducer: weakref.ref[Reducer], index: int, i: int, _: torch.Tensor) -> None:
    live = reducer()
    if live is not None:
        live.on_gradient_ready(index, i)


def _on_frozen_gradient(reducer: weakref.ref[Reducer], name: str, parameter: torch.Tensor) -> None:
    live = reducer()
    if live is not None:
        live.on_frozen_gradient(name, parameter)


def _owned_elsewhere(reducer: Reducer, named: Named) -> str | None:
    for name, parameter in named:
        owner = _owners.get(parameter)  # type: ignore[no-untyped-call]
        if owner is not None and owner() not in (None, reducer):
            return name
    return None


def _close(hooks: list[Any], buckets: list[Bucket]) -> None:
    while hooks:
        hooks.pop().remove()
    while buckets:
        buckets.pop().detach()


def _finalize(hooks: list[Any], buckets: list[Bucket], bucket_plan: BucketPlan) -> None:
    _close(hooks, buckets)
    bucket_plan.detach_exchange()


def _same(these: Named, those: Named) -> bool:
    return len(these) == len(those) and all(a is b for (_, a), (_, b) in zip(these, those, strict=True))
