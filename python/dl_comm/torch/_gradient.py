"""One gradient during an allreduce: the tensor for the core, and the destination of the mean.

The memory rule. Autograd may give a parameter a gradient with shared memory: a view of a tensor that later nodes of the
same backward read, of another parameter's gradient, or of a user's tensor. So a gradient is averaged in place only if
nothing else refers to its storage. That holds for nearly all gradients: no copy, and references to `p.grad` see the
mean after backward. Any other gradient is copied, and the copy replaces `p.grad` afterwards. (Separate result memory
would also work, but costs every step new pages or a second set of gradients.)

Exceptions: a gradient that existed before backward, such as a part of a flat tensor of the script, stays in place:
backward adds to it, and the mean is stored there too. A gradient with a place in shared memory (`_shared_grads`) is
moved there when backward has finished it, and averaged there.

Thread rule: as the reducer, one thread at a time.
"""

from __future__ import annotations

import torch

from dl_comm._base.errors import ArgumentError, StateError
from dl_comm.torch._second import differentiable_mean

# Private to torch. Without it every gradient is copied.
_storage_use_count = getattr(torch._C, "_storage_Use_Count", None)


class Gradient:
    """The gradient of one parameter, from the start of an allreduce to its end."""

    def __init__(
        self,
        name: str,
        parameter: torch.Tensor,
        existing: torch.Tensor | None,
        sparse_as_dense: bool,
        view: torch.Tensor | None = None,
        donated: bool = False,
    ) -> None:
        """Take the current gradient of `parameter`.

        `existing`: the gradient before backward, if its memory was shared. `view`: its tensor in shared memory, or
        None. `donated`: the team keeps the averaged tensor.

        Raises ArgumentError when the gradient is sparse and `sparse_as_dense` is False.
        """
        self._name = name
        self._parameter = parameter
        gradient = parameter.grad
        if gradient is not None and gradient.layout is not torch.strided:
            if not sparse_as_dense:
                raise ArgumentError(f"the gradient of {name} is sparse: give DistributedOptimizer sparse_as_dense=True")
            gradient = parameter.grad = gradient.to_dense()
        if gradient is not view and view is not None and not donated and gradient is not existing:
            move(parameter, view)
            gradient = parameter.grad
        self.absent = gradient is None
        self._original = gradient
        # Of a backward with create_graph. The graph may need the values of the gradient, so it stays as it is.
        self.has_graph = gradient is not None and gradient.requires_grad
        self._version = 0 if gradient is None else gradient._version
        in_view = gradient is not None and gradient is view
        self._in_place = (
            gradient is not None
            and not self.has_graph
            and not (in_view and donated)
            and (in_view or not _shared(gradient))
        )
        if gradient is None and view is not None and not donated:
            self._buffer = view.zero_()
        elif gradient is None:
            self._buffer = torch.zeros_like(parameter, memory_format=torch.contiguous_format, requires_grad=False)
        elif self._in_place:
            self._buffer = contiguous_copy(gradient)
        else:
            self._buffer = contiguous_copy(gradient.detach().clone(memory_format=torch.contiguous_format))
            self._in_place = gradient is existing and not self.has_graph
        # The tensor that the core averages.
        self.comm_buffer = torch.view_as_real(self._buffer) if self._buffer.is_complex() else self._buffer

    def expect_unchanged(self, discard: bool) -> None:
        """Raise StateError if the parameter's gradient changed since the start; with `discard` it may be None."""
        gradient = self._parameter.grad
        if gradient is self._original and (
            gradient is None or gradient._is_view() or gradient._version == self._version
        ):
            return  # views share one version counter, so that of a view proves nothing
        if gradient is None and discard:
            return
        raise StateError(
            f"the gradient of {self._name} was changed during its allreduce; the gradients are now invalid: change "
            "gradients after backward(), not in hooks; with a non-blocking schedule, after optimizer.synchronize()"
        )

    def finish(self, used: bool, with_graph: bool = False) -> None:
        """Store the mean, which is in `comm_buffer`, as the gradient; `used`: some rank had a gradient.

        `with_graph`: as a function of the parameters.
        """
        gradient = self._original
        if with_graph and used:
            self._parameter.grad = differentiable_mean(self._name, self._parameter, gradient, self._buffer)
        elif gradient is None:
            # Another rank used this parameter: this rank makes the same step with the same gradient.
            if used and self._parameter.grad is None:
                self._parameter.grad = self._buffer
        elif self._in_place:
            if self._buffer is not gradient:
                gradient.copy_(self._buffer)
        elif gradient.is_contiguous() or overlaps(gradient):
            self._parameter.grad = self._buffer
        else:
            self._parameter.grad = torch.empty_like(gradient).copy_(self._buffer)

    def replace(self, mean: torch.Tensor | None) -> None:
        """Store the mean of an earlier step, which has its own memory, as the gradient; do not use `comm_buffer`.

        None: no rank had a gradient of this parameter in that step; the gradient becomes None, or zeros if it must
        stay.
        """
        gradient = self._original
        if gradient is not None and self._in_place and self._buffer is not gradient:
            gradient.zero_() if mean is None else gradient.copy_(mean)
        elif mean is None or gradient is None or gradient.is_contiguous() or overlaps(gradient):
            self._parameter.grad = mean
        else:
            self._parameter.grad = torch.empty_like(gradient).copy_(mean)

    def detach(self) -> None:
        """Remove the gradient from the parameter if a detached call will still write to it."""
        if self._in_place and self._buffer is self._original and self._parameter.grad is self._original:
            self._parameter.grad = None

    def tensor(self, mean: torch.Tensor) -> torch.Tensor:
        """Convert a mean of `comm_buffer`'s type to the type of the parameter."""
        return torch.view_as_complex(mean) if self._buffer.is_complex() else mean


