"""Checks GPUs, CUDA, NVRTC and NCCL. Tensors in host memory need none of them."""

from __future__ import annotations

import os
import shutil
from typing import Any

from dl_comm._base.paths import PACKAGE
from dl_comm._libraries.build import KERNELS
from dl_comm.doctor._checks import Check
from dl_comm.doctor._probes import Failed, Probe, Process

_QUERY = "index,name,uuid,pci.bus_id,memory.total,driver_version"


class Gpu:
    """The checks of this file. The constructor starts the probes; ``check`` waits for them."""

    def __init__(self) -> None:
        self._probe = Probe("gpu")
        smi = shutil.which("nvidia-smi")
        self._smi = Process([smi, f"--query-gpu={_QUERY}", "--format=csv,noheader"], 30) if smi else None

    def check(self) -> list[Check]:
        """The checks."""
        try:
            result = self._probe.result()
        except Failed as error:
            return [Check("gpu", "CUDA", "warn", f"the CUDA probe {error}", {"error": str(error)})]
        return [self._cuda(result), _nvrtc(result), _nccl(result)]

    def _cuda(self, result: dict[str, Any]) -> Check:
        facts = {"devices": 0, **result, "gpus": [], "visible": os.environ.get("CUDA_VISIBLE_DEVICES")}
        if self._smi:
            try:
                rows = [line.split(", ") for line in self._smi.result().splitlines() if line.count(", ") == 5]
                facts["gpus"] = [dict(zip(_QUERY.split(","), row, strict=True)) for row in rows]
            except Failed as error:
                facts["smi_error"] = str(error)
        names = [f"{gpu['index']}: {gpu['name']}, {gpu['memory.total']}" for gpu in facts["gpus"]]
        if "cuda_error" not in result:
            listed = "; ".join(names) or "no nvidia-smi"
            text = f"driver for CUDA {result['cuda_driver_api']}, {result['devices']} GPUs ({listed})"
            return Check("gpu", "CUDA", "ok", text, facts)
        if facts["gpus"]:
            text = f"nvidia-smi shows GPUs ({'; '.join(names)}), but the driver's library fails: {result['cuda_error']}"
            return Check("gpu", "CUDA", "warn", text, facts)
        if "cannot open shared object" not in result["cuda_error"]:
            return Check("gpu", "CUDA", "warn", f"the driver fails: {result['cuda_error']}", facts)
        return Check("gpu", "CUDA", "ok", "no GPU (not needed for tensors in host memory)", facts)


def _nvrtc(result: dict[str, Any]) -> Check:
    if "nvrtc" in result:
        return Check("gpu", "NVRTC", "ok", f"{result['nvrtc']}, {result['nvrtc_library']}", result)
    if result.get("devices") and (PACKAGE / KERNELS).is_dir():
        text = "not found (needed only for GPUs that the kernels in this package are not for)"
        return Check("gpu", "NVRTC", "ok", text, result)
    if result.get("devices"):
        text = "not found: ranks that share a GPU average through the host; 'pip install nvidia-cuda-nvrtc' installs it"
        return Check("gpu", "NVRTC", "warn", text, result)
    return Check("gpu", "NVRTC", "ok", "not found (not needed without a GPU)", result)


def _nccl(result: dict[str, Any]) -> Check:
    if "nccl" in result:
        text = f"{result['nccl']}, {result['nccl_library']} (used if each rank has its own GPU)"
        return Check("gpu", "NCCL", "ok", text, result)
    if result.get("devices"):
        text = "not found: ranks with separate GPUs average with CUDA IPC or through the host"
        return Check("gpu", "NCCL", "warn", text, result)
    return Check("gpu", "NCCL", "ok", "not found (not needed without a GPU)", result)
