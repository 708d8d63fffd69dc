"""The contenders: a row of CONTENDERS each. A further one is a row more, with how it is started."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.allreduce.build import Missing, Tools, compile_program, mpich_program, program, spin_library
from benchmarks.allreduce.jobs import Launch

Start = Callable[[Tools, int], Launch]
"""How to start the ranks of a contender; raises Missing when something is not there."""


@dataclass(frozen=True)
class Contender:
    """One of those that are compared.

    Attributes:
        name: Its name in tables and on the command line.
        group: "limit", "copy", "ours" or "peer".
        what: A few words for legends.
        start: How its ranks are started.
        face: For ours: the face, as `--face` has it.
        ways: How it averages lists: in one call ("list"), with a call each ("each"), in one flat buffer ("flat").
    """

    name: str
    group: str
    what: str
    start: Start
    face: str = ""
    ways: tuple[str, ...] = ("list",)


def python_command(averager: str) -> list[str]:
    """The command of one rank of a Python contender, for the root of the repository."""
    return [sys.executable, "-m", "benchmarks.allreduce.worker", averager]


def environment(tools: Tools, ranks: int) -> dict[str, str]:
    """What every contender's processes get."""
    threads = str(max(1, len(os.sched_getaffinity(0)) // ranks))
    return {"OMP_NUM_THREADS": threads, "BENCH_SPIN": spin_library(tools), "DL_COMM_DUMP_DIR": "none"}


def forking(name: str) -> Start:
    """A C program that forks its ranks."""

    def start(tools: Tools, ranks: int) -> Launch:
        path = compile_program(tools, ["cc"], f"{name}.c", name)
        return Launch([[path, str(ranks)]], [environment(tools, ranks)])

    return start


def core(memory: str) -> Start:
    """dl_comm from C, on this kind of memory (a row of core.c)."""

    def start(tools: Tools, ranks: int) -> Launch:
        package = _package("dl_comm")
        words = [f"-I{package}/include", f"-L{package}", "-l:libdl_comm.so.0", f"-Wl,-rpath,{package}"]
        path = compile_program(tools, ["cc"], "core.c", "core", [*words, "-Wl,--allow-shlib-undefined"])
        return _mpich(tools, ranks, [path, memory])

    return start


def python_mpich(averager: str, *packages: str) -> Start:
    """A Python contender under the MPICH's launcher."""

    def start(tools: Tools, ranks: int) -> Launch:
        for package in packages:
            _package(package)
        return _mpich(tools, ranks, python_command(averager))

    return start


def mpi4py_mpich(tools: Tools, ranks: int) -> Launch:
    """mpi4py on the MPICH."""
    _package("mpi4py")
    return _mpich(tools, ranks, python_command("mpi4py"), _mpi4py(tools.mpich))


def c_mpich(tools: Tools, ranks: int) -> Launch:
    """The C program with the MPICH."""
    path = compile_program(tools, [mpich_program(tools, "mpicc")], "mpi.c", "mpich")
    return _mpich(tools, ranks, [path])


def mpi4py_openmpi(tools: Tools, ranks: int) -> Launch:
    """mpi4py on the Open MPI; one mpi4py may serve several MPIs."""
    _package("mpi4py")
    return _openmpi(tools, ranks, python_command("mpi4py"), _mpi4py(_openmpi_prefix(tools)))


def c_openmpi(tools: Tools, ranks: int) -> Launch:
    """The C program with the Open MPI."""
    compiler = program(_openmpi_prefix(tools) / "bin/mpicc", "mpicc of the Open MPI")
    return _openmpi(tools, ranks, [compile_program(tools, [compiler], "mpi.c", "openmpi")])


def gloo(tools: Tools, ranks: int) -> Launch:
    """torch.distributed with gloo; it needs no launcher."""
    _package("torch")
    own = [
        {"BENCH_RANK": str(rank), "BENCH_RANKS": str(ranks), "GLOO_SOCKET_IFNAME": "lo"} | environment(tools, ranks)
        for rank in range(ranks)
    ]
    return Launch([python_command("gloo")] * ranks, own)


def _package(name: str) -> Path:
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:
        raise Missing(f"the Python package {name} is not installed")
    return Path(found.origin).parent


def _mpich(tools: Tools, ranks: int, command: list[str], extra: Mapping[str, str] | None = None) -> Launch:
    words = [mpich_program(tools, "mpiexec"), "-n", str(ranks), *command]
    return Launch([words], [environment(tools, ranks) | dict(extra or {})])


def _openmpi(tools: Tools, ranks: int, command: list[str], extra: Mapping[str, str] | None = None) -> Launch:
    launcher = program(_openmpi_prefix(tools) / "bin/mpirun", "mpirun of the Open MPI")
    # Without these two, ranks may not outnumber the cores, and all threads of a rank are bound to one.
    words = [launcher, "--map-by", "slot:OVERSUBSCRIBE", "--bind-to", "none", "-n", str(ranks), *command]
    root = ("OMPI_ALLOW_RUN_AS_ROOT", "PRTE_ALLOW_RUN_AS_ROOT")
    allow = {f"{name}{end}": "1" for name in root for end in ("", "_CONFIRM")}
    return Launch([words], [environment(tools, ranks) | allow | dict(extra or {})])


def _openmpi_prefix(tools: Tools) -> Path:
    if tools.openmpi is None:
        raise Missing("no Open MPI was given (--openmpi PREFIX)")
    return tools.openmpi


def _mpi4py(prefix: Path) -> dict[str, str]:
    """mpi4py's choice of an MPI, where that MPI's library lies in its prefix."""
    # The name without a version is for the linker, and in PyPI's packages no library.
    found = sorted((prefix / "lib").glob("libmpi.so.[0-9]*"))
    return {"MPI4PY_LIBMPI": str(found[0])} if found else {}


PEER_WAYS = ("each", "flat")

CONTENDERS = (
    Contender("limit", "limit", "limit: shared memory, two barriers", forking("limit")),
    Contender("copy", "copy", "memcpy", forking("copy")),
    Contender("core", "ours", "dl_comm, C", core("ordinary"), "c"),
    Contender("core-shared", "ours", "dl_comm, C, shared memory", core("shared"), "c"),
    Contender("numpy", "ours", "dl_comm, NumPy (new arrays)", python_mpich("numpy", "dl_comm"), "numpy"),
    Contender("numpy-inplace", "ours", "dl_comm, NumPy in place", python_mpich("numpy-inplace", "dl_comm"), "numpy"),
    Contender(
        "numpy-shared", "ours", "dl_comm, NumPy, shared memory", python_mpich("numpy-shared", "dl_comm"), "numpy"
    ),
    Contender("torch", "ours", "dl_comm, torch (new tensors)", python_mpich("torch", "dl_comm", "torch"), "torch"),
    Contender(
        "torch-inplace", "ours", "dl_comm, torch in place", python_mpich("torch-inplace", "dl_comm", "torch"), "torch"
    ),
    Contender("gloo", "peer", "torch.distributed, gloo", gloo, ways=PEER_WAYS),
    Contender("mpich", "peer", "MPICH, C", c_mpich, ways=PEER_WAYS),
    Contender("mpich-mpi4py", "peer", "MPICH, mpi4py", mpi4py_mpich, ways=PEER_WAYS),
    Contender("openmpi", "peer", "Open MPI, C", c_openmpi, ways=PEER_WAYS),
    Contender("openmpi-mpi4py", "peer", "Open MPI, mpi4py", mpi4py_openmpi, ways=PEER_WAYS),
)
FACES = tuple(dict.fromkeys(contender.face for contender in CONTENDERS if contender.face))
"""The values of `--face`."""
