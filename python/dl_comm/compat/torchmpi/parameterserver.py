"""TorchMPI's parameter server: its functions, on `dl_comm.ParameterServer`.

    from dl_comm.compat.torchmpi import parameterserver

    server = parameterserver.init(weights)
    parameterserver.syncHandle(parameterserver.send(server, update, "add"))
    parameterserver.syncHandle(parameterserver.receive(server, weights))

The functions with `Tensors` take lists (`list(net.parameters())`), and keep a server for them until `freeAll`.
Tensors are NumPy arrays or torch tensors. New programs use `dl_comm.ParameterServer`, whose lists are one call.

Thread rule: one thread at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import dl_comm
from dl_comm import ArgumentError, ParameterServer, Work

__all__ = [
    "free",
    "freeAll",
    "init",
    "initTensors",
    "integrateTensors",
    "prefetchTensors",
    "receive",
    "send",
    "sendTensors",
    "syncHandle",
    "syncHandles",
]


class Shared:
    """The server of one tensor of a list."""

    def __init__(self, server: ParameterServer, index: int, tensor: Any, prefetched: Any) -> None:
        self.server, self.index, self.tensor, self.prefetched = server, index, tensor, prefetched


_servers: list[ParameterServer] = []
_of_tensors: dict[int, Shared] = {}
"""By the `id` of a tensor, which the entry keeps alive."""

AnyServer = ParameterServer | Shared


def init(t: Any) -> ParameterServer:
    """Makes a server of one tensor, with an element for each rank at least. Collective.

    Each shard has its owner's values: broadcast the tensor first if the ranks differ.
    """
    server = ParameterServer(t)
    _servers.append(server)
    return server


def send(ps: AnyServer, t: Any, rule: str) -> Work[None]:
    """Starts to send an update; `rule` is "zero", "copy" or "add", which must be given."""
    server, index = _place(ps)
    work: Any = server.send(None if rule == "zero" else _plain(t), rule, tensor=index, async_op=True)
    return work  # type: ignore[no-any-return]


def receive(ps: AnyServer, t: Any) -> Work[Any]:
    """Starts to receive the values into `t`."""
    server, index = _place(ps)
    work: Any = server.receive(_plain(t), tensor=index, async_op=True)
    return work  # type: ignore[no-any-return]


def syncHandle(handle: Work[Any] | None) -> None:
    """Waits for a send or receive. None is no wait."""
    if handle is not None:
        handle.wait()


def syncHandles(handles: Sequence[Work[Any] | None]) -> list[Work[Any]]:
    """Waits for all, and returns an empty list."""
    for handle in handles:
        syncHandle(handle)
    return []


def free(ps: ParameterServer) -> None:
    """Ends a server of `init`. Collective."""
    ps.close()
    _servers[:] = [each for each in _servers if each is not ps]


def freeAll() -> None:
    """Ends all servers, in the order in which they were made. Collective."""
    _of_tensors.clear()
    while _servers:
        free(_servers[0])


def initTensors(
    tensors: Sequence[Any],
    prefetchAllocator: Callable[[Any], Any] | None = None,
    psInit: Callable[[Shared, Any], object] | None = None,
) -> None:
    """Makes a server for a list of tensors. Collective.

    Args:
        tensors: Parameters or gradients.
        prefetchAllocator: Makes the tensor into which one is prefetched; default: a copy, in host memory.
        psInit: Called with the server of each tensor and the tensor, to set its values; default: those of rank 0.

    Raises:
        ArgumentError: A tensor has a server already.
    """
    if any(id(each) in _of_tensors for each in tensors):
        raise ArgumentError("a tensor has a server already")
    prefetched = [_plain((prefetchAllocator or _copy)(each)) for each in tensors]
    if psInit is None:
        dl_comm.broadcast(prefetched, 0, in_place=True)
    server = ParameterServer(prefetched)
    _servers.append(server)
    for index, (each, memory) in enumerate(zip(tensors, prefetched, strict=True)):
        _of_tensors[id(each)] = Shared(server, index, each, memory)
        if psInit is not None:
            psInit(_of_tensors[id(each)], each)
    dl_comm.barrier()


def prefetchTensors(tensors: Sequence[Any]) -> list[Work[Any]]:
    """Starts to receive the values of all tensors into memory of their own; returns handles."""
    return [receive(shared, shared.prefetched) for shared in map(_shared, tensors)]


def integrateTensors(tensors: Sequence[Any], localUpdateRule: Callable[[Any, Any], object]) -> None:
    """Calls `localUpdateRule(prefetched, t)` for each tensor, after `syncHandles` of its prefetch."""
    for each in tensors:
        localUpdateRule(_shared(each).prefetched, each)


def sendTensors(
    tensors: Sequence[Any],
    updates: Sequence[Any],
    rule: str,
    preprocess: Callable[[Any], Any] | None = None,
) -> list[Work[Any]]:
    """Starts to send an update for each tensor, after `preprocess`; returns handles."""
    if len(tensors) != len(updates):
        raise ArgumentError(f"updates has {len(updates)} tensors for {len(tensors)}")
    return [
        send(_shared(each), update if preprocess is None else preprocess(update), rule)
        for each, update in zip(tensors, updates, strict=True)
    ]


def _place(ps: AnyServer) -> tuple[ParameterServer, int | None]:
    if isinstance(ps, Shared):
        return ps.server, ps.index
    if not isinstance(ps, ParameterServer):
        raise ArgumentError(f"ps is a {type(ps).__name__}; give what init has returned")
    return ps, None


def _shared(tensor: Any) -> Shared:
    found = _of_tensors.get(id(tensor))
    if found is None:
        raise ArgumentError("a tensor has no server: call initTensors with it first, and pass the same object")
    return found


def _plain(tensor: Any) -> Any:
    """A torch tensor without its gradient; others as they are."""
    return tensor.detach() if hasattr(tensor, "detach") else tensor


def _copy(tensor: Any) -> Any:
    return tensor.detach().cpu().clone() if hasattr(tensor, "detach") else tensor.copy()


def __dir__() -> list[str]:
    return sorted(__all__)
