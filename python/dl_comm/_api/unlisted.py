"""Names that ``dl_comm`` has, but does not list: those of other libraries, which ``dl_comm.compat`` lists.

``core_id`` is for tests.
"""

from __future__ import annotations

from dl_comm._api.averages import check_buffers_match
from dl_comm._arrays.teams import config_team, create_team, get_waited
from dl_comm._dl_comm import core_id
from dl_comm._job.ranks import get_localrank, get_nranks, get_rank
from dl_comm._job.start import init_mpi
from dl_comm._levels.communicators import (
    Communicator,
    collective_span,
    communicator,
    communicator_names,
    pop_communicator,
    push_communicator,
    set_communicator,
)
from dl_comm._levels.selector import CollectiveSelector, collective_availability, collective_selector

__all__ = [
    "CollectiveSelector",
    "Communicator",
    "check_buffers_match",
    "collective_availability",
    "collective_selector",
    "collective_span",
    "communicator",
    "communicator_names",
    "config_team",
    "core_id",
    "create_team",
    "get_localrank",
    "get_nranks",
    "get_rank",
    "get_waited",
    "init_mpi",
    "pop_communicator",
    "push_communicator",
    "set_communicator",
]
