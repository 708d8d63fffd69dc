"""Types of arguments and results, for type checkers.

The overloads of the collectives use them: a result has the type of its argument, and with ``async_op=True`` is a
``Work`` of it. At run time they cost nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypedDict, TypeVar

if TYPE_CHECKING:
    from dl_comm._arrays.groups import Group

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


# The keyword arguments that the overloads of a collective share, as `table` has them.
class Named(TypedDict, total=False):
    """Of all calls."""

    group: Group | None
    name: str | None
    timeout: float | None


class Matched(Named, total=False):
    """Of all collectives that move data."""

    by_name: bool


class Copied(Matched, total=False):
    """Of broadcast."""

    in_place: bool


class Common(Matched, total=False):
    """Of those with results."""

    out: Any


class Scaled(Common, total=False):
    """Of allreduce."""

    prescale: float
    postscale: float


class Ragged(Common, total=False):
    """Of all_gather and gather."""

    counts: Sequence[Any] | None
    ragged: bool


class ScaledBlocks(Scaled, total=False):
    """Of reduce_scatter."""

    counts: Sequence[Any] | None


class Exchanged(Common, total=False):
    """Of all_to_all."""

    send_counts: Sequence[Any] | None
    receive_counts: Sequence[Any] | None


class Scattered(Matched, total=False):
    """Of scatter, which has overloads for ``out``."""

    counts: Sequence[Any] | None
