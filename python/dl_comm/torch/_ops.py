"""The op library for PyTorch: loads it, completes its ops for the compiler and autograd, and wraps them.

Tensors are in host memory or in that of a GPU, all of one call in the same. On a GPU an op is done when torch's current
stream will see the result; the host does not wait for that.

The wrappers raise `dl_comm.CommError` and its subclasses. They may be
called from any thread; those that wait do so without the GIL.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from dl_comm import _cuda, _load
from dl_comm._errors import translate

_path = _load.ops_library("torch")
torch.ops.load_library(_path)  # type: ignore[no-untyped-call]
_ops = torch.ops.dl_comm
_load.check_one_core(_path, _ops.core_id())


def _set_cuda_stream_source() -> None:
    """Tell the ops where torch keeps its streams, if it was built with CUDA."""
    library = Path(_path).with_name("libdl_comm_torch_cuda.so")
    if torch.version.cuda is None or not library.exists():
        return
    _cuda.preload()
    function = ctypes.CDLL(str(library)).dl_comm_current_stream
    _ops.set_stream_source(ctypes.cast(function, ctypes.c_void_p).value)


_set_cuda_stream_source()

Tensors = Sequence[torch.Tensor]

# Those that the core can broadcast.
DTYPES = frozenset(
    {
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
    }
)


GROUP_TIMEOUT = -1.0
"""A timeout, in seconds otherwise: that of the team."""


def average_in_place(tensors: Tensors, team: int, name: str, labels: str = "", timeout: float = GROUP_TIMEOUT) -> None:
    """Replace contiguous tensors by their means over all ranks; return when that is done."""
    with torch.no_grad():
        _call(_ops.average_, list(tensors), team, name, labels, timeout)
    torch.autograd.graph.increment_version(tensors)


def average_new(
    tensors: Tensors, team: int, name: str, labels: str = "", towers: int = 1, timeout: float = GROUP_TIMEOUT
) -> list[torch.Tensor]:
    """Return the means of tensors over all ranks (and `towers` in the list) as new tensors; differentiable."""
    return list(_call(_ops.average, list(tensors), team, name, labels, towers, timeout))


def broadcast_in_place(
    tensors: Tensors, root: int, name: str, labels: str = "", timeout: float = GROUP_TIMEOUT
) -> None:
    """Replace contiguous tensors by those of rank `root`; return when that is done."""
    with torch.no_grad():
        _call(_ops.broadcast_, list(tensors), root, name, labels, timeout)
    torch.autograd.graph.increment_version(tensors)


CONTINUES_STEP, DONATE_TENSORS = 1, 2
"""Flags of `average_start`: the call is a further part of the step before it; the tensors may be kept for good."""


def average_start(tensors: Tensors, team: int, name: str, labels: str = "", flags: int = 0, owner: int = 0) -> int:
    """Start `average_in_place` and return a number for `wait`; leave the tensors alone until then.

    `owner` tells apart, on this rank, equal lists of one name on a schedule.
    """
    with torch.no_grad():
        return int(_call(_ops.average_start, list(tensors), team, name, labels, flags, owner))


def discard_carried(team: int, owner: int) -> None:
    """Forget the means that the last calls of `owner` have left."""
    _ops.discard_carried(team, owner)


def may_return_early(team: int, owner: int = 0) -> bool:
    """Tell whether coming averages of `owner` may return before they have ended, or what another one has left."""
    return bool(_ops.may_return_early(team, owner))


def wait(number: int) -> tuple[list[torch.Tensor], float, float]:
    """Wait for the end of the call with this number, once.

    Returns tensors and two shares: the result is the first share of the call's tensors, and the second of these.
    Without the flag DONATE_TENSORS there are no tensors: the result is in those of the call.
    """
    tensors, own, share = _call(_ops.wait, number)
    return list(tensors), float(own), float(share)


def detach(number: int) -> None:
    """Let the call with this number end without anyone waiting for it."""
    _call(_ops.detach, number)


def comm_seconds(owner: int) -> float:
    """Return for how many seconds calls of `average_start` of `owner` were under way since this was asked last."""
    return float(_ops.comm_seconds(owner))


# What an reducer tells the other ranks, apart from gradients: one small tensor, averaged in place.


def start_control(tensor: torch.Tensor, team: int, name: str, label: str, owner: int) -> int:
    """Start the average of a note, as a part of the step before, and return a number for `wait_control`."""
    return int(_call(_ops.average_start, [tensor], team, name, label, CONTINUES_STEP, owner))


def wait_control(number: int) -> None:
    """Wait until the note with this number is averaged, once."""
    _call(_ops.wait, number)


def detach_control(number: int) -> None:
    """Let the average of a note end without anyone waiting for it."""
    _call(_ops.detach, number)


def _call(op: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return op(*arguments)
    except RuntimeError as error:
        known = translate(error)
        if known is error:
            raise
        raise known from None


# What the compiler runs in place of the ops while it traces: shapes only.


@torch.library.register_fake("dl_comm::average_")  # type: ignore[untyped-decorator]
def _(tensors: list[torch.Tensor], team: int, name: str, labels: str, timeout: float) -> None:
    return None


@torch.library.register_fake("dl_comm::broadcast_")  # type: ignore[untyped-decorator]
def _(tensors: list[torch.Tensor], root: int, name: str, labels: str, timeout: float) -> None:
    return None


@torch.library.register_fake("dl_comm::average")  # type: ignore[untyped-decorator]
def _(
    tensors: list[torch.Tensor], team: int, name: str, labels: str, towers: int, timeout: float
) -> list[torch.Tensor]:
    return [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in tensors]


# Every rank's result depends on every rank's input with weight 1/size, so the gradient of the ranks' summed losses is
# size times the mean of the ranks' gradients, times 1/size: the mean.


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, ctx.team, ctx.name, ctx.labels, ctx.towers, ctx.timeout = inputs


def _gradient(ctx: Any, gradients: list[torch.Tensor]) -> tuple[Any, ...]:
    means = _ops.average(gradients, ctx.team, f"{ctx.name}.gradient", ctx.labels, ctx.towers, ctx.timeout)
    return means, None, None, None, None, None


torch.library.register_autograd("dl_comm::average", _gradient, setup_context=_setup_context)
