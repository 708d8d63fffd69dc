"""The optimizer that averages gradients over all ranks before each step."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

import torch

from dl_comm._arrays.groups import Group, averaging_team, given, unless_world
from dl_comm._arrays.teams import start_team
from dl_comm._base.buckets import bucket_bytes
from dl_comm._base.checks import checked_int, checked_team, checked_threads
from dl_comm._base.errors import ArgumentError, CommError, DTypeError, StateError
from dl_comm._base.private_names import check
from dl_comm._job import state
from dl_comm.torch import _functions, _ops
from dl_comm.torch._bucket_plan import Named
from dl_comm.torch._compiler import uncompiled
from dl_comm.torch._names import ParameterNames, keep_names
from dl_comm.torch._reducer import Communication, Reducer

_ATTRIBUTE = "_dl_comm_reducer"
_BUFFERS = "_dl_comm_buffers"
# The first optimizers get one team each; later ones share these teams.
AUTOMATIC_TEAMS = 8
_num_of_group: weakref.WeakKeyDictionary[Group, int] = weakref.WeakKeyDictionary()  # those of a group


class AveragingOptimizer(torch.optim.Optimizer):
    """The methods that `DistributedOptimizer` adds to an optimizer. Do not construct it directly.

    A copy or pickle is the original optimizer class. Thread rule: as torch optimizers, one thread at a time.
    """

    def synchronize(self) -> None:
        """Average the gradients, unless backward has already done so. Collective.

        Call it before you read or change gradients that backward has not averaged: gradients accumulated in
        `no_sync()`, set by hand, or of a non-blocking schedule. `step()` calls it. Raises `dl_comm.CommError` when the
        allreduce fails; the gradients are invalid then.
        """
        _reducer(self).synchronize_rest()

    def communication(self) -> Communication:
        """Return the communication times of the last step on this rank, in seconds: exposed and total.

        Zeros before the first step. With a non-blocking schedule, `exposed` is the time that the step waited.
        """
        return _reducer(self).communication

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """In this context, `step()` uses the gradients as they are."""
        reducer = _reducer(self)
        before, reducer.skip = reducer.skip, True
        try:
            yield
        finally:
            reducer.skip = before

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """In this context, backward passes only accumulate; the next pass outside averages the sum."""
        with _reducer(self).local():
            yield

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, as the original optimizer does. Waits for calls in flight first.

        Raises StateError when gradients were changed during their allreduce (with a non-blocking schedule): the ranks
        may differ then.
        """
        reducer = _reducer(self)
        if reducer.in_round:
            reducer.synchronize(discard=True)
        reducer.averaged = False
        reducer.register()
        super().zero_grad(set_to_none)
        reducer.begin()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, as the original optimizer does, and broadcast it from rank 0. Collective.

        With `DistributedOptimizer(..., broadcast=False)` the ranks keep their values. Raises ArgumentError when another
        DistributedOptimizer has one of the parameters, and MismatchError when the ranks add different parameters; then
        the group is not added.
        """
        super().add_param_group(param_group)
        reducer = _reducer(self)
        try:
            reducer.names.find(self)
            reducer.check_unowned()
            reducer.names.agree()
            if reducer.broadcasts:
                # Broadcast only the new parameters: the others are already equal.
                added = {id(parameter) for parameter in self.param_groups[-1]["params"]}
                named = reducer.names.named(self)
                _functions.broadcast_in_order([pair for pair in named if id(pair[1]) in added], group=reducer.group)
        except CommError:
            self.param_groups.pop()
            raise
        reducer.take_ownership()
        reducer.register()

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # GradScaler.step() reads this before it decides, from this rank's gradients, whether to step.
        reducer = _reducer(self)
        if not reducer.skip:
            _require_blocking(
                reducer, "a GradScaler changes its scale, and gradients of another step have another scale"
            )
            if not reducer.averaged:
                raise StateError("gradients are not averaged: call optimizer.synchronize() before the GradScaler")
        return bool(self.__dict__.get("_step_supports_amp_scaling", False))

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Copy and pickle the original optimizer class."""
        return _new_instance, (type(self).__bases__[1],), self.__getstate__()


