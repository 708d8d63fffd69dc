"""The optimizer that averages gradients over all ranks before each step."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

import torch

import dl_comm
from dl_comm import ArgumentError, DTypeError, StateError
from dl_comm._buckets import bucket_bytes
from dl_comm._process import checked_team, start_team
from dl_comm.torch import _functions, _ops
from dl_comm.torch._bucket_plan import Named
from dl_comm.torch._reducer import Communication, Reducer

_ATTRIBUTE = "_dl_comm_reducer"
# As many optimizers average at once, each on a team of its own; the next ones share.
AUTOMATIC_TEAMS = 8
_num_created = 0  # optimizers, since dl_comm was brought up


class AveragingOptimizer(torch.optim.Optimizer):
    """What `DistributedOptimizer` adds to an optimizer. Made by it, not by a constructor.

    A copy or pickle of one is the plain optimizer. Thread rule: that of torch optimizers, one thread at a time.
    """

    def synchronize(self) -> None:
        """Average the gradients unless backward has done so; then it does nothing.

        Needed, and collective, before gradients are read or changed that no backward pass has averaged: those
        accumulated in `no_sync()`, set by hand, or on a schedule that does not wait. `step()` does it by itself. Raises
        `dl_comm.CommError` when the average fails; the gradients are invalid then.
        """
        _reducer(self).synchronize_rest()

    def communication(self) -> Communication:
        """Tell what the averages of the last step took on this rank, in seconds: exposed, and busy.

        Zeros before the first. An average that a schedule lets end later counts as far as its step waited for it.
        """
        return _reducer(self).communication

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Use the gradients as they are in a `step()` within this context."""
        reducer = _reducer(self)
        before, reducer.skip = reducer.skip, True
        try:
            yield
        finally:
            reducer.skip = before

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Only accumulate in the backward passes within this context; the next one outside averages the sum."""
        with _reducer(self).local():
            yield

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, as the plain optimizer does. An average that is under way ends first.

        Raises StateError when gradients were changed while they were averaged (on a schedule that does not wait): the
        ranks may differ by then.
        """
        reducer = _reducer(self)
        if reducer.in_round:
            reducer.synchronize(discard=True)
        reducer.averaged = False
        reducer.register()
        super().zero_grad(set_to_none)
        reducer.begin()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, as the plain optimizer does, and give all ranks those of rank 0; collective.

        With `DistributedOptimizer(..., broadcast=False)` the ranks keep their own. Raises ArgumentError when another
        DistributedOptimizer has one of the parameters, and MismatchError when the ranks add different ones; the group
        is not added then.
        """
        super().add_param_group(param_group)
        reducer = _reducer(self)
        try:
            reducer.check_unowned()
            if reducer.broadcasts:
                # Only these: on a rank that has trained, the others are the same already.
                added = {id(parameter) for parameter in self.param_groups[-1]["params"]}
                named = [pair for part in reducer.parameters() for pair in part]
                _functions.broadcast_parameters([pair for pair in named if id(pair[1]) in added])
        except dl_comm.CommError:
            self.param_groups.pop()
            raise
        reducer.take_ownership()
        reducer.register()

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # GradScaler.step() asks this before it decides, by this rank's gradients, whether to step.
        reducer = _reducer(self)
        if not reducer.skip:
            _require_blocking(
                reducer, "a GradScaler changes its scale, and the gradients of another step have another one"
            )
            if not reducer.averaged:
                raise StateError(
                    "gradients are not averaged: call optimizer.synchronize() before the GradScaler is used"
                )
        return bool(self.__dict__.get("_step_supports_amp_scaling", False))

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Give the plain optimizer to copy and pickle."""
        return _new_instance, (type(self).__bases__[1],), self.__getstate__()


