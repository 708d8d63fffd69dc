"""``dl_comm.torch`` under the plugin's first name, with the ``DistributedOptimizer`` signature of that time."""

from __future__ import annotations

from typing import Any

import dl_comm.torch as _torch
from dl_comm.torch import *  # noqa: F403 - the same names
from dl_comm.torch import __all__ as __all__
from ml_comm import config_team as config_team


def DistributedOptimizer(  # type: ignore[no-redef] # noqa: N802 (the name is the plugin's)
    optimizer: Any,
    nstep: int,
    nteam: int = 1,
    nthread_per_team: int = 2,
    warmup: float = 0.10,
    verb: int = 2,
    freq: int = 100,
    **options: Any,
) -> Any:
    """``dl_comm.torch.DistributedOptimizer`` with ``nstep`` as the second argument: non-blocking after the warm-up.

    See there for all arguments; ``options`` are its other keyword arguments.
    """
    return _torch.DistributedOptimizer(
        optimizer, nteam, nthread_per_team, nstep=nstep, warmup=warmup, verb=verb, freq=freq, **options
    )


def __dir__() -> list[str]:
    return sorted(__all__)
