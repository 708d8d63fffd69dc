"""Checks the host: shared memory, process limits, processors, NUMA nodes, kernel. Reads /proc and /sys."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import resource
import tempfile
from pathlib import Path
from typing import Any

from dl_comm._base.text import runs_text, size_text
from dl_comm.doctor._checks import Check, numbers_of

_NODES = Path("/sys/devices/system/node")
_MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs", "hugetlbfs")


def check(described: dict[str, Any], local_ranks: int) -> list[Check]:
    """The checks of this host, for a job with ``local_ranks`` ranks on it."""
    settings: dict[str, Any] = described.get("settings", {})
    folder = Path(settings.get("DL_COMM_SHM_DIR", "/dev/shm"))
    checks = [_shared_memory("shared memory", folder, _needed(described, local_ranks))]
    if folder != Path("/dev/shm"):
        # MPICH, Open MPI and torch's data loaders always use /dev/shm.
        checks.append(_shared_memory("/dev/shm", Path("/dev/shm"), 64 << 20, need="MPI and data loaders use it too"))
    checks.append(_left_behind({folder, Path("/dev/shm")}, Path(tempfile.gettempdir())))
    return [*checks, _memlock(), _files(), _processors(local_ranks), _numa(), _kernel()]


def _needed(described: dict[str, Any], local_ranks: int) -> int:
    """The shared memory that a job needs on a host: the control team and one team with the default threads."""
    by_ranks: list[int] = described["group_bytes"]
    power = (max(local_ranks, 2) - 1).bit_length()
    return 2 * by_ranks[min(power, len(by_ranks) - 1)]


def _shared_memory(name: str, folder: Path, needed: int, need: str = "the control team and one more") -> Check:
    facts: dict[str, Any] = {"folder": str(folder), "needed_bytes": needed}
    help_ = "set DL_COMM_SHM_DIR to another folder; start containers with --shm-size or --ipc=host"
    try:
        with tempfile.TemporaryFile(dir=folder, prefix="dl_comm.doctor."):
            pass
        usage = os.statvfs(folder)
    except OSError as error:
        return Check("host", name, "bad", f"{folder} cannot be used: {error.strerror}; {help_}", facts)
    facts |= {"size_bytes": usage.f_blocks * usage.f_frsize, "free_bytes": usage.f_bavail * usage.f_frsize}
    facts |= mount_of(folder)
    size, free = size_text(facts["size_bytes"]), size_text(facts["free_bytes"])
    text = f"{folder}: {facts.get('type', 'unknown file system')}, {size}, {free} free"
    if facts["free_bytes"] < needed:
        text += f", which is less than the {size_text(needed)} for {need}; {help_}"
        return Check("host", name, "bad" if name == "shared memory" else "warn", text, facts)
    if facts.get("type", "tmpfs") not in _MEMORY_FILE_SYSTEMS:
        return Check("host", name, "warn", f"{text}: not in memory, so calls may wait for a disk; {help_}", facts)
    return Check("host", name, "ok", text, facts)


def _left_behind(shared: set[Path], temporary: Path) -> Check:
    """Leftovers of ended processes that the next start does not remove: they are too new, or of another user."""
    mapped = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # another user's, or already ended
            mapped |= set(re.findall(r" (/\S+/(?:dl_comm\.|mpich_shm_)\S+)", maps.read_text(errors="replace")))
    segments = [path for folder in shared for name in ("dl_comm.*", "mpich_shm_*") for path in folder.glob(name)]
    left = sorted(str(path) for path in segments if str(path) not in mapped and path.is_file())
    dumps = sorted(str(path) for path in temporary.glob(f"dl_comm-{os.geteuid()}*/*"))
    facts = {"segments": left, "dumps": dumps}
    text = f"dumps of {len(dumps)} job(s) in {temporary}, kept for a week" if dumps else "nothing"
    if left:
        more = f" and {len(left) - 3} more" if len(left) > 3 else ""
        text += f"; unused shared memory: {', '.join(left[:3])}{more} (of a job that starts now, or of a crashed one)"
        return Check("host", "left behind", "warn", text, facts)
    return Check("host", "left behind", "ok", text, facts)


def mount_of(folder: Path) -> dict[str, Any]:
    """Type and options of a folder's file system, from /proc/self/mountinfo (proc_pid_mountinfo(5))."""
    device = folder.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        fields, (kind, _, special) = before.split(), after.split(maxsplit=2)
        if fields[2] == number:
            return {"type": kind, "options": f"{fields[5]},{special}"}
    return {}


