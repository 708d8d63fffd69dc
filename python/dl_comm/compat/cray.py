"""The Cray PE DL Plugin's names: teams, which are numbered groups of all ranks, and their schedules.

    import dl_comm.compat.cray as mc

    mc.init(2, 1, number_of_elements)
    mc.config_team(0, 0, int(0.10 * max_steps), max_steps, 1, 100)
    gradients = mc.gradients(gradients, 0)

A script of the plugin imports ``dl_comm`` or ``ml_comm`` and runs unchanged: every name here is also ``dl_comm.NAME``.
New programs need few of them: ``rank``, ``size`` and ``local_rank`` are those of the world, ``init`` starts the ranks,
and a group takes the place of a team, unless means are to be one step old (docs/schedules.md).

``init``, ``finalize``, ``barrier``, ``broadcast``, ``gradients`` and ``average`` are those of ``dl_comm``. The others:
"""

from __future__ import annotations

from dl_comm import (
    average,
    barrier,
    broadcast,
    check_buffers_match,
    config_team,
    create_team,
    finalize,
    get_localrank,
    get_nranks,
    get_rank,
    get_waited,
    gradients,
    init,
    init_mpi,
)

__all__ = [
    "average",
    "barrier",
    "broadcast",
    "check_buffers_match",
    "config_team",
    "create_team",
    "finalize",
    "get_localrank",
    "get_nranks",
    "get_rank",
    "get_waited",
    "gradients",
    "init",
    "init_mpi",
]


def __dir__() -> list[str]:
    return sorted(__all__)
