"""``finalize``, then ``init``: another job of the same processes, whatever has started them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hosts import Hosts
from launch import Finished, run

Script = Callable[..., Finished]

JOBS = """
import os
import numpy as np
import dl_comm

def use(job):
    rank, size = dl_comm.rank(), dl_comm.size()
    assert size == int(os.environ["EXPECTED"])
    total = size * (size - 1) / 2
    world = dl_comm.world()
    assert world.allreduce(np.full(1000, float(rank + job)))[0] == total + job * size
    assert dl_comm.gradients([np.float32([rank])])[0][0] == total / size
    assert dl_comm.broadcast_object(("job", job) if rank == 0 else None) == ("job", job)
    with dl_comm.Group([*range(size)][::-1], "reversed") as group:
        assert group.all_gather(rank).tolist() == [*range(size)][::-1]
    pair = world.split(rank % 2)
    assert pair.allreduce(1) == len(range(rank % 2, size, 2))
    if size > 1:
        right, left = (rank + 1) % size, (rank - 1) % size
        dl_comm.sendrecv(np.full(3, rank), right, got := np.empty(3, int), left)
        assert got[0] == left
    started = dl_comm.allreduce(np.ones(1 << 18), async_op=True)
    assert started.wait()[0] == size
    dl_comm.push_communicator(str(rank % 2))
    return world, pair

for job in range(4):
    dl_comm.init()
    assert dl_comm.is_initialized()
    old, pair = use(job)
    dl_comm.finalize()
    assert not dl_comm.is_initialized()
    assert dl_comm.rank() == old.rank, "known after the end"
    for call in (dl_comm.world, dl_comm.barrier, lambda: old.allreduce(1), lambda: pair.allreduce(1)):
        try:
            call()
        except dl_comm.CommError as error:
            assert "finalize" in str(error) or "has ended" in str(error), error
        else:
            raise SystemExit("a call works without a job")
