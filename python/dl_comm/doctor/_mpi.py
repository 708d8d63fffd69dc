"""Checks MPI: the library and its ABI, the launchers, mpi4py, and whether MPI starts."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from typing import Any

from dl_comm.doctor._checks import Check
from dl_comm.doctor._launcher import Launch
from dl_comm.doctor._probes import Failed, Probe, Process

_ABI = {
    "12": "the ABI of MPICH (libmpi.so.12), which Cray MPICH, Intel MPI and MVAPICH share",
    "40": "the ABI of Open MPI (libmpi.so.40)",
}
_NAMES = {"mpich": "MPICH family", "openmpi": "Open MPI"}


def interpreter_mpiexec() -> Path | None:
    """The mpiexec in the interpreter's folder, if there is one."""
    path = Path(sys.executable).parent / "mpiexec"
    return path if path.exists() else None


def family_of(text: str) -> str | None:
    """``openmpi`` or ``mpich`` by the version text of a library or launcher; None: neither."""
    if re.search(r"Open MPI|OpenRTE|PRRTE|open-mpi", text):
        return "openmpi"
    return "mpich" if re.search(r"MPICH|HYDRA|Intel\(R\) MPI|MVAPICH", text, re.IGNORECASE) else None


def check_library(described: dict[str, Any]) -> Check:
    """The MPI library that this process has loaded."""
    mpi: dict[str, Any] = described["mpi"]
    found = re.search(r"libmpi\w*\.so\.(\d+)", mpi["library"] or "")
    abi = _ABI.get(found[1], f"an unknown ABI ({found[0]})") if found else "an unknown ABI"
    facts = {**mpi, "family": _family(described), "soname_version": found[1] if found else None}
    # Drop the configuration that MPICH and Open MPI append.
    first = re.split(r"\n|, package:", mpi["library_version"])[0].replace("\t", " ")
    text = f"{re.sub(' {2,}', ' ', first)}, MPI {mpi['standard']}, {mpi['library']}; {abi}"
    return Check("mpi", "library", "ok", text, facts)


def check_launcher(described: dict[str, Any], launch: Launch) -> Check:
    """Whether the launcher matches the library."""
    family = _family(described)
    text = f"{launch.launcher} started this process"
    if not launch.family or not family or launch.family == family:
        return Check("mpi", "launcher", "ok", text, vars(launch))
    text += (
        f", but the library is {_NAMES[family]}: each process would run as a single rank, or abort. Use the mpiexec "
        "next to the Python that has dl_comm, or build dl_comm for the launcher's MPI "
        "(MPICC=/path/to/mpicc pip install ...)"
    )
    return Check("mpi", "launcher", "bad", text, vars(launch))


def check_thread_level(group: str, name: str, level: str | None, text: str) -> Check:
    """The check of the granted thread level."""
    facts = {"thread_level": level}
    if level in ("MPI_THREAD_MULTIPLE", "MPI_THREAD_SERIALIZED"):
        slower = "" if level.endswith("MULTIPLE") else "; only one team thread at a time communicates between hosts"
        return Check(group, name, "ok", text + slower, facts)
    return Check(group, name, "warn", f"{text}: jobs on several hosts need at least MPI_THREAD_SERIALIZED", facts)


class Programs:
    """The interpreter's mpiexec and the first one on the PATH. The constructor starts them with ``--version``.

    Args:
        described: The output of ``dl_comm_describe``.
        launch: The launcher of this process; with one, a missing mpiexec is no problem.
    """

    def __init__(self, described: dict[str, Any], launch: Launch | None) -> None:
        self._family, self._launched = _family(described), launch is not None
        on_path = shutil.which("mpiexec")
        paths = [interpreter_mpiexec(), Path(on_path) if on_path else None]
        self._programs = {path: Process([str(path), "--version"], 20) for path in dict.fromkeys(paths) if path}

    def check(self) -> list[Check]:
        """The checks; waits for the programs."""
        if not self._programs:
            text = "none next to the interpreter or on the PATH: start jobs with the library's own mpiexec, or srun"
            return [Check("mpi", "mpiexec", "ok" if self._launched else "warn", text, {"path": None})]
        own = interpreter_mpiexec()
        checks = []
        for path, program in self._programs.items():
            where = "next to the interpreter" if path == own else "the first on the PATH"
            name = "mpiexec" if path == own or own is None else "mpiexec on the PATH"
            checks.append(self._check(name, path, where, program))
        return checks

    def _check(self, name: str, path: Path, where: str, program: Process) -> Check:
        facts: dict[str, Any] = {"path": str(path)}
        try:
            family = family_of(program.result())
        except Failed as error:
            return Check("mpi", name, "warn", f"{path} --version {error}", {**facts, "error": str(error)})
        facts["family"] = family
        if family is None or self._family is None or family == self._family:
            kind = _NAMES.get(family or "", "unknown MPI")
            return Check("mpi", name, "ok", f"{path} ({where}): {kind}", facts)
        text = (
            f"{path} ({where}) is for {_NAMES[family]}, the library is {_NAMES[self._family]}: it cannot start ranks; "
            "start jobs with the library's own mpiexec"
        )
        return Check("mpi", name, "warn", text, facts)


class Mpi4py:
    """Whether mpi4py uses the MPI library of dl_comm. The constructor starts a probe."""

    def __init__(self, described: dict[str, Any]) -> None:
        self._library = described["mpi"]["library"]
        self._probe = Probe("mpi4py")

    def check(self) -> list[Check]:
        """The check; waits for the probe."""
        try:
            result = self._probe.result()
        except Failed as error:
            text = f"importing mpi4py.MPI {error}; programs that import it with dl_comm may fail too"
            return [Check("mpi", "mpi4py", "warn", text, {"error": str(error)})]
        text = f"mpi4py {result['version']} uses "
        if self._library in result["libraries"]:
            return [Check("mpi", "mpi4py", "ok", f"{text}the same library", result)]
        text += f"{result['library_version']} ({', '.join(result['libraries'])})"
        return [Check("mpi", "mpi4py", "warn", text + _ONE_MPI, result)]


_ONE_MPI = (
    "; do not import both in one program: install mpi4py for the MPI of dl_comm (MPICC=... pip install --no-binary)"
)


class SingleRank:
    """dl_comm on one rank, without a launcher. The constructor starts a probe."""

    def __init__(self) -> None:
        self._probe = Probe("single_rank")

    def check(self) -> list[Check]:
        """The check; waits for the probe."""
        try:
            result = self._probe.result()
        except Failed as error:
            text = f"dl_comm on one rank, without a launcher, {error}"
            return [Check("mpi", "one rank", "bad", text, {"error": str(error)})]
        level = result["mpi"]["thread_level"]
        if not result["average_is_right"]:
            text = "the average over one rank differs from the array"
            return [Check("mpi", "one rank", "bad", text, {"thread_level": level})]
        return [check_thread_level("mpi", "one rank", level, f"MPI starts and ends, {level}")]


def _family(described: dict[str, Any]) -> str | None:
    return family_of(described["mpi"]["library_version"])
