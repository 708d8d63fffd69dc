"""Hosts and their slots: from ``-H``, a hostfile, PBS or Slurm, and how ranks fill them. Pure; any thread."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Host:
    """A host, and how many ranks it takes."""

    name: str
    slots: int = 1


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Reads ``a:4,b:4``; without a number a host has one slot.

    Raises:
        ValueError: It is something else.
    """
    return _merge(_host(word) for word in text.split(","))


def parse_hostfile(text: str) -> tuple[Host, ...]:
    """Reads a hostfile: ``name``, ``name:4`` (MPICH) or ``name slots=4`` (Open MPI) a line; ``#`` begins a comment.

    A name that comes again adds its slots, as in PBS's ``$PBS_NODEFILE``. Other words of a line (``max_slots=``,
    ``ifname=``) are left out of account.

    Raises:
        ValueError: A line is something else, or there is no host.
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
        tasks: ``SLURM_TASKS_PER_NODE``, for example ``4(x3),2``; one a host when it is absent.

    Raises:
        ValueError: They are something else.
    """
    names = [name for word in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodes) for name in _expand(word)]
    slots: list[int] = []
    for word in (tasks or f"1(x{len(names)})").split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", word)
        if not match:
            raise ValueError(f"SLURM_TASKS_PER_NODE: {tasks!r} is not understood")
        slots += [int(match[1])] * int(match[2] or 1)
    if len(slots) != len(names):
        raise ValueError(f"SLURM_TASKS_PER_NODE names {len(slots)} hosts, SLURM_JOB_NODELIST {len(names)}")
    return tuple(map(Host, names, slots))


def allocation(environ: Mapping[str, str]) -> tuple[str, tuple[Host, ...]] | None:
    """The hosts that a batch system has given this job, with its name, ``"slurm"`` or ``"pbs"``.

    Raises:
        ValueError: What it says of them is not understood.
        OSError: PBS's file cannot be read.
    """
    if nodes := environ.get("SLURM_JOB_NODELIST"):
        return "slurm", slurm(nodes, environ.get("SLURM_TASKS_PER_NODE"))
    if path := environ.get("PBS_NODEFILE"):
        return "pbs", parse_hostfile(Path(path).read_text())
    return None


def assign_ranks(hosts: Iterable[Host], ranks: int | None, ppn: int | None) -> tuple[Host, ...]:
    """The hosts that are used, each with its number of ranks: they are filled in order.

    Args:
        hosts: What there is.
        ranks: How many ranks; ``None``: as many as there are slots.
        ppn: How many ranks each host takes, whatever its slots are.

    Raises:
        ValueError: There are fewer slots than ranks.
    """
    offered = [Host(host.name, ppn or host.slots) for host in hosts]
    total = sum(host.slots for host in offered)
    left = total if ranks is None else ranks
    if left > total:
        raise ValueError(
            f"{ranks} ranks, but the hosts have {total} slots: say how many each takes, with HOST:SLOTS or --ppn"
        )
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
        raise ValueError("there is no host in it")
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
            raise ValueError(f"SLURM_JOB_NODELIST: {word!r} is not understood")
        numbers = range(int(first), int(last or first) + 1)
        names += [f"{match[1]}{number:0{len(first)}}{tail}" for number in numbers for tail in _expand(match[3])]
    return names
