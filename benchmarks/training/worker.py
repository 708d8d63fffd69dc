"""One process of a contender: creates its model and runs its trials.

    python -m benchmarks.training.worker MODEL TRAINER

A trial is a line. "steps N" runs N steps; the answer is "ok LOSS" and 3 N numbers: the seconds of each step, and the
exposed and the total communication time that the contender reports (NaN: not reported). "parameters FILE" answers "ok
DIGEST", the SHA-256 of all parameters; rank 0 writes them to the file as float32, unless FILE is "-".
`common/processes.py` has the rest of the protocol.
"""

from __future__ import annotations

import gc
import hashlib
import importlib
import sys
import time

import numpy as np

from benchmarks.common.worker import serve
from benchmarks.training.models import MODELS
from benchmarks.training.trainer import Trainer


def steps(trainer: Trainer, count: int) -> bytes:
    """Runs and times steps."""
    numbers = np.empty((3, count))
    gc.collect()
    for i in range(count):
        begin = time.perf_counter()
        trainer.step()
        numbers[0, i] = time.perf_counter() - begin
        numbers[1:, i] = trainer.reported()
    return f"ok {trainer.loss()}\n".encode() + numbers.tobytes()


def parameters(trainer: Trainer, file: str) -> bytes:
    """Returns the digest of the parameters, and writes them on rank 0."""
    flat = np.concatenate([parameter.ravel() for parameter in trainer.parameters()])
    if file != "-" and trainer.rank == 0:
        flat.tofile(file)
    return f"ok {hashlib.sha256(flat.tobytes()).hexdigest()}\n".encode()


def main() -> int:
    """Runs trials until the stream ends."""
    model = MODELS[sys.argv[1]]
    trainer: Trainer = importlib.import_module(f"benchmarks.training.{model.framework}_side").TRAINERS[sys.argv[2]](
        model
    )
    gc.disable()

    def answer(line: str) -> bytes:
        word, value = line.split()
        return steps(trainer, int(value)) if word == "steps" else parameters(trainer, value)

    serve(trainer.rank, answer)
    trainer.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
