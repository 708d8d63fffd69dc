"""Which implementation runs a collective, by device, hosts and mode, as in TorchMPI.

Thread rule: the table belongs to the process; all ranks set it equally, while no call is made.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from dl_comm import _dl_comm
from dl_comm._arrays import groups
from dl_comm._arrays.groups import Group
from dl_comm._base.errors import ArgumentError, CommError
from dl_comm._base.table import COLLECTIVES as _CALLS
from dl_comm._job import state
from dl_comm._levels import communicators
from dl_comm._levels.communicators import communicator, span
from dl_comm._levels.hierarchy import Levels

COLLECTIVES = tuple(each.name for each in _CALLS)
"""By their codes, from 1."""

_DEVICES, _HOSTS, _MODES = ("cpu", "gpu"), ("singlenode", "multinode"), ("sync", "async_")
_AXES = (_DEVICES, _HOSTS, _MODES)
_ALGORITHMS = ("doubling", "halving", "pairwise", "ring")
_PATHS = ("nccl", "ipc", "staged")

_lock = threading.Lock()


def implementations(collective: str, device: str = "cpu", hosts: str = "singlenode", mode: str = "sync") -> list[str]:
    """The implementations of a collective. ``auto`` leaves the choice to the core; ``flat`` too, but ignores a span."""
    if device == "gpu":
        # The other paths copy what is neither an allreduce nor a broadcast to host memory.
        paths = _PATHS if collective in ("allreduce", "broadcast") else _PATHS[:1]
        return ["auto", *(paths if collective != "barrier" else ())]
    known = ["auto", "flat"]
    if collective == "allreduce" and mode == "sync":
        known.append("hierarchical")
    if hosts == "multinode" and collective in ("allreduce", "reduce"):
        known.extend(_ALGORITHMS)
    return known


class _View:
    """A part of the table: ``collective_selector.cpu.multinode.sync``."""

    def __init__(self, *path: str) -> None:
        object.__setattr__(self, "_path", path)

    def __getattr__(self, name: str) -> Any:
        path = self._path
        if len(path) < len(_AXES) and name in _AXES[len(path)]:
            return _View(*path, name)
        if len(path) == len(_AXES) and name in COLLECTIVES:
            return collective_selector.get(name, *path)
        raise AttributeError(f"there is no {name!r} here; there are {', '.join(self.__dir__())}")

    def __setattr__(self, name: str, implementation: str) -> None:
        if len(self._path) < len(_AXES) or name not in COLLECTIVES:
            raise AttributeError(f"give device, hosts, mode and collective, as in cpu.singlenode.sync.{COLLECTIVES[0]}")
        collective_selector.set(name, implementation, *self._path)

    def __dir__(self) -> list[str]:
        return list(_AXES[len(self._path)] if len(self._path) < len(_AXES) else COLLECTIVES)


class CollectiveSelector(_View):
    """The table of implementations: ``print(collective_selector)`` shows it.

    ``collective_selector.cpu.multinode.sync.allreduce = "ring"`` changes an entry, as ``set`` does. An entry says how
    the collective runs when it is called without ``group=``. An algorithm between hosts or a GPU path has a group of
    its own, with the other settings of the environment, which the ranks make at its first use; all ranks must make the
    same changes. TensorFlow's calls have the entries of the CPU, and those of a graph the ones of its tracing.
    """

    def get(self, collective: str, device: str = "cpu", hosts: str | None = None, mode: str = "sync") -> str:
        """The implementation of a collective; ``hosts`` None: that of this job."""
        key = (_one(device, _DEVICES), _one(hosts or _job_hosts(), _HOSTS), _one(mode, _MODES))
        return state.current.choices.get((*key, _one(collective, COLLECTIVES)), "auto")

    def set(
        self,
        collective: str,
        implementation: str,
        device: str | None = None,
        hosts: str | None = None,
        mode: str | None = None,
    ) -> None:
        """Chooses an implementation; None: for both.

        Raises:
            ArgumentError: An argument is unknown, or no chosen entry has this implementation.
        """
        _one(collective, COLLECTIVES)
        entries = [
            (one, other, third)
            for one in ([_one(device, _DEVICES)] if device else _DEVICES)
            for other in ([_one(hosts, _HOSTS)] if hosts else _HOSTS)
            for third in ([_one(mode, _MODES)] if mode else _MODES)
        ]
        able = [entry for entry in entries if implementation in implementations(collective, *entry)]
        if not able:
            known = sorted({name for entry in entries for name in implementations(collective, *entry)})
            raise ArgumentError(
                f"invalid implementation of {collective}: {implementation!r} (expected one of {', '.join(known)})"
            )
        state.current.choices.update({(*entry, collective): implementation for entry in able})
        update_route()

    def reset(self) -> None:
        """Sets all entries to ``auto``."""
        state.current.choices.clear()
        update_route()

    def __str__(self) -> str:
        columns = [(device, hosts, mode) for device in _DEVICES for hosts in _HOSTS for mode in _MODES]
        return _table(columns, lambda collective, column: self.get(collective, *column))


def collective_availability(cpu: bool = True, gpu: bool = True) -> str:
    """Prints and returns a table of the collectives and their implementations, by device and hosts.

    A GPU's column says ``unavailable`` where this process has no GPU.
    """
    devices = [device for device, shown in zip(_DEVICES, (cpu, gpu), strict=True) if shown]
    columns = [(device, hosts, "sync") for device in devices for hosts in _HOSTS]
    has_gpu = gpu and _has_gpu()

    def cell(collective: str, column: tuple[str, str, str]) -> str:
        known = implementations(collective, *column)
        return " ".join(known) if column[0] == "cpu" or has_gpu else "unavailable"

    text = _table(columns, cell)
    print(text)
    return text


def _has_gpu() -> bool:
    try:
        return _dl_comm.gpu_count() > 0
    except CommError:  # there is no driver
        return False


def _table(columns: list[tuple[str, str, str]], cell: Callable[[str, tuple[str, str, str]], str]) -> str:
    modes = {column[2] for column in columns}
    titles = [".".join(column if len(modes) > 1 else column[:2]) for column in columns]
    rows = [["collective", *titles]]
    rows += [[collective, *(cell(collective, column) for column in columns)] for collective in COLLECTIVES]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _free_variants(popped: Group) -> None:
    for key in [key for key in state.current.variants if key[0] == popped.number]:
        state.current.variants.pop(key).free()
    for levels in [levels for levels in state.current.hierarchies if levels[1] == popped.number]:
        del state.current.hierarchies[levels]


def _one(value: str, known: tuple[str, ...]) -> str:
    if not isinstance(value, str) or value not in known:
        raise ArgumentError(f"{value!r} is not one of {', '.join(known)}")
    return value


def _job_hosts() -> str:
    return _HOSTS[_dl_comm.hosts() > 1]


def update_route() -> None:
    """Lets calls without a group follow the table and the span, if they say more than the default."""
    plain = span() == (0, 0) and all(name in ("auto", "flat") for name in state.current.choices.values())
    groups.set_route(None if plain else _route)


def _route(code: int, device: str, async_op: bool) -> Group:
    begin, end = span()
    group = communicator(begin).local
    if not code:
        return group
    collective, mode = COLLECTIVES[code - 1], _MODES[async_op]
    chosen = collective_selector.get(collective, device, _HOSTS[_spans_hosts(group)], mode)
    if chosen in _ALGORITHMS or chosen in _PATHS:
        return _variant(group, begin, chosen)
    if chosen == "hierarchical" and end == begin:
        raise ArgumentError(f"{collective} is set to hierarchical; choose its levels with collective_span first")
    has_levels = end > begin and "hierarchical" in implementations(collective, device, mode=mode)
    return _hierarchy(group, begin, end) if has_levels and chosen != "flat" else group


def _spans_hosts(group: Group) -> bool:
    return _dl_comm.hosts() > 1 and group.size > 1


def _variant(group: Group, level: int, chosen: str) -> Group:
    key = (group.number, chosen)
    with _lock:  # two threads must not make two
        variants = state.current.variants
        if key in variants:
            return variants[key]
        algorithm, gpu_path = (chosen, None) if chosen in _ALGORITHMS else (None, chosen)
        variants[key] = Group(group.ranks, f"{chosen} of level {level}", algorithm=algorithm, gpu_path=gpu_path)
        return variants[key]


def _hierarchy(group: Group, begin: int, end: int) -> Group:
    levels = [communicator(level) for level in range(end, begin, -1)]
    key = (group.number, levels[0].local.number)
    hierarchies = state.current.hierarchies
    if key not in hierarchies:
        hierarchies[key] = Levels(group, levels)
    return hierarchies[key]


communicators.on_change.append(update_route)
communicators.on_pop.append(_free_variants)
collective_selector = CollectiveSelector()
"""The table of this process."""
