"""Probes that may crash or hang, each run in a separate process: ``python _probe_script.py NAME [ARGUMENTS]``.

Prints one line of JSON after ``_MARK``. Run by path, so that only probes of dl_comm import it.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from pathlib import Path
from typing import Any

_MARK = "probe result: "
_MAPS = Path("/proc/self/maps")


def framework(name: str, operations: str) -> dict[str, Any]:
    """Imports a framework and, with ``operations``, dl_comm's built operations for it."""
    began = time.monotonic()
    module = __import__(name)
    result: dict[str, Any] = {"version": module.__version__, "import_s": round(time.monotonic() - began, 2)}
    if name == "torch":
        result["cuda_build"] = module.version.cuda
    else:
        result["cuda_build"] = module.sysconfig.get_build_info().get("cuda_version")
    if operations == "operations":
        __import__(f"dl_comm.{name}")
    return result


def distributed() -> dict[str, Any]:
    """The backend of ``torch.distributed``, built before, on one rank."""
    import tempfile

    import torch
    import torch.distributed as dist

    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("dl_comm", init_method=f"file://{folder}/store", rank=0, world_size=1)
        numbers = torch.arange(4.0)
        dist.all_reduce(numbers)
        dist.destroy_process_group()
    return {"all_reduce_is_right": numbers.tolist() == [0, 1, 2, 3]}


def mpi4py() -> dict[str, Any]:
    """The MPI of mpi4py, without starting it."""
    import mpi4py as package

    package.rc.initialize = False
    from mpi4py import MPI

    paths = {line.split()[-1] for line in _MAPS.read_text().splitlines() if "/libmpi" in line}
    version = MPI.Get_library_version().strip().splitlines()[0]
    return {"version": package.__version__, "library_version": version, "libraries": sorted(paths)}


def gpu() -> dict[str, Any]:
    """The CUDA driver, NVRTC and NCCL, as the core finds them: with the loader, or in this Python's packages."""
    from dl_comm import _dl_comm
    from dl_comm._base.cuda import preload

    result: dict[str, Any] = {"packaged": list(preload())}
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        result["cuda_error"] = str(error)
    else:
        number = ctypes.c_int()
        code = cuda.cuInit(0)
        if code:
            result["cuda_error"] = f"cuInit returned {code}"
        else:
            cuda.cuDriverGetVersion(ctypes.byref(number))
            result["cuda_driver_api"] = f"{number.value // 1000}.{number.value % 1000 // 10}"
            try:
                result["devices"] = _dl_comm.gpu_count()
            except Exception as error:
                result["cuda_error"] = str(error)
    result |= _nvrtc()
    try:
        nccl = ctypes.CDLL("libnccl.so.2")
    except OSError as error:
        result["nccl_error"] = str(error)
    else:
        number = ctypes.c_int()
        nccl.ncclGetVersion(ctypes.byref(number))
        # NCCL 2.9 and later: major * 10000 + minor * 100 + patch (nccl.h, NCCL_VERSION).
        result["nccl"] = f"{number.value // 10000}.{number.value // 100 % 100}.{number.value % 100}"
        result["nccl_library"] = _file_of("libnccl.so")
    return result


def _nvrtc() -> dict[str, Any]:
    for name in ("libnvrtc.so", "libnvrtc.so.13", "libnvrtc.so.12"):
        try:
            nvrtc = ctypes.CDLL(name)
        except OSError:
            continue
        major, minor = ctypes.c_int(), ctypes.c_int()
        nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        return {"nvrtc": f"{major.value}.{minor.value}", "nvrtc_library": _file_of("libnvrtc.so")}
    return {"nvrtc_error": "libnvrtc.so is not found"}


def _file_of(name: str) -> str | None:
    lines = (line.split() for line in _MAPS.read_text().splitlines())
    return next((line[-1] for line in lines if f"/{name}" in line[-1]), None)


def single_rank() -> dict[str, Any]:
    """dl_comm as rank 0 of 1: starts MPI, averages, ends."""
    import numpy as np

    import dl_comm
    from dl_comm import _dl_comm

    dl_comm.init()
    described: dict[str, Any] = json.loads(_dl_comm.describe())
    mean = dl_comm.gradients([np.arange(4, dtype=np.float32)], 0)[0]
    described["average_is_right"] = bool(np.array_equal(mean, np.arange(4)))
    dl_comm.finalize()
    return described


_PROBES = {"framework": framework, "distributed": distributed, "mpi4py": mpi4py, "gpu": gpu, "single_rank": single_rank}

if __name__ == "__main__":
    # Python put this file's folder first; its private modules must not shadow others.
    sys.path[:] = [folder for folder in sys.path if Path(folder) != Path(__file__).parent]
    result = _PROBES[sys.argv[1]](*sys.argv[2:])  # type: ignore[operator]
    print(_MARK + json.dumps(result), flush=True)
