"""Checks the ranks of a job: host, processors, NUMA nodes and GPU of each; the path between hosts, and its reason."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from typing import Any

from dl_comm._base.text import runs_text
from dl_comm.doctor._checks import Check, numbers_of
from dl_comm.doctor._host import cgroup_cpus, numa_nodes
from dl_comm.doctor._network import used, used_text

MAX_LINES = 16
"""Most ranks, or kinds of hosts, that are printed; the facts have all."""


def mine(described: dict[str, Any]) -> dict[str, Any]:
    """This rank's data for the other ranks. Call it after the first messages between hosts."""
    allowed = os.sched_getaffinity(0)
    nodes = numa_nodes()
    return {
        "rank": described["rank"],
        "processors": runs_text(allowed, ","),
        "count": len(allowed),
        "numa_nodes": [node for node, cpus in sorted(nodes.items()) if cpus & allowed],
        "cuda_visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "cgroup_cpus": cgroup_cpus(),
        "network": used(),
    }


def check(described: dict[str, Any], gathered: list[dict[str, Any]], gpus: dict[int, int]) -> list[Check]:
    """The checks, from the gathered data of all ranks and the number of GPUs of each host (by its index)."""
    ranks = [{**place, **more} for place, more in zip(described["ranks"], gathered, strict=True)]
    for rank in ranks:
        rank["gpu"] = _gpu(rank, gpus.get(rank["host_index"], 0))
    by_host: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for rank in ranks:
        by_host[rank["host_index"]].append(rank)
    hosts = [by_host[index] for index in sorted(by_host)]
    return [_placement(ranks, hosts), *_oversubscribed(hosts), *_paths(hosts), *_pid_namespaces(hosts)]


def _gpu(rank: dict[str, Any], count: int) -> str:
    """The GPU of a rank: local rank modulo the number of visible GPUs."""
    visible: str | None = rank["cuda_visible_devices"]
    seen = list(map(str, range(count))) if visible is None else list(filter(None, visible.split(",")))
    if not count or not seen:
        return "none"
    return seen[int(rank["local_rank"]) % len(seen)]


def _placement(ranks: list[dict[str, Any]], hosts: list[list[dict[str, Any]]]) -> Check:
    text = f"{len(ranks)} on {len(hosts)} host{'s' * (len(hosts) > 1)}"
    for rank in ranks[:MAX_LINES]:
        node = f"NUMA {runs_text(rank['numa_nodes'], ',') or 'unknown'}"
        gpu = "" if rank["gpu"] == "none" else f", GPU {rank['gpu']}"
        place = f"{rank['host']}, local rank {rank['local_rank']}, pid {rank['pid']}"
        text += f"\nrank {rank['rank']}: {place}, processors {rank['processors']}, {node}{gpu}"
    if len(ranks) > MAX_LINES:
        text += f"\n... and {len(ranks) - MAX_LINES} more (--json has all)"
    return Check("ranks", "placement", "ok", text, {"ranks": ranks, "hosts": len(hosts)})


def _oversubscribed(hosts: list[list[dict[str, Any]]]) -> list[Check]:
    """Hosts with more ranks than usable processors."""
    checks = []
    for ranks in hosts:
        union = set().union(*(numbers_of(rank["processors"]) for rank in ranks))
        quotas = [rank["cgroup_cpus"] for rank in ranks if rank["cgroup_cpus"] is not None]
        least = min([float(len(union)), *quotas])
        if least < len(ranks):
            text = (
                f"{len(ranks)} ranks share {least:.3g} processor{'s' * (least != 1)}; calls "
                "then wait for time slices: start fewer ranks, or bind them to separate processors (--bind-to)"
            )
            facts = {"host_index": ranks[0]["host_index"], "ranks": len(ranks), "processors": least}
            checks.append(Check("ranks", f"oversubscribed {ranks[0]['host']}", "warn", text, facts))
    return checks


def path(one: dict[str, Any], other: dict[str, Any]) -> tuple[str, str]:
    """The path between two ranks, ``shared memory`` or ``messages``, and its reason (see transport/mpi/world.rs)."""
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
    """A row for each kind of host: equal number of ranks, paths to other hosts, and network."""
    rows: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for index, ranks in enumerate(hosts):
        others = [path(ranks[0], other[0]) for at, other in enumerate(hosts) if at != index]
        # Ignore host names in the reasons, so that containers of one machine are one kind.
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
    """Hosts on one machine, whose ranks could share memory."""
    machines: dict[str, list[list[dict[str, Any]]]] = defaultdict(list)
    for ranks in hosts:
        machines[ranks[0]["boot_id"] or str(ranks[0]["host_index"])].append(ranks)
    checks = []
    for number, parts in enumerate(machines.values()):
        if len(parts) > 1:
            reason = path(parts[0][0], parts[1][0])[1]
            text = (
                f"ranks {parts[0][0]['rank']} and {parts[1][0]['rank']} are on {reason}: they use messages "
                "instead of shared memory; give containers of one machine the same host name and one /dev/shm "
                "(--uts=host --ipc=host)"
            )
            facts = {"hosts": [ranks[0]["host_index"] for ranks in parts]}
            checks.append(Check("ranks", f"split machine {number}", "warn", text, facts))
    return checks


def _pid_namespaces(hosts: list[list[dict[str, Any]]]) -> list[Check]:
    """Ranks of one host in different pid namespaces, which cannot monitor each other."""
    checks = []
    for ranks in hosts:
        spaces = {rank["pid_namespace"] for rank in ranks}
        if len(spaces) > 1:
            text = (
                f"the ranks are in {len(spaces)} pid namespaces, so that a lost rank "
                "is detected at the deadline only; start the containers with --pid=host"
            )
            facts = {"host_index": ranks[0]["host_index"], "pid_namespaces": sorted(spaces)}
            checks.append(Check("ranks", f"namespaces {ranks[0]['host']}", "warn", text, facts))
    return checks
