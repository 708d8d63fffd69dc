"""Parses the command line. Invalid input ends with one line and exit status 2.

Pure, except for reading the files of ``--env-file`` and ``--hostfile``. Any thread.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dl_comm.run._hosts import Host, parse_hostfile, parse_hosts

KINDS = ("mpich", "openmpi", "srun", "plain")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


class UsageError(Exception):
    """An invalid command line; the text has the reason and the fix."""


@dataclass(frozen=True)
class Options:
    """The parsed command line. ``None``: not given."""

    command: tuple[str, ...]
    ranks: int | None = None
    hosts: tuple[Host, ...] | None = None
    ppn: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    omp_threads: int | None = None
    bind: str | None = None
    pin_gpu: bool = False
    network: str | None = None
    launcher: str | None = None
    mpiexec: str | None = None
    mpi_args: tuple[str, ...] = ()
    output_dir: Path | None = None
    show: str = "first"
    grace: float = 10.0
    check: bool = False
    dry_run: bool = False
    dump: int | None = None
    parent: tuple[int, Path] | None = None


def parse(arguments: Sequence[str], environ: Mapping[str, str] = os.environ, prog: str = "dl-comm-run") -> Options:
    """Parses a command line.

    Args:
        arguments: The arguments after the program's name.
        environ: The source of ``-x NAME`` values.
        prog: The program's name in the help and in errors of argparse.

    Raises:
        UsageError: A value is invalid, or a file cannot be read.
        SystemExit: Status 2 when argparse finds an error, 0 after ``--help``.
    """
    given = _parser(prog).parse_args(arguments)
    command = given.command[1:] if given.command[:1] == ["--"] else given.command
    if not command and not given.check and given.dump is None:
        raise UsageError("no program to run; for example: dl-comm run -n 4 python train.py")
    if given.ranks != 1 and reads_program(command):
        raise UsageError(f"only rank 0 gets standard input, from which {command[0]} reads its program: use a file")
    if given.host and given.hostfile:
        raise UsageError("use either -H or --hostfile, not both")
    for name, value in (("-n", given.ranks), ("--ppn", given.ppn), ("--omp-threads", given.omp_threads)):
        if value is not None and value < 1:
            raise UsageError(f"{name} {value}: must be at least 1")
    if not given.grace >= 0:
        raise UsageError(f"--grace {given.grace}: must be 0 or more seconds")
    try:
        hosts = parse_hosts(given.host) if given.host else None
        if given.hostfile:
            hosts = parse_hostfile(_read(given.hostfile))
        mpi_args = tuple(word for words in given.mpi_args for word in shlex.split(words))
    except ValueError as error:
        raise UsageError(str(error)) from error
    environment: dict[str, str] = {}
    for path in given.env_file:
        environment |= env_file(_read(path), path)
    for setting in given.x:
        name, equals, value = setting.partition("=")
        if not _NAME.match(name):
            raise UsageError(f"-x {setting}: {name!r} is not a variable name")
        if not equals and name not in environ:
            raise UsageError(f"-x {name}: the variable is not set here; use -x {name}=VALUE")
        environment[name] = value if equals else environ[name]
    return Options(
        command=tuple(with_python(command)),
        ranks=given.ranks,
        hosts=hosts,
        ppn=given.ppn,
        environment=environment,
        omp_threads=given.omp_threads,
        bind=given.bind,
        pin_gpu=given.pin_gpu,
        network=given.network,
        launcher=given.launcher,
        mpiexec=given.mpiexec,
        mpi_args=mpi_args,
        output_dir=Path(given.output_dir).absolute() if given.output_dir else None,
        show="tag" if given.tag_output else "all" if given.all_output else "first",
        grace=given.grace,
        check=given.check,
        dry_run=given.dry_run,
        dump=given.dump,
        parent=(int(given.parent[0]), Path(given.parent[1])) if given.parent else None,
    )


def with_python(command: Sequence[str]) -> list[str]:
    """``train.py ...`` becomes ``PYTHON train.py ...`` with this Python; other commands are unchanged."""
    script = bool(command) and command[0].endswith(".py") and not os.access(command[0], os.X_OK)
    return [sys.executable, *command] if script else list(command)


def reads_program(command: Sequence[str]) -> bool:
    """Whether the program is an interpreter that reads its script from standard input, which only rank 0 gets."""
    if not command or not re.fullmatch(r"(python|pypy)[\d.]*|(ba|da|k|z)?sh", Path(command[0]).name):
        return False
    words = iter(command[1:])
    for word in words:
        if word in ("-W", "-X", "-o"):  # with a value
            next(words, None)
        elif word == "-" or word == "-s" and not Path(command[0]).name.startswith("py"):
            return True
        elif not word.startswith("-") or word[1:2] != "-" and set(word) & {"c", "m"}:
            return False
    return True


def env_file(text: str, path: str) -> dict[str, str]:
    """Parses lines ``NAME=VALUE``; skips empty lines and ``#`` comments, and unquotes nothing.

    Raises:
        UsageError: A line has another format; the text has ``path`` and the line.
    """
    found = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, equals, value = line.strip().partition("=")
        if not equals or not _NAME.match(name):
            raise UsageError(f"{path}, line {number}: {line.strip()!r} is not NAME=VALUE")
        found[name] = value
    return found


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {error}") from error


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        usage=f"{prog} [options] PROGRAM [ARGUMENT...]",
        description="Starts a program on several ranks, and reports which rank failed first and why.",
        allow_abbrev=False,
    )
    where = parser.add_argument_group("ranks and hosts")
    where.add_argument(
        "-n", "-np", dest="ranks", type=int, metavar="N", help="number of ranks; default: all slots of the hosts"
    )
    where.add_argument("-H", "--host", "--hosts", metavar="HOST:SLOTS,...", help="hosts with their slots (default 1)")
    where.add_argument("--hostfile", metavar="FILE", help="hosts, in the format of MPICH, Open MPI or PBS")
    where.add_argument("--ppn", type=int, metavar="N", help="ranks on each host")
    what = parser.add_argument_group("environment of the ranks")
    what.add_argument(
        "-x", action="append", default=[], metavar="VAR[=VALUE]", help="an environment variable; may be repeated"
    )
    what.add_argument("--env-file", action="append", default=[], metavar="FILE", help="file with VAR=VALUE lines")
    what.add_argument("--omp-threads", type=int, metavar="N", help="OMP_NUM_THREADS; default: a host's cores / ranks")
    what.add_argument("--bind", choices=("core", "numa", "none"), help="CPU binding of each rank (default: none)")
    what.add_argument("--pin-gpu", action="store_true", help="each rank sees one GPU: local rank modulo GPU count")
    what.add_argument("--network", metavar="IFACE", help="network interface between hosts, for example eth0")
    shown = parser.add_argument_group("output (default: rank 0's output and the other ranks' stderr)")
    shown.add_argument("--all-output", action="store_true", help="show the output of all ranks")
    shown.add_argument("--tag-output", action="store_true", help="the same, with '[rank] ' before each line")
    shown.add_argument("--output-dir", metavar="DIR", help="also write a log file for each rank there")
    how = parser.add_argument_group("the launcher")
    how.add_argument("--launcher", choices=KINDS, help="its kind; default: detected")
    how.add_argument("--mpiexec", metavar="PATH", help="path of the launcher; default: that of dl_comm's MPI")
    how.add_argument("--mpi-args", action="append", default=[], metavar="'WORDS'", help="more launcher options")
    how.add_argument(
        "--grace",
        type=float,
        default=10.0,
        metavar="S",
        help="stop the other ranks S seconds after a failure; 0: never (default: 10)",
    )
    how.add_argument("--check", action="store_true", help="first run 'python -m dl_comm.doctor' on every host")
    how.add_argument("--dry-run", action="store_true", help="print the launcher's command line, start nothing")
    how.add_argument(
        "--dump",
        type=int,
        metavar="JOB",
        help="start nothing; the ranks of the running dl-comm-run process JOB write a dump",
    )
    # For dl_comm.run(function): ends with that process, and writes the report to its folder.
    how.add_argument("--parent", nargs=2, metavar=("PID", "FOLDER"), help=argparse.SUPPRESS)
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="PROGRAM", help="the program and its arguments")
    return parser
