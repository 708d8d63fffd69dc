"""A training loop with hooks: the engine of TorchMPI (`tnt.AllReduceSGDEngine`) for PyTorch.

Thread rule: one thread uses an engine. With `prefetch` a second thread, which ends with `train` or `test`, takes all
items from the iterator; it does nothing else.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from dl_comm._arrays.groups import Group, given, unless_world, world
from dl_comm._arrays.objects import all_gather_object
from dl_comm._base.checks import checked_flag, checked_int
from dl_comm._base.errors import ArgumentError, DTypeError
from dl_comm._job.start import ensure_initialized
from dl_comm.torch._asynchronous import AsynchronousOptimizer
from dl_comm.torch._collectives import allreduce
from dl_comm.torch._functions import average as mean_over_ranks
from dl_comm.torch._functions import broadcast_optimizer_state, broadcast_parameters
from dl_comm.torch._names import kept_names
from dl_comm.torch._optimizer import AveragingOptimizer, DistributedOptimizer
from dl_comm.torch._reducer import is_owned

HOOKS = ("on_start", "on_start_epoch", "on_sample", "on_forward", "on_backward", "on_update", "on_end_epoch", "on_end")


@dataclass
class EngineState:
    """What the hooks of an `Engine` get: where training is. Hooks may set `sample`, `output`, `loss` and `epochs`."""

    model: torch.nn.Module
    """The model."""
    criterion: Callable[..., Any]
    """The loss function."""
    optimizer: torch.optim.Optimizer
    """The optimizer."""
    iterator: Iterable[Any]
    """What gives the batches."""
    training: bool
    """Whether this is `train`, not `test`."""
    epochs: int = 1
    """The number of epochs. Training ends when `epoch` reaches it: set it on all ranks to end early."""
    epoch: int = 0
    """The current epoch, from 0; after the last one, the number of epochs."""
    step: int = 0
    """The current step, from 0; after the last one, the number of steps."""
    sample: Any = None
    """The current batch as a pair: input and target."""
    output: Any = None
    """What the model made of the input."""
    loss: Any = None
    """The loss of this rank's batch, a tensor of one element."""
    samples: int = 0
    """The number of this rank's samples in this epoch so far."""
    average_loss: float = float("nan")
    """The mean loss of the samples of all ranks in the last epoch that ended: set before `on_end_epoch`."""


Hook = Callable[[EngineState], Any]


