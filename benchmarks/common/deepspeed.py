"""DeepSpeed's allreduce in shared memory, which it uses for inference on CPUs, without its other layers."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from benchmarks.common.tools import Missing, package

_BUILDER = "deepspeed.ops.op_builder"


def environment(ranks: int) -> dict[str, str]:
    """What its ranks need in their environment. Compiles it the first time; raises Missing if that is not possible."""
    package("deepspeed")
    build = f"from {_BUILDER} import ShareMemCommBuilder; ShareMemCommBuilder().load()"
    done = subprocess.run([sys.executable, "-c", build], capture_output=True, text=True, check=False)
    if done.returncode:
        raise Missing(f"DeepSpeed's ShareMemComm does not compile: {done.stderr.strip().splitlines()[-1]}")
    # It works on one host only, and must know that all ranks are there. It names its memory by address and port.
    return {"LOCAL_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(os.getpid())}


def all_reduce(rank: int, ranks: int) -> Callable[[Any], Any]:
    """The sum of a tensor over the ranks, in place. Collective."""
    importlib.import_module(_BUILDER).ShareMemCommBuilder().load(verbose=False).initialize(ranks, rank)
    found: Callable[[Any], Any] = importlib.import_module("torch").ops.deepspeed.inference_all_reduce_
    return found
