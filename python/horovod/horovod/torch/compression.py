"""Compression of gradients for the reduction: floating-point tensors in a type of 16 bits.

Thread rule: any thread.
"""

from __future__ import annotations

from typing import Any

import torch

from horovod.common.compression import Compressor, NoneCompressor

__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


class _Cast(Compressor):
    dtype: torch.dtype

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Returns a floating-point tensor in the smaller type, others as they are."""
        return tensor.to(cls.dtype) if tensor.is_floating_point() else tensor, tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Returns the tensor in its original type."""
        return tensor.to(ctx)


class FP16Compressor(_Cast):
    """float16: more digits, a small range."""

    dtype = torch.float16


class BF16Compressor(_Cast):
    """bfloat16: the range of float32, fewer digits. Not in Horovod."""

    dtype = torch.bfloat16


class Compression:
    """The compressors: ``hvd.DistributedOptimizer(optimizer, compression=hvd.Compression.fp16)``."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
