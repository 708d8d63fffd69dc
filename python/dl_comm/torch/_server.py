"""A parameter server of torch tensors. Those of a GPU go through pinned host memory.

Thread rule: any thread may call every method.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from dl_comm._base.errors import ArgumentError, DTypeError
from dl_comm.torch._arguments import HALVES, tensors_of

_CODES = {
    torch.float16: 0,
    torch.bfloat16: 1,
    torch.float32: 2,
    torch.float64: 3,
    torch.int8: 4,
    torch.uint8: 5,
    torch.int32: 6,
    torch.int64: 7,
    torch.bool: 8,
    torch.uint16: 9,
    torch.uint32: 10,
    torch.uint64: 11,
    torch.int16: 12,
    torch.complex64: 13,
    torch.complex128: 14,
}
"""Those of `dlDataType_t`."""


def _memory(tensor: torch.Tensor) -> tuple[int, int, int]:
    if tensor.dtype not in _CODES:
        raise DTypeError(f"a parameter server has no elements of {tensor.dtype}")
    return tensor.data_ptr(), tensor.numel(), _CODES[tensor.dtype]


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device.type == "cpu":
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)


def _place_for(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device.type == "cpu" and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")


class TensorKind:
    """Torch tensors."""

    def listed(self, x: Any, argument: str) -> tuple[list[Any], Callable[[list[Any]], Any]]:
        """The tensors of an argument, without their gradients."""
        tensors, wrap = tensors_of(x, argument)
        for index, tensor in enumerate(tensors):
            if tensor.is_meta or tensor.layout is not torch.strided:
                raise ArgumentError(
                    f"{argument}: tensor {index} is sparse or on the meta device; a server has dense ones"
                )
        return [tensor.detach() for tensor in tensors], wrap

    def outgoing(self, tensors: list[Any]) -> tuple[list[Any], list[Any]]:
        """The tensors, or contiguous copies in host memory."""
        kept = [_on_host(tensor).resolve_conj().resolve_neg().contiguous() for tensor in tensors]
        return [_memory(tensor) for tensor in kept], kept

    def incoming(self, tensors: list[Any]) -> tuple[list[Any], list[Any], list[Callable[[], object]]]:
        """The tensors, or memory that is then copied to them."""
        kept = [_place_for(tensor) for tensor in tensors]
        ends: list[Callable[[], object]] = [
            partial(to.copy_, place) for to, place in zip(tensors, kept, strict=True) if place is not to
        ]
        return [_memory(place) for place in kept], kept, ends

    def empty_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """A new tensor on the same device."""
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)

    def sizes(self, tensor: torch.Tensor) -> tuple[int, int]:
        """Bytes of an element, and of one in the memory of the server."""
        return tensor.itemsize, 4 if tensor.dtype in HALVES else tensor.itemsize

    def raw(self, tensor: torch.Tensor) -> np.ndarray[Any, Any]:
        """The bytes of a tensor."""
        raw: np.ndarray[Any, Any] = tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy()
        return raw

    def of_raw(self, raw: np.ndarray[Any, Any], like: torch.Tensor, stored: bool) -> torch.Tensor:
        """A tensor on the memory of `raw`."""
        return torch.from_numpy(raw).view(torch.float32 if stored and like.dtype in HALVES else like.dtype)
