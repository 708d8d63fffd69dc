"""Asynchronous training by a parameter server: Downpour SGD and elastic averaging SGD, as wrappers of an optimizer.

Thread rule: as torch optimizers, one thread at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from dl_comm._arrays.collectives import all_gather
from dl_comm._arrays.groups import Group, given
from dl_comm._arrays.server import Server
from dl_comm._arrays.work import Work
from dl_comm._base.checks import checked_float, checked_int
from dl_comm._base.errors import ArgumentError, StateError
from dl_comm.torch._functions import broadcast
from dl_comm.torch._optimizer import AveragingOptimizer
from dl_comm.torch._server import TensorKind

_KEY = "dl_comm"


class Flat:
    """Memory like that of some parameters: a row for each type and device, and a view for each parameter.

    One row instead of many tensors: few locks and messages, and parameters of any length.
    """

    def __init__(self, parameters: list[torch.Tensor], ranks: int) -> None:
        lengths: dict[tuple[torch.dtype, torch.device], int] = {}
        places = []
        for each in parameters:
            kind = each.dtype, each.device
            places.append((kind, lengths.get(kind, 0)))
            lengths[kind] = lengths.get(kind, 0) + each.numel()
        # The server has at least an element for each rank.
        rows = {kind: torch.zeros(max(n, ranks), dtype=kind[0], device=kind[1]) for kind, n in lengths.items()}
        self.rows = list(rows.values())
        self.views = [
            rows[kind][start : start + each.numel()].view(each.shape)
            for (kind, start), each in zip(places, parameters, strict=True)
        ]

    def copy_(self, values: list[torch.Tensor]) -> Flat:
        """Take the values."""
        for view, value in zip(self.views, values, strict=True):
            view.copy_(value)
        return self


class AsynchronousOptimizer(torch.optim.Optimizer):
    """What `Downpour` and `EASGD` have in common. Do not construct it directly."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        group: Group | None,
        update_frequency: int,
        init_delay: int,
        prefetch: int,
    ) -> None:
        # Not torch's: parameters and state are those of `optimizer`.
        if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(optimizer, AsynchronousOptimizer):
            raise ArgumentError(f"optimizer is a {type(optimizer).__name__}; give an optimizer of torch")
        self._optimizer = optimizer
        self._every = checked_int("update_frequency", update_frequency, 1)
        self._delay = checked_int("init_delay", init_delay, 0)
        self._ahead = checked_int("prefetch", prefetch, 0, self._every)
        self._server: Server | None = None
        self._is_closed = False
        self._work: Work[None] | None = None
        self._fetch: Work[Any] | None = None
        self._center: list[torch.Tensor] | None = None
        self._steps = 0
        self._parameters = [each for of in optimizer.param_groups for each in of["params"] if each.requires_grad]
        for index, each in enumerate(self._parameters):
            if not each.is_floating_point():
                raise ArgumentError(f"parameter {index} has the type {each.dtype}; a server averages floating point")
        self._group = self._checked_group(group)
        self._roots = self._group_of_roots()
        self._share()

    def _checked_group(self, group: Group | None) -> Group | None:
        """The ranks that train synchronously with this one."""
        if group is not None and given(group).size > 1 and not isinstance(self._optimizer, AveragingOptimizer):
            raise ArgumentError(
                "the ranks of group train synchronously: give DistributedOptimizer(optimizer, ..., group=group)"
            )
        return group

    def _group_of_roots(self) -> Group | None:
        """The first ranks of all groups, which use the server; None for the world."""
        if self._group is None:
            return None
        firsts = all_gather(np.array([self._group.ranks[0]]))
        return Group(sorted({int(first) for first in firsts}), "roots") if self._is_root else None

    @property
    def _is_root(self) -> bool:
        return self._group is None or self._group.rank == 0

    def _share(self) -> None:
        """All ranks get the parameters of the first."""
        with torch.no_grad():
            if self._is_root:
                self._copy(self._shared(self._parameters, self._roots))
            self._share_in_group()

    def _share_in_group(self) -> None:
        if self._group is not None:
            self._copy(self._shared(self._parameters, self._group))

    def _shared(self, values: list[torch.Tensor], group: Group | None) -> list[torch.Tensor]:
        """The values of the first rank of a group, all of which train in the same way."""
        found: list[torch.Tensor] = broadcast(
            [each.detach() for each in values], 0, group=group, name=f"values of {type(self).__name__}"
        )
        return found

    def _copy(self, values: list[torch.Tensor]) -> None:
        for each, value in zip(self._parameters, values, strict=True):
            if each.data_ptr() != value.data_ptr():
                each.copy_(value)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make a step of the optimizer, then exchange with the server if it is time.

        Collective once: in the step after `init_delay`, which makes the server.
        """
        if self._is_closed:
            raise StateError("the optimizer was closed")
        if self._server is None and self._steps >= self._delay:
            self._start()
        with torch.enable_grad():
            loss = self._optimizer.step(closure)
        self._steps += 1
        since = self._steps - self._delay
        if since > 0:
            integrates = since % self._every == 0
            if self._server is not None:
                self._exchange(self._server, since, integrates)
                if self._ahead and (since + self._ahead) % self._every == 0:
                    self._fetch = self._server.receive(self._fetched.rows, async_op=True)
            if integrates:
                self._share_in_group()
        return loss

    def _start(self) -> None:
        """Makes the server, from the values of the first root."""
        if not self._is_root or self._server is not None:
            return
        self._fetched = self._new().copy_(self._center or self._parameters)
        self._server = Server(
            TensorKind(), self._shared(self._fetched.rows, self._roots), self._roots, rules=None, timeout=None
        )
        self._center = None
        self._update = self._new()
        self._begin()

    def _new(self) -> Flat:
        return Flat(self._parameters, given(self._roots).size)

    def _begin(self) -> None:
        """The server is there."""

    def _values(self, server: Server) -> list[torch.Tensor]:
        """The values of the server, for each parameter; from a prefetch, if there is one."""
        if self._fetch is None:
            server.receive(self._fetched.rows)
        else:
            self._fetch.wait()
            self._fetch = None
        return self._fetched.views

    def _exchange(self, server: Server, since: int, integrates: bool) -> None:
        """Exchanges with the server after step `since` of the asynchronous phase."""
        raise NotImplementedError

    def _send(self, server: Server) -> None:
        """Starts to add the update, whose memory is then used until `_drain`."""
        self._work = server.send(self._update.rows, async_op=True)

    def _drain(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None

    def close(self) -> None:
        """End the asynchronous phase: all ranks get the server's values, which are the trained model. Collective."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._server is not None:
            if self._fetch is not None:
                self._values(self._server)  # older than what follows
            self._drain()
            self._last(self._server)
            given(self._roots).barrier()  # all have sent
            with torch.no_grad():
                self._copy(self._values(self._server))
            self._server.close()
        with torch.no_grad():
            if self._server is None and self._is_root:
                self._share()
            else:
                self._share_in_group()

    def _last(self, server: Server) -> None:
        """Sends what was not sent."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the optimizer, the number of steps, and the values of the server. Not collective."""
        state = dict(self._optimizer.state_dict())
        self._drain()
        center = None
        if self._server is not None:
            values = self._new()
            self._server.receive(values.rows)
            center = [each.clone() for each in values.views]
        state[_KEY] = {"steps": self._steps, "center": center}
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state of `state_dict`, before the first step; or that of the original optimizer.

        The server begins with the values that rank 0 has loaded.

        Raises:
            StateError: The server runs already.
        """
        if self._server is not None:
            raise StateError("load the state before the server runs: before the step after init_delay")
        state = dict(state_dict)
        own = state.pop(_KEY, None)
        self._optimizer.load_state_dict(state)
        if own is not None:
            self._steps, self._center = int(own["steps"]), own["center"]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, as the original optimizer does."""
        self._optimizer.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse further parameters: the server has those of the start."""
        raise StateError("the server has the parameters of the start; wrap the optimizer after add_param_group")

    def __getattr__(self, name: str) -> Any:
        """What the wrapped optimizer has: `param_groups`, `state`, `defaults`, hooks."""
        if name == "_optimizer":
            raise AttributeError(name)
        return getattr(self._optimizer, name)

    def __getstate__(self) -> dict[str, Any]:
        """Refuse copies: a server belongs to this process."""
        raise StateError("an optimizer with a parameter server cannot be copied or pickled; use state_dict()")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._optimizer!r})"


class Downpour(AsynchronousOptimizer):
    """Downpour SGD: every rank trains on its own, and adds its changes of the parameters to a server. Collective.

        optimizer = cdl.Downpour(torch.optim.SGD(model.parameters(), 0.05))
        ...  # the training script as it is
        optimizer.close()

    Each `send_frequency` steps a rank sends the sum of its optimizer's changes since the last send, and each
    `update_frequency` steps it takes the server's parameters, which contain the changes of all ranks. No rank waits for
    another. The first `init_delay` steps are of this rank alone; the server then begins with rank 0's parameters. The
    state of the optimizer (momentum) stays local. Buffers, such as batch-norm statistics, are not shared. The changes
    of all ranks add up, as with a learning rate `size` times as high. Sources: Dean et al., "Large Scale Distributed
    Deep Networks", 2012; TorchMPI's DownpourUpdate.

    Args:
        optimizer: An optimizer of torch with floating-point parameters. All ranks start from rank 0's.
        update_frequency: Steps between two fetches.
        init_delay: Steps before the server starts.
        prefetch: The fetch starts so many steps before its use, at most `update_frequency`.
        send_frequency: Steps between two sends.
        group: Ranks that train synchronously: `optimizer` is then a `DistributedOptimizer(..., group=group)`. Their
            first rank uses the server, and broadcasts in the group. None: every rank uses the server.

    Raises:
        ArgumentError: An argument out of range, or a parameter that is not floating point.
        CommError: By `step`: the server has ended, because a rank is lost.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        update_frequency: int = 10,
        init_delay: int = 100,
        prefetch: int = 0,
        send_frequency: int = 1,
        group: Group | None = None,
    ) -> None:
        self._send_every = checked_int("send_frequency", send_frequency, 1)
        super().__init__(optimizer, group, update_frequency, init_delay, prefetch)

    def _begin(self) -> None:
        self._reference = self._new().copy_(self._parameters)

    def _send_change(self, server: Server) -> None:
        """Adds what the optimizer has changed since the last send."""
        self._drain()
        places = zip(self._parameters, self._reference.views, self._update.views, strict=True)
        for each, reference, update in places:
            torch.sub(each, reference, out=update)
            reference.copy_(each)
        self._send(server)

    def _exchange(self, server: Server, since: int, integrates: bool) -> None:
        if integrates or since % self._send_every == 0:
            self._send_change(server)
        if integrates:
            self._copy(self._values(server))
            self._reference.copy_(self._parameters)

    def _last(self, server: Server) -> None:
        with torch.no_grad():
            self._send_change(server)
        self._drain()


