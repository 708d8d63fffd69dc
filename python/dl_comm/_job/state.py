"""What belongs to one job of this process: from a start to ``finalize``, which replaces it.

Files of higher layers keep here what must not outlive the job; each attribute names its file.

Thread rule: that of the files.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dl_comm._arrays.groups import Group
    from dl_comm._levels.communicators import Communicator


class Job:
    """One job.

    Attributes:
        has_master: Whether MASTER_ADDR and MASTER_PORT are published (`_job.rank_variables`).
        held_port: The port of MASTER_PORT, which rank 0 keeps free (`_job.rank_variables`).
        world: The group of all ranks, once it is used (`_arrays.groups`).
        route: What chooses the group of a call without one: a function of its collective, device and ``async_op``;
            None: the world (`_arrays.groups`).
        communicators: The levels that are pushed (`_levels.communicators`).
        span: The first and the last level of the span (`_levels.communicators`).
        choices: The implementations that the selector's table names (`selector`).
        variants: Groups with another implementation, by the number of the group that they stand for (`selector`).
        hierarchies: Groups whose allreduce goes through several levels, by the numbers of two groups (`selector`).
        optimizers: The number of torch's optimizers on all ranks (torch/_optimizer).
        is_of_torch: Whether ``torch.distributed.init_process_group`` has started it (_torch_distributed).
    """

    def __init__(self) -> None:
        self.has_master = False
        self.held_port: socket.socket | None = None
        self.world: Group | None = None
        self.route: Callable[[int, str, bool], Group] | None = None
        self.communicators: list[Communicator] = []
        self.span = (0, 0)
        self.choices: dict[tuple[str, str, str, str], str] = {}
        self.variants: dict[tuple[int, str], Group] = {}
        self.hierarchies: dict[tuple[int, int], Group] = {}
        self.optimizers = 0
        self.is_of_torch = False

    def close(self) -> None:
        """Gives back what the job holds."""
        if self.held_port is not None:
            self.held_port.close()


current = Job()
"""The running job, or the next one."""

on_end: list[Callable[[], None]] = []
"""Called by ``finalize`` before the groups end: by files with something to do then."""


def end() -> None:
    """Replaces the job by the next one."""
    global current
    for act in on_end:
        act()
    current.close()
    current = Job()
