"""The GPUs that a process sees."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def visible_gpus(environ: Mapping[str, str] = os.environ, devices: Path = Path("/dev")) -> list[str]:
    """The GPUs that a process with this environment sees, as names for ``CUDA_VISIBLE_DEVICES``.

    Does not use CUDA, because CUDA reads that variable only once.
    """
    if "CUDA_VISIBLE_DEVICES" in environ:
        names = [name.strip() for name in environ["CUDA_VISIBLE_DEVICES"].split(",")]
        return names[: next((i for i, name in enumerate(names) if name in ("", "-1")), len(names))]
    numbers = (file.name.removeprefix("nvidia") for file in devices.glob("nvidia[0-9]*"))
    # CUDA numbers the devices from 0, whatever their file names are.
    return [str(i) for i in range(sum(number.isdecimal() for number in numbers))]
