"""Torch's six variables: by every start, in scripts that ask for them first; and what an import changes."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from dl_comm._base.master import MasterError, Start
from dl_comm._base.torch_variables import MARK, NAMES, Position, given, launched
from hosts import Hosts, possible
from imported import TORCH, python
from launch import QUIET, Finished, launch, mpiexec, run
from ranks import free_port
from ranks import start as start_plain

ENV = [str(Path(sys.executable).with_name("dl-comm")), "env"]
RUN = [sys.executable, "-m", "dl_comm.run", "--all-output"]
SETTINGS = {**QUIET, "OMP_NUM_THREADS": "1"}
SHOW = f"""
import os, sys
if len(sys.argv) > 1:
    import dl_comm
    dl_comm.init()
    assert dl_comm.rank() == int(os.environ["RANK"])
os.write(1, (" ".join(f"{{n}}={{os.environ.get(n)}}" for n in {NAMES}) + "\\n").encode())
"""
NANOGPT = """
import os, sys, torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
torch.set_num_threads(1)
ddp = int(os.environ.get("RANK", -1)) != -1
rank = 0
if ddp:
    dist.init_process_group(backend=sys.argv[1])
    rank, local_rank, size = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
if ddp:
    model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
torch.manual_seed(100 + rank)
for _ in range(5):
    inputs = torch.randn(4, 8)
    (model(inputs) - inputs.sum(1, keepdim=True)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
weights = sum(parameter.detach().abs().sum().item() for parameter in model.parameters())
os.write(1, f"rank {rank}: {weights:.5f}\\n".encode())
if ddp:
    dist.destroy_process_group()
"""

# As the reference scripts of torchvision: torch gets the numbers that the script has read, other ranks print nothing.
TORCHVISION = """
import builtins, os, sys, torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
torch.set_num_threads(1)
rank = world_size = None
if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
    rank, world_size, local_rank = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
elif "SLURM_PROCID" in os.environ:
    rank = int(os.environ["SLURM_PROCID"])
else:
    sys.exit("Not using distributed mode")
dist.init_process_group(sys.argv[1], init_method="env://", world_size=world_size, rank=rank)
dist.barrier()
stock = builtins.print
builtins.print = lambda *values, force=False: stock(*values) if rank == 0 or force else None

def reduce_across_processes(value):
    total = torch.tensor(value)
    dist.barrier()
    dist.all_reduce(total)
    return total

torch.manual_seed(rank)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 1))
model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
inputs = torch.randn(30, 8, generator=torch.Generator().manual_seed(1))
data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
sampler = DistributedSampler(data)
for epoch in range(2):
    sampler.set_epoch(epoch)
    samples, total = 0, 0.0
    for inputs, targets in DataLoader(data, 4, sampler=sampler):
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        samples, total = samples + len(inputs), total + loss.item() * len(inputs)
    count, total = reduce_across_processes([samples, total]).tolist()
    assert count == reduce_across_processes(samples).item() == len(data)
