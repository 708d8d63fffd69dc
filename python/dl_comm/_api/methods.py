"""The methods of groups: ``group.allreduce(x)`` is ``dl_comm.allreduce(x, group=group)``, and so on.

Each function with a keyword ``group`` is also a method. Importing this module adds them to ``Group``.

Thread rule: that of the functions.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from dl_comm._api import dispatch
from dl_comm._api.averages import average, broadcast, equal_on_all_ranks, gradients
from dl_comm._api.replicas import check_replicas
from dl_comm._arrays.checkpoint import read_on_rank0, write_on_rank0
from dl_comm._arrays.collectives import barrier
from dl_comm._arrays.groups import Group, join
from dl_comm._arrays.groups import world as all_ranks
from dl_comm._arrays.metrics import any_rank, average_metrics
from dl_comm._arrays.objects import all_gather_object, broadcast_object, gather_object
from dl_comm._arrays.random_states import random_states, set_random_states
from dl_comm._base.made import Variant, documentation
from dl_comm._base.table import CALLS
from dl_comm._job.start import ensure_initialized
from dl_comm._levels.communicators import grid
from dl_comm._levels.split import split

FUNCTIONS: tuple[Callable[..., Any], ...] = (
    dispatch.allreduce,
    dispatch.reduce,
    dispatch.all_gather,
    dispatch.gather,
    dispatch.scatter,
    dispatch.reduce_scatter,
    dispatch.all_to_all,
    dispatch.send,
    dispatch.recv,
    dispatch.sendrecv,
    broadcast,
    barrier,
    gradients,
    average,
    average_metrics,
    any_rank,
    equal_on_all_ranks,
    check_replicas,
    random_states,
    set_random_states,
    all_gather_object,
    gather_object,
    broadcast_object,
    read_on_rank0,
    write_on_rank0,
    join,
    split,
    grid,
)


def world() -> Group:
    """The group of all ranks; starts the ranks if ``init`` was not called. Collective the first time.

    ``world.allreduce(x)`` and the other methods are the functions of ``dl_comm`` without ``group``:

        world = dl_comm.world()
        y = world.allreduce(x, "mean")
        print(world.rank, world.size, world.local_rank, world.local_size, world.hosts)

    Raises:
        CommError: The start fails, as in ``init``.
        StateError: ``finalize`` was called.
    """
    ensure_initialized()
    return all_ranks()


def _method(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def method(self: Group, *args: Any, **kwargs: Any) -> Any:
        return function(*args, group=self, **kwargs)

    signature = inspect.signature(function)
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    others = [each for each in signature.parameters.values() if each.name not in ("group", "team")]
    method.__signature__ = signature.replace(parameters=[own, *others])  # type: ignore[attr-defined]
    method.__qualname__ = f"Group.{function.__name__}"
    for call in CALLS:
        if call.name == function.__name__:
            method.__doc__ = documentation(call, Variant(without=("group",)))
    return method


for _function in FUNCTIONS:
    setattr(Group, _function.__name__, _method(_function))
