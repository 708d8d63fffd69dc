"""The command line of each kind of launcher. Pure; any thread.

``mpich`` is Hydra, the mpiexec of MPICH, Cray MPICH, MVAPICH and Intel MPI; ``openmpi`` that of Open MPI 4 (ORTE) and 5
(PRRTE); ``plain`` is an unknown launcher with option ``-n``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dl_comm.run._hosts import Host
from dl_comm.run._options import UsageError


@dataclass(frozen=True)
class Launcher:
    """A program that starts ranks: its kind (``_options.KINDS``), its path, and its version if needed."""

    kind: str
    path: str
    version: tuple[int, ...] = ()


@dataclass(frozen=True)
class JobSpec:
    """The job to start.

    ``hosts`` are passed to the launcher, with their ranks; empty if it knows them, or for this host. ``names`` are the
    variables to pass to the ranks; they are set in the launcher's environment.
    """

    command: Sequence[str]
    ranks: int | None
    hosts: tuple[Host, ...] = ()
    ppn: int | None = None
    bind: str | None = None
    network: str | None = None
    names: tuple[str, ...] = ()
    extra: tuple[str, ...] = field(default=())


def command_line(launcher: Launcher, job: JobSpec) -> list[str]:
    """The command line that starts ``job``.

    Raises:
        UsageError: This kind of launcher does not support it.
    """
    args = _ARGUMENTS[launcher.kind](launcher, job)
    return [launcher.path, *args, *job.extra, *job.command]


def _mpich(_launcher: Launcher, job: JobSpec) -> list[str]:
    # Hydra passes its whole environment, also to other hosts (-genvall is its default).
    args = _count("-n", job.ranks)
    if job.hosts:
        args += ["-hosts", ",".join(f"{host.name}:{host.slots}" for host in job.hosts)]
    elif job.ppn:
        args += ["-ppn", str(job.ppn)]
    if job.bind:
        args += ["-bind-to", job.bind]
    if job.network:
        args += ["-iface", job.network]
    return args


def _openmpi(launcher: Launcher, job: JobSpec) -> list[str]:
    args = _count("-n", job.ranks)
    if job.hosts:
        args += ["--host", ",".join(f"{host.name}:{host.slots}" for host in job.hosts)]
    elif job.ppn:
        args += ["--map-by", f"ppr:{job.ppn}:node"]
    else:
        # Allow more ranks than cores, as MPICH does.
        args += ["--map-by", "slot:OVERSUBSCRIBE"]
    # The default binds each rank to one core, which all its threads would share.
    bind = job.bind or "none"
    args += ["--bind-to", bind if bind == "none" else f"{bind}:overload-allowed"]
    if job.network:
        args += ["--mca", "btl_tcp_if_include", job.network]
        if job.network == "lo":
            pass  # its daemons refuse to use it, and do not need it on one host
        elif launcher.version[:1] < (5,):
            args += ["--mca", "oob_tcp_if_include", job.network]
        else:
            args += ["--prtemca", "prte_if_include", job.network]
    for name in job.names:
        args += ["-x", name]
    return args


def _srun(_launcher: Launcher, job: JobSpec) -> list[str]:
    args = [*_count("-n", job.ranks), "--kill-on-bad-exit=1", "--export=ALL"]
    if job.hosts:
        each = {host.slots for host in job.hosts}
        if len(each) > 1:
            raise UsageError("srun needs the same number of ranks on each host: set -n and --ppn accordingly")
        args += ["-N", str(len(job.hosts)), "-w", ",".join(host.name for host in job.hosts)]
        args += [f"--ntasks-per-node={each.pop()}"]
    elif job.ppn:
        args += [f"--ntasks-per-node={job.ppn}"]
    if job.bind:
        args += ["--cpu-bind=" + {"core": "cores", "numa": "ldoms", "none": "none"}[job.bind]]
    return args


def _plain(launcher: Launcher, job: JobSpec) -> list[str]:
    asked = {"hosts": job.hosts, "--ppn": job.ppn, "--bind": job.bind}
    if wrong := [name for name, value in asked.items() if value]:
        raise UsageError(
            f"{launcher.path} is an unknown launcher: pass {', '.join(wrong)} in its own format with --mpi-args"
        )
    return _count("-n", job.ranks)


def _count(flag: str, number: int | None) -> list[str]:
    return [flag, str(number)] if number else []


_ARGUMENTS = {"mpich": _mpich, "openmpi": _openmpi, "srun": _srun, "plain": _plain}
