"""Train a convolutional network for some steps on several processes, and say how many images per second that is.

    mpiexec -n 2 python examples/cnn_benchmarks/benchmark.py --framework torch --model resnet20 --batch_size 32

Options and output are those of tf_cnn_benchmarks, as far as they mean something here; see README.md.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

import data
import dl_comm
import options
import report


def trainer(args: argparse.Namespace, threads: int) -> Any:
    """Give the framework's Trainer; importing the module imports the framework."""
    return importlib.import_module({"torch": "torch_side", "tensorflow": "tf_side"}[args.framework]).Trainer(
        args, threads
    )


def measure(args: argparse.Namespace, side: Any) -> list[float]:
    """Train, print the lines of the steps, and give the seconds of each measured step."""
    batches = data.batches(args, dl_comm.rank(), dl_comm.size(), side.decode)
    if args.synthetic:
        prepared = side.prepare(*next(batches))  # always the same batch, as tf_cnn_benchmarks does
    times = []
    report.say("Running warm up")
    for step in range(-args.num_warmup_batches, args.num_batches):
        if step == 0:
            report.say("Done warm up\nStep\tImg/sec\ttotal_loss")
            dl_comm.barrier()
        begin = time.perf_counter()
        loss = side.step(*(prepared if args.synthetic else side.prepare(*next(batches))))
        seconds = time.perf_counter() - begin
        if step >= 0:
            times.append(seconds)
            if step == 0 or (step + 1) % args.display_every == 0:
                report.progress(step + 1, times, args.batch_size, loss)
    return times


def main() -> int:
    """Run the benchmark, and give the exit status: 1 when the ranks end with different weights."""
    args = options.parse()
    # A framework reads these when it is imported.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    dl_comm.init(args.nthread_per_team or 2, args.nteams or 1)
    threads = args.num_intra_threads or max(1, len(os.sched_getaffinity(0)) // dl_comm.local_size())
    side = trainer(args, threads)
    if args.ksteps is not None:
        steps = args.num_warmup_batches + args.num_batches
        dl_comm.config_team(0, args.trans_alg or 0, args.ksteps, steps, 1, args.display_every)
    report.header(args, side.parameters)
    times = measure(args, side)
    report.total(times, args.batch_size, args.single_rank_images_per_sec)
    different = args.variable_update != "none" and dl_comm.check_buffers_match(side.weights(), 1) != 0
    side.close()
    dl_comm.finalize()
    if different:
        print("the ranks' weights differ", file=sys.stderr)
    return int(different)


if __name__ == "__main__":
    sys.exit(main())
