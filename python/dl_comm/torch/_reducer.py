"""Overlaps gradient allreduce with backward: starts one call per bucket of parameters, as DDP's Reducer.

These rules keep all ranks in step, in whatever order autograd works:
- buckets hold the parameters in the order in which rank 0's first backward finished them; before that is known, in
  reverse registration order, which is close to it (`_bucket_plan`);
- a bucket starts when its last gradient is ready and all earlier buckets have started;
- each bucket carries a vector of flags, which parameters have a gradient: ranks may differ in that;
- a round ends with the backward pass that started it (`_backward`), or with the last of `passes`. With a non-blocking
  schedule, and on a rank whose backward had no gradient, it ends with `step()`.

Thread rule: as autograd's hooks of CPU parameters, one thread at a time.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import weakref
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from dl_comm._arrays import groups
from dl_comm._arrays.groups import Group
from dl_comm._arrays.teams import new_owner
from dl_comm._base.errors import ArgumentError, StateError
from dl_comm._job.ranks import local_size
from dl_comm.torch import _backward, _ops
from dl_comm.torch._bucket import Bucket, CarriedMeans
from dl_comm.torch._bucket_plan import BucketPlan, Named, group_by_device
from dl_comm.torch._compiler import uncompiled
from dl_comm.torch._gradient import can_count_references
from dl_comm.torch._names import ParameterNames

# The owner of each parameter; keeps neither alive.
_owners = WeakTensorKeyDictionary()


@dataclass(frozen=True)
class Communication:
    """Communication times of an optimizer's last step on this rank, in seconds."""

    exposed: float
    """Exposed time: how long backward or `step()` waited for communication."""
    total: float
    """Communication time: how long at least one allreduce was in flight. Backward usually hides most of it."""


