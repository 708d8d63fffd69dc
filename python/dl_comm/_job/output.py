"""What a rank prints and logs: on rank 0 only, or with its rank.

Thread rule: any thread may call everything. Nothing here is collective.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, MutableMapping
from typing import Any

from dl_comm._base.checks import checked_ints, checked_text
from dl_comm._job.ranks import rank, size


def print0(*values: Any, **options: Any) -> None:
    """Prints on rank 0 only, at once; other ranks do nothing. Not collective.

        loss = dl_comm.average(loss)  # on every rank
        dl_comm.print0(f"loss {loss:.4f}")

    Args:
        *values: As for ``print``. Every rank computes them, so they may contain collective calls.
        **options: As for ``print``; ``flush`` is True unless given.
    """
    if rank() == 0:
        print(*values, **{"flush": True, **options})


class RankLogger(logging.LoggerAdapter):  # type: ignore[type-arg] # no parameters before Python 3.11
    """The logger of ``get_logger``: a ``logging.LoggerAdapter`` whose lines begin with the rank."""

    def __init__(self, logger: logging.Logger, ranks: tuple[int, ...] | None) -> None:
        """Nothing starts before the first line."""
        super().__init__(logger, {})
        self._ranks = ranks

    def isEnabledFor(self, level: int) -> bool:  # noqa: N802 - of logging
        """Whether this rank logs lines of the level: other ranks than the chosen ones log from WARNING on."""
        chosen = self._ranks is None or level >= logging.WARNING or rank() in self._ranks
        return chosen and super().isEnabledFor(level)

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Puts the rank before the line."""
        return f"rank {rank()} of {size()}: {msg}", kwargs


def get_logger(name: str | None = None, ranks: Iterable[int] | None = None) -> RankLogger:
    """A logger of Python's ``logging`` whose lines begin with the rank: ``rank 1 of 4: loaded``. Not collective.

        logging.basicConfig(level="INFO")
        log = dl_comm.get_logger(__name__, ranks=[0])
        log.info("epoch %d", epoch)  # on rank 0
        log.warning("no samples")  # on every rank that calls it

    Args:
        name: The name of the logger, as in ``logging.getLogger``.
        ranks: Those that log lines below the level WARNING; None: all. All ranks log warnings and errors.

    Raises:
        ArgumentError: ``ranks`` is not a list of ranks.
        DTypeError: ``name`` is not a string.
    """
    logger = logging.getLogger(None if name is None else checked_text("name", name))
    return RankLogger(logger, None if ranks is None else tuple(checked_ints("ranks", ranks, 0)))
