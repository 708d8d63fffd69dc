"""The ranks of a job: the host, processors, NUMA nodes and GPU of each; how each pair of hosts talks, and why."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from typing import Any

from dl_comm.doctor._checks import Check, numbers_of, ranges_text
from dl_comm.doctor._host import cgroup_cpus, numa_nodes
from dl_comm.doctor._network import used, used_text

MAX_LINES = 16
"""At most so many ranks, or kinds of hosts, are printed; the facts have all."""


def mine(described: dict[str, Any]) -> dict[str, Any]:
    """What this rank tells the others of itself, once messages have gone between the hosts."""
    allowed = os.sched_getaffinity(0)
    nodes = numa_nodes()
    return {
        "rank": described["rank"],
        "processors": ranges_text(allowed),
        "count": len(allowed),
        "numa_nodes": [node for node, cpus in sorted(nodes.items()) if cpus & allowed],
        "cuda_visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "cgroup_cpus": cgroup_cpus(),
        "network": used(),
    }


def check(described: dict[str, Any], gathered: list[dict[str, Any]], gpus: dict[int, int]) -> list[Check]:
    """The checks, from what each rank gathered and the number of GPUs of each host (by its index)."""
    ranks = [{**place, **more} for place, more in zip(described["ranks"], gathered, strict=True)]
    for rank in ranks:
        rank["gpu"] = _gpu(rank, gpus.get(rank["host_index"], 0))
    by_host: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for rank in ranks:
        by_host[rank["host_index"]].append(rank)
    hosts = [by_host[index] for index in sorted(by_host)]
    return [_placement(ranks, hosts), *_oversubscribed(hosts), *_paths(hosts), *_pid_namespaces(hosts)]


def _gpu(rank: dict[str, Any], count: int) -> str:
    """The GPU that a rank would take: the usual rule, local rank modulo what it may see."""
    visible: str | None = rank["cuda_visible_devices"]
    seen = list(map(str, range(count))) if visible is None else list(filter(None, visible.split(",")))
    if not count or not seen:
        return "none"
    return seen[int(rank["local_rank"]) % len(seen)]


def _placement(ranks: list[dict[str, Any]], hosts: list[list[dict[str, Any]]]) -> Check:
    text = f"{len(ranks)} on {len(hosts)} host{'s' * (len(hosts) > 1)}"
    for rank in ranks[:MAX_LINES]:
        node = f"NUMA {ranges_text(rank['numa_nodes']) or 'not known'}"
        gpu = "" if rank["gpu"] == "none" else f", GPU {rank['gpu']}"
        place = f"{rank['host']}, local rank {rank['local_rank']}, pid {rank['pid']}"
        text += f"\nrank {rank['rank']}: {place}, processors {rank['processors']}, {node}{gpu}"
    if len(ranks) > MAX_LINES:
        text += f"\n... and {len(ranks) - MAX_LINES} more (--json has all)"
    return Check("ranks", "placement", "ok", text, {"ranks": ranks, "hosts": len(hosts)})


def _oversubscribed(hosts: list[list[dict[str, Any]]]) -> list[Check]:
    """Hosts whose ranks outnumber the processors that they may use."""
    checks = []
    for ranks in hosts:
        union = set().union(*(numbers_of(rank["processors"]) for rank in ranks))
        quotas = [rank["cgroup_cpus"] for rank in ranks if rank["cgroup_cpus"] is not None]
        least = min([float(len(union)), *quotas])
        if least < len(ranks):
            text = (
                f"{len(ranks)} ranks share {least:.3g} processor{'s' * (least != 1)}; averages "
                "then wait for one another's turn: start fewer ranks, or let the launcher bind them apart (--bind-to)"
            )
            facts = {"host_index": ranks[0]["host_index"], "ranks": len(ranks), "processors": least}
            checks.append(Check("ranks", f"oversubscribed {ranks[0]['host']}", "warn", text, facts))
    return checks


def path(one: dict[str, Any], other: dict[str, Any]) -> tuple[str, str]:
    """How two ranks talk, ``shared memory`` or ``messages``, and why: as core/src/transport/mpi/world.rs decides it."""
    if one["host_index"] == other["host_index"]:
        return "shared memory", "same host name, boot and file system of the segments"
    if one["boot_id"] != other["boot_id"] or not one["boot_id"]:
        return "messages", "different machines"
    reasons = []
    if one["host"] != other["host"]:
        reasons.append(f"the host names differ ({one['host']}, {other['host']})")
    if one["shm_device"] != other["shm_device"]:
        reasons.append("the file systems for shared memory differ")
    return "messages", "one machine, but " + " and ".join(reasons)


def _paths(hosts: list[list[dict[str, Any]]]) -> list[Check]:
    """A row for each kind of host: those with as many ranks, the same paths to the others and the same network."""
    rows: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for index, ranks in enumerate(hosts):
        others = [path(ranks[0], other[0]) for at, other in enumerate(hosts) if at != index]
        # Containers of one machine have names of their own in the reasons: one kind all the same.
        reasons = sorted({re.sub(r" \(.*?\)", "", reason) for _, reason in others})
        networks = {used_text(rank["network"]) for rank in ranks if _is_used(rank["network"])}
        rows[len(ranks), tuple(reasons), tuple(sorted(networks))].append(index)
    lines, facts = [], []
    for (count, reasons, networks), indices in rows.items():
        names = [hosts[index][0]["host"] for index in indices]
        shown = ", ".join(names[:4]) + f" and {len(names) - 4} more" * (len(names) > 4)
        within = "shared memory (same host name, boot and file system)" if count > 1 else "one rank"
        line = (
            f"{shown}: {count} rank{'s' * (count > 1)} each, inside: {within}"
            if len(names) > 1
            else f"{shown}: {within}"
        )
        network = " and ".join(networks) or used_text({"tcp": [], "devices": []})
        if reasons:
            line += f"; to the other host{'s' * (len(hosts) > 2)}: MPI messages ({'; '.join(reasons)}) over {network}"
        lines.append(line)
        row = {"hosts": indices, "names": names, "ranks_each": count, "inside": "shared memory" if count > 1 else None}
        facts.append({**row, "outside": "messages" if reasons else None, "why": list(reasons), "network": network})
    text = "\n".join(lines[:MAX_LINES]) + f"\n... and {len(lines) - MAX_LINES} more" * (len(lines) > MAX_LINES)
    checks = [Check("ranks", "paths", "ok", text, {"rows": facts})]
    return [*checks, *_one_machine(hosts)]


def _is_used(network: dict[str, Any]) -> bool:
    return bool(network["tcp"] or network["devices"])


def _one_machine(hosts: list[list[dict[str, Any]]]) -> list[Check]:
    """Hosts that are one machine: their ranks could share memory."""
    machines: dict[str, list[list[dict[str, Any]]]] = defaultdict(list)
    for ranks in hosts:
        machines[ranks[0]["boot_id"] or str(ranks[0]["host_index"])].append(ranks)
    checks = []
    for number, parts in enumerate(machines.values()):
        if len(parts) > 1:
            reason = path(parts[0][0], parts[1][0])[1]
            text = (
                f"ranks {parts[0][0]['rank']} and {parts[1][0]['rank']} are on {reason}: they send messages "
                "where they could share memory; give containers of one machine the same host name and one /dev/shm "
                "(--uts=host --ipc=host)"
            )
            facts = {"hosts": [ranks[0]["host_index"] for ranks in parts]}
            checks.append(Check("ranks", f"split machine {number}", "warn", text, facts))
    return checks


def _pid_namespaces(hosts: list[list[dict[str, Any]]]) -> list[Check]:
    """Ranks of one host in different namespaces of processes cannot watch each other."""
    checks = []
    for ranks in hosts:
        spaces = {rank["pid_space"] for rank in ranks}
        if len(spaces) > 1:
            text = (
                f"the ranks are in {len(spaces)} namespaces of processes, so that the end of a rank "
                "is noticed at the deadline only, not at once; start the containers with --pid=host"
            )
            facts = {"host_index": ranks[0]["host_index"], "pid_spaces": sorted(spaces)}
            checks.append(Check("ranks", f"namespaces {ranks[0]['host']}", "warn", text, facts))
    return checks
