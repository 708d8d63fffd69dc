"""Assigns GPUs to ranks: local rank modulo GPU count."""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Any

from dl_comm import _dl_comm
from dl_comm._base import log
from dl_comm._base.errors import StateError
from dl_comm._base.visible_gpus import visible_gpus


def pin() -> int | None:
    """Restricts this process to one GPU: ``local_rank`` modulo the number of visible GPUs. Extra ranks share GPUs.

    Before the first use of CUDA, sets ``CUDA_VISIBLE_DEVICES``. If torch has already used CUDA, even by
    ``torch.cuda.is_available()``, sets torch's current device instead. If TensorFlow has already listed its GPUs, sets
    TensorFlow's visible device.

    Returns:
        The index of the GPU among the GPUs that were visible; None without a GPU.

    Raises:
        StateError: TensorFlow has used its GPUs already.
    """
    gpus = visible_gpus()
    rank, size = _dl_comm.local_rank(), _dl_comm.local_size()
    if not gpus:
        _tell(rank, "pin_gpu: there is no GPU")
        return None
    index = rank % len(gpus)
    if size > len(gpus) > 1 or (len(gpus) == 1 and size > 1 and not _was_pinned()):
        _tell(rank, f"{size} ranks share {len(gpus)} GPU{'s' if len(gpus) > 1 else ''}")
    torch = sys.modules.get("torch")
    if torch is not None and (torch.cuda.is_initialized() or _driver_started()):
        torch.cuda.set_device(index)
        return index
    os.environ["CUDA_VISIBLE_DEVICES"] = gpus[index]
    if "tensorflow" in sys.modules:
        _pin_tensorflow(sys.modules["tensorflow"], index, len(gpus))
    return index


def _pin_tensorflow(tensorflow: Any, index: int, count: int) -> None:
    devices = tensorflow.config.list_physical_devices("GPU")
    if len(devices) == count > 1:  # TensorFlow listed them before the restriction
        try:
            tensorflow.config.set_visible_devices(devices[index], "GPU")
        except RuntimeError as error:
            raise StateError("pin_gpu is too late: TensorFlow has used its GPUs; call init earlier") from error


def _driver_started() -> bool:
    """Whether the CUDA driver is initialized in this process: it then ignores changes of ``CUDA_VISIBLE_DEVICES``."""
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:
        return False
    count = ctypes.c_int()
    return int(driver.cuDeviceGetCount(ctypes.byref(count))) == 0 and count.value > 0


def _was_pinned() -> bool:
    """Whether a launcher has already restricted this process to one GPU of several."""
    return "CUDA_VISIBLE_DEVICES" in os.environ and len(visible_gpus({})) > 1


def _tell(local_rank: int, text: str) -> None:
    if local_rank == 0:
        log.warn(text)
