"""What the MNIST examples share: command line, data, shards and progress.

It needs dl_comm and NumPy only, and scikit-learn when there is no MNIST on this machine.
"""

from __future__ import annotations

import argparse
import gzip
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dl_comm.training import DistributedSampler

Images = NDArray[np.float32]
Labels = NDArray[np.int64]

IMAGES_MAGIC, LABELS_MAGIC = 0x803, 0x801
FILES = (
    ("train-images", "idx3"),
    ("train-labels", "idx1"),
    ("t10k-images", "idx3"),
    ("t10k-labels", "idx1"),
)


@dataclass(frozen=True)
class Data:
    """A data set: images are float32 [N, 28, 28] from 0 to 1, labels int64 [N] from 0 to 9."""

    train_images: Images
    train_labels: Labels
    test_images: Images
    test_labels: Labels


def arguments(description: str, lr: float = 0.05, devices: Sequence[str] = ()) -> argparse.Namespace:
    """Read the command line of an example.

    `lr` is the example's default learning rate for one rank; `devices` are those it can be told to train on.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--data-dir", help="folder with the four MNIST files, gzipped or not")
    parser.add_argument("--epochs", type=_positive, default=2, help="passes over the training images")
    parser.add_argument("--batch-size", type=_positive, default=64, help="images a step on each rank")
    parser.add_argument("--lr", type=float, default=lr, help="learning rate for one rank; multiplied by their number")
    parser.add_argument("--checkpoint", help="file that rank 0 writes the trained weights to")
    if devices:
        text = "what each rank trains on; None is a GPU where torch finds one"
        parser.add_argument("--device", choices=devices, help=text)
    return parser.parse_args()


def load(data_dir: str | None, verbose: bool) -> Data:
    """Load MNIST from `data_dir`, else from the frameworks' usual caches, else scikit-learn's smaller digits.

    `verbose` (rank 0) prints where the images come from. Raises FileNotFoundError when `data_dir` lacks a file, and
    ValueError when a file is not an IDX file.
    """
    if data_dir is not None:
        data = _from_idx(Path(data_dir))
        source = data_dir
    else:
        data, source = _from_caches()
    if verbose:
        print(f"data: {len(data.train_images)} training and {len(data.test_images)} test images from {source}")
    return data


def shard(images: Images, labels: Labels, rank: int, size: int, epoch: int, seed: int = 0) -> tuple[Images, Labels]:
    """Give the part of `rank` in one epoch: each `size`-th image of an order that all ranks shuffle alike.

    Every rank gets the same number of images (up to `size - 1` are left out), so that all take the same steps.
    """
    sampler = DistributedSampler(len(images), size, rank, seed=seed, even="drop")
    sampler.set_epoch(epoch)
    mine = list(sampler)
    return images[mine], labels[mine]


def steps(images: Images, size: int, batch_size: int) -> int:
    """Give the number of whole batches a rank has in an epoch, when `size` ranks share `images`.

    Raises SystemExit when there is none.
    """
    share = len(images) // size
    if share < batch_size:
        raise SystemExit(f"--batch-size {batch_size} is more than the {share} images of each of {size} ranks")
    return share // batch_size


class Progress:
    """Shows how far training is: one line that is rewritten on a terminal, else a line each tenth of the way.

    The last line is the speed, by the median of the steps: the first ones may compile.
    """

    def __init__(self, enabled: bool, total_steps: int, images: int) -> None:
        """Show something only when `enabled` (rank 0) out of `total_steps` steps, each of `images` of all ranks."""
        self._enabled = enabled
        self._total = max(total_steps, 1)
        self._images = images
        self._terminal = sys.stdout.isatty()
        self._tenth = 0
        self._begin = time.monotonic()
        self._ends = [self._begin]

    def update(self, step: int, loss: float) -> None:
        """Report that `step` steps (counted from 1) are done, the last with `loss`."""
        if not self._enabled:
            return
        last, now = step >= self._total, time.monotonic()
        line = f"step {step}/{self._total}  loss {loss:.4f}  {now - self._begin:.0f} s"
        tenth = step * 10 // self._total
        if self._terminal:
            print(f"\r{line:<60}", end="\n" if last else "", flush=True)
        elif tenth > self._tenth:
            print(line, flush=True)
        self._tenth = tenth
        self._ends.append(now)
        if last:
            print(f"images/s: {self._images / np.median(np.diff(self._ends)):.0f}", flush=True)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return number


def _from_caches() -> tuple[Data, str]:
    keras = Path.home() / ".keras" / "datasets" / "mnist.npz"
    if keras.is_file():
        with np.load(keras) as file:
            return _data(file["x_train"], file["y_train"], file["x_test"], file["y_test"]), str(keras)
    for torch in (Path("MNIST/raw"), Path("data/MNIST/raw")):
        if all(_find(torch, stem, kind) for stem, kind in FILES):
            return _from_idx(torch), str(torch)
    return _from_digits(), "scikit-learn's load_digits (no MNIST here; see --data-dir)"


def _from_digits() -> Data:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise FileNotFoundError(
            "no MNIST found: give --data-dir, or pip install scikit-learn for its digits"
        ) from error
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.images))
    grown = np.kron(digits.images[order], np.ones((3, 3)))  # [N, 24, 24] from 0 to 16
    images = np.pad(grown, ((0, 0), (2, 2), (2, 2))) * (255.0 / 16.0)
    labels = digits.target[order]
    cut = len(images) * 5 // 6
    return _data(images[:cut], labels[:cut], images[cut:], labels[cut:])


def _from_idx(folder: Path) -> Data:
    arrays = []
    for stem, kind in FILES:
        path = _find(folder, stem, kind)
        if path is None:
            raise FileNotFoundError(f"no {stem}-{kind}-ubyte (or .gz) in {folder}")
        arrays.append(_read_idx(path, IMAGES_MAGIC if kind == "idx3" else LABELS_MAGIC))
    return _data(*arrays)


def _find(folder: Path, stem: str, kind: str) -> Path | None:
    names = (f"{stem}{joint}{kind}-ubyte{end}" for joint in "-." for end in ("", ".gz"))
    return next((folder / name for name in names if (folder / name).is_file()), None)


def _read_idx(path: Path, magic: int) -> NDArray[np.uint8]:
    # The IDX format: a big-endian magic number (type and number of dimensions), the dimensions, then the bytes.
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    ndim = magic & 0xFF
    if len(raw) < 4 * (1 + ndim) or int.from_bytes(raw[:4], "big") != magic:
        raise ValueError(f"{path} is not an IDX file of {ndim} dimensions")
    shape = tuple(int.from_bytes(raw[4 * i : 4 * i + 4], "big") for i in range(1, ndim + 1))
    values = np.frombuffer(raw, np.uint8, offset=4 * (1 + ndim))
    if values.size != int(np.prod(shape)):
        raise ValueError(f"{path} holds {values.size} bytes where its header says {int(np.prod(shape))}")
    return values.reshape(shape)


def _data(*arrays: NDArray[Any]) -> Data:
    train_images, train_labels, test_images, test_labels = arrays
    return Data(
        (train_images / np.float32(255)).astype(np.float32, copy=False),
        train_labels.astype(np.int64),
        (test_images / np.float32(255)).astype(np.float32, copy=False),
        test_labels.astype(np.int64),
    )