def DistributedOptimizer(  # noqa: N802 (the name is the plugin's)
    optimizer: torch.optim.Optimizer,
    nteam: int = 1,
    nthread_per_team: int = 2,
    *,
    threads: int | None = None,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | Mapping[str, torch.Tensor] | None = None,
    bucket_mb: float | None = None,
    backward_passes_per_step: int = 1,
    sparse_as_dense: bool = False,
    gradient_as_bucket_view: bool = True,
    team: int | None = None,
    group: Group | None = None,
    broadcast: bool = True,
    broadcast_buffers: torch.nn.Module | None = None,
    nstep: int | None = None,
    warmup: float = 0.10,
    verb: int = 2,
    freq: int = 100,
) -> AveragingOptimizer:
    """Make `optimizer` average its gradients over all ranks, or over those of a group, and return it.

    The optimizer remains the same object and an instance of its class, with its state, groups, hooks and learning rate
    schedulers. From now on backward averages gradients, one bucket of parameters at a time as they become ready, and
    waits at its end. After `backward()` the gradients are means, to read, clip and change as in one process. A second
    backward adds to them and averages again. Every rank must make the same backward passes and steps. Ranks may use
    different parameters: a missing gradient counts as zero, and stays None if all ranks miss it. A rank whose backward
    had no gradient at all takes part in its next `step()`. A gradient that shares its memory (for example with another
    parameter's) is replaced by a separate tensor.

    A closure given to `step()` runs with averaged gradients and returns the mean of the ranks' losses to the optimizer.
    So all ranks call it equally often (LBFGS).

    Args:
        optimizer: any torch optimizer except SparseAdam.
        nteam: minimum number of teams. Optimizers use eight teams in turn, which are created as needed.
        nthread_per_team: the plugin's name of `threads`.
        threads: threads of each team that is created here (2).
        named_parameters: names, as from `module.named_parameters()`. Parameters without a name here have the one of the
            module that holds them. The ranks match parameters by name, in whatever order the optimizer has them; where
            the found names differ between ranks, by position.
        bucket_mb: bucket size in MiB; the first bucket has at most 1 MiB. None: ``DL_COMM_BUCKET_MB`` if set, else the
            size that was fastest in the first steps, the same on all ranks.
        backward_passes_per_step: number of backward passes whose gradients are summed before the allreduce.
        sparse_as_dense: convert sparse gradients (of embeddings) to dense ones; otherwise they are an error.
        gradient_as_bucket_view: when backward has finished a gradient, move `p.grad` to memory that the ranks of a host
            share, and average it there without copies. This applies to dense, contiguous CPU gradients that the script
            has not laid out itself, if shared memory is available, with several ranks on the host. All other gradients
            stay in their memory.
        team: the team to use instead of the next one.
        group: the ranks that average, instead of a team: those that hold the same part of a model, such as `grid.data`.
            Only they make the optimizer. A group has no schedule: not together with `team` and `nstep`. Rank 0 is that
            of the group then.
        broadcast: broadcast the parameters of rank 0 now, and those of groups that are added later.
        broadcast_buffers: a module whose buffers, such as the statistics of batch normalization, take the values of
            rank 0 now and after each step, as in DistributedDataParallel. `dl_comm.torch.SyncBatchNorm` has the
            statistics of all ranks instead, and needs no broadcast. Not together with `dl_comm.join`.
        nstep: the total number of `step()`s. It sets the team's schedule
            `dl_comm.config_team(team, 0, int(warmup * nstep), nstep, verb, freq)`: after the warm-up a step applies the
            means of the previous step, and does not wait. Then gradients are not averaged before `step()`: call
            `synchronize()` to read or change them. `p.grad` is a different tensor after each step.
        warmup: the fraction of steps that wait for their own means.
        verb: who prints the time waited for communication: 0: no rank; 1: rank 0; 2: every rank.
        freq: steps between these lines.

    Raises:
        DTypeError: `optimizer` is not a torch optimizer.
        ArgumentError: `optimizer` is a DistributedOptimizer or SparseAdam, another DistributedOptimizer has one of its
            parameters, or an argument is out of range.
        MismatchError: The ranks' parameters differ in number, shape, type or given name. Collective.

    `backward()` then raises the errors of an allreduce, and StateError: on all ranks when their step numbers differ, or
    when a hook changed a gradient during its allreduce.

    The name and the first three arguments are those of the Cray plugin's `dl_comm.torch.DistributedOptimizer`.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise DTypeError(f"expected a torch optimizer, not {type(optimizer).__name__}")
    if isinstance(optimizer, AveragingOptimizer):
        raise ArgumentError("the optimizer is a DistributedOptimizer already")
    check("torch")
    size = bucket_bytes(bucket_mb)
    backward_passes_per_step = checked_int("backward_passes_per_step", backward_passes_per_step, 1)
    nteam, threads = checked_int("nteam", nteam, 1), checked_threads(threads, nthread_per_team, 2)
    if team is not None:
        team = checked_team(team)
    if not isinstance(broadcast_buffers, (torch.nn.Module, type(None))):
        raise DTypeError(f"broadcast_buffers takes a module, not {type(broadcast_buffers).__name__}")
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise ArgumentError(
            "SparseAdam needs sparse gradients, and means are dense: use torch.optim.Adam with "
            "DistributedOptimizer(..., sparse_as_dense=True)"
        )
    group = unless_world(group)
    if group is not None:
        if team is not None or nstep is not None:
            raise ArgumentError("give group, or team and nstep: a group has no schedule")
        number = _num_of_group.get(given(group), 0)
        chosen = averaging_team(group, 0)
    else:
        number = state.current.optimizers
        chosen = number % AUTOMATIC_TEAMS if team is None else team
    # The number distinguishes optimizers on one team, and detects ranks that created different optimizers.
    call_name = f"{type(optimizer).__name__}.{number}"
    names = ParameterNames(named_parameters, call_name, group)
    reducer = Reducer(
        functools.partial(_parameters, weakref.ref(optimizer), names),
        chosen,
        f"gradients of {call_name}",
        size,
        backward_passes_per_step,
        sparse_as_dense,
        gradient_as_bucket_view,
    )
    reducer.broadcasts, reducer.names, reducer.group = broadcast, names, group
    names.find(optimizer)
    reducer.check_unowned()
    if group is None:
        state.current.optimizers = number + 1
        start_team(chosen, nteam, threads, nstep, warmup, verb, freq)
    else:
        _num_of_group[group] = number + 1
    names.agree()
    if broadcast:
        _functions.broadcast_in_order(names.named(optimizer), group=group)
    optimizer.__dict__[_ATTRIBUTE] = reducer
    keep_names(optimizer, names)
    optimizer.__dict__[_BUFFERS] = broadcast_buffers
    _broadcast_buffers(optimizer)
    optimizer.register_step_pre_hook(_before_step)
    optimizer.register_step_post_hook(_after_step)
    optimizer.__class__ = _averaging_class(type(optimizer))  # type: ignore[arg-type]
    reducer.take_ownership()
    reducer.register()
    return cast(AveragingOptimizer, optimizer)


def _new_instance(base: type[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    return base.__new__(base)


@functools.cache
def _averaging_class(base: type[torch.optim.Optimizer]) -> type[AveragingOptimizer]:
    return type(base.__name__, (AveragingOptimizer, base), {"__module__": base.__module__, "__doc__": base.__doc__})


def _reducer(optimizer: torch.optim.Optimizer) -> Reducer:
    return cast(Reducer, optimizer.__dict__[_ATTRIBUTE])


def _parameters(of: weakref.ref[torch.optim.Optimizer], names: ParameterNames) -> tuple[Named, Named]:
    """Return the parameters of an optimizer with their names: the trainable ones, and the frozen ones."""
    optimizer = of()
    named = [] if optimizer is None else names.named(optimizer)
    return [pair for pair in named if pair[1].requires_grad], [pair for pair in named if not pair[1].requires_grad]


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
    # torch calls this before step(), and again when a subclass's step() calls its base's step().
    reducer = _reducer(optimizer)
    if reducer.skip:
        return None
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if closure is None:
        cast(AveragingOptimizer, optimizer).synchronize()
        return None
    if isinstance(closure, _AveragedClosure):
        return None
    _require_blocking(reducer, "a closure needs the gradient at the current parameters")
    averaged = _AveragedClosure(optimizer, closure)
    if "closure" in kwargs:
        return args, {**kwargs, "closure": averaged}
    return (args[0], averaged, *args[2:]), kwargs


@uncompiled
def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    reducer = _reducer(optimizer)
    reducer.averaged = False
    reducer.steps += not reducer.skip
    _broadcast_buffers(optimizer)


def _broadcast_buffers(optimizer: torch.optim.Optimizer) -> None:
    module = optimizer.__dict__[_BUFFERS]
    if module is not None:
        _functions.broadcast_parameters(list(module.named_buffers()), group=_reducer(optimizer).group)


class _AveragedClosure:
    """A closure of `step()` with averaged gradients and loss, so that all ranks make the same decisions."""

    def __init__(self, optimizer: torch.optim.Optimizer, closure: Any) -> None:
        self._optimizer = cast(AveragingOptimizer, optimizer)
        self._closure = closure

    def __call__(self) -> Any:
        reducer = _reducer(self._optimizer)
        reducer.averaged = False
        loss = self._closure()
        self._optimizer.synchronize()
        if isinstance(loss, torch.Tensor):
            loss = loss.detach()
        return None if loss is None else _functions.average(loss, "loss of the closure", group=reducer.group)


def _require_blocking(reducer: Reducer, reason: str) -> None:
    if _ops.may_return_early(reducer.team, reducer.owner):
        raise StateError(
            f"{reason}, but the schedule of team {reducer.team} returns means of the previous step: let all calls "
            "block, with config_team(..., ksteps=max_steps, ...) or warmup=1.0"
        )
