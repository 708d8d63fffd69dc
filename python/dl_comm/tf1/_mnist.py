"""`tensorflow.examples.tutorials.mnist.input_data`: MNIST from local files.

Thread rule: one thread uses a DataSet.
"""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tensorflow
from numpy.typing import NDArray

tf = tensorflow.compat.v1

__all__ = ["DataSet", "Datasets", "read_data_sets"]


class DataSet:
    """Images and labels, in batches."""

    def __init__(
        self,
        images: NDArray[Any],
        labels: NDArray[Any],
        dtype: Any = tf.float32,
        reshape: bool = True,
        seed: int | None = None,
    ) -> None:
        """Store images [N, H, W, 1] of bytes and their labels.

        Args:
            images: The images.
            labels: The labels, one per image.
            dtype: `tf.float32` scales the bytes to the range 0 to 1; `tf.uint8` keeps them.
            reshape: Whether to reshape images to [N, H * W].
            seed: Seed of the shuffling in `next_batch`.

        Raises:
            ValueError: The numbers of labels and images differ, or `dtype` is not supported.
        """
        if len(images) != len(labels):
            raise ValueError(f"there are {len(images)} images and {len(labels)} labels")
        dtype = tf.as_dtype(dtype)
        if dtype not in (tf.float32, tf.uint8):
            raise ValueError(f"invalid dtype: {dtype.name} (expected float32 or uint8)")
        if reshape:
            images = images.reshape(len(images), -1)
        self.images = images / np.float32(255) if dtype == tf.float32 else images
        self.labels = labels
        self.num_examples = len(images)
        self.epochs_completed = 0
        self._order: NDArray[Any] = np.arange(len(images))
        self._next = 0
        self._random = np.random.default_rng(seed)

    def next_batch(
        self, batch_size: int, fake_data: bool = False, shuffle: bool = True
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return the next `batch_size` images and labels; a batch may span two epochs.

        Raises ValueError for fake data, which is not supported, and when `batch_size` exceeds the number of examples.
        """
        _refuse_fake(fake_data)
        if not 0 < batch_size <= self.num_examples:
            raise ValueError(f"invalid batch_size: {batch_size} (expected 1 to {self.num_examples} examples)")
        if shuffle and self._next == 0 and self.epochs_completed == 0:
            self._random.shuffle(self._order)
        chosen = self._order[self._next : self._next + batch_size]
        self._next += batch_size
        if self._next > self.num_examples:
            self.epochs_completed += 1
            self._next -= self.num_examples
            rest = chosen.copy()
            if shuffle:
                self._random.shuffle(self._order)
            chosen = np.concatenate([rest, self._order[: self._next]])
        return self.images[chosen], self.labels[chosen]


class Datasets(NamedTuple):
    """The three parts of MNIST."""

    train: DataSet
    validation: DataSet
    test: DataSet


def read_data_sets(
    train_dir: str,
    fake_data: bool = False,
    one_hot: bool = False,
    dtype: Any = tf.float32,
    reshape: bool = True,
    validation_size: int = 5000,
    seed: int | None = None,
    source_url: str | None = None,
) -> Datasets:
    """Read MNIST's four IDX files, gzipped or not. Downloads nothing.

    Args:
        train_dir: The folder with the files.
        fake_data: Must be False.
        one_hot: Whether labels are one-hot vectors.
        dtype: See `DataSet`.
        reshape: See `DataSet`.
        validation_size: The number of training images, from the first on, for validation.
        seed: See `DataSet`.
        source_url: Not used.

    Raises:
        FileNotFoundError: A file is not in the folder.
        ValueError: A file is not a valid IDX file, or an argument is out of range.
    """
    del source_url
    _refuse_fake(fake_data)
    images, labels = _read(train_dir, "train-images-idx3", 3), _read(train_dir, "train-labels-idx1", 1)
    tests = _read(train_dir, "t10k-images-idx3", 3), _read(train_dir, "t10k-labels-idx1", 1)
    if not 0 <= validation_size <= len(images):
        raise ValueError(f"invalid validation_size: {validation_size} (expected 0 to {len(images)})")

    def made(images: NDArray[Any], labels: NDArray[Any]) -> DataSet:
        labels = np.eye(10)[labels] if one_hot else labels
        return DataSet(images[..., np.newaxis], labels, dtype, reshape, seed)

    cut = validation_size
    return Datasets(made(images[cut:], labels[cut:]), made(images[:cut], labels[:cut]), made(*tests))


def _refuse_fake(fake_data: bool) -> None:
    if fake_data:
        raise ValueError("dl_comm.tf1 does not support fake data")


def _read(folder: str, stem: str, dimensions: int) -> NDArray[np.uint8]:
    name = f"{stem}-ubyte"
    packed, plain = Path(folder) / f"{name}.gz", Path(folder) / name
    if not packed.is_file() and not plain.is_file():
        raise FileNotFoundError(f"neither {name}.gz nor {name} is in {folder}; dl_comm.tf1 downloads nothing")
    raw = gzip.decompress(packed.read_bytes()) if packed.is_file() else plain.read_bytes()
    # Two zeros, the element type (8: bytes), the number of dimensions; the dimensions (big-endian uint32); the bytes.
    header = 4 + 4 * dimensions
    shape = np.frombuffer(raw[4:header], ">u4").tolist()
    if raw[:4] != bytes((0, 0, 8, dimensions)) or len(raw) != header + int(np.prod(shape)):
        raise ValueError(f"{name} in {folder} is not an IDX file of {dimensions} dimensions")
    elements: NDArray[np.uint8] = np.frombuffer(raw, np.uint8, offset=header).reshape(shape)
    return elements