class Reducer:
    """Averages the gradients of a list of parameters over all ranks, during backward.

    It owns references to the parameters. Their hooks hold weak references to it, and are removed with it.
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

        `team` may stand for a group, see `groups.averaging_team`.
        `parameters` returns the current parameters: those to average, and the frozen ones, which get no gradients.
        `bucket_bytes`: None finds a size by trials. `as_views`: store gradients in memory that the ranks of a host
        share.
        """
        self.team = team
        self.averaged = False  # the gradients are means; reset by a new gradient and by a step
        self.in_round = False  # backward has produced gradients since the last round ended
        self.skip = False  # the next step uses the gradients as they are
        self.steps = 0  # steps with averaged gradients
        self._joins = groups.joins  # joins of the ranks, after which the parameters were equal
        self.parameters = parameters
        self.broadcasts = True  # broadcast parameters that are added later
        self.names: ParameterNames  # of `parameters`
        self.group: Group | None = None  # the ranks, if `team` stands for a group
        self._name = name
        self._bucket_plan = BucketPlan(bucket_bytes)
        self._views_requested = as_views
        self._as_views = False  # requested, and saves copies in this job
        self._deferred = False  # the schedule lets this round's calls complete after backward
        self._passes = passes
        self._passes_done = 0  # completed backward passes of this round
        self._pass_end: Any = None  # weak reference to the end of the current backward pass; None outside of one
        self._sparse_as_dense = sparse_as_dense
        self.communication = Communication(0.0, 0.0)
        self._first_gradient = self._last_gradient = 0.0  # perf_counter of this round's first and last gradient
        self._planned: Named = []
        self._frozen: Named = []
        self._buckets: list[Bucket] = []
        self._without_gradient: list[torch.Tensor] = []  # parameters without a gradient at the end of the last round
        self._round: list[Bucket] = []  # all buckets of this round, once all have started
        self._hooks: list[Any] = []
        self._next_bucket = 0  # the bucket to start next
        self.owner = new_owner(self, team)
        self._carried = CarriedMeans()
        self._frozen_with_grad: list[tuple[str, torch.Tensor]] = []  # in this round
        self._local = False
        weakref.finalize(self, _finalize, self._hooks, self._buckets, self._bucket_plan).atexit = False

    @uncompiled
    def register(self) -> None:
        """Register the current parameters for the next round. Does nothing during a round."""
        named, frozen = self.parameters()
        if self.in_round or (_same(named, self._planned) and _same(frozen, self._frozen)):
            return
        self._build_buckets(list(named), list(frozen))

    def _build_buckets(self, named: Named, frozen: Named) -> None:
        """Build the buckets, unless they exist already, and register hooks."""
        # For a rank that is alone on its host, shared memory saves no copy.
        self._as_views = self._views_requested and can_count_references() and local_size() > 1
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
            bucket.collect_carried(self.team, f"{self._name}, bucket {bucket.index}", self.owner, self._carried)
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
                parameter.requires_grad_(True)  # torch requires this for hooks
                hook = functools.partial(_on_frozen_gradient, self_ref, name)
                self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
                parameter.requires_grad_(False)

    def check_unowned(self) -> None:
        """Raise ArgumentError if something else averages one of the parameters."""
        check_unowned(self, self.parameters()[0])

    def take_ownership(self) -> None:
        """Make this reducer the owner of its parameters. Raises as `check_unowned`."""
        own(self, self.parameters()[0])

    @uncompiled
    def parameters_broadcast(self, places: Container[int]) -> None:
        """After a `join`: start over if the tensors at these addresses, now equal on all ranks, are its parameters."""
        if self._joins == groups.joins or not all(p.data_ptr() in places for _, p in self._planned):
            return
        self._joins, self.steps = groups.joins, 0
        self._reset()
        self._bucket_plan.restart()
        self._build_buckets(self._planned, self._frozen)

    @uncompiled
    def begin(self) -> None:
        """Begin a round with the current gradients. Does nothing during a round."""
        if not self.in_round:
            self._reset()

    @uncompiled
    def before_end(self) -> None:
        """Start the remaining calls at the end of the round's last backward pass."""
        if self._passes_done + 1 == self._passes:
            self._start_rest()

    def _start_rest(self) -> None:
        named, _ = self.parameters()
        planned = {id(parameter) for _, parameter in self._planned}
        # Parameters that all ranks unfroze or added after this round was planned.
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

    @uncompiled
    def at_end(self) -> None:
        """Complete the round at the end of its last backward pass."""
        self._pass_end = None
        self._passes_done += 1
        if self._passes_done == self._passes:
            self.synchronize()

    @uncompiled
    def synchronize(self, discard: bool = False) -> None:
        """Start the remaining calls, wait for all, and begin a new round with the current parameters.

        Raises StateError when gradients were changed after their call started (`discard`: they may be None), or when a
        frozen parameter got a gradient.
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
            # The carried means belong to gradients that are discarded, or were changed during the call.
            _ops.discard_carried(self.team, self.owner)
        if failure is None and frozen_with_grad and not discard:
            # Other ranks may have no gradient for it, so it cannot be averaged.
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
        """Average unless already done. A gradient that was set by hand since then, where there was none, counts."""
        if not self.averaged or any(parameter.grad is not None for parameter in self._without_gradient):
            self.synchronize()

    @contextlib.contextmanager
    def local(self) -> Iterator[None]:
        """In this context, backward passes only accumulate; the next pass outside averages the sum."""
        before, self._local = self._local, True
        try:
            yield
        finally:
            self._local = before

    @uncompiled
    def on_gradient_ready(self, index: int, i: int) -> None:
        """Record that backward finished the gradient of parameter `i` of bucket `index`; start ready buckets."""
        bucket = self._buckets[index]
        self._record_gradient()
        if index < self._next_bucket:
            deferred = self._deferred
            self._reset()
            raise StateError(
                f"backward changed the gradient of {bucket.names[i]} during its allreduce; the gradients are now "
                "invalid: "
                + (
                    f"team {self.team} has a non-blocking schedule: call step() or zero_grad() after each backward, "
                    "give DistributedOptimizer backward_passes_per_step, or use no_sync()"
                    if deferred
                    else "one backward reached the parameter twice (a checkpointed layer that the model uses twice): "
                    "checkpoint with use_reentrant=False"
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

    @uncompiled
    def on_frozen_gradient(self, name: str, parameter: torch.Tensor) -> None:
        """Record that backward produced a gradient for a frozen parameter."""
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
        """Begin a round that ends with this backward pass, unless a round has begun."""
        self.in_round = True
        if self._deferred or (self._pass_end is not None and self._pass_end() is not None):
            return
        if self._pass_end is not None:
            self._reset()
            raise StateError(
                "the previous backward pass failed, and other ranks may wait for its allreduces: call the optimizer's "
                "zero_grad() after a failed backward pass"
            )
        self._pass_end = _backward.join(self)

    def _start(self, bucket: Bucket) -> None:
        if self._joins != groups.joins:
            raise StateError(
                "the ranks have joined, and may have made different numbers of steps: make their parameters equal with "
                "broadcast_parameters(model, last), where last = dl_comm.join()"
            )
        with torch.no_grad():
            bucket.start(
                self.team, f"{self._name}, bucket {bucket.index}", self.owner, self._sparse_as_dense, self.steps
            )
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


def parameters_broadcast(tensors: Iterable[torch.Tensor]) -> None:
    """Tell the owners of the process that these tensors are equal on all ranks."""
    places = {tensor.data_ptr() for tensor in tensors}
    for owner in {owner() for owner in _owners.values()}:  # type: ignore[no-untyped-call]
        if owner is not None:
            owner.parameters_broadcast(places)


class Owner(Protocol):
    """What averages the gradients of parameters. A parameter has one owner."""

    def parameters_broadcast(self, places: Container[int]) -> None:
        """Learn that the tensors at these addresses are equal on all ranks."""


def check_unowned(owner: Owner, named: Named) -> None:
    """Raise ArgumentError if another live owner has one of the parameters."""
    owned = _owned_elsewhere(owner, named)
    if owned is not None:
        gc.collect()  # a dropped optimizer may be part of a cycle
        owned = _owned_elsewhere(owner, named)
    if owned is not None:
        raise ArgumentError(
            f"another DistributedOptimizer or BlockSequential averages {owned} already: give each parameter to one, or "
            "drop (del) the other, and an optimizer's learning rate schedulers, first"
        )


def own(owner: Owner, named: Named) -> None:
    """Make `owner` the owner of the parameters. Raises as `check_unowned`."""
    check_unowned(owner, named)
    for _, parameter in named:
        _owners[parameter] = weakref.ref(owner)


def is_owned(parameter: torch.Tensor) -> bool:
    """Return whether something averages the gradient of a parameter already."""
    owner = _owners.get(parameter)  # type: ignore[no-untyped-call]
    return owner is not None and owner() is not None


def _owned_elsewhere(this: Owner, named: Named) -> str | None:
    for name, parameter in named:
        owner = _owners.get(parameter)  # type: ignore[no-untyped-call]
        if owner is not None and owner() not in (None, this):
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
