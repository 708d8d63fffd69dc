"""The cases: an operation on a buffer or on a list of buffers. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.allreduce.lists import lengths

ITEM_BYTES = {"f32": 4, "bf16": 2, "f16": 2, "f64": 8}
"""The bytes of an element by the type's name."""

MIB = 1 << 20
SIZES = (64, 512, 4 << 10, 32 << 10, 64 << 10, 256 << 10, MIB, 8 * MIB, 64 * MIB, 256 * MIB)
"""Bytes of single buffers."""
LATENCY_SIZES = (64, 4 << 10)
"""Bytes of the buffers whose percentiles are taken."""
MODELS = ("resnet50", "bert_base", "gpt2_small", "tiny_10000")

UNTIMED = 2
"""Warm-up iterations at the start of each trial; trial.c has the same number."""
_RING = 512 * MIB
_SMALL_RING = 512
_MOST = {"buffer": 500, "latency": 5000, "list": 50}
_MOST_LARGE = 200


@dataclass(frozen=True)
class Case:
    """One operation.

    Attributes:
        kind: "buffer" (one buffer), "latency" (one buffer, with percentiles) or "list" (of tensors).
        name: The list's name, or the bytes of the buffer.
        dtype: A key of ITEM_BYTES.
        lengths: The elements of each tensor.
    """

    kind: str
    name: str
    dtype: str
    lengths: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """The bytes of all tensors."""
        return sum(self.lengths) * ITEM_BYTES[self.dtype]

    def iterations(self, seconds: float, each: float, most: int | None = None) -> int:
        """The number of iterations of `each` seconds in a trial of `seconds`; at least 3 and at most `most`."""
        usual = _MOST_LARGE if self.kind == "buffer" and self.bytes >= MIB else _MOST[self.kind]
        return max(3, min(most or usual, usual, int(seconds / max(each, 1e-7))))

    def slots(self, iterations: int, cache: int) -> int:
        """The number of buffers in the ring, for a last-level cache of `cache` bytes; at least 2."""
        ring = -(-_RING // self.bytes) if self.bytes >= MIB else min(_SMALL_RING, -(-2 * cache // self.bytes))
        return max(2, min(ring, iterations + UNTIMED))

    def trial(self, mode: str, iterations: int, cache: int) -> str:
        """The line that starts a trial; trial.h has the format."""
        fields = [self.dtype, mode, self.slots(iterations, cache), iterations, len(self.lengths), *self.lengths]
        return " ".join(map(str, fields)) + "\n"


def buffers(sizes: Sequence[int], dtypes: Sequence[str]) -> Iterator[Case]:
    """Single buffers of all sizes (bytes) and types; sizes are rounded up to whole elements."""
    for dtype in dtypes:
        for size in sizes:
            yield Case("buffer", str(size), dtype, (-(-size // ITEM_BYTES[dtype]),))


def latencies(sizes: Sequence[int], dtype: str) -> Iterator[Case]:
    """Single small buffers, for percentiles."""
    for size in sizes:
        yield Case("latency", str(size), dtype, (-(-size // ITEM_BYTES[dtype]),))


def models(names: Sequence[str], dtype: str) -> Iterator[Case]:
    """Lists of tensors by name."""
    for name in names:
        yield Case("list", name, dtype, lengths(name))
