"""Which GPU a rank works on: by turns, by its number among the ranks of its host."""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Any

from dl_comm import _dl_comm
from dl_comm._errors import StateError
from dl_comm.run._child import visible_gpus


def pin() -> int | None:
    """Leaves this process one GPU: number ``local_rank`` modulo how many it sees. More ranks than GPUs share them.

    Before CUDA is used the process sees that GPU only (``CUDA_VISIBLE_DEVICES``). Where torch has used CUDA already, if
    only to ask ``torch.cuda.is_available()``, its current device is set instead; where TensorFlow has counted its
    GPUs, it sees that one only.

    Returns:
        The number of the GPU among those that the process saw; None where it sees none.

    Raises:
        StateError: TensorFlow has used its GPUs already.
    """
    gpus = visible_gpus()
    rank, size = _dl_comm.local_rank(), _dl_comm.local_size()
    if not gpus:
        _log(rank, "pin_gpu: there is no GPU")
        return None
    index = rank % len(gpus)
    if size > len(gpus) > 1 or (len(gpus) == 1 and size > 1 and not _was_pinned()):
        _log(rank, f"{size} ranks share {len(gpus)} GPU{'s' if len(gpus) > 1 else ''}")
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
    if len(devices) == count > 1:  # counted before this process saw one only
        try:
            tensorflow.config.set_visible_devices(devices[index], "GPU")
        except RuntimeError as error:
            raise StateError("pin_gpu comes too late: TensorFlow has used its GPUs; call init before") from error


def _driver_started() -> bool:
    """Whether the driver has started in this process: then it does not look at ``CUDA_VISIBLE_DEVICES`` any more."""
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:
        return False
    count = ctypes.c_int()
    return int(driver.cuDeviceGetCount(ctypes.byref(count))) == 0 and count.value > 0


def _was_pinned() -> bool:
    """Whether somebody has left this process one GPU of several: a launcher that pins."""
    return "CUDA_VISIBLE_DEVICES" in os.environ and len(visible_gpus({})) > 1


def _log(local_rank: int, text: str) -> None:
    if local_rank == 0:
        print(f"dl_comm: {text}", file=sys.stderr)
