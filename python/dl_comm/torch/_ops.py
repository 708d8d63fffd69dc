"""The op library for PyTorch: loads it, registers fake kernels and autograd, and wraps the ops.

All tensors of a call are on one device. On a GPU an op returns when torch's current stream is ordered after the result;
the host does not wait for it.

The wrappers raise `dl_comm.CommError` and its subclasses. Any thread may call them; they wait without the GIL.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.autograd import forward_ad

from dl_comm._base import cuda
from dl_comm._base.errors import ArgumentError, DTypeError, StateError, translate
from dl_comm._libraries import load
from dl_comm.torch._compiler import constant

_path = load.ops_library("torch")
torch.ops.load_library(_path)  # type: ignore[no-untyped-call]
ops = _ops = torch.ops.dl_comm
load.check_one_core(_path, _ops.core_id())


def _set_cuda_stream_source() -> None:
    """Give the ops access to torch's CUDA streams, if torch was built with CUDA."""
    library = Path(_path).with_name("libdl_comm_torch_cuda.so")
    if torch.version.cuda is None or not library.exists():
        return
    cuda.preload()
    function = ctypes.CDLL(str(library)).dl_comm_current_stream
    _ops.set_stream_source(ctypes.cast(function, ctypes.c_void_p).value)


_set_cuda_stream_source()

_group_of = ctypes.CDLL(_path).dl_comm_ops_group
_group_of.argtypes = [ctypes.c_uint64, ctypes.POINTER(ctypes.c_int32), ctypes.POINTER(ctypes.c_int32)]


@constant
def group(number: int) -> tuple[int, int]:
    """Return this process's rank in a group, and the number of its ranks."""
    rank, size = ctypes.c_int32(), ctypes.c_int32()
    if _group_of(int(number), ctypes.byref(rank), ctypes.byref(size)) != 0:
        if number:
            raise ArgumentError(f"group {number} was freed")
        raise StateError("dl_comm.init was not called, or finalize was")
    return rank.value, size.value


Tensors = Sequence[torch.Tensor]

# The types that the core can broadcast.
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
"""As `timeout`, which is in seconds: use the team's."""


_AVERAGE, _AVERAGE_NO_GRAD = _ops.average.default, _ops.average_no_grad.default


def learns(tensors: list[torch.Tensor]) -> bool:
    """Return whether a result of these tensors has a gradient."""
    for tensor in tensors:
        if tensor.requires_grad:
            return torch.is_grad_enabled()
    return False


def differentiates(tensors: list[torch.Tensor]) -> bool:
    """Return whether a call needs the op with a gradient; torch's compiler knows only that one."""
    return learns(tensors) or torch.compiler.is_compiling()


def average_in_place(tensors: Tensors, team: int, name: str, labels: str = "", timeout: float = GROUP_TIMEOUT) -> None:
    """Replace contiguous tensors by their means over all ranks; blocking."""
    with torch.no_grad():
        call(_ops.average_, list(tensors), team, name, labels, timeout)
    torch.autograd.graph.increment_version(tensors)


def average_new(
    tensors: Tensors, team: int, name: str, labels: str = "", towers: int = 1, timeout: float = GROUP_TIMEOUT
) -> list[torch.Tensor]:
    """Return the means of tensors over all ranks (and over the `towers` in the list) as new tensors; differentiable."""
    given = list(tensors)
    op = _AVERAGE if differentiates(given) else _AVERAGE_NO_GRAD
    return list(call(op, given, team, name, labels, towers, timeout))


def broadcast_in_place(
    tensors: Tensors, root: int, name: str, labels: str = "", timeout: float = GROUP_TIMEOUT
) -> None:
    """Replace contiguous tensors by those of rank `root`; blocking."""
    with torch.no_grad():
        call(_ops.broadcast_, list(tensors), root, name, labels, timeout)
    torch.autograd.graph.increment_version(tensors)


CONTINUES_STEP, DONATE_TENSORS = 1, 2
"""Flags of `average_start`: the call belongs to the previous call's step; the core may keep the tensors."""


def average_start(tensors: Tensors, team: int, name: str, labels: str = "", flags: int = 0, owner: int = 0) -> int:
    """Start `average_in_place` and return a number for `wait`; do not touch the tensors until then.

    `owner` distinguishes, on this rank, equal lists of the same name on a schedule.
    """
    with torch.no_grad():
        return int(call(_ops.average_start, list(tensors), team, name, labels, flags, owner))


def discard_carried(team: int, owner: int) -> None:
    """Drop the means that earlier calls of `owner` carry over to later ones."""
    _ops.discard_carried(team, owner)


