"""The contenders: one row of CONTENDERS each, with a function that starts it."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.allreduce.build import compile_program, spin_library
from benchmarks.common import deepspeed
from benchmarks.common.contenders import Contender, Start, gloo, mpich, unlaunched
from benchmarks.common.processes import Launch
from benchmarks.common.tools import Missing, Tools, mpich_program, package, program


@dataclass(frozen=True)
class AllreduceContender(Contender):
    """A contender of this benchmark; its group is "limit", "copy", "ours" or "peer".

    Attributes:
        binding: For ours: the binding, a value of `--binding`.
        modes: How it averages lists: one call ("list"), one call a tensor ("each"), one flat buffer ("flat").
    """

    binding: str = ""
    modes: tuple[str, ...] = ("list",)


def python_command(backend: str) -> list[str]:
    """The command of one rank of a Python contender, run in the root of the repository."""
    return [sys.executable, "-m", "benchmarks.allreduce.worker", backend]


def environment(tools: Tools, ranks: int) -> dict[str, str]:
    """The environment of all contenders."""
    threads = str(max(1, len(os.sched_getaffinity(0)) // ranks))
    return {"OMP_NUM_THREADS": threads, "BENCH_SPIN": spin_library(tools), "DL_COMM_DUMP_DIR": "none"}


def forking(name: str) -> Start:
    """A C program that forks its ranks."""

    def start(tools: Tools, ranks: int) -> Launch:
        path = compile_program(tools, ["cc"], f"{name}.c", name)
        return Launch([[path, str(ranks)]], [environment(tools, ranks)])

    return start


def core(memory: str) -> Start:
    """dl_comm from C, with this memory kind (a row of core.c)."""

    def start(tools: Tools, ranks: int) -> Launch:
        ours = package("dl_comm")
        words = [f"-I{ours}/include", f"-L{ours}", "-l:libdl_comm.so.0", f"-Wl,-rpath,{ours}"]
        path = compile_program(tools, ["cc"], "core.c", "core", [*words, "-Wl,--allow-shlib-undefined"])
        return _mpich(tools, ranks, [path, memory])

    return start


def python_mpich(backend: str, *packages: str) -> Start:
    """A Python contender under the MPICH's launcher."""

    def start(tools: Tools, ranks: int) -> Launch:
        for name in packages:
            package(name)
        return _mpich(tools, ranks, python_command(backend))

    return start


def mpi4py_mpich(tools: Tools, ranks: int) -> Launch:
    """mpi4py on the MPICH."""
    package("mpi4py")
    return _mpich(tools, ranks, python_command("mpi4py"), _mpi4py(tools.mpich))


def c_mpich(tools: Tools, ranks: int) -> Launch:
    """The C program with the MPICH."""
    path = compile_program(tools, [mpich_program(tools, "mpicc")], "mpi.c", "mpich")
    return _mpich(tools, ranks, [path])


def mpi4py_openmpi(tools: Tools, ranks: int) -> Launch:
    """mpi4py on the Open MPI; one mpi4py may serve several MPIs."""
    package("mpi4py")
    return _openmpi(tools, ranks, python_command("mpi4py"), _mpi4py(_openmpi_prefix(tools)))


def c_openmpi(tools: Tools, ranks: int) -> Launch:
    """The C program with the Open MPI."""
    compiler = program(_openmpi_prefix(tools) / "bin/mpicc", "mpicc of the Open MPI")
    return _openmpi(tools, ranks, [compile_program(tools, [compiler], "mpi.c", "openmpi")])


def torch_gloo(tools: Tools, ranks: int) -> Launch:
    """torch.distributed with gloo, without a launcher."""
    package("torch")
    return gloo(ranks, python_command("gloo"), environment(tools, ranks))


def torch_deepspeed(tools: Tools, ranks: int) -> Launch:
    """DeepSpeed's allreduce in shared memory, which is compiled here the first time."""
    package("torch")
    own = deepspeed.environment(ranks)
    return gloo(ranks, python_command("deepspeed"), {**environment(tools, ranks), **own})


def cuda_ours(path: str) -> Start:
    """dl_comm on GPU tensors, with this path."""

    def start(tools: Tools, ranks: int) -> Launch:
        package("dl_comm")
        package("torch")
        return _mpich(tools, ranks, python_command("cuda"), {"DL_COMM_GPU_PATH": path})

    return start


def cuda_gloo(tools: Tools, ranks: int) -> Launch:
    """torch.distributed's gloo on GPU tensors."""
    package("torch")
    return gloo(ranks, python_command("cuda-gloo"), environment(tools, ranks))


def cuda_unlaunched(backend: str) -> Start:
    """A contender without a launcher."""

    def start(tools: Tools, ranks: int) -> Launch:
        package("torch")
        return unlaunched(ranks, python_command(backend), environment(tools, ranks))

    return start


def cuda_mpi4py(tools: Tools, ranks: int) -> Launch:
    """mpi4py with MPICH, on GPU tensors."""
    package("mpi4py")
    return _mpich(tools, ranks, python_command("cuda-mpi4py"), _mpi4py(tools.mpich))