os.write(1, b"fine\\n")
"""


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_four_jobs_under_mpiexec(script: Script, ranks: int) -> None:
    finished = script(ranks, JOBS, env={"EXPECTED": str(ranks)})
    assert finished.output.count("fine") == ranks, finished.output
    assert finished.returncode == 0


def test_four_jobs_under_dl_comm_run(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(JOBS)
    command = [sys.executable, "-m", "dl_comm.run", "-n", "2", sys.executable, str(path)]
    finished = run(command, 60, {"EXPECTED": "2"})
    assert finished.returncode == 0, finished.output
    assert "fine" in finished.output, finished.output


@pytest.mark.heavy
def test_four_jobs_on_two_hosts(two: Hosts, tmp_path: Path) -> None:
    """MPI carries the messages of all of them."""
    path = tmp_path / "script.py"
    path.write_text(JOBS)
    finished = two.launch(2, [sys.executable, str(path)], 100, {"EXPECTED": "4"})
    assert finished.output.count("fine") == 4, finished.output
    assert finished.returncode == 0, finished.output


def test_a_group_of_an_earlier_job_stays_apart(script: Script) -> None:
    """Its number may be that of a new group."""
    text = (
        "import os, dl_comm\n"
        "dl_comm.init()\n"
        "old = dl_comm.Group([0, 1], 'old')\n"
        "assert old.allreduce(1) == 2\n"
        "dl_comm.finalize()\n"
        "dl_comm.init()\n"
        "new = dl_comm.Group([1, 0], 'new')\n"
        "assert new.all_gather(dl_comm.rank()).tolist() == [1, 0]\n"
        "try: old.allreduce(1)\n"
        "except dl_comm.CommError: pass\n"
        "else: raise SystemExit('the old group works')\n"
        "assert new.allreduce(1) == 2\n"
        "os.write(1, b'fine\\n')\n"
    )
    finished = script(2, text)
    assert finished.output.count("fine") == 2, finished.output


def test_a_rank_may_work_on_after_the_end(script: Script, tmp_path: Path) -> None:
    """The launcher ends no rank, and the rank that waits for the exit of the other takes no processor."""
    text = (
        "import os, pathlib, time, dl_comm\n"
        "dl_comm.init()\n"
        f"file = pathlib.Path({str(tmp_path / 'pid')!r})\n"
        "if dl_comm.rank() == 1: file.write_text(str(os.getpid()))\n"
        "dl_comm.finalize()\n"
        "def seconds():\n"
        "    fields = pathlib.Path(f'/proc/{file.read_text()}/stat').read_text().rsplit(')', 1)[1].split()\n"
        "    return (int(fields[11]) + int(fields[12])) / os.sysconf('SC_CLK_TCK')\n"
        "if dl_comm.rank() == 0:\n"
        "    time.sleep(2)\n"
        "    before = seconds()\n"
        "    time.sleep(3)\n"
        "    os.write(1, f'seconds {seconds() - before}\\nfine\\n'.encode())\n"
    )
    finished = script(2, text)
    assert finished.returncode == 0, finished.output
    assert finished.output.count("fine") == 1, finished.output
    (line,) = [line for line in finished.output.splitlines() if line.startswith("seconds")]
    assert float(line.split()[1]) < 1, "it spins"


def test_a_rank_that_fails_after_the_end_is_not_waited_for(script: Script) -> None:
    text = (
        "import os, sys, dl_comm\n"
        "dl_comm.init()\n"
        "rank = dl_comm.rank()\n"
        "dl_comm.finalize()\n"
        "if rank == 0: os._exit(3)\n"
    )
    finished = script(2, text, timeout=30)
    assert finished.returncode != 0


def test_no_new_job_after_a_lost_rank(script: Script) -> None:
    """The ranks of a launcher start together, or not at all."""
    text = (
        "import os, time, dl_comm\n"
        "dl_comm.init()\n"
        "if dl_comm.rank() == 1:\n"
        "    time.sleep(30)\n"
        "else:\n"
        "    dl_comm.finalize()\n"
        "    try: dl_comm.init()\n"
        "    except dl_comm.StateError as error: assert 'cannot be used again' in str(error), error\n"
        "    else: raise SystemExit('started')\n"
        "    os.write(1, b'fine\\n')\n"
    )
    finished = script(2, text, env={"DL_COMM_TIMEOUT_S": "2"}, timeout=60)
    assert "fine" in finished.output, finished.output


@pytest.mark.heavy
def test_torch_in_three_jobs(script: Script) -> None:
    """New and old optimizers, collectives with gradients, compiled functions."""
    text = (
        "import os, torch, dl_comm, dl_comm.torch as cdl\n"
        "kept = []\n"
        "for job in range(3):\n"
        "    dl_comm.init()\n"
        "    model = torch.nn.Linear(3, 2)\n"
        "    optimizer = cdl.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))\n"
        "    kept.append((model, optimizer, torch.compile(lambda x: cdl.allreduce(x) + 1)))\n"
        "    for model, optimizer, compiled in kept:\n"
        "        model(torch.full((2, 3), dl_comm.rank() + 1.0)).sum().backward()\n"
        "        optimizer.step()\n"
        "        optimizer.zero_grad()\n"
        "        weights = cdl.all_gather(model.weight.detach()[None])\n"
        "        assert torch.equal(weights[0], weights[1])\n"
        "        assert compiled(torch.ones(2)).tolist() == [3, 3]\n"
        "    dl_comm.finalize()\n"
        "os.write(1, b'fine\\n')\n"
    )
    finished = script(2, text, timeout=120)
    assert finished.output.count("fine") == 2, finished.output


@pytest.mark.heavy
def test_tensorflow_in_two_jobs(script: Script) -> None:
    text = (
        "import os, keras, numpy as np, tensorflow as tf, dl_comm, dl_comm.keras, dl_comm.tensorflow as cdl\n"
        "in_graph = tf.function(lambda x: cdl.allreduce(x, name='in graph'))\n"
        "for job in range(2):\n"
        "    dl_comm.init()\n"
        "    rank = dl_comm.rank()\n"
        "    assert in_graph(tf.ones(3) * rank).numpy().tolist() == [1, 1, 1]\n"
        "    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(2)])\n"
        "    model.compile(dl_comm.keras.DistributedOptimizer(keras.optimizers.SGD(0.1)), 'mse')\n"
        "    callbacks = [dl_comm.keras.BroadcastCallback()]\n"
        "    model.fit(np.full((8, 3), rank + 1.0), np.ones((8, 2)), epochs=2, verbose=0, callbacks=callbacks)\n"
        "    weights = cdl.all_gather(model.weights[0][None])\n"
        "    assert np.array_equal(weights[0], weights[1])\n"
        "    dl_comm.finalize()\n"
        "os.write(1, b'fine\\n')\n"
    )
    finished = script(2, text, timeout=200)
    assert finished.output.count("fine") == 2, finished.output
