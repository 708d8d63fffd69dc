"""``dl-comm run``, ``dl-comm-run`` or ``python -m dl_comm.run``: starts a program on several ranks.

    dl-comm run -n 4 python train.py
    dl-comm run -H node1:4,node2:4 --network eth0 --output-dir logs python train.py

The package is the function ``dl_comm.run`` as well: it starts ranks from Python, and calls a function on each
(``_function.py``).

Detects MPICH, Open MPI, Slurm's ``srun`` and PBS; ``--dry-run`` prints the launcher's command line. After a failure it
reports the rank that failed first, the cause, and the rank's last lines. docs/run.md is the manual.

Imports neither a framework nor the compiled module.
"""

from __future__ import annotations

import importlib
import inspect
import os
import shlex
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

from dl_comm._base.network import addresses, is_here, variables
from dl_comm._base.torch_variables import hold_port
from dl_comm.run import _launch
from dl_comm.run._check import healthy
from dl_comm.run._dump import dump
from dl_comm.run._find import built_for, find
from dl_comm.run._function import run
from dl_comm.run._hosts import Host, allocation, assign_ranks
from dl_comm.run._launchers import JobSpec, Launcher, command_line
from dl_comm.run._options import Options, UsageError, parse
from dl_comm.run._parent import end_with, report
from dl_comm.run._report import Outcome

__all__ = ["main", "run"]


def __dir__() -> list[str]:
    return sorted(__all__)


def main(arguments: Sequence[str] | None = None, prog: str = "dl-comm-run") -> int:
    """The command line.

    Args:
        arguments: The arguments after the program's name; ``None``: those of this process.
        prog: The program's name in the help.

    Returns:
        The exit status: that of the rank that failed first (128 + signal), or of the launcher if no rank is known to
        have failed; 1 if ranks were stopped for an unknown reason, or if ``--check`` found a problem; 2 for an invalid
        command line.
    """
    parent = None
    try:
        options = parse(sys.argv[1:] if arguments is None else arguments, prog=prog)
        parent = options.parent
        if parent is not None:
            end_with(parent[0])
        found = _run(options)
    except UsageError as error:
        found = Outcome(2, str(error))
    if parent is not None:
        report(*parent, found)
    elif found.text:
        _log(found.text)
    return found.status


def _run(options: Options) -> Outcome:
    if options.dump is not None:
        print(dump(options.dump))
        return Outcome(0, "")
    launcher = find(options, os.environ, built_for())
    hosts, job = _job(options, launcher)
    settings = _environment(options)
    names = {*settings, *(name for name in os.environ if name.startswith(("DL_COMM_", "MASTER_")))}
    job = replace(job, names=tuple(sorted(names)))
    if options.dry_run:
        before = ["env", *(f"{name}={value}" for name, value in settings.items())] if settings else []
        print(shlex.join([*before, *command_line(launcher, job)]))
        return Outcome(0, "")
    env = {**os.environ, **settings}
    if options.check and not healthy(launcher, job, hosts, env):
        return Outcome(1, "")
    if not options.command:
        return Outcome(0, "")
    if options.output_dir:
        try:
            options.output_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--output-dir {options.output_dir}: {error.strerror}") from error
    reported = replace(job, command=_launch.wrapped(options.command), names=(*job.names, "DL_COMM_RUN_CONFIG"))
    rank_settings: dict[str, Any] = {
        "show": options.show,
        "output_dir": str(options.output_dir) if options.output_dir else None,
        # srun binds by default, as configured by the site.
        "bound": options.bind in ("core", "numa") or (launcher.kind == "srun" and options.bind is None),
        "pin_gpu": options.pin_gpu,
        "local": options.ppn or -(-(job.ranks or 1) // max(1, len(hosts))),
    }
    # --mpi-args may name further hosts.
    is_known = not options.mpi_args and launcher.kind not in ("srun", "plain")
    here = is_known and all(is_here(host.name) for host in hosts)
    rank_settings |= {"here": here, "master": None}
    if is_known and hosts or here:
        rank_settings["master"], _held = _master(hosts, options.network, here)
    reached = addresses([host.name for host in hosts], options.network, anywhere=bool(options.mpi_args))
    return _launch.run(command_line(launcher, reported), env, rank_settings, reached, job.ranks, options.grace)


def _master(hosts: Sequence[Host], network: str | None, here: bool) -> tuple[tuple[str, int], socket.socket]:
    """Where the ranks of a program meet: on the first host, that of rank 0. The socket keeps the port on this host."""
    # On another host it is most likely free, too; rank 0 tells if it is not.
    held = hold_port()
    port = int(held.getsockname()[1])
    if here:
        return ("127.0.0.1", port), held
    first = hosts[0].name
    names = [host.name for host in hosts]
    return (addresses(names, network)[0] if is_here(first) else first, port), held


def _job(options: Options, launcher: Launcher) -> tuple[tuple[Host, ...], JobSpec]:
    """The known hosts and the job on them."""
    try:
        batch = allocation(os.environ)
        known = options.hosts or (batch[1] if batch else ())
        # Open MPI's and MPICH's launchers, and srun, query Slurm themselves; without hosts all ranks are on this one.
        explicit = bool(options.hosts) or (batch is not None and batch[0] == "pbs")
        used = assign_ranks(known, options.ranks, options.ppn) if explicit else ()
    except (ValueError, OSError) as error:
        raise UsageError(str(error)) from error
    ranks = options.ranks or sum(options.ppn or host.slots for host in known) or None
    if ranks is None and options.command:
        raise UsageError("how many ranks? Set -n, or name hosts with -H or --hostfile")
    job = JobSpec(options.command, ranks, used, options.ppn, options.bind, options.network, extra=options.mpi_args)
    return used or known, job


def _environment(options: Options) -> dict[str, str]:
    """Variables of the options, for the launcher and its ranks. A network variable that is already set is kept."""
    network = variables(options.network) if options.network else {}
    found = {
        name: value for name, value in network.items() if name == "DL_COMM_SOCKET_IFNAME" or name not in os.environ
    }
    if options.omp_threads:
        found["OMP_NUM_THREADS"] = str(options.omp_threads)
    return {**found, **options.environment}


def _log(text: str) -> None:
    lines = (line if line.startswith(" ") else f"dl-comm-run: {line}" for line in text.splitlines())
    print("\n".join(lines), file=sys.stderr, flush=True)


class _Package(ModuleType):
    """The type of this package: ``dl_comm.run(function)`` calls it."""

    __call__ = staticmethod(run)
    __signature__ = inspect.signature(run)  # which inspect would take for a method

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        """By name, as pickles of other modules: a function may refer to it."""
        return importlib.import_module, (self.__name__,)


sys.modules[__name__].__class__ = _Package