def DistributedOptimizer(  # noqa: N802 (the name is the plugin's)
    optimizer: torch.optim.Optimizer,
    nteam: int = 1,
    nthread_per_team: int = 2,
    *,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | Mapping[str, torch.Tensor] | None = None,
    bucket_mb: float | None = None,
    backward_passes_per_step: int = 1,
    sparse_as_dense: bool = False,
    gradient_as_bucket_view: bool = True,
    team: int | None = None,
    broadcast: bool = True,
    nstep: int | None = None,
    warmup: float = 0.10,
    verb: int = 2,
    freq: int = 100,
) -> AveragingOptimizer:
    """Make `optimizer` average its gradients over all ranks, and return it.

    The optimizer stays the object that it was, and an instance of its class, with its state, groups, hooks and learning
    rate schedulers. From now on a backward pass averages gradients, a bucket of parameters at a time when they are
    ready, and waits at its end: after `backward()` they are means, to read, clip and change as on one process. A second
    backward adds to them and averages again. Every rank must make the same backward passes and steps. It may use other
    parameters than the other ranks: a missing gradient counts as zero, and one that all ranks miss stays None. A rank
    whose backward had no gradient at all takes part in its next `step()`. A gradient that shares its memory (with
    another parameter's, say) is replaced by a tensor of its own.

    A closure given to `step()` is called with averaged gradients and gives the mean of the ranks' losses to the
    optimizer, so that all ranks call it equally often (LBFGS).

    Args:
        optimizer: any optimizer over CPU parameters.
        nteam: number of teams to have at least; each optimizer takes the next one of eight in turn, which is created
            if need be.
        nthread_per_team: threads of the teams that are created here.
        named_parameters: names for error messages, as `module.named_parameters()` gives them.
        bucket_mb: size of a bucket in MiB; the first has 1 MiB at most. None is what ``DL_COMM_BUCKET_MB`` says, else
            the size that was fastest in the first steps, the same on all ranks.
        backward_passes_per_step: backward passes whose gradients are added up before they are averaged.
        sparse_as_dense: turn sparse gradients (of embeddings) into dense ones; they are an error otherwise.
        gradient_as_bucket_view: `p.grad` lies, once backward has it ready, in memory that the ranks of a host see in
            each other, where it is averaged without copies. Gradients that are not dense, contiguous CPU tensors, that
            you have laid out yourself, or for which there is no shared memory, are averaged where they are, as all are
            with False, on a single rank and on several hosts.
        team: the team that averages, when it is not to be the next one.
        broadcast: give all ranks the parameters of rank 0 now, and those of a group that is added later.
        nstep: the number of `step()`s in all; with it the team gets the schedule
            `dl_comm.config_team(team, 0, int(warmup * nstep), nstep, verb, freq)`: after the warm-up a step applies the
            averages that the step before has started, and waits for nothing. Then gradients are not averaged before
            `step()`: call `synchronize()` to read or change them. `p.grad` is another tensor after each step.
        warmup: the share of the steps that wait for their own averages.
        verb: 1: rank 0 prints how long it has waited for communication, 2: every rank does, 0: none.
        freq: after how many steps each.

    Raises:
        DTypeError: `optimizer` is not a torch optimizer.
        ArgumentError: It averages already, it is SparseAdam, another one averages one of its parameters, or an argument
            is out of range.
        MismatchError: The ranks' parameters differ in number, shape or type. Collective.

    `backward()` then raises what an average may raise, and StateError: on all ranks when they have made different
    numbers of steps, or when a hook has changed a gradient on its way.

    The name and the first three arguments are those of the Cray plugin's `dl_comm.torch.DistributedOptimizer`.
    """
    global _num_created
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise DTypeError(f"expected a torch optimizer, not {type(optimizer).__name__}")
    if isinstance(optimizer, AveragingOptimizer):
        raise ArgumentError("this optimizer averages its gradients already")
    size = bucket_bytes(bucket_mb)
    if backward_passes_per_step < 1 or nteam < 1 or nthread_per_team < 1:
        raise ArgumentError("backward_passes_per_step, nteam and nthread_per_team must be positive")
    if team is not None:
        team = checked_team(team)
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise ArgumentError(
            "SparseAdam takes sparse gradients only, and averages are dense: use torch.optim.Adam, with "
            "DistributedOptimizer(..., sparse_as_dense=True)"
        )
    names = _names(optimizer, named_parameters)
    named = _named_parameters(optimizer, names)
    number = _num_created if dl_comm.is_initialized() else 0
    chosen = number % AUTOMATIC_TEAMS if team is None else team
    # The number lets calls of optimizers on one team be told apart, and shows ranks that made other optimizers.
    call_name = f"{type(optimizer).__name__}.{number}"
    reducer = Reducer(
        functools.partial(_parameters, weakref.ref(optimizer), names),
        chosen,
        call_name,
        size,
        backward_passes_per_step,
        sparse_as_dense,
        gradient_as_bucket_view,
    )
    reducer.broadcasts = broadcast
    reducer.check_unowned()
    _num_created = number + 1
    start_team(chosen, nteam, nthread_per_team, nstep, warmup, verb, freq)
    if broadcast:
        _functions.broadcast_parameters(named)
    optimizer.__dict__[_ATTRIBUTE] = reducer
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