def _mpich(tools: Tools, ranks: int, command: list[str], extra: Mapping[str, str] | None = None) -> Launch:
    return mpich(tools, ranks, command, environment(tools, ranks) | dict(extra or {}))


def _openmpi(tools: Tools, ranks: int, command: list[str], extra: Mapping[str, str] | None = None) -> Launch:
    launcher = program(_openmpi_prefix(tools) / "bin/mpirun", "mpirun of the Open MPI")
    # Allow more ranks than cores, and do not bind all threads of a rank to one core.
    words = [launcher, "--map-by", "slot:OVERSUBSCRIBE", "--bind-to", "none", "-n", str(ranks), *command]
    root = ("OMPI_ALLOW_RUN_AS_ROOT", "PRTE_ALLOW_RUN_AS_ROOT")
    allow = {f"{name}{end}": "1" for name in root for end in ("", "_CONFIRM")}
    return Launch([words], [environment(tools, ranks) | allow | dict(extra or {})])


def _openmpi_prefix(tools: Tools) -> Path:
    if tools.openmpi is None:
        raise Missing("no Open MPI was given (--openmpi PREFIX)")
    return tools.openmpi


def _mpi4py(prefix: Path) -> dict[str, str]:
    """The variable that selects mpi4py's MPI library in `prefix`."""
    # The name without a version is for the linker, and is not a library in PyPI's packages.
    found = sorted((prefix / "lib").glob("libmpi.so.[0-9]*"))
    return {"MPI4PY_LIBMPI": str(found[0])} if found else {}


PEER_MODES = ("each", "flat")

CONTENDERS = (
    AllreduceContender("limit", "limit", "limit: shared memory, two barriers", forking("limit")),
    AllreduceContender("copy", "copy", "memcpy", forking("copy")),
    AllreduceContender("core", "ours", "dl_comm, C", core("ordinary"), "c"),
    AllreduceContender("core-shared", "ours", "dl_comm, C, shared memory", core("shared"), "c"),
    AllreduceContender("numpy", "ours", "dl_comm, NumPy (new arrays)", python_mpich("numpy", "dl_comm"), "numpy"),
    AllreduceContender(
        "numpy-inplace", "ours", "dl_comm, NumPy in place", python_mpich("numpy-inplace", "dl_comm"), "numpy"
    ),
    AllreduceContender(
        "numpy-shared", "ours", "dl_comm, NumPy, shared memory", python_mpich("numpy-shared", "dl_comm"), "numpy"
    ),
    AllreduceContender(
        "torch", "ours", "dl_comm, torch (new tensors)", python_mpich("torch", "dl_comm", "torch"), "torch"
    ),
    AllreduceContender(
        "torch-inplace", "ours", "dl_comm, torch in place", python_mpich("torch-inplace", "dl_comm", "torch"), "torch"
    ),
    AllreduceContender("gloo", "peer", "torch.distributed, gloo", torch_gloo, modes=PEER_MODES),
    AllreduceContender("deepspeed", "peer", "DeepSpeed, shared memory", torch_deepspeed, modes=PEER_MODES),
    AllreduceContender("mpich", "peer", "MPICH, C", c_mpich, modes=PEER_MODES),
    AllreduceContender("mpich-mpi4py", "peer", "MPICH, mpi4py", mpi4py_mpich, modes=PEER_MODES),
    AllreduceContender("openmpi", "peer", "Open MPI, C", c_openmpi, modes=PEER_MODES),
    AllreduceContender("openmpi-mpi4py", "peer", "Open MPI, mpi4py", mpi4py_openmpi, modes=PEER_MODES),
)
CUDA_CONTENDERS = (
    AllreduceContender("limit-copy", "limit", "limit: the GPU's copy, 2pN / B", cuda_unlaunched("cuda-limit-copy")),
    AllreduceContender(
        "limit-pinned", "copy", "pinned copies in both directions", cuda_unlaunched("cuda-limit-pinned")
    ),
    AllreduceContender("nccl", "ours", "dl_comm, NCCL", cuda_ours("nccl"), "torch"),
    AllreduceContender("ipc", "ours", "dl_comm, CUDA IPC", cuda_ours("ipc"), "torch"),
    AllreduceContender("staged", "ours", "dl_comm, through the host", cuda_ours("staged"), "torch"),
    AllreduceContender("torch-nccl", "peer", "torch.distributed, NCCL", cuda_unlaunched("cuda-nccl"), modes=("each",)),
    AllreduceContender("torch-gloo", "peer", "torch.distributed, gloo", cuda_gloo, modes=("each",)),
    AllreduceContender("mpich-host", "peer", "MPICH, mpi4py through the host", cuda_mpi4py, modes=("each",)),
)
"""The contenders of `--device cuda`."""
BINDINGS = tuple(dict.fromkeys(contender.binding for contender in CONTENDERS if contender.binding))
"""The values of `--binding`."""