def _limit(number: int) -> str:
    return "unlimited" if number == resource.RLIM_INFINITY else str(number)


def _memlock() -> Check:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    verbs = Path("/sys/class/infiniband")
    devices = sorted(device.name for device in verbs.iterdir()) if verbs.is_dir() else []
    finite = None if soft == resource.RLIM_INFINITY else soft
    facts = {"soft_bytes": finite, "rdma_devices": devices}
    text = "unlimited" if soft == resource.RLIM_INFINITY else size_text(soft)
    if devices and finite is not None and finite < 64 << 20:
        text += (
            f", but {', '.join(devices)} pin memory: MPI between hosts may fail or fall back to TCP; raise 'ulimit -l'"
        )
        return Check("host", "locked memory", "warn", text, facts)
    return Check("host", "locked memory", "ok", text + " (no RDMA device needs it)" * (not devices), facts)


def _files() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    facts = {"soft": soft, "hard": hard}
    if 0 <= soft < 1024:
        text = f"{soft}: too few sockets for many ranks; raise 'ulimit -n' to 1024 or more"
        return Check("host", "open files", "warn", text, facts)
    return Check("host", "open files", "ok", _limit(soft), facts)


def _processors(local_ranks: int) -> Check:
    allowed = sorted(os.sched_getaffinity(0))
    quota = cgroup_cpus()
    memory = cgroup_memory()
    facts = {"host": os.cpu_count(), "allowed": allowed, "cgroup_cpus": quota, "cgroup_memory_bytes": memory}
    text = f"{os.cpu_count()}, this process may use {len(allowed)} ({runs_text(allowed, ',')})"
    if quota is not None:
        text += f", its cgroup the time of {quota:.3g}"
    if memory is not None:
        text += f" and {size_text(memory)} of memory"
    if quota is not None and quota < local_ranks:
        return Check("host", "processors", "warn", f"{text}: less than one for each of {local_ranks} ranks", facts)
    return Check("host", "processors", "ok", text, facts)


def _cgroup(name: str) -> list[str]:
    """The values of this process's cgroup v2 file ``name``, of the nearest group with a limit."""
    try:
        path = Path("/proc/self/cgroup").read_text().partition("0::")[2].split("\n")[0].strip("/")
    except OSError:
        return []
    folder = Path("/sys/fs/cgroup", path)
    for group in (folder, *folder.parents):
        file = group / name
        if file.is_file() and (values := file.read_text().split()) and values[0] != "max":
            return values
        if group == Path("/sys/fs/cgroup"):
            break
    return []


def cgroup_cpus() -> float | None:
    """The processor limit of the cgroup (v2, cpu.max); None: no limit, or unknown."""
    values = _cgroup("cpu.max")
    return int(values[0]) / int(values[1]) if values else None


def cgroup_memory() -> int | None:
    """The memory limit of the cgroup (v2, memory.max) in bytes; None: no limit, or unknown."""
    values = _cgroup("memory.max")
    return int(values[0]) if values else None


def numa_nodes() -> dict[int, set[int]]:
    """The processors of each NUMA node; empty if unknown."""
    lists = {folder: folder / "cpulist" for folder in _NODES.glob("node[0-9]*")}
    return {int(folder.name[4:]): numbers_of(file.read_text()) for folder, file in lists.items() if file.exists()}


def _numa() -> Check:
    nodes = {str(node): runs_text(cpus, ",") for node, cpus in sorted(numa_nodes().items())}
    text = "; ".join(f"node {node}: processors {cpus or 'none'}" for node, cpus in nodes.items())
    return Check("host", "NUMA", "ok", text or "unknown", {"nodes": nodes})


def _kernel() -> Check:
    system = platform.uname()
    text = f"{system.system} {system.release} {system.machine}, host name {system.node}"
    return Check(
        "host", "kernel", "ok", text, {"release": system.release, "machine": system.machine, "host": system.node}
    )