class Engine:
    """A training loop over all ranks, or those of a group. Hooks see each of its stages.

        engine = dl_comm.torch.Engine(model, criterion, optimizer, {"on_end_epoch": report})
        engine.train(loader, epochs=2)
        loss = engine.test(test_loader).average_loss

    Any torch optimizer works. One that does not average gradients becomes a `DistributedOptimizer`, unless the model is
    a `dl_comm.torch.nn.BlockSequential`, which averages them itself. A step is: zero_grad, forward, criterion,
    backward, update. An optimizer whose `step` needs a closure (LBFGS) gets one, and may make several passes in a step.

    Each rank's iterator gives its own batches, pairs of input and target; use `dl_comm.torch.DistributedSampler`, whose
    `set_epoch` the engine calls. All ranks need the same number of batches to train. Different lengths are refused
    before the epoch, by ArgumentError on all ranks; if the iterators have no length, the ranks get MismatchError when
    one ends before the others. Gradients are means over the ranks, so give the ranks batches of the same size.

    Args:
        model: A module; called with the input.
        criterion: A function of output and target that returns the mean loss of the batch, a tensor of one element. If
            it is a module, the engine broadcasts its parameters and buffers too.
        optimizer: Any torch optimizer.
        hooks: Functions of an `EngineState`, by name. In this order: "on_start"; "on_start_epoch"; for each batch
            "on_sample" (to move the batch to a GPU, set `state.sample`), "on_forward" (after the criterion),
            "on_backward" (the gradients are means: clip them here), "on_update" (after the step); "on_end_epoch";
            "on_end". `test` has no epochs, backward and updates. They stay in `engine.hooks`.
        prefetch: Fetch the next batch during backward, on a thread. False for iterators that draw random numbers of
            torch while backward does so too (activation checkpoints of dropout).
        broadcast: `train` starts from the parameters, buffers and optimizer state of rank 0.
        average: False: the optimizer stays as it is, for one that makes ranks agree in another way; always so for
            `Downpour` and `EASGD`. Then ranks may have different numbers of batches, and wait for each other at the end
            of an epoch only.
        group: The ranks; None: those of a `DistributedOptimizer`, else all.

    Raises:
        DTypeError: An argument has a wrong type.
        ArgumentError: A hook has an unknown name, `group` is not that of the optimizer, or something else averages some
            of the parameters.
        MismatchError: The parameters differ between ranks. Collective.

    Source: `tnt.AllReduceSGDEngine` of TorchMPI (Facebook, 2017).
    """

    def __init__(
        self,
        model: torch.nn.Module,
        criterion: Callable[..., Any],
        optimizer: torch.optim.Optimizer,
        hooks: Mapping[str, Hook] | None = None,
        *,
        prefetch: bool = True,
        broadcast: bool = True,
        average: bool = True,
        group: Group | None = None,
    ) -> None:
        if not isinstance(model, torch.nn.Module):
            raise DTypeError(f"model is a {type(model).__name__}, not a torch module")
        if not callable(criterion):
            raise DTypeError(f"criterion is a {type(criterion).__name__}; give a function of output and target")
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise DTypeError(f"optimizer is a {type(optimizer).__name__}, not a torch optimizer")
        self.model, self.criterion = model, criterion
        self.hooks: dict[str, Hook] = dict(hooks or {})
        self._check_hooks()
        self._prefetch = checked_flag("prefetch", prefetch)
        self._broadcast = checked_flag("broadcast", broadcast)
        # Those that are asynchronous have started from rank 0's parameters, and average nothing.
        is_asynchronous = isinstance(optimizer, AsynchronousOptimizer)
        self._average = checked_flag("average", average) and not is_asynchronous
        self._broadcast_optimizer = not is_asynchronous
        ensure_initialized()
        given(group)
        kept = kept_names(optimizer)
        if kept is not None:
            if unless_world(group) not in (None, kept.group):
                raise ArgumentError(f"group is {group!r}, and the optimizer averages over {kept.group or world()!r}")
            group = kept.group
        self._group = group
        if self._average and not _averages(optimizer):
            optimizer = DistributedOptimizer(
                optimizer, group=group, broadcast=broadcast, named_parameters=_named(model, criterion, optimizer)
            )
        self.optimizer = optimizer

    def train(self, iterator: Iterable[Any], epochs: int) -> EngineState:
        """Train for `epochs` passes over the iterator. Collective.

        Args:
            iterator: An iterable that starts anew each epoch, such as a DataLoader, of pairs of input and target.
            epochs: The number of epochs, at least 0.

        Returns:
            The state at the end; `average_loss` is that of the last epoch.

        Raises:
            DTypeError: `iterator` is not iterable, or an item or a loss has a wrong type.
            ArgumentError: `epochs` is negative, the ranks' iterators have different lengths, or none has a batch.
            StateError: The gradients cannot be averaged: as `backward()` with a `DistributedOptimizer`.

        Errors of hooks, model, criterion and iterator are raised as they are.
        """
        epochs = checked_int("epochs", epochs, 0)
        state = self._new_state(iterator, True)
        state.epochs = epochs
        if self._broadcast:
            for module in (self.model, self.criterion):
                if isinstance(module, torch.nn.Module):
                    broadcast_parameters(module, group=self._group)
            if self._broadcast_optimizer:
                broadcast_optimizer_state(self.optimizer, group=self._group)
        self.model.train()
        self._call("on_start", state)
        while state.epoch < state.epochs:
            self._check_lengths(state)
            sampler = getattr(iterator, "sampler", None)
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(state.epoch)  # type: ignore[union-attr]
            self._call("on_start_epoch", state)
            self._pass_over(state, self._train_on)
            self._call("on_end_epoch", state)
            state.epoch += 1
        self._call("on_end", state)
        return state

    def test(self, iterator: Iterable[Any]) -> EngineState:
        """Measure the loss of the samples of all ranks, in evaluation mode and without gradients. Collective.

        Args:
            iterator: As for `train`. The ranks may have different numbers of batches, also none.

        Returns:
            The state at the end; `average_loss` is the mean loss.

        Raises:
            DTypeError: As `train`.
            ArgumentError: No rank has a batch.
        """
        state = self._new_state(iterator, False)
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        try:
            with torch.no_grad():
                self._call("on_start", state)
                self._pass_over(state, self._test_on)
                self._call("on_end", state)
        finally:
            for module, mode in modes:
                module.training = mode
        return state

    def _ranks(self) -> Group:
        return world() if self._group is None else self._group

    def _new_state(self, iterator: Iterable[Any], training: bool) -> EngineState:
        self._check_hooks()
        if not hasattr(iterator, "__iter__"):
            raise DTypeError(f"iterator is a {type(iterator).__name__}; give an iterable, such as a DataLoader")
        return EngineState(self.model, self.criterion, self.optimizer, iterator, training)

    def _check_hooks(self) -> None:
        for name, hook in self.hooks.items():
            if name not in HOOKS:
                raise ArgumentError(f"hooks: unknown name {name!r} (expected some of {', '.join(HOOKS)})")
            if not callable(hook):
                raise DTypeError(f"hooks: {name} is a {type(hook).__name__}; give a function of the state")

    def _check_lengths(self, state: EngineState) -> None:
        """Raise ArgumentError on all ranks if their iterators have different lengths."""
        if not self._average:
            return
        lengths = all_gather_object(_length(state.iterator), group=self._ranks())
        known = {length for length in lengths if length is not None}
        if len(known) > 1:
            raise ArgumentError(
                f"iterator: the ranks have {lengths} batches, and all need the same number: use "
                "dl_comm.torch.DistributedSampler, or drop_last=True"
            )

    def _call(self, name: str, state: EngineState) -> None:
        hook = self.hooks.get(name)
        if hook is not None:
            hook(state)

    def _pass_over(self, state: EngineState, use: Callable[[EngineState, _Batches], None]) -> None:
        """Use each batch once, and average the loss."""
        total = torch.zeros((), dtype=torch.float64)
        state.samples = 0
        with _Batches(state.iterator, self._prefetch) as batches:
            for sample in batches:
                state.sample = sample
                self._call("on_sample", state)
                use(state, batches)
                count = _samples(state.sample)
                state.samples += count
                # On the loss's device: reading it would wait for a GPU.
                total = total.to(state.loss.device) + state.loss.detach().reshape(()).double() * count
                state.step += 1
        sums = torch.stack([total.cpu(), torch.tensor(float(state.samples), dtype=torch.float64)])
        loss, samples = allreduce(sums, group=self._ranks(), name="Engine: the average loss").tolist()
        if samples == 0:
            raise ArgumentError(
                "iterator: no rank has a batch"
                + (f" in epoch {state.epoch}" if state.training else "")
                + ": give what "
                "starts anew each time, such as a DataLoader"
            )
        state.average_loss = loss / samples

    def _test_on(self, state: EngineState, batches: _Batches) -> None:
        self._forward(state)

    def _train_on(self, state: EngineState, batches: _Batches) -> None:
        def compute_gradients() -> None:
            self.optimizer.zero_grad()
            with torch.enable_grad():
                self._forward(state)
                batches.prefetch()
                state.loss.backward()
            self._call("on_backward", state)

        def closure() -> Any:
            compute_gradients()
            if isinstance(self.optimizer, AveragingOptimizer) or not self._average:
                return state.loss
            # What an optimizer decides by the loss must be the same on all ranks; an AveragingOptimizer sees to it.
            return mean_over_ranks(state.loss.detach(), group=self._group)

        if _needs_closure(self.optimizer):
            self.optimizer.step(closure)
        else:
            compute_gradients()
            self.optimizer.step()
        self._call("on_update", state)

    def _forward(self, state: EngineState) -> None:
        try:
            x, target = state.sample
        except (TypeError, ValueError):
            raise DTypeError(
                f"iterator: an item is a {type(state.sample).__name__}, not a pair of input and target; a hook "
                "on_sample may set state.sample to one"
            ) from None
        state.output = self.model(x)
        state.loss = self.criterion(state.output, target)
        if not isinstance(state.loss, torch.Tensor) or state.loss.numel() != 1:
            kind = tuple(state.loss.shape) if isinstance(state.loss, torch.Tensor) else type(state.loss).__name__
            raise DTypeError(f"criterion: it returned {kind}; the loss is a tensor of one element")
        self._call("on_forward", state)


