"""What the benchmark prints, in the format of tf_cnn_benchmarks, so that scripts which read that can read this.

All functions are called by all ranks; rank 0 prints. Images/sec are those of all ranks together.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np

import dl_comm


def say(text: str) -> None:
    """Print on rank 0."""
    if dl_comm.rank() == 0:
        print(text, flush=True)


def header(args: argparse.Namespace, parameters: int) -> None:
    """Print what is going to be measured."""
    size = dl_comm.size()
    lines = {
        "Model": args.model,
        "Parameters": f"{parameters:,}",
        "Framework": args.framework,
        "Dataset": f"{args.data}{' (synthetic)' if args.synthetic else ''}",
        "Mode": "training",
        "Batch size": f"{args.batch_size * size} global\n{'':13}{args.batch_size} per device",
        "Num batches": args.num_batches,
        "Num ranks": f"{size} on {dl_comm.num_hosts()} host(s)",
        "Data format": args.data_format,
        "Optimizer": args.optimizer,
        "Variables": args.variable_update,
    }
    say("\n".join(f"{name + ':':12} {value}" for name, value in lines.items()) + "\n==========")


def progress(step: int, times: Sequence[float], batch_size: int, loss: float) -> None:
    """Print the line of a step: the speed so far, its uncertainty, its jitter, and the mean loss. Collective.

    The uncertainty is the standard error of the speeds of the steps; the jitter is their median absolute deviation,
    scaled to be the standard deviation of a normal distribution. Both are added up over the ranks, which wait for each
    other and so vary together.
    """
    speeds = batch_size / np.asarray(times)
    mine = {
        "mean": batch_size / np.mean(times),
        "uncertainty": np.std(speeds) / np.sqrt(len(speeds)),
        "jitter": 1.4826 * np.median(np.abs(speeds - np.median(speeds))),
    }
    means = dl_comm.average_metrics({**mine, "loss": loss})
    mean, uncertainty, jitter = (means[name] * dl_comm.size() for name in mine)
    say(f"{step}\timages/sec: {mean:.1f} +/- {uncertainty:.1f} (jitter = {jitter:.1f})\t{means['loss']:.3f}")


def total(times: Sequence[float], batch_size: int, baseline: float | None) -> None:
    """Print the speed of all steps, and how much each rank has of `baseline`, that of a rank alone. Collective."""
    size = dl_comm.size()
    speed = dl_comm.average_metrics({"speed": batch_size / np.mean(times)})["speed"] * size
    line = "-" * 64
    say(f"{line}\ntotal images/sec: {speed:.2f}\n{line}")
    if baseline is not None:
        say(f"scaling efficiency: {100 * speed / (size * baseline):.1f} %")