def _parameters(of: weakref.ref[torch.optim.Optimizer], names: dict[int, str]) -> tuple[Named, Named]:
    """The parameters of an optimizer with their names: those that can have a gradient, and the frozen ones."""
    optimizer = of()
    named = [] if optimizer is None else _named_parameters(optimizer, names)
    return [pair for pair in named if pair[1].requires_grad], [pair for pair in named if not pair[1].requires_grad]


def _named_parameters(optimizer: torch.optim.Optimizer, names: dict[int, str]) -> Named:
    # By identity: a parameter may stand in a group twice (torch warns of that).
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for g, group in enumerate(optimizer.param_groups):
        for i, parameter in enumerate(group["params"]):
            found.setdefault(id(parameter), (names.get(id(parameter)) or f"group{g}.parameter{i}", parameter))
    return list(found.values())


def _names(
    optimizer: torch.optim.Optimizer,
    named: Iterable[tuple[str, torch.Tensor]] | Mapping[str, torch.Tensor] | None,
) -> dict[int, str]:
    names: dict[int, str] = {}
    for g, group in enumerate(optimizer.param_groups):
        given = group.get("param_names")  # there when the optimizer was made of (name, parameter) pairs
        for i, parameter in enumerate(group["params"]):
            names.setdefault(id(parameter), given[i] if given else f"group{g}.parameter{i}")
    pairs = named.items() if isinstance(named, Mapping) else named or ()
    names.update((id(parameter), name) for name, parameter in pairs)
    return names


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
    # torch calls this before step(), and once more when step() of a subclass calls that of its base.
    reducer = _reducer(optimizer)
    if reducer.skip:
        return None
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if closure is None:
        cast(AveragingOptimizer, optimizer).synchronize()
        return None
    if isinstance(closure, _AveragedClosure):
        return None
    _require_blocking(reducer, "a closure needs the gradient of the point where it is called")
    averaged = _AveragedClosure(optimizer, closure)
    if "closure" in kwargs:
        return args, {**kwargs, "closure": averaged}
    return (args[0], averaged, *args[2:]), kwargs


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    reducer = _reducer(optimizer)
    reducer.averaged = False
    reducer.steps += not reducer.skip


class _AveragedClosure:
    """A closure of `step()` with averaged gradients and loss: decisions that rest on them are the same on all ranks."""

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
        return None if loss is None else _functions.average(loss, "loss of the closure")


def _require_blocking(reducer: Reducer, reason: str) -> None:
    if _ops.may_return_early(reducer.team, reducer.owner):
        raise StateError(
            f"{reason}, but team {reducer.team} returns averages of the step before by its schedule: let all calls "
            "block, config_team(..., ksteps=max_steps, ...) or warmup=1.0"
        )