class EASGD(AsynchronousOptimizer):
    """Elastic averaging SGD: every rank trains on its own, drawn to a common center that follows all ranks. Collective.

        optimizer = cdl.EASGD(torch.optim.SGD(model.parameters(), 0.05), update_frequency=10)
        ...  # the training script as it is
        optimizer.close()

    Each `update_frequency` steps a rank moves its parameters x to x + a (c - x), and the server's center c to
    c + a (x - c), with a = `beta` / number of ranks at the server. No rank waits for another. The center is
    the trained model, which `close` gives to all ranks. Between exchanges ranks explore on their own, so it needs few.
    Source: Zhang, Choromanska, LeCun, "Deep learning with Elastic Averaging SGD", 2015; TorchMPI's EASGDUpdate.

    Args:
        optimizer: As for `Downpour`.
        beta: The strength of the pull, above 0 and below 1 for one that is stable.
        update_frequency: Steps between two exchanges.
        init_delay: As for `Downpour`.
        prefetch: As for `Downpour`.
        group: As for `Downpour`: elastic averaging over synchronous groups.

    Raises:
        ArgumentError: As for `Downpour`.
        CommError: As for `Downpour`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        beta: float = 0.9,
        update_frequency: int = 10,
        init_delay: int = 100,
        prefetch: int = 0,
        group: Group | None = None,
    ) -> None:
        self._beta = checked_float("beta", beta)
        if not 0 < self._beta <= 1:
            raise ArgumentError(f"invalid beta: {beta!r} (expected a number above 0, at most 1)")
        super().__init__(optimizer, group, update_frequency, init_delay, prefetch)

    def _exchange(self, server: Server, since: int, integrates: bool) -> None:
        if not integrates:
            return
        self._drain()
        alpha = self._beta / server.size
        for center, each, move in zip(self._values(server), self._parameters, self._update.views, strict=True):
            torch.sub(center, each, out=move).mul_(alpha)
            each.add_(move)
            move.neg_()
        self._send(server)
