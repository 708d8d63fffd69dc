"""One bucket of gradients: its call, its memory and its results. `_reducer` orders the buckets.

Thread rule: as the reducer, one thread at a time.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Sequence
from time import perf_counter
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from dl_comm._arrays.tensor_names import labels
from dl_comm._base.errors import StateError
from dl_comm._job.ranks import get_nranks
from dl_comm.torch import _ops
from dl_comm.torch._bucket_plan import Named
from dl_comm.torch._gradient import Gradient, existing_shared_grad, move
from dl_comm.torch._shared_grads import ALLOC_ERRORS, SharedGradBuffer, can_hold


class CarriedMeans:
    """Means of earlier steps that no step has applied yet.

    They exist only on teams with a non-blocking schedule; see `dl_comm.config_team`.
    """

    def __init__(self) -> None:
        self._means = WeakTensorKeyDictionary()

    def add(self, parameter: torch.Tensor, mean: torch.Tensor) -> None:
        """Store a mean for the next step."""
        earlier = self._means.get(parameter)  # type: ignore[no-untyped-call]
        self._means[parameter] = mean if earlier is None else earlier + mean

    def apply(self) -> None:
        """Add the stored means to the gradients."""
        for parameter, mean in list(self._means.items()):  # type: ignore[no-untyped-call]
            parameter.grad = mean if parameter.grad is None else parameter.grad.add_(mean)
        self._means.clear()


# `_flags` ends with the step number modulo this, one-hot: its mean shows whether all ranks agree.
STEP_FLAGS = 3


class Bucket:
    """Parameters that one call averages, and the state of that call in a round (from one step to the next)."""

    def __init__(
        self, index: int, named: Named, first: int = 0, single_use: bool = False, as_views: bool = False
    ) -> None:
        """Make bucket number `index` of these parameters. `first` is the plan's index of its first parameter.

        `single_use`: the bucket serves this step only, and backward has already produced its gradients.
        `as_views`: store the gradients in shared memory if possible.
        """
        self.index = index
        self.first = first
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        self.donated = False  # the team may keep the tensors of the last call
        self._single_use = single_use
        self._on_gpu = self.parameters[0].device.type != "cpu"  # a bucket has one device
        self._labels = labels([*self.names, "(which parameters have a gradient)"])
        self._steps = 0
        # One ordinary tensor forces copies of the whole bucket: use all or none.
        self._as_views = as_views and not single_use and all(map(can_hold, self.parameters))
        self._memory: SharedGradBuffer | None = None
        self.reset()
        if single_use:
            self._existing.clear()

    def reset(self) -> None:
        """Begin a round. Does not wait for a call in flight."""
        self.passes = [0] * len(self.parameters)
        self.waiting = len(self.parameters)
        self.waited = 0.0  # seconds
        self._call: int | None = None
        self._control: int | None = None  # the call for `_flags`, if separate
        self._streams: set[Any] = set()  # the streams on which backward computed the gradients
        self._gradients: list[Gradient] = []
        self._flags = torch.empty(0)
        views = [None] * len(self.parameters) if self._memory is None else self._memory.tensors
        each = enumerate(zip(self.parameters, views, strict=True))
        # A gradient in shared memory is averaged in place, even with other references to it.
        self._existing = {i: None if p.grad is view else existing_shared_grad(p) for i, (p, view) in each}

    def record_stream(self) -> None:
        """Record the current stream: backward computed a gradient on it."""
        if self._on_gpu:
            self._streams.add(torch.cuda.current_stream(self.parameters[0].device))

    def move_to_view(self, i: int) -> None:
        """Move the gradient of parameter `i`, which backward has just finished, to shared memory.

        Must not be called while `donated`: the team then owns the memory of the gradients.
        """
        parameter = self.parameters[i]
        memory = self._shared_buffer()
        if memory is None or parameter.grad is None or parameter.grad is self._existing.get(i):
            return
        view = memory.view_for(i, parameter.grad)
        if view is not None:
            move(parameter, view)

    def start(self, team: int, call_name: str, owner: int, sparse_as_dense: bool, steps: int) -> None:
        """Start the allreduce of the gradients, with zeros for missing ones. `steps`: steps made so far."""
        if self._on_gpu:
            current = torch.cuda.current_stream(self.parameters[0].device)
            for stream in self._streams - {current}:
                current.wait_stream(stream)
        # A single-use bucket has no next call that could return a carried mean.
        self.donated = donated = not self._single_use and _ops.may_return_early(team, owner)
        memory = self._shared_buffer() if not donated else self._memory
        self._gradients = []
        for i, (name, parameter) in enumerate(zip(self.names, self.parameters, strict=True)):
            view = None if memory is None else memory.view_for(i, parameter.grad)
            self._gradients.append(Gradient(name, parameter, self._existing.get(i), sparse_as_dense, view, donated))
        self._steps = steps
        flags = [not gradient.absent for gradient in self._gradients]
        flags.extend(steps % STEP_FLAGS == i for i in range(STEP_FLAGS))
        self._flags = torch.tensor(flags, dtype=torch.float32)
        if donated:
            # The team keeps these tensors past the step and returns other memory. New gradients in the shared buffer
            # would overwrite them. So gradients stay in autograd's memory while the schedule is non-blocking.
            self._memory = None
        elif memory is not None:
            self._flags = memory.used.copy_(self._flags)
        options = (_ops.CONTINUES_STEP if self.index > 0 else 0) | (_ops.DONATE_TENSORS if self.donated else 0)
        buffers = [*self._comm_buffers(), self._flags]
        if self._on_gpu and not donated:
            # The host reads the flags. A separate call avoids waiting for the GPU.
            buffers.pop()
        elif self._on_gpu:
            buffers[-1] = self._flags = self._flags.to(buffers[0].device)
        with self._on_comm_stream():
            self._call = _ops.average_start(buffers, team, call_name, self._labels, options, owner)
        if self._on_gpu and not donated:
            label = "(which parameters have a gradient)"
            self._control = _ops.start_control(self._flags, team, f"{call_name}.used", label, owner)

    def finish(self, discard: bool, carried: CarriedMeans) -> None:
        """Wait for the allreduce, if it was started, and store the means in the gradients.

        The team may return the mean of an earlier step instead. If no step can take that mean (`discard`: the gradients
        may be gone; or an error), it is carried to the next step.

        Raises StateError when gradients were changed meanwhile, or, on all ranks, when their step numbers differ.
        """
        call, self._call = self._call, None
        if call is None:
            return
        control, self._control = self._control, None
        earlier: list[torch.Tensor] = []
        own, share = 1.0, 0.0
        try:
            since = perf_counter()
            try:
                earlier, own, share = _ops.wait(call)
            finally:
                if control is not None:
                    _ops.wait_control(control)
            self.waited = perf_counter() - since
            for gradient in self._gradients:
                gradient.expect_unchanged(discard)
        except Exception:
            self._memory = None
            self._carry(earlier, share, carried)
            if self.donated:
                self._replace(None for _ in self._gradients)
            raise
        if not earlier:
            torch.autograd.graph.increment_version(self._comm_buffers())
            *shares, at_0, at_1, at_2 = self._flags.tolist()
            with_graph = any(gradient.has_graph for gradient in self._gradients)
            for gradient, used in zip(self._gradients, shares, strict=True):
                gradient.finish(used > 0, with_graph)
            # The means are equal on all ranks, so all ranks raise or none does. Ranks that have joined add zeros.
            if max(at_0, at_1, at_2) < at_0 + at_1 + at_2 - 0.5 / get_nranks():
                raise StateError(
                    f"the ranks have made different numbers of steps with this optimizer (this one {self._steps}), so "
                    "that their parameters differ: call step() on all ranks or on none (decide by "
                    "dl_comm.torch.average(loss), which is the same on all, not by this rank's loss)"
                )
        elif discard:
            self._carry(earlier, share, carried)
            self._replace(None for _ in self._gradients)
        else:
            buffers = [*self._comm_buffers(), self._flags]
            if share != 1.0:
                torch._foreach_mul_(earlier, share)
            if own > 0.0:
                torch._foreach_add_(earlier, buffers, alpha=own)
            self._replace(self._means(earlier))

    def collect_carried(self, team: int, call_name: str, owner: int, carried: CarriedMeans) -> None:
        """Collect the mean that the last call carried over; this bucket makes no further call."""
        if not self.donated:
            return
        parameters = zip(self.names, self.parameters, strict=True)
        self._gradients = [Gradient(name, _empty_parameter(parameter), None, False) for name, parameter in parameters]
        buffers = [
            *self._comm_buffers(),
            torch.zeros(len(self._gradients) + STEP_FLAGS, device=self.parameters[0].device),
        ]
        _ops.wait(_ops.average_start(buffers, team, call_name, self._labels, _ops.CONTINUES_STEP, owner))
        self._carry(buffers, 1.0, carried)
        self.donated = False

    def detach(self) -> None:
        """Give up waiting for a call in flight; detach the gradients that it will write to from their parameters."""
        call, self._call = self._call, None
        control, self._control = self._control, None
        if control is not None:
            _ops.detach_control(control)
        if call is not None:
            if self._on_gpu:
                comm_stream = _comm_stream(self.parameters[0].device)
                for comm_buffer in self._comm_buffers():
                    comm_buffer.record_stream(comm_stream)
            _ops.detach(call)
            self._memory = None
            for gradient in self._gradients:
                gradient.detach()

    def _on_comm_stream(self) -> contextlib.AbstractContextManager[Any]:
        """On a GPU: enter a side stream that waits for backward's work so far, and start the call there.

        The stream that starts a call also waits for its result: backward's stream must not.
        """
        if not self._on_gpu:
            return contextlib.nullcontext()
        device = self.parameters[0].device
        comm_stream = _comm_stream(device)
        comm_stream.wait_stream(torch.cuda.current_stream(device))
        return torch.cuda.stream(comm_stream)

    def _shared_buffer(self) -> SharedGradBuffer | None:
        if self._memory is None and self._as_views:
            try:
                self._memory = SharedGradBuffer(self.parameters, len(self.parameters) + STEP_FLAGS)
            except ALLOC_ERRORS:
                self._as_views = False  # gradients stay in autograd's memory, which is slower
        return self._memory

    def _means(self, results: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """The means; None for parameters for which no rank had a gradient."""
        used = results[-1].tolist()[:-STEP_FLAGS]
        each = zip(self._gradients, results[:-1], used, strict=True)
        return [gradient.tensor(mean) if is_used > 0 else None for gradient, mean, is_used in each]

    def _carry(self, earlier: Sequence[torch.Tensor], share: float, carried: CarriedMeans) -> None:
        if earlier and share > 0.0:
            for parameter, mean in zip(self.parameters, self._means(earlier), strict=True):
                if mean is not None:
                    carried.add(parameter, mean if share == 1.0 else mean * share)

    def _replace(self, means: Iterable[torch.Tensor | None]) -> None:
        for gradient, mean in zip(self._gradients, means, strict=True):
            gradient.replace(mean)

    def _comm_buffers(self) -> list[torch.Tensor]:
        return [gradient.comm_buffer for gradient in self._gradients]


@functools.cache
def _comm_stream(device: torch.device) -> Any:
    """The stream of this GPU on which calls start."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _empty_parameter(parameter: torch.Tensor) -> torch.Tensor:
    """An uninitialized parameter of the same shape, dtype and device, without a gradient."""
    return torch.empty_like(parameter, memory_format=torch.contiguous_format)
