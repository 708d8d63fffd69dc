"""Gradients in memory that the ranks of a host share: one contiguous buffer per bucket.

If the tensors of all ranks are in shared memory, the allreduce runs in place, without a copy. Each gradient is a
separate tensor for the core, so that errors name the parameter that differs, and so that ranks without shared memory
can take part. One flat tensor would save about 0.5 us per gradient: nothing for large parameters, a sixth of a call for
parameters of ten thousand elements, more than half for some hundreds.

Each tensor has its own storage and version counter, although they share one buffer. So a change of one gradient is seen
in that gradient only, and saving or copying a gradient does not save the others.

Thread rule: as the reducer, one thread at a time.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import numpy as np
import torch

from dl_comm._arrays.memory import shared_zeros
from dl_comm._base.errors import CommError, StateError
from dl_comm.torch._gradient import has_sole_reference

# Tensors start at cache lines: no two ranks write to the same line.
_ALIGN = 64
# The fraction of the shared memory's file system that stays free for others, such as data loader workers.
_RESERVED_FRACTION = 0.5


class SharedGradBuffer:
    """The shared memory of a bucket, initially zeros. It lives as long as its tensors."""

    def __init__(self, parameters: Sequence[torch.Tensor], flags: int) -> None:
        """Allocate tensors for parameters that satisfy `can_hold`, and `flags` float32 elements (`used`).

        Raises CommError, StateError or OSError when there is no memory.
        """
        lengths = [parameter.numel() * parameter.element_size() for parameter in parameters]
        lengths.append(flags * torch.float32.itemsize)
        starts = [0]
        for length in lengths:
            starts.append(-(-(starts[-1] + length) // _ALIGN) * _ALIGN)
        _check_space(starts[-1])
        memory = shared_zeros(starts[-1], np.uint8)
        layout = zip(parameters, starts, strict=False)
        self.tensors = [_tensor(memory, start, parameter.shape, parameter.dtype) for parameter, start in layout]
        self.used = _tensor(memory, starts[-2], torch.Size([flags]), torch.float32)

    def view_for(self, i: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Return the tensor for parameter `i` with this gradient; None while the script still refers to it."""
        tensor = self.tensors[i]
        return (
            tensor
            if tensor is gradient or (_references(self.tensors, i) <= _FREE_COUNT and has_sole_reference(tensor))
            else None
        )


def shared_flat(elements: int, dtype: torch.dtype) -> torch.Tensor:
    """Return zeros in memory that the ranks of a host share. Raises `ALLOC_ERRORS` when there is none."""
    length = elements * dtype.itemsize
    _check_space(length)
    return _tensor(shared_zeros(length, np.uint8), 0, torch.Size([elements]), dtype)


def can_hold(parameter: torch.Tensor) -> bool:
    """Return whether the parameter's gradients can be in shared memory: plain, dense, contiguous CPU tensors."""
    return (
        type(parameter) in (torch.nn.Parameter, torch.Tensor)
        and parameter.layout is torch.strided
        and parameter.device.type == "cpu"
        and parameter.is_contiguous()
    )


def _check_space(size: int) -> None:
    folder = os.environ.get("DL_COMM_SHM_DIR") or "/dev/shm"
    system = os.statvfs(folder)
    if (system.f_bavail - system.f_blocks * _RESERVED_FRACTION) * system.f_frsize < size:
        raise CommError(f"{folder} has too little free space for {size} bytes of gradients")


def _tensor(memory: np.ndarray, start: int, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    if shape.numel() == 0:
        return torch.empty(shape, dtype=dtype)
    flat = torch.frombuffer(memory, dtype=dtype, count=shape.numel(), offset=start)
    return flat.view(shape).data  # not a view for autograd: it has its own version counter


def _references(tensors: list[torch.Tensor], i: int) -> int:
    return sys.getrefcount(tensors[i])


# The reference count, as `view_for` sees it, of a tensor that only its list refers to.
_FREE_COUNT = _references([torch.empty(1)], 0) + 1

ALLOC_ERRORS = (CommError, StateError, OSError)
"""The exceptions of `SharedGradBuffer` when it cannot allocate memory."""