assert dist.get_world_size() == 2
print(f"once: {total / count:.5f}")
print(f"rank {rank}: {total / count:.5f}", force=True)
dist.destroy_process_group()
"""


def check_six(finished: Finished, ranks: int) -> dict[str, str]:
    assert finished.returncode == 0, finished.output
    found = [dict(re.findall(r"([A-Z_]+)=(\S+)", line)) for line in finished.output.splitlines()]
    found.sort(key=lambda each: each["RANK"])
    assert [each["RANK"] for each in found] == [each["LOCAL_RANK"] for each in found] == [str(r) for r in range(ranks)]
    assert {(each["WORLD_SIZE"], each["LOCAL_WORLD_SIZE"]) for each in found} == {(str(ranks), str(ranks))}
    ((address, port),) = {(each["MASTER_ADDR"], each["MASTER_PORT"]) for each in found}
    assert address == "127.0.0.1"
    assert 0 < int(port) < 65536
    return found[0]


@pytest.mark.parametrize("init", [[], ["init"]])
@pytest.mark.parametrize("start", [[*mpiexec(), "-n", "2", *ENV], [*RUN, "-n", "2"]])
def test_from_the_first_line(tmp_path: Path, start: list[str], init: list[str]) -> None:
    program = tmp_path / "show.py"
    program.write_text(SHOW)
    check_six(run([*start, sys.executable, str(program), *init], 60, QUIET), 2)


def test_after_init(tmp_path: Path) -> None:
    program = tmp_path / "show.py"
    program.write_text(SHOW)
    check_six(launch(2, [sys.executable, str(program), "init"], 60), 2)
    check_six(run([sys.executable, str(program), "init"], 60, QUIET), 1)


def test_those_of_the_user_are_kept(tmp_path: Path) -> None:
    program = tmp_path / "show.py"
    program.write_text(SHOW)
    port = str(free_port())
    for command in ([*ENV, sys.executable, str(program)], [sys.executable, str(program), "init"]):
        assert check_six(launch(2, command, 60, {"MASTER_PORT": port}), 2)["MASTER_PORT"] == port
    alone = {"DL_COMM_RANK": "0", "DL_COMM_SIZE": "1", "DL_COMM_ADDR": f"localhost:{free_port()}"}
    finished = run([sys.executable, str(program), "init"], 60, {**QUIET, "RANK": "3", "WORLD_SIZE": "4", **alone})
    assert "RANK is 3 and WORLD_SIZE is 4 in the environment, but this is rank 0 of 1" in finished.output


def test_a_launcher_without_the_prefix_changes_nothing(tmp_path: Path) -> None:
    """Independent programs may be started by mpiexec."""
    program = tmp_path / "show.py"
    program.write_text(
        SHOW + "import signal, torch.distributed as dist\n"
        "from torch.distributed.rendezvous import _rendezvous_handlers as handlers\n"
        "assert handlers['env'].__module__ == 'torch.distributed.rendezvous'\n"
        "try: dist.init_process_group('gloo')\nexcept ValueError as error: os.write(1, f'{error}\\n'.encode())\n"
        "assert not [name for name in sys.modules if name == 'dl_comm']\n"
    )
    finished = launch(2, [*python(*TORCH), str(program)], 60)
    assert finished.returncode == 0, finished.output
    assert finished.output.count("RANK=None WORLD_SIZE=None") == 2, finished.output
    assert finished.output.count("environment variable RANK expected, but not set") == 2, finished.output


def test_an_import_changes_no_handler() -> None:
    text = (
        "import signal, sys\nbefore = [signal.getsignal(n) for n in signal.valid_signals()], sys.excepthook\n"
        "import dl_comm, dl_comm.torch\ndl_comm.rank\n"
        "assert before == ([signal.getsignal(n) for n in signal.valid_signals()], sys.excepthook)\n"
        "dl_comm.init()\nassert sys.excepthook is not before[1]\n"
    )
    finished = run([sys.executable, "-c", text], 60, QUIET)
    assert finished.returncode == 0, finished.output


@pytest.mark.parametrize(
    "script",
    [pytest.param(NANOGPT, marks=pytest.mark.heavy, id="nanoGPT"), pytest.param(TORCHVISION, id="torchvision")],
)
def test_a_script_that_asks_for_RANK_first_trains_together(tmp_path: Path, script: str) -> None:
    program = tmp_path / "train.py"
    program.write_text(script)
    command = [*python(*TORCH), str(program)]
    results = {
        "gloo": start_plain(2, [*command, "gloo"], 90, SETTINGS).output,
        "dl-comm-run": run([*RUN, "-n", "2", *command, "dl_comm"], 90, SETTINGS).output,
        "mpiexec dl-comm env": launch(2, [*ENV, *command, "dl_comm"], 90, SETTINGS).output,
    }
    found = {start: sorted(re.findall(r"rank (\d): (\d+\.\d+)", text)) for start, text in results.items()}
    assert [rank for rank, _ in found["gloo"]] == ["0", "1"], results
    assert len({weights for ranks in found.values() for _, weights in ranks}) == 1, found
    assert all(len(ranks) == 2 for ranks in found.values()), results
    assert {text.count("once: ") for text in results.values()} == {int(script == TORCHVISION)}, results


@pytest.mark.heavy
@pytest.mark.skipif(not possible(), reason="needs root and iproute2 to make network namespaces")
def test_two_hosts(tmp_path: Path) -> None:
    """The address of rank 0 goes through the launcher; MPI is started by it, and left together."""
    program = tmp_path / "train.py"
    program.write_text(NANOGPT)
    with Hosts(2) as hosts:
        finished = hosts.launch(1, [*ENV, sys.executable, str(program), "dl_comm"], 90, SETTINGS)
    assert finished.returncode == 0, finished.output
    assert "BAD TERMINATION" not in finished.output, finished.output
    ranks = re.findall(r"rank (\d): (\d+\.\d+)", finished.output)
    assert (sorted(rank for rank, _ in ranks), len({weights for _, weights in ranks})) == (["0", "1"], 1), (
        finished.output
    )


def test_a_rank_that_ends_later_is_not_killed(tmp_path: Path) -> None:
    """Mpiexec kills the others of a rank that ends before it has left MPI, and reports success."""
    program = tmp_path / "late.py"
    program.write_text(
        "import sys, time, torch, torch.distributed as dist\n"
        "dist.init_process_group('dl_comm')\nrank = dist.get_rank()\ndist.all_reduce(torch.ones(3))\n"
        "dist.destroy_process_group()\n"
        "if rank == 1:\n    time.sleep(2)\n    open(sys.argv[1], 'w').write('checkpoint')\n"
    )
    for words in ([], ENV):
        checkpoint = tmp_path / f"checkpoint{len(words)}"
        finished = launch(2, [*words, *python(*TORCH), str(program), str(checkpoint)], 90, SETTINGS)
        assert finished.returncode == 0, finished.output
        assert checkpoint.read_text() == "checkpoint"


@pytest.mark.parametrize(
    ("variables", "ranks"),
    [
        ({}, 1),
        ({"DL_COMM_SIZE": "2", "index": "DL_COMM_RANK"}, 2),
        ({"DL_COMM_SIZE": "2", "index": "JOB_COMPLETION_INDEX"}, 2),
    ],
    ids=["alone", "DL_COMM_RANK", "Kubernetes"],
)
def test_init_process_group_knows_what_init_knows(tmp_path: Path, variables: dict[str, str], ranks: int) -> None:
    program = tmp_path / "group.py"
    program.write_text(
        "import os, torch, torch.distributed as dist\ndist.init_process_group('dl_comm')\n"
        "ones = torch.ones(2)\ndist.all_reduce(ones)\n"
        "assert ones[0] == dist.get_world_size() == int(os.environ['WORLD_SIZE'])\n"
        "os.write(1, b'sum %d\\n' % ones[0])\n"
    )
    variables = {**SETTINGS, **variables, "DL_COMM_ADDR": f"localhost:{free_port()}"} if variables else SETTINGS
    index = variables.pop("index", "DL_COMM_TEST_INDEX")
    both = (
        f'for rank in $(seq 0 {ranks - 1}); do env {index}=$rank "$@" & pids="$pids $!"; done; '
        "for pid in $pids; do wait $pid || exit 1; done"
    )
    finished = run(["sh", "-c", both, "sh", *python(*TORCH), str(program)], 90, variables)
    assert finished.returncode == 0, finished.output
    assert finished.output.count(f"sum {ranks}\n") == ranks, finished.output


def test_a_program_from_standard_input_is_refused() -> None:
    for command in (
        [*RUN, "-n", "2", "python", "-"],
        [*RUN, "-n", "2", "bash"],
        [*mpiexec(), "-n", "2", *ENV, "python3"],
    ):
        finished = run(command, 60, QUIET)
        assert finished.returncode == 2, finished.output
        assert "only rank 0 gets standard input" in finished.output


def test_the_prefix_needs_a_launcher() -> None:
    finished = run([*ENV, "true"], 60, QUIET)
    assert finished.returncode == 2
    assert "mpiexec -n 2 dl-comm env" in finished.output


def test_the_exit_status_is_the_programs() -> None:
    # Of several ranks Hydra kills those that still run when the first one fails, and returns the signal.
    finished = launch(1, [*ENV, "sh", "-c", "exit 3"], 60)
    assert finished.returncode == 3, finished.output


SLURM = {
    **{"SLURM_JOB_ID": "70", "SLURM_STEP_ID": "1", "SLURM_PROCID": "4", "SLURM_LOCALID": "0", "SLURM_NODEID": "1"},
    **{"SLURM_STEP_NUM_TASKS": "6", "SLURM_STEP_TASKS_PER_NODE": "4,2", "SLURM_STEP_NODELIST": "n[07-08]"},
}


@pytest.mark.parametrize(
    ("variables", "position"),
    [
        ({}, None),
        ({"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}, (1, 4, 1, 2, "Hydra")),
        (SLURM, (4, 6, 0, 2, "srun")),
        ({**SLURM, "PMI_RANK": "4", "PMI_SIZE": "6"}, (4, 6, 0, 2, "srun")),
        (
            {**SLURM, "PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "1"},
            (1, 2, 1, 2, "Hydra"),
        ),
        ({**SLURM, "SLURM_STEP_ID": "4294967291"}, None),
        ({"PALS_RANKID": "1", "PMI_SIZE": "2", "PALS_LOCAL_RANKID": "1", "PMI_LOCAL_SIZE": "2"}, (1, 2, 1, 2, "PALS")),
        (
            {f"OMPI_COMM_WORLD_{name}": "1" for name in ("RANK", "LOCAL_RANK")}
            | {f"OMPI_COMM_WORLD_{name}": "2" for name in ("SIZE", "LOCAL_SIZE")},
            (1, 2, 1, 2, "Open MPI"),
        ),
    ],
)
def test_positions(variables: Mapping[str, str], position: tuple[int | str, ...] | None) -> None:
    found = launched(variables)
    assert (None if found is None else tuple(found)) == position


def test_where_ranks_of_slurm_meet() -> None:
    position = launched(SLURM)
    assert position is not None
    first = Start(SLURM, position).apply({"KEPT": "1", MARK: "7 RANK=1"})
    assert (first["MASTER_ADDR"], first["KEPT"], MARK in first) == ("n07", "1", False)
    assert 20000 <= int(first["MASTER_PORT"]) < 30000
    step = {**SLURM, "SLURM_STEP_ID": "2"}
    assert Start(step, position).variables["MASTER_PORT"] != first["MASTER_PORT"]
    mine = {**SLURM, "MASTER_ADDR": "n08", "MASTER_PORT": "500"}
    assert Start(mine, position).variables | mine == Start(mine, position).variables | mine | {"RANK": "4"}
    with pytest.raises(MasterError, match="set MASTER_ADDR to the host of rank 0"):
        Start({"PMIX_NAMESPACE": "a"}, Position(0, 4, 0, 2, "Open MPI"))
    with pytest.raises(MasterError, match="MASTER_PORT is 'x'"):
        Start({**SLURM, "MASTER_PORT": "x"}, position)


def test_a_port_in_use_is_told() -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(MasterError, match=f"port {port}.*set MASTER_PORT"):
            Start({}, Position(0, 2, 0, 2, "Hydra"), ("127.0.0.1", port))


def test_those_of_an_outer_rank_do_not_count() -> None:
    outer = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "9", MARK: "1 RANK=1 WORLD_SIZE=2"}
    assert given(outer) == {"MASTER_PORT": "9"}
    assert given({**outer, "RANK": "0"}) == {"RANK": "0", "MASTER_PORT": "9"}
