"""One rank: measures all cases, and rank 0 prints a JSON line for each. Its argument is a JSON object of options."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import dl_comm
import dl_comm.torch as cdl
from benchmarks.common import deepspeed
from benchmarks.common.benchmark_run import rotated
from benchmarks.training.torch_networks import TASKS, loss

RING_BYTES = 64 << 20
WARM_UP = 3
BATCHES = {4 << 10: 100, 64 << 10: 20}
"""Calls of one timing, by the largest size; 1 above."""
Call = Callable[[int], object]


class Worker:
    """This rank, with a group of each backend."""

    def __init__(self, options: dict[str, Any]) -> None:
        torch.set_num_threads(1)
        self.options = options
        dist.init_process_group("dl_comm", timeout=timedelta(seconds=300))
        dl_comm.init(nthread_per_team=1, nteams=1)  # for the contender "core"
        self.groups = {"dl_comm": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.deepspeed = deepspeed.all_reduce(self.rank, self.size) if options["deepspeed"] else None

    def slowest(self, seconds: float) -> float:
        """The largest value of all ranks."""
        value = torch.tensor([seconds], dtype=torch.float64)
        dist.all_reduce(value, dist.ReduceOp.MAX)
        return value.item()

    def median(self, call: Call, batch: int, times: int) -> float:
        """The median seconds of a call, of the slowest rank."""
        found = []
        for turn in range(times):
            dist.barrier()
            begin = time.perf_counter()
            for repeat in range(batch):
                call(turn * batch + repeat)
            found.append(self.slowest((time.perf_counter() - begin) / batch))
        return statistics.median(found)

    def compare(self, case: dict[str, Any], calls: dict[str, Call], batch: int, seconds: float) -> None:
        """Measures the contenders of a case in turns, and prints their times of each round."""
        times = {}
        for name, call in calls.items():
            once = self.median(call, batch, WARM_UP)
            times[name] = max(3, min(200, int(seconds / (once * batch + 1e-9))))
        found: dict[str, list[float]] = {name: [] for name in calls}
        for turn in range(self.options["rounds"]):
            for name in rotated(list(calls), turn):
                found[name].append(self.median(calls[name], batch, times[name]))
        if self.rank == 0:
            print(json.dumps({**case, "ranks": self.size, "rounds_s": found}), flush=True)

    def collectives(self) -> None:
        """Every collective and size."""
        for name, sizes in self.options["sizes"].items():
            for bytes_ in sizes:
                block = -(-bytes_ // 4 // self.size)
                whole = block * self.size if name != "all_reduce" else bytes_ // 4
                slots = max(2, min(64, RING_BYTES // (8 * whole)))
                ring = [(torch.ones(whole), torch.ones(whole)) for _ in range(slots)]
                calls = {backend: self._call(name, group, ring, block) for backend, group in self.groups.items()}
                if name == "all_reduce":
                    calls["core"] = lambda i, ring=ring: cdl.allreduce(
                        ring[i % len(ring)][0], out=ring[i % len(ring)][0]
                    )
                    if self.deepspeed:
                        calls["deepspeed"] = lambda i, ring=ring: self.deepspeed(ring[i % len(ring)][0])
                batch = next((batch for most, batch in BATCHES.items() if bytes_ <= most), 1)
                self.compare({"case": name, "bytes": bytes_}, calls, batch, self.options["seconds"])

    def _call(self, name: str, group: Any, ring: list[tuple[torch.Tensor, torch.Tensor]], block: int) -> Call:
        def call(i: int) -> None:
            one, two = ring[i % len(ring)]
            if name == "all_reduce":
                dist.all_reduce(one, group=group)
            elif name == "all_gather_into_tensor":
                dist.all_gather_into_tensor(two, one[:block], group=group)
            elif name == "reduce_scatter_tensor":
                dist.reduce_scatter_tensor(two[:block], one, group=group)
            else:
                dist.all_to_all_single(two, one, group=group)

        return call

    def training(self) -> None:
        """Steps of DDP and FSDP2."""
        task = TASKS[self.options["model"]]
        batch = task.batch(self.options["batch"], torch.Generator().manual_seed(self.rank))

        def step(model: Any) -> Call:
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

            def run(_: int) -> None:
                optimizer.zero_grad()
                loss(model(batch[0]), batch[1]).backward()
                optimizer.step()

            return run

        def network() -> torch.nn.Module:
            torch.manual_seed(1)
            return task.network()

        parameters = sum(parameter.numel() for parameter in network().parameters())
        about = {"model": self.options["model"], "parameters": parameters}
        calls: dict[str, Call] = {}
        for backend, group in self.groups.items():
            model = torch.nn.parallel.DistributedDataParallel(network(), process_group=group)
            calls[backend] = step(model)
        silent = torch.nn.parallel.DistributedDataParallel(network())
        run_silent = step(silent)

        def alone(i: int) -> None:
            with silent.no_sync():
                run_silent(i)

        calls["no_sync"] = alone
        self.compare({"case": "ddp", **about}, calls, 1, self.options["train_s"])
        calls.clear()
        for backend, group in self.groups.items():
            mesh = DeviceMesh.from_group(group, "cpu")
            model = network()
            for block in model.blocks:  # type: ignore[union-attr]
                fully_shard(block, mesh=mesh)
            calls[backend] = step(fully_shard(model, mesh=mesh))
        self.compare({"case": "fsdp2", **about}, calls, 1, self.options["train_s"])


def main() -> None:
    """Measures everything."""
    worker = Worker(json.loads(sys.argv[1]))
    worker.collectives()
    if worker.options["model"]:
        worker.training()
    dist.barrier()
    dist.destroy_process_group()
    # The threads of gloo may hold up the end of the interpreter.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
