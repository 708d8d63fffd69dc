"""Compares synchronous training with Downpour and EASGD where one rank is slower than the others.

    python benchmarks/asynchronous.py --data-dir MNIST --out results      # some minutes

Three ranks train a small network on MNIST. A step of a rank takes as long as its batch and a pause, which stands for
the computation of a larger network: one rank pauses three times as long. Rank 0, which is not that one, tests its model
again and again. The folder gets `asynchronous.json`, and `asynchronous.png` and `.svg`: test accuracy over time, and
when it first reached the goal. Needs matplotlib for the plot.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
KINDS = ("synchronous", "Downpour", "EASGD")
COLORS = ("#636363", "#08519c", "#e6550d")


def worker(args: argparse.Namespace) -> None:
    """Train on this rank, and print the curve."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "examples/torchmpi")]
    import torch
    from common import network
    from torch.nn import functional

    import dl_comm
    import dl_comm.torch as cdl
    from mnist import load, shard

    dl_comm.init()
    rank, size = dl_comm.rank(), dl_comm.size()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = load(args.data_dir, verbose=False)
    images, labels = (torch.from_numpy(each) for each in shard(data.train_images, data.train_labels, rank, size, 0))
    tests, answers = torch.from_numpy(data.test_images[:4000]).unsqueeze(1), torch.from_numpy(data.test_labels[:4000])
    images = images.unsqueeze(1)
    model = network()
    # Downpour adds the changes of all ranks, so the mean of the synchronous ones gets the learning rate of all.
    rate = args.lr * (size if args.kind == "synchronous" else 1)
    sgd = torch.optim.SGD(model.parameters(), rate, momentum=0.9)
    optimizer: Any = {
        "synchronous": lambda: cdl.DistributedOptimizer(sgd, named_parameters=model.named_parameters()),
        "Downpour": lambda: cdl.Downpour(sgd, init_delay=20, update_frequency=2),
        "EASGD": lambda: cdl.EASGD(sgd, init_delay=20, update_frequency=4),
    }[args.kind]()
    pause = args.pause_ms / 1e3 * (3 if rank == size - 1 else 1)
    dl_comm.barrier()
    begin, curve, tested = time.monotonic(), [], 0.0
    step, batch = 0, 64
    while True:
        at = step * batch % (len(images) - batch)
        optimizer.zero_grad()
        functional.cross_entropy(model(images[at : at + batch]), labels[at : at + batch]).backward()
        optimizer.step()
        time.sleep(pause)
        step += 1
        now = time.monotonic() - begin - tested
        # Synchronous ranks make the same number of steps, others train for the same time.
        ends = now > args.seconds
        if dl_comm.broadcast(float(ends), 0) if args.kind == "synchronous" else ends:
            break
        if rank == 0 and now - (curve[-1][0] if curve else 0) > args.seconds / 60:
            since = time.monotonic()
            with torch.no_grad():
                accuracy = (model(tests).argmax(1) == answers).float().mean().item()
            curve.append((now, accuracy))
            tested += time.monotonic() - since  # the others wait meanwhile, or go on
    if args.kind != "synchronous":
        optimizer.close()
    steps = dl_comm.all_gather([step_array(step)])[0].tolist()
    dl_comm.finalize()
    if rank == 0:
        print(json.dumps({"curve": curve, "steps": steps}))


def step_array(step: int) -> Any:
    """The number as an array."""
    import numpy as np

    return np.array([step])


def reached(curve: list[list[float]], goal: float) -> float | None:
    """When the accuracy was first at the goal, in seconds."""
    return next((at for at, accuracy in curve if accuracy >= goal), None)


def draw(results: dict[str, Any], goal: float, path: Path) -> None:
    """Plot accuracy over time."""
    from benchmarks.common.plot import pyplot, save

    plt = pyplot()
    figure, panel = plt.subplots(figsize=(7.5, 4), layout="constrained")
    for kind, color in zip(KINDS, COLORS, strict=True):
        curve = results[kind]["curve"]
        at = reached(curve, goal)
        when = "not reached" if at is None else f"{100 * goal:.0f} % after {at:.0f} s"
        panel.plot(*zip(*curve, strict=True), color=color, label=f"{kind}: {when}")
    panel.axhline(goal, color="0.6", linewidth=0.8, linestyle="--")
    panel.set_ylim(0.88, 1)
    panel.set_xlabel("seconds")
    panel.set_ylabel("test accuracy on rank 0")
    panel.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
    panel.legend(loc="lower right")
    panel.grid(color="0.9")
    panel.set_title("MNIST on three ranks, one of which takes three times as long for a step", fontsize=10)
    save(figure, path)


def main() -> None:
    """Run all kinds, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", help="folder with the MNIST files")
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--seconds", type=float, default=40, help="of each training")
    parser.add_argument("--pause-ms", type=float, default=10, help="of a fast rank's step")
    parser.add_argument("--lr", type=float, default=0.03)
    parser.add_argument("--goal", type=float, default=0.97)
    parser.add_argument("--kind", choices=KINDS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.kind:
        worker(args)
        return
    args.out.mkdir(parents=True, exist_ok=True)
    results = {}
    launcher = str(Path(sys.executable).parent / "mpiexec")
    for kind in KINDS:
        given = ["--seconds", args.seconds, "--pause-ms", args.pause_ms, "--lr", args.lr, "--kind", kind]
        if args.data_dir:
            given += ["--data-dir", args.data_dir]
        command = [launcher, "-n", "3", sys.executable, __file__, *map(str, given)]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        results[kind] = json.loads(output.splitlines()[-1])
        at, best = reached(results[kind]["curve"], args.goal), max(accuracy for _, accuracy in results[kind]["curve"])
        print(f"{kind}: {100 * args.goal:g} % after {at} s, best {best:.4f}, steps by rank {results[kind]['steps']}")
    (args.out / "asynchronous.json").write_text(json.dumps(results))
    sys.path.insert(0, str(ROOT))
    draw(results, args.goal, args.out / "asynchronous")


if __name__ == "__main__":
    main()