_END = object()


class _Batches:
    """The items of an iterable, of which the next one can be fetched ahead. As a context manager it ends its thread."""

    def __init__(self, iterable: Iterable[Any], ahead: bool) -> None:
        self._iterable = iterable
        self._items: Iterator[Any] = iter(())
        self._thread = ThreadPoolExecutor(1, "dl_comm.Engine") if ahead else None
        self._next: Future[Any] | None = None

    def __enter__(self) -> _Batches:
        return self

    def __exit__(self, *_: Any) -> None:
        if self._thread is not None:
            self._thread.shutdown()

    def __iter__(self) -> Iterator[Any]:
        self._items = iter(self._iterable)  # on this thread: a DataLoader sets signal handlers
        while True:
            if self._thread is None:
                item = self._fetch()
            else:
                self.prefetch()
                assert self._next is not None
                item, self._next = self._next.result(), None
            if item is _END:
                return
            yield item

    def prefetch(self) -> None:
        """Begin to fetch the next item, unless that was begun. All items are fetched on one thread."""
        if self._thread is not None and self._next is None:
            self._next = self._thread.submit(self._fetch)

    def _fetch(self) -> Any:
        return next(self._items, _END)


def _length(iterable: Any) -> int | None:
    try:
        return len(iterable)
    except TypeError:  # an IterableDataset, or a generator
        return None


def _samples(sample: Any) -> int:
    """The number of samples of a batch: the first extent of its target, or of its input."""
    for each in reversed(sample):
        if isinstance(each, torch.Tensor) and each.dim():
            return int(each.shape[0])
    return 1


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _averages(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the gradients of all parameters of an optimizer are averaged already."""
    return isinstance(optimizer, AveragingOptimizer) or all(map(is_owned, _parameters(optimizer)))


def _named(model: torch.nn.Module, criterion: Any, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The names in model and criterion of the optimizer's parameters."""
    wanted = {id(parameter) for parameter in _parameters(optimizer)}
    named = dict(model.named_parameters())
    if isinstance(criterion, torch.nn.Module):
        named |= {f"criterion.{name}": parameter for name, parameter in criterion.named_parameters()}
    return {name: parameter for name, parameter in named.items() if id(parameter) in wanted}


def _needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty
