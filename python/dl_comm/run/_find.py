"""Finds the launcher of the MPI that dl_comm was built with.

The core's file names this MPI, and is not loaded: the name of its MPI library (``libmpi.so.12`` is the ABI of MPICH,
``libmpi.so.40`` that of Open MPI) and its run path.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from dl_comm.run._launchers import Launcher
from dl_comm.run._options import Options, UsageError

_CORE = Path(__file__).resolve().parent.parent / "libdl_comm.so.0"
_FAMILIES = {"12": "mpich", "40": "openmpi"}


@dataclass(frozen=True)
class BuiltFor:
    """The MPI that the core is linked to: its kind of launcher (``None``: unknown), and its mpiexec if it exists."""

    kind: str | None = None
    mpiexec: Path | None = None

    @property
    def bundled(self) -> bool:
        """Whether that MPI is in this Python environment."""
        return self.mpiexec is not None and Path(sys.prefix).resolve() in self.mpiexec.parents


def built_for(core: Path = _CORE) -> BuiltFor:
    """The MPI of the core at ``core``; unknown if the file does not exist."""
    if not core.exists():
        return BuiltFor()
    data = core.read_bytes()
    soname = re.search(rb"\0libmpi\.so\.(\d+)\0", data)
    if not soname:
        return BuiltFor()
    number = soname[1].decode()
    runpath = re.search(rb"\0([^\0]*\$ORIGIN[^\0]*)\0", data)
    for folder in runpath[1].decode().split(":") if runpath else []:
        lib = Path(folder.replace("$ORIGIN", str(core.parent))).resolve()
        if (lib / f"libmpi.so.{number}").exists() and (lib.parent / "bin/mpiexec").exists():
            return BuiltFor(_FAMILIES.get(number), lib.parent / "bin/mpiexec")
    return BuiltFor(_FAMILIES.get(number))


def find(options: Options, environ: Mapping[str, str], built: BuiltFor) -> Launcher:
    """The launcher for ``options``.

    In this order: the one in the options; ``srun`` inside a Slurm allocation, unless the MPI is in this Python
    environment; the mpiexec of the MPI; one next to this Python; one on the PATH.

    Raises:
        UsageError: None was found, or it belongs to another MPI.
    """
    path = environ.get("PATH")
    srun = shutil.which("srun", path=path)
    if options.mpiexec:
        named = shutil.which(options.mpiexec, path=path)
        if not named:
            raise UsageError(f"--mpiexec {options.mpiexec}: no such program")
        return identify(named, options.launcher)
    if options.launcher == "srun" or (not options.launcher and srun and _in_slurm(environ) and not built.bundled):
        if not srun:
            raise UsageError("--launcher srun: no srun on the PATH")
        return Launcher("srun", srun)
    wanted = options.launcher or built.kind
    others = []
    for candidate in _candidates(built, path):
        launcher = identify(str(candidate))
        if wanted in (None, "plain", launcher.kind):
            return Launcher("plain", launcher.path) if wanted == "plain" else launcher
        others.append(f"{candidate} is of {launcher.kind}")
    what = f"no mpiexec of {wanted}" if wanted else "no mpiexec"
    seen = f" ({'; '.join(others)})" if others else ""
    raise UsageError(f"{what} was found{seen}: set --mpiexec PATH, or run 'pip install mpich'")


def identify(path: str, kind: str | None = None) -> Launcher:
    """The launcher at ``path``; ``--version`` determines its kind, unless ``kind`` is given.

    Raises:
        UsageError: It cannot be run.
    """
    if kind in ("srun", "plain") or Path(path).name == "srun":
        return Launcher(kind or "srun", path)
    try:
        run = subprocess.run(
            [path, "--version"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"{path} --version: {error}") from error
    version = run.stdout + run.stderr
    if re.search(r"HYDRA|Intel\(R\) MPI|MVAPICH", version):
        return Launcher(kind or "mpich", path)
    if match := re.search(r"(?:Open MPI\)|OpenRTE\)|prterun \(.*\)) (\d+)\.(\d+)", version):
        return Launcher(kind or "openmpi", path, (int(match[1]), int(match[2])))
    return Launcher(kind or "plain", path)


def _in_slurm(environ: Mapping[str, str]) -> bool:
    return "SLURM_JOB_ID" in environ


def _candidates(built: BuiltFor, path: str | None) -> Iterator[Path]:
    seen: set[Path] = set()
    found = [built.mpiexec, Path(sys.executable).parent / "mpiexec"]
    found += [Path(name) for name in (shutil.which(program, path=path) for program in ("mpiexec", "mpirun")) if name]
    for candidate in found:
        if candidate and candidate.exists() and candidate not in seen:
            seen.add(candidate)
            yield candidate