def may_return_early(team: int, owner: int = 0) -> bool:
    """Return whether later calls of `owner` may return early, or return the mean of an earlier call."""
    return bool(_ops.may_return_early(team, owner))


def wait(number: int) -> tuple[list[torch.Tensor], float, float]:
    """Wait for the call with this number; once per number.

    Returns (tensors, own_share, share). The result is own_share * (the call's tensors) + share * tensors. Without the
    flag DONATE_TENSORS, `tensors` is empty and the result is in the call's tensors.
    """
    tensors, own, share = call(_ops.wait, number)
    return list(tensors), float(own), float(share)


def detach(number: int) -> None:
    """Give up waiting for the call with this number."""
    call(_ops.detach, number)


def comm_seconds(owner: int) -> float:
    """Return the seconds with calls of `average_start` of `owner` in flight, since the last query."""
    return float(_ops.comm_seconds(owner))


# Control calls of a reducer: one small tensor, averaged in place.


def start_control(tensor: torch.Tensor, team: int, name: str, label: str, owner: int) -> int:
    """Start the allreduce of a control tensor, as part of the current step; return a number for `wait_control`."""
    return int(call(_ops.average_start, [tensor], team, name, label, CONTINUES_STEP, owner))


def wait_control(number: int) -> None:
    """Wait for the control call with this number; once per number."""
    call(_ops.wait, number)


def detach_control(number: int) -> None:
    """Give up waiting for a control call."""
    call(_ops.detach, number)


def refuse_tangents(tensors: list[torch.Tensor]) -> None:
    """Raise ArgumentError for tensors with tangents, which torch would drop."""
    # Outside of `dual_level` there are none. The name is private to torch; without it, every tensor is looked at.
    if getattr(forward_ad, "_current_level", 0) < 0 or torch.compiler.is_compiling():
        return
    for tensor in tensors:
        if forward_ad.unpack_dual(tensor).tangent is not None:  # type: ignore[no-untyped-call]
            raise ArgumentError(
                "a tensor has a tangent, and dl_comm has no forward-mode differentiation: use backward "
                "(torch.func.vjp instead of jvp)"
            )


def call(op: Callable[..., Any], *arguments: Any) -> Any:
    """Call an op; raise the error of dl_comm that it reports, and ArgumentError for tensors with tangents."""
    if type(arguments[0]) is list:
        refuse_tangents(arguments[0])
    try:
        return op(*arguments)
    except (RuntimeError, TypeError) as error:
        known = translate(error)
        if known is error:
            # For tensors of a device or layout that the op has no code for, or of a subclass that takes no such ops.
            if isinstance(error, (NotImplementedError, TypeError)):
                raise DTypeError(f"dl_comm does not take these tensors: {error}") from error
            raise
        raise known from None


# Fake kernels, for tracing by the compiler: shapes only.

_Fake = TypeVar("_Fake", bound=Callable[..., Any])


def traced_as(*names: str) -> Callable[[_Fake], _Fake]:
    """Register a fake kernel of ops. Compiled graphs run these ops between CUDA graphs, not in them.

    The ranks agree on each call on the host, which a replay of a CUDA graph would leave out.
    """
    # Older versions of torch do not ask, and end the capture with the error of the call.
    unsafe = getattr(torch.Tag, "cudagraph_unsafe", None)

    def register(fake: _Fake) -> _Fake:
        for name in names:
            torch.library.register_fake(f"dl_comm::{name}")(fake)
            if unsafe is not None:
                getattr(_ops, name).default.tags.append(unsafe)
        return fake

    return register


@traced_as("average_")
def _(tensors: list[torch.Tensor], team: int, name: str, labels: str, timeout: float) -> None:
    return None


@traced_as("broadcast_")
def _(tensors: list[torch.Tensor], root: int, name: str, labels: str, timeout: float) -> None:
    return None


@traced_as("average", "average_no_grad")
def _(
    tensors: list[torch.Tensor], team: int, name: str, labels: str, towers: int, timeout: float
) -> list[torch.Tensor]:
    return [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in tensors]


# Each rank's result depends on each rank's input with weight 1/size. So the gradient of the sum of all ranks' losses is
# the mean of the ranks' gradients.


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, ctx.team, ctx.name, ctx.labels, ctx.towers, ctx.timeout = inputs


def _gradient(ctx: Any, gradients: list[torch.Tensor]) -> tuple[Any, ...]:
    means = call(_ops.average, gradients, ctx.team, f"{ctx.name}.gradient", ctx.labels, ctx.towers, ctx.timeout)
    return means, None, None, None, None, None


torch.library.register_autograd("dl_comm::average", _gradient, setup_context=_setup_context)
