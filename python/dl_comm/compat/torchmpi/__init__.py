"""TorchMPI's names: a stack of communicators, spans of its levels, and the selector of implementations.

    from dl_comm.compat import torchmpi

    torchmpi.push_communicator(host_name)  # level 1: the ranks of a host
    with torchmpi.collective_span(0, 1):
        dl_comm.allreduce(x)  # within the hosts, then across them
    torchmpi.collective_selector.cpu.multinode.sync.allreduce = "ring"

`parameterserver` and `nn` have TorchMPI's functions for asynchronous training and for networks; import them, they are
no names of `dl_comm`. Every other name here is also ``dl_comm.NAME``. The stack and the selector belong to the process,
and decide where the collectives without ``group=`` run; optimizers and ``gradients`` use teams, and ignore both. New
programs make groups instead, by ``dl_comm.split`` and ``dl_comm.grid``, and pass them to each call. Without a span the
core uses the structure of the hosts itself.
"""

from __future__ import annotations

from dl_comm import (
    CollectiveSelector,
    Communicator,
    collective_availability,
    collective_selector,
    collective_span,
    communicator,
    communicator_names,
    pop_communicator,
    push_communicator,
    set_communicator,
)

__all__ = [
    "CollectiveSelector",
    "Communicator",
    "collective_availability",
    "collective_selector",
    "collective_span",
    "communicator",
    "communicator_names",
    "pop_communicator",
    "push_communicator",
    "set_communicator",
]


def __dir__() -> list[str]:
    return sorted(__all__)
