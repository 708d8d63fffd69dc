"""Gradients in memory that the ranks of a host see in each other: one flat piece of it for each bucket.

Tensors that lie there on all ranks are averaged in place, without a copy. Each is handed to the core as a tensor of its
own, so that errors name the parameter that differs, and ranks whose gradients lie elsewhere (there was no memory; the
script has laid them out) go together with ranks whose gradients lie here. One flat tensor would save about half a
microsecond a tensor: nothing where parameters are large, a sixth of the time of a call where they have ten thousand
elements, more than half where they have some hundreds.

Each of the tensors has a storage and a version counter of its own, though their memory is one piece: so a change of one
gradient is seen in that one, and what saves or copies a gradient takes along no other.

Thread rule: that of the reducer, one thread at a time.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import numpy as np
import torch

from dl_comm import CommError, StateError, shared_zeros
from dl_comm.torch._gradient import has_sole_reference

# Tensors start at multiples of it: a cache line, which no two ranks write to then.
_ALIGN = 64
# The share of the shared memory's file system that is left to others, such as the workers of data loaders.
_RESERVED_FRACTION = 0.5


class SharedGradBuffer:
    """The memory of a bucket: zeros at first. It lives as long as the tensors in it."""

    def __init__(self, parameters: Sequence[torch.Tensor], flags: int) -> None:
        """Lay out parameters for which `can_hold` is true, and so many float32 (`used`).

        Raises CommError or StateError when there is no memory.
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
        """Return the tensor for parameter `i`, which has `gradient`; None while the script holds an earlier one."""
        tensor = self.tensors[i]
        return (
            tensor
            if tensor is gradient or (_references(self.tensors, i) <= _FREE_COUNT and has_sole_reference(tensor))
            else None
        )


def can_hold(parameter: torch.Tensor) -> bool:
    """Tell whether the parameter's gradients can lie in shared memory: dense ones of plain CPU tensors."""
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
        raise CommError(f"{folder} has no {size} bytes to spare")


def _tensor(memory: np.ndarray, start: int, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    if shape.numel() == 0:
        return torch.empty(shape, dtype=dtype)
    flat = torch.frombuffer(memory, dtype=dtype, count=shape.numel(), offset=start)
    return flat.view(shape).data  # not a view to autograd: it has a version of its own


def _references(tensors: list[torch.Tensor], i: int) -> int:
    return sys.getrefcount(tensors[i])


# The count for a tensor that only its list holds, and `view_for`.
_FREE_COUNT = _references([torch.empty(1)], 0) + 1

ALLOC_ERRORS = (CommError, StateError, OSError)
"""What `SharedGradBuffer` raises when there is no memory to be had."""
