"""Images for the benchmark: made up, or from the files of ImageNet, CIFAR-10 or MNIST. NumPy only.

Where the files lie in `--data_dir`:

- imagenet: a folder for each class with its JPEG files, here or in `train/`; the classes are numbered by name.
- cifar10: the files of the binary version (`data_batch_1.bin`, ...) or of the Python version (`data_batch_1`, ...),
  here or in the folder that the archive makes.
- mnist: the four IDX files, as for the other examples.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import mnist
from options import Shape

Batch = tuple[np.ndarray, np.ndarray]
"""Images, float32 [N, side, side, channels] around 0, and labels, int64 [N]."""

Decode = Callable[[Path, int], np.ndarray]
"""A JPEG file, and the side of the square that is wanted, to uint8 [side, side, 3]."""


def batches(args: argparse.Namespace, rank: int, size: int, decode: Decode) -> Iterator[Batch]:
    """Give batches without end: those of `rank`, which takes every `size`-th image of an order that all shuffle alike.

    Raises FileNotFoundError when the data set is not where it should be, ValueError when it is too small.
    """
    if args.synthetic:
        return _synthetic(args.shape, args.batch_size, rank)
    if args.data == "imagenet":
        return _from_files(args, rank, size, decode)
    if args.data == "mnist":
        found = mnist.load(args.data_dir, verbose=False)
        images, labels = found.train_images[..., None] * 255, found.train_labels
    else:
        images, labels = _cifar10(Path(args.data_dir))
    return _from_arrays(images, labels, args.batch_size, rank, size)


def _synthetic(shape: Shape, batch_size: int, rank: int) -> Iterator[Batch]:
    generator = np.random.default_rng(rank)
    while True:
        images = generator.normal(size=(batch_size, shape.side, shape.side, shape.channels))
        yield images.astype(np.float32), generator.integers(shape.classes, size=batch_size)


def _orders(count: int, batch_size: int, rank: int, size: int) -> Iterator[np.ndarray]:
    """Give the numbers of the images of each batch, epoch after epoch."""
    mine = count // size
    if mine < batch_size:
        raise ValueError(f"{count} images are too few for {size} rank(s) with --batch_size {batch_size}")
    epoch = 0
    while True:
        order = np.random.default_rng(epoch).permutation(count)[: mine * size][rank::size]
        yield from (order[i : i + batch_size] for i in range(0, mine - batch_size + 1, batch_size))
        epoch += 1


def _from_arrays(images: np.ndarray, labels: np.ndarray, batch_size: int, rank: int, size: int) -> Iterator[Batch]:
    for order in _orders(len(images), batch_size, rank, size):
        yield _centred(images[order]), labels[order]


def _from_files(args: argparse.Namespace, rank: int, size: int, decode: Decode) -> Iterator[Batch]:
    folder = Path(args.data_dir)
    folder = folder / "train" if (folder / "train").is_dir() else folder
    classes = sorted(path for path in folder.iterdir() if path.is_dir())
    files = [(file, label) for label, path in enumerate(classes) for file in sorted(path.glob("*.[jJ][pP]*[gG]"))]
    if not files:
        raise FileNotFoundError(f"no folders of JPEG files in {folder}")
    if len(classes) > args.shape.classes:
        raise ValueError(f"{folder} has {len(classes)} classes; the model has {args.shape.classes}")

    def load(order: np.ndarray) -> Batch:
        images = np.stack([decode(files[i][0], args.shape.side) for i in order])
        return _centred(images), np.array([files[i][1] for i in order])

    # The next batch is decoded while one is trained on.
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        orders = _orders(len(files), args.batch_size, rank, size)
        ahead = pool.submit(load, next(orders))
        for order in orders:
            ready, ahead = ahead, pool.submit(load, order)
            yield ready.result()


def _centred(images: np.ndarray) -> np.ndarray:
    return images.astype(np.float32) / np.float32(127.5) - np.float32(1)


def _cifar10(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    for inside in ("", "cifar-10-batches-bin", "cifar-10-batches-py"):
        binary, pickled = (sorted((folder / inside).glob(f"data_batch_[1-5]{end}")) for end in (".bin", ""))
        if binary:
            rows = np.concatenate([np.fromfile(path, np.uint8).reshape(-1, 1 + 3072) for path in binary])
            return _upright(rows[:, 1:]), rows[:, 0].astype(np.int64)
        if pickled:
            # Only what you trust: a pickle can hold a program.
            parts: list[dict[bytes, Any]] = [pickle.loads(path.read_bytes(), encoding="bytes") for path in pickled]
            labels = np.concatenate([np.asarray(part[b"labels"], np.int64) for part in parts])
            return _upright(np.concatenate([part[b"data"] for part in parts])), labels
    raise FileNotFoundError(f"no data_batch_1.bin or data_batch_1 of CIFAR-10 in {folder}")


def _upright(rows: np.ndarray) -> np.ndarray:
    return rows.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
