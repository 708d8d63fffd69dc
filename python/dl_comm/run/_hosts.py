"""Hosts and their slots from ``-H``, a hostfile, PBS or Slurm, and the ranks on each. Pure; any thread."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Host:
    """A host and its number of slots."""

    name: str
    slots: int = 1


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Parses ``a:4,b:4``; the default is one slot.

    Raises:
        ValueError: The text has another format.
    """
    return _merge(_host(word) for word in text.split(","))


def parse_hostfile(text: str) -> tuple[Host, ...]:
    """Parses a hostfile: ``name``, ``name:4`` (MPICH) or ``name slots=4`` (Open MPI) a line; ``#`` begins a comment.

    Repeated names add their slots, as in PBS's ``$PBS_NODEFILE``. Other words of a line (``max_slots=``,
    ``ifname=``) are ignored.

    Raises:
        ValueError: A line has another format, or there is no host.
    """
    found = []
    for line in text.splitlines():
        words = line.partition("#")[0].split()
        if not words:
            continue
        host = _host(words[0])
        for word in words[1:]:
            name, equals, value = word.partition("=")
            if not equals:
                raise ValueError(f"hostfile: {line.strip()!r} is neither HOST, HOST:SLOTS nor HOST slots=N")
            if name == "slots":
                host = Host(host.name, _count(value, word))
        found.append(host)
    return _merge(found)


def slurm(nodes: str, tasks: str | None) -> tuple[Host, ...]:
    """The hosts of a Slurm allocation.

    Args:
        nodes: ``SLURM_JOB_NODELIST``, for example ``n[01-03,7],login1``.
        tasks: ``SLURM_TASKS_PER_NODE``, for example ``4(x3),2``; default: one for each host.

    Raises:
        ValueError: They have another format.
    """
    names = [name for word in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodes) for name in _expand(word)]
    slots: list[int] = []
    for word in (tasks or f"1(x{len(names)})").split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", word)
        if not match:
            raise ValueError(f"invalid SLURM_TASKS_PER_NODE: {tasks!r}")
        slots += [int(match[1])] * int(match[2] or 1)
    if len(slots) != len(names):
        raise ValueError(f"SLURM_TASKS_PER_NODE names {len(slots)} hosts, SLURM_JOB_NODELIST {len(names)}")
    return tuple(map(Host, names, slots))


def allocation(environ: Mapping[str, str]) -> tuple[str, tuple[Host, ...]] | None:
    """The hosts that a batch system has allocated, with its name, ``"slurm"`` or ``"pbs"``.

    Raises:
        ValueError: Its variables have an unknown format.
        OSError: PBS's file cannot be read.
    """
    if nodes := environ.get("SLURM_JOB_NODELIST"):
        return "slurm", slurm(nodes, environ.get("SLURM_TASKS_PER_NODE"))
    if path := environ.get("PBS_NODEFILE"):
        return "pbs", parse_hostfile(Path(path).read_text())
    return None


def assign_ranks(hosts: Iterable[Host], ranks: int | None, ppn: int | None) -> tuple[Host, ...]:
    """Fills the hosts in order; returns the used ones with their number of ranks.

    Args:
        hosts: The available hosts.
        ranks: The number of ranks; ``None``: all slots.
        ppn: Ranks on each host, instead of its slots.

    Raises:
        ValueError: There are fewer slots than ranks.
    """
    offered = [Host(host.name, ppn or host.slots) for host in hosts]
    total = sum(host.slots for host in offered)
    left = total if ranks is None else ranks
    if left > total:
        raise ValueError(f"{ranks} ranks, but the hosts have {total} slots: set them with HOST:SLOTS or --ppn")
    used = []
    for host in offered:
        if left > 0:
            used.append(Host(host.name, min(host.slots, left)))
        left -= host.slots
    return tuple(used)


def _host(word: str) -> Host:
    name, colon, count = word.strip().rpartition(":")
    if not colon:
        name, count = word.strip(), "1"
    if not name or name.startswith("-") or ":" in name:
        raise ValueError(f"{word!r} is neither HOST nor HOST:SLOTS")
    return Host(name, _count(count, word))


def _count(text: str, word: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{word!r}: the number of slots must be at least 1")
    return int(text)


def _merge(hosts: Iterable[Host]) -> tuple[Host, ...]:
    slots: dict[str, int] = {}
    for host in hosts:
        slots[host.name] = slots.get(host.name, 0) + host.slots
    if not slots:
        raise ValueError("no host given")
    return tuple(Host(name, count) for name, count in slots.items())


def _expand(word: str) -> list[str]:
    """``n[01-03,7]x`` as n01x, n02x, n03x, n7x."""
    match = re.fullmatch(r"([^\[]*)\[([^\]]*)\](.*)", word)
    if not match:
        return [word]
    names = []
    for part in match[2].split(","):
        first, _, last = part.partition("-")
        if not first.isdecimal() or not (last or first).isdecimal():
            raise ValueError(f"invalid SLURM_JOB_NODELIST: {word!r}")
        numbers = range(int(first), int(last or first) + 1)
        names += [f"{match[1]}{number:0{len(first)}}{tail}" for number in numbers for tail in _expand(match[3])]
    return names
