"""Measures the exposed time of a step, blocking and non-blocking: the rows of benchmarks/README.md.

    mpiexec -n 2 python benchmarks/overlap.py [--binding numpy torch tensorflow] [--compute-ms 30] [--average-ms 10]

Each step computes for a while, then averages a gradient, whose size is chosen so that a blocking call takes about
`--average-ms`. A row has, blocking and non-blocking, the exposed communication of a step (`get_waited`), and the whole
time in the call, which for NumPy includes the copies of the non-blocking phase. Values are means over the steps, then
over the ranks.
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
"""One step: computes, averages, and returns the seconds in the call."""


def compute(seconds: float) -> None:
    """Multiplies small matrices in cache for `seconds`."""
    a = np.full((64, 64), 1e-3, np.float32)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        a = np.clip(a @ a, 1e-6, 1.0)


def numpy_step(count: int, team: int, seconds: float) -> Step:
    """NumPy arrays belong to the caller: a non-blocking call copies them."""
    gradient = np.ones(count, np.float32)

    def step() -> float:
        compute(seconds)
        begin = time.perf_counter()
        mc.gradients([gradient], team)
        return time.perf_counter() - begin

    return step


def torch_step(count: int, team: int, seconds: float) -> Step:
    """The optimizer of dl_comm.torch, whose hooks donate the gradients to the team."""
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


BINDINGS = {"numpy": numpy_step, "torch": torch_step, "tensorflow": tensorflow_step}


def measure(step: Step, team: int, steps: int) -> tuple[float, float]:
    """Milliseconds of a step: exposed, and in the call."""
    before = mc.get_waited(team)
    inside = sum(step() for _ in range(steps))
    waited = mc.get_waited(team) - before
    return float(mc.average(1e3 * waited / steps)), float(mc.average(1e3 * inside / steps))


def calibrate(make: Callable[..., Step], team: int, compute_s: float, target_ms: float) -> int:
    """The number of float32 elements whose blocking call takes about `target_ms`, equal on all ranks."""
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
    parser.add_argument("--binding", nargs="+", choices=BINDINGS, default=["numpy"])
    parser.add_argument("--compute-ms", type=float, default=30.0)
    parser.add_argument("--average-ms", type=float, default=10.0)
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    mc.init(2, 1)
    lines = [
        "| binding | gradient | waited, blocking | non-blocking | ratio "
        "| in the call, blocking | non-blocking | ratio |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for index, binding in enumerate(args.binding):
        make, team = BINDINGS[binding], index + 1
        mc.create_team(team)
        count = calibrate(make, team, args.compute_ms / 1e3, args.average_ms)
        step = make(count, team, args.compute_ms / 1e3)
        measure(step, team, 3)
        waited, inside = measure(step, team, args.steps)
        mc.config_team(team, 0, 0, 10 * args.steps)
        measure(step, team, 3)
        waited_async, inside_async = measure(step, team, args.steps)
        cells = [binding, f"{count * 4 / 2**20:.1f} MiB"]
        for blocking, non_blocking in ((waited, waited_async), (inside, inside_async)):
            cells += [f"{blocking:.2f} ms", f"{non_blocking:.2f} ms", f"{non_blocking / blocking:.3f}"]
        lines.append(f"| {' | '.join(cells)} |")
        if mc.get_rank() == 0:
            print(f"{binding}: done", file=sys.stderr, flush=True)
    if mc.get_rank() == 0:
        print(f"{args.compute_ms:g} ms of computation a step, {mc.get_nranks()} ranks on {mc.num_hosts()} host(s)")
        print("\n".join(lines), flush=True)
    mc.finalize()
    return 0


if __name__ == "__main__":
    sys.exit(main())
