"""How long a step waits for its average, blocking and non-blocking: the rows of benchmarks/README.md.

    mpiexec -n 2 python benchmarks/overlap.py [--face numpy torch tensorflow] [--compute-ms 30] [--average-ms 10]

Each step computes for a while and then averages a gradient. The gradient's size is chosen so that its average takes
about `--average-ms` when it blocks. A row gives, blocking and non-blocking, how long a step has waited for
communication (`get_waited`, what the plugin prints), and how long the caller was in the call in all, which for NumPy
has the copies of the non-blocking phase in it; means over the steps, then over the ranks.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_NUM_INTRAOP_THREADS", "1")
import numpy as np

import dl_comm as mc

Step = Callable[[], float]
"""One step: computes, averages, and returns the seconds that it was in the call."""


def compute(seconds: float) -> None:
    """Multiplies small matrices for a while: work that stays in the cache of its core."""
    a = np.full((64, 64), 1e-3, np.float32)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        a = np.clip(a @ a, 1e-6, 1.0)


def numpy_step(count: int, team: int, seconds: float) -> Step:
    """NumPy arrays, which stay the caller's: a non-blocking call copies them."""
    gradient = np.ones(count, np.float32)

    def step() -> float:
        compute(seconds)
        begin = time.perf_counter()
        mc.gradients([gradient], team)
        return time.perf_counter() - begin

    return step


def torch_step(count: int, team: int, seconds: float) -> Step:
    """The optimizer of dl_comm.torch, whose hooks lend the gradients to the team."""
    import torch

    import dl_comm.torch as cdl

    parameter = torch.nn.Parameter(torch.zeros(count))
    optimizer = cdl.DistributedOptimizer(torch.optim.SGD([parameter], lr=0.0), team=team, broadcast=False)

    def step() -> float:
        compute(seconds)
        optimizer.zero_grad()
        parameter.sum().backward()
        optimizer.step()
        return optimizer.communication().exposed

    return step


def tensorflow_step(count: int, team: int, seconds: float) -> Step:
    """The op of dl_comm.tensorflow in a tf.function, which keeps its inputs alive."""
    import tensorflow as tf

    import dl_comm.tensorflow as dt

    weight = tf.Variable(tf.ones([count]))

    @tf.function
    def gradient() -> tf.Tensor:
        return 2.0 * weight

    @tf.function
    def average(x: tf.Tensor) -> tf.Tensor:
        return dt.gradients([x], team)[0]

    def step() -> float:
        compute(seconds)
        x = gradient()
        begin = time.perf_counter()
        average(x)
        return time.perf_counter() - begin

    return step


FACES = {"numpy": numpy_step, "torch": torch_step, "tensorflow": tensorflow_step}


def measure(step: Step, team: int, steps: int) -> tuple[float, float]:
    """Milliseconds of a step: waited for communication, and in the call."""
    before = mc.get_waited(team)
    inside = sum(step() for _ in range(steps))
    waited = mc.get_waited(team) - before
    return float(mc.average(1e3 * waited / steps)), float(mc.average(1e3 * inside / steps))


def calibrate(make: Callable[..., Step], team: int, compute_s: float, target_ms: float) -> int:
    """A number of float32 whose blocking average takes about `target_ms`, the same on all ranks."""
    count = 1 << 18
    for _ in range(4):
        step = make(count, team, compute_s)
        measure(step, team, 2)
        waited, _ = measure(step, team, 8)
        count = max(1024, int(count * target_ms / max(waited, 1e-3)))
        del step
    return count


def main() -> int:
    """Measures and prints the table on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--face", nargs="+", choices=FACES, default=["numpy"])
    parser.add_argument("--compute-ms", type=float, default=30.0)
    parser.add_argument("--average-ms", type=float, default=10.0)
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    mc.init(2, 1)
    lines = [
        "| face | gradient | waited, blocking | non-blocking | ratio | in the call, blocking | non-blocking | ratio |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for index, face in enumerate(args.face):
        make, team = FACES[face], index + 1
        mc.create_team(team)
        count = calibrate(make, team, args.compute_ms / 1e3, args.average_ms)
        step = make(count, team, args.compute_ms / 1e3)
        measure(step, team, 3)
        waited, inside = measure(step, team, args.steps)
        mc.config_team(team, 0, 0, 10 * args.steps)
        measure(step, team, 3)
        waited_behind, inside_behind = measure(step, team, args.steps)
        cells = [face, f"{count * 4 / 2**20:.1f} MiB"]
        for blocking, behind in ((waited, waited_behind), (inside, inside_behind)):
            cells += [f"{blocking:.2f} ms", f"{behind:.2f} ms", f"{behind / blocking:.3f}"]
        lines.append(f"| {' | '.join(cells)} |")
        if mc.get_rank() == 0:
            print(f"{face}: done", file=sys.stderr, flush=True)
    if mc.get_rank() == 0:
        print(f"{args.compute_ms:g} ms of computation a step, {mc.get_nranks()} ranks on {mc.num_hosts()} host(s)")
        print("\n".join(lines), flush=True)
    mc.finalize()
    return 0


if __name__ == "__main__":
    sys.exit(main())
