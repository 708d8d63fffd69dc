"""Types of arguments and results, for type checkers.

The overloads of the collectives use them: a result has the type of its argument, and with ``async_op=True`` is a
``Work`` of it. At run time they cost nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol, TypedDict, TypeVar

Operator = Literal["sum", "mean", "min", "max", "product", "bit_and", "bit_or", "bit_xor", "adasum"]
"""The operators of the reductions, as a type: annotate with it what is passed as ``op``."""


class _Tensor(Protocol):
    """An array, or a tensor of a framework."""

    @property
    def shape(self) -> Any: ...

    @property
    def dtype(self) -> Any: ...


Arrays = TypeVar("Arrays", bound=_Tensor | list[Any])
"""An array or tensor, or a list of them."""
Values = TypeVar("Values", bound=_Tensor | list[Any] | complex)
"""The same, or a number."""
Object = TypeVar("Object")


# Keyword arguments that the overloads of a collective share; the functions describe them.
class Options(TypedDict, total=False):
    """Of reduce."""

    name: str | None
    timeout: float | None
    out: Any


class Scaled(Options, total=False):
    """Of allreduce."""

    prescale: float
    postscale: float


class Ragged(Options, total=False):
    """Of all_gather and gather."""

    counts: Sequence[int] | None
    ragged: bool


class ScaledBlocks(Scaled, total=False):
    """Of reduce_scatter."""

    counts: Sequence[int] | None


class Exchanged(Options, total=False):
    """Of all_to_all."""

    send_counts: Sequence[int] | None
    receive_counts: Sequence[int] | None


class Scattered(TypedDict, total=False):
    """Of scatter."""

    name: str | None
    timeout: float | None
    counts: Sequence[int] | None
