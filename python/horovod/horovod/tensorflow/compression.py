"""Compression of gradients for the reduction: floating-point tensors in a type of 16 bits.

Thread rule: any thread.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf


class Compressor:
    """The interface; a script may pass a class of its own."""

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """Returns the tensor to reduce, and what ``decompress`` needs."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
        """Returns the reduced tensor in its original type."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """No compression."""

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """Returns the tensor itself."""
        return tensor, None

    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
        """Returns the tensor itself."""
        return tensor


class _Cast(Compressor):
    dtype: tf.DType

    @classmethod
    def compress(cls, tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """Returns a floating-point tensor in the smaller type, others as they are."""
        return tf.cast(tensor, cls.dtype) if tensor.dtype.is_floating else tensor, tensor.dtype

    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
        """Returns the tensor in its original type."""
        return tf.cast(tensor, ctx)


class FP16Compressor(_Cast):
    """float16: more digits, a small range."""

    dtype = tf.float16


class BF16Compressor(_Cast):
    """bfloat16: the range of float32, fewer digits. Not in Horovod."""

    dtype = tf.bfloat16


class Compression:
    """The compressors: ``hvd.DistributedOptimizer(optimizer, compression=hvd.Compression.fp16)``."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