def existing_shared_grad(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient from before backward if other tensors share its memory, else None."""
    gradient = parameter.grad
    if gradient is None or gradient.layout is not torch.strided or overlaps(gradient) or not _shared(gradient):
        return None
    return gradient


def move(parameter: torch.Tensor, view: torch.Tensor) -> None:
    """Copy the gradient of `parameter` to `view`, and make `view` the gradient, if type and layout are equal."""
    gradient = parameter.grad
    if gradient is None or gradient is view:
        return
    if (
        type(gradient) is torch.Tensor
        and gradient.layout is torch.strided
        and gradient.dtype is view.dtype
        and gradient.shape == view.shape
        and not gradient.requires_grad  # of a backward with create_graph
        and gradient.is_contiguous()
        and gradient.device.type == "cpu"
    ):
        parameter.grad = view.copy_(gradient)


def contiguous_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a copy that is contiguous and without pending conjugation or negation."""
    return tensor.resolve_conj().resolve_neg().contiguous()


def overlaps(tensor: torch.Tensor) -> bool:
    """Return whether elements of the tensor share memory, as in an expanded tensor."""
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def can_count_references() -> bool:
    """Return whether torch can count the references to a storage; if not, every gradient is copied."""
    return _storage_use_count is not None


def has_sole_reference(tensor: torch.Tensor) -> bool:
    """Return whether only this tensor refers to its storage; False if torch cannot count references."""
    return _storage_use_count is not None and _use_count(tensor) <= _SOLE_COUNT


def _shared(tensor: torch.Tensor) -> bool:
    return overlaps(tensor) or not has_sole_reference(tensor)


def _use_count(tensor: torch.Tensor) -> int:
    storage = tensor.untyped_storage()
    assert _storage_use_count is not None
    return int(_storage_use_count(storage._cdata))


# The count for a tensor with the only reference, plus that of the query.
_SOLE_COUNT = 0 if _storage_use_count is None else _use_count(torch.empty(1))
