"""One gradient on its way through an average: what is handed to the core, and where the mean goes.

The memory rule. Autograd may give a parameter a gradient whose memory others use: a view of the gradient that nodes of
the same backward have yet to read, of another parameter's, or of a tensor of the user's. So a gradient is averaged
where it lies only when nothing else refers to its storage, which is so for nearly all: no copy, no second set of
gradients, and references that hooks hold to `p.grad` see the mean after backward. Any other gradient is
copied, and the copy takes its place as `p.grad` afterwards. (Results in separate memory for all would serve as well,
but cost every step fresh pages or a second set of gradients.) The exception are gradients that stood before backward,
such as parts of one flat tensor that the script has laid out: backward adds to them in place, and the mean goes there
too. Where a gradient has a place in shared memory (`_shared_grads`), it is moved there once backward has it ready, and
averaged there.

Thread rule: that of the reducer, one thread at a time.
"""

from __future__ import annotations

import torch

from dl_comm import ArgumentError, StateError

# Absent in a later torch: every gradient is copied then.
_storage_use_count = getattr(torch._C, "_storage_Use_Count", None)


class Gradient:
    """The gradient of one parameter, from the start of an average to its end."""

    def __init__(
        self,
        name: str,
        parameter: torch.Tensor,
        existing: torch.Tensor | None,
        sparse_as_dense: bool,
        view: torch.Tensor | None = None,
        donated: bool = False,
    ) -> None:
        """Take the gradient that `parameter` has now. `existing` is the one it had before backward, if it was shared.

        `view` is its place in shared memory, if it has one; `donated`: what is averaged is given away for good.

        Raises ArgumentError when the gradient is sparse and may not be made dense.
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
        self._version = 0 if gradient is None else gradient._version
        in_view = gradient is not None and gradient is view
        self._in_place = gradient is not None and not (in_view and donated) and (in_view or not _shared(gradient))
        if gradient is None and view is not None and not donated:
            self._buffer = view.zero_()
        elif gradient is None:
            self._buffer = torch.zeros_like(parameter, memory_format=torch.contiguous_format, requires_grad=False)
        elif self._in_place:
            self._buffer = contiguous_copy(gradient)
        else:
            self._buffer = contiguous_copy(gradient.clone(memory_format=torch.contiguous_format))
            self._in_place = gradient is existing
        # What the core averages.
        self.comm_buffer = torch.view_as_real(self._buffer) if self._buffer.is_complex() else self._buffer

    def expect_unchanged(self, discard: bool) -> None:
        """Raise StateError when the parameter's gradient is not what was taken; `discard`: it may be gone."""
        gradient = self._parameter.grad
        if gradient is self._original and (
            gradient is None or gradient._is_view() or gradient._version == self._version
        ):
            return  # the version of a view is that of all views of one tensor
        if gradient is None and discard:
            return
        raise StateError(
            f"the gradient of {self._name} was changed while it was averaged, the gradients are invalid now: change "
            "gradients after backward(), not in hooks; on a schedule that does not wait, after optimizer.synchronize()"
        )

    def finish(self, used: bool) -> None:
        """Store the mean, which is in `comm_buffer`, as the gradient; `used`: some rank has a gradient."""
        gradient = self._original
        if gradient is None:
            # Another rank used this parameter: this rank takes the same step with the same gradient.
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
        """Put the mean of an earlier step, in memory of its own, where the gradient is, and give `comm_buffer` up.

        None: no rank had a gradient of this parameter then; it has none now, on any rank.
        """
        gradient = self._original
        if gradient is not None and self._in_place and self._buffer is not gradient:
            gradient.zero_() if mean is None else gradient.copy_(mean)
        elif mean is None or gradient is None or gradient.is_contiguous() or overlaps(gradient):
            self._parameter.grad = mean
        else:
            self._parameter.grad = torch.empty_like(gradient).copy_(mean)

    def detach(self) -> None:
        """Take the gradient away when the average that nobody waits for is still going to write to it."""
        if self._in_place and self._buffer is self._original and self._parameter.grad is self._original:
            self._parameter.grad = None

    def tensor(self, mean: torch.Tensor) -> torch.Tensor:
        """Give a mean that came for `comm_buffer` the type of the parameter."""
        return torch.view_as_complex(mean) if self._buffer.is_complex() else mean


def existing_shared_grad(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient that stands before backward, where its memory is shared."""
    gradient = parameter.grad
    if gradient is None or gradient.layout is not torch.strided or overlaps(gradient) or not _shared(gradient):
        return None
    return gradient


def move(parameter: torch.Tensor, view: torch.Tensor) -> None:
    """Copy the gradient of `parameter` to `view`, which takes its place; leave one alone that is of another kind."""
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
    """Return the tensor, or a copy, contiguous and without pending conjugation or negation."""
    return tensor.resolve_conj().resolve_neg().contiguous()


def overlaps(tensor: torch.Tensor) -> bool:
    """Tell whether elements of the tensor share memory, as those of an expanded one do."""
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def can_count_references() -> bool:
    """Tell whether torch says who refers to a storage; without that every gradient is copied anyway."""
    return _storage_use_count is not None


def has_sole_reference(tensor: torch.Tensor) -> bool:
    """Tell whether nothing but this tensor refers to its storage; no where torch does not say."""
    return _storage_use_count is not None and _use_count(tensor) <= _SOLE_COUNT


def _shared(tensor: torch.Tensor) -> bool:
    return overlaps(tensor) or not has_sole_reference(tensor)


def _use_count(tensor: torch.Tensor) -> int:
    storage = tensor.untyped_storage()
    assert _storage_use_count is not None
    return int(_storage_use_count(storage._cdata))


# The count for a tensor that is alone, with the handle that asks.
_SOLE_COUNT = 0 if _storage_use_count is None else _use_count(torch.empty(1))
