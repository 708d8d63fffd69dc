"""Ranks of torchrun, through the store of its agent: restarts, child processes, several hosts."""

from __future__ import annotations

import socket
import sys
import tempfile
from pathlib import Path

import pytest

from dl_comm._job.torchrun import is_connected, numbers
from hosts import Hosts
from installed import needs
from launch import QUIET, Finished, run
from plain_ranks import shared_memory

needs("torch")

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
SETTINGS = {**QUIET, "OMP_NUM_THREADS": "1", "DL_COMM_TIMEOUT_S": "60"}


def torchrun(ranks: int, program: Path, text: str, *options: str, env: dict[str, str] | None = None) -> Finished:
    program.write_text(text)
    command = [*TORCHRUN, "--standalone", "--nproc-per-node", str(ranks), *options, str(program)]
    return run(command, 150, {**SETTINGS, **(env or {})})


@pytest.fixture
def program(tmp_path: Path) -> Path:
    return tmp_path / "train.py"


TRAIN = """
import os, sys
import numpy as np
import dl_comm
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dl_comm.init()
assert (dl_comm.get_rank(), dl_comm.get_nranks()) == (rank, size)
known = dl_comm.topology()
assert known["launcher"] == "torchrun", known
assert dl_comm.local_rank() == int(os.environ["LOCAL_RANK"])
total = dl_comm.allreduce(np.arange(1000.0) + rank, op="sum")
np.testing.assert_array_equal(total, np.arange(1000.0) * size + sum(range(size)))
dl_comm.init_mpi()
dl_comm.init(nteams=2)
"""


@pytest.mark.parametrize(
    "ranks", [pytest.param(1, marks=pytest.mark.heavy), 2, pytest.param(3, marks=pytest.mark.heavy)]
)
def test_processes_become_ranks_and_start_again(program: Path, ranks: int) -> None:
    again = """
dl_comm.finalize()
dl_comm.init_mpi()
dl_comm.init()
assert dl_comm.gradients([np.full(5, rank, np.float32)])[0][0] == (size - 1) / 2
os.write(1, b"fine\\n")
"""
    with shared_memory() as folder:
        finished = torchrun(ranks, program, TRAIN + again, env={"DL_COMM_SHM_DIR": str(folder)})
        assert finished.returncode == 0, finished.output
        assert finished.output.count("fine\n") == ranks, finished.output


@pytest.mark.heavy
def test_a_torch_optimizer(program: Path) -> None:
    """The process group of torch works beside it, through the same agent."""
    finished = torchrun(
        2,
        program,
        """
import os
import torch
import torch.distributed as dist
import dl_comm.torch as cdl
cdl.init()
dist.init_process_group("gloo")
assert (cdl.rank(), cdl.size()) == (dist.get_rank(), dist.get_world_size()) == (int(os.environ["RANK"]), 2)
model = torch.nn.Linear(3, 1, bias=False)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
optimizer = cdl.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
cdl.broadcast_parameters(model.state_dict(), 0)
for step in range(3):
    optimizer.zero_grad()
    model(torch.full((4, 3), float(cdl.rank() + step))).sum().backward()
    optimizer.step()
weights = [torch.zeros(1, 3) for _ in range(2)]
dist.all_gather(weights, model.weight.detach())
assert torch.equal(*weights)
dist.destroy_process_group()
os.write(1, b"fine\\n")
""",
    )
    assert finished.returncode == 0, finished.output
    assert finished.output.count("fine\n") == 2, finished.output


CHILDREN = """
import multiprocessing, subprocess
from torch.utils.data import DataLoader, Dataset

class Numbers(Dataset):
    def __len__(self): return 8
    def __getitem__(self, index):
        dl_comm.init()
        assert (dl_comm.get_rank(), dl_comm.get_nranks()) == (RANK, SIZE)
        return index

def work(_):
    dl_comm.init()
    try: dl_comm.barrier()
    except dl_comm.StateError as error: caught = str(error)
    return dl_comm.get_rank(), dl_comm.get_nranks(), caught

if __name__ == "__main__":
    for how in ("spawn", "forkserver", "fork"):
        with multiprocessing.get_context(how).Pool(1) as pool:
            (found,) = pool.map(work, [0])
        assert found[:2] == (RANK, SIZE) and "rank itself" in found[2], found
        loader = DataLoader(Numbers(), batch_size=4, num_workers=1, multiprocessing_context=how)
        assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    child = "import os, dl_comm; dl_comm.init(); os.write(1, b'%d of %d' % (dl_comm.get_rank(), dl_comm.get_nranks()))"
    def output(*words, **env):
        command = [*words, sys.executable, "-c", child]
        return subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, **env}).stdout
    assert output() == f"{RANK} of {SIZE}"
    assert output(DL_COMM_ALONE="1") == "0 of 1"
    from dl_comm._job.torchrun import here
    assert here(os.environ) == (RANK, SIZE)
    which = "import os; from dl_comm._job.torchrun import here; print(here(os.environ))"
    for name, numbers in (("OMPI_COMM_WORLD_RANK", None), ("HOME", (RANK, SIZE)), ("MASTER_PORT", (RANK, SIZE))):
        env = {**os.environ, name: "1"}
        found = subprocess.run([sys.executable, "-c", which], capture_output=True, text=True, check=True, env=env)
        assert found.stdout == f"{numbers}\\n", (name, found)
    if RANK == 0:
        script = sys.argv[0] + ".child"
        with open(script, "w") as file: file.write(child)
        inner = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", script]
        found = subprocess.run(inner, capture_output=True, text=True)
        assert sorted(found.stdout[start : start + 6] for start in (0, 6, 12)) == ["0 of 3", "1 of 3", "2 of 3"], found
    dl_comm.barrier()
    os.write(1, b"fine\\n")
"""


@pytest.mark.heavy
@pytest.mark.parametrize("ranks", [1, 2])
def test_child_processes_are_no_ranks(program: Path, ranks: int) -> None:
    head = "import os, sys\nimport dl_comm\ndl_comm.init()\nRANK, SIZE = dl_comm.get_rank(), dl_comm.get_nranks()\n"
    finished = torchrun(ranks, program, head + CHILDREN)
    assert finished.returncode == 0, finished.output
    assert finished.output.count("fine\n") == ranks, finished.output


@pytest.mark.heavy
@pytest.mark.parametrize("lost", [0, 1])
def test_training_resumes_when_torchrun_starts_all_ranks_again(program: Path, tmp_path: Path, lost: int) -> None:
    """A rank that ends makes the others raise at once, before the agent kills them."""
    text = """
import os, signal, sys, time
import numpy as np
import dl_comm
checkpoint = sys.argv[1]
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
dl_comm.init()
rank, size = dl_comm.get_rank(), dl_comm.get_nranks()
# The agent would end this process too soon to see the error.
signal.signal(signal.SIGTERM, signal.SIG_IGN)
state = {"weights": np.zeros(1000), "step": np.zeros(1)}
if os.path.exists(checkpoint):
    with np.load(checkpoint) as saved: state = dict(saved)
for values in state.values(): dl_comm.broadcast([values], 0)
first = int(state["step"][0])
assert first == (5 if attempt else 0), (attempt, first)
for step in range(first, 10):
    if attempt == 0 and step == 5 and rank == LOST:
        open(checkpoint + ".time", "w").write(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        (mean,) = dl_comm.gradients([np.full(1000, float(rank + step))])
    except dl_comm.PeerLostError:
        while not os.path.exists(checkpoint + ".time"): time.sleep(0.01)
        assert time.time() - float(open(checkpoint + ".time").read()) < 20
        os.write(1, b"raised\\n")
        os._exit(1)
    state = {"weights": state["weights"] + mean, "step": np.full(1, step + 1.0)}
    dl_comm.write_on_rank0(checkpoint, lambda path: np.savez(path, **state))
assert (state["weights"] == sum(range(10)) + 10 * (size - 1) / 2).all()
os.write(1, b"fine\\n")
"""
    program.write_text(text.replace("LOST", str(lost)))
    options = ["--standalone", "--nproc-per-node", "3", "--max-restarts", "1", "--monitor-interval", "0.5"]
    finished = run([*TORCHRUN, *options, str(program), str(tmp_path / "checkpoint.npz")], 150, SETTINGS)
    assert finished.returncode == 0, finished.output
    assert finished.output.count("raised\n") == 2, finished.output
    assert finished.output.count("fine\n") == 3, finished.output


@pytest.mark.heavy
def test_two_nodes(two: Hosts, program: Path) -> None:
    """Through the store of the first node's agent; MPI is started by its values."""
    program.write_text(
        TRAIN
        + """
assert (known["hosts"], known["local_size"]) == (2, 2), known
assert not [name for name in os.environ if name.startswith("PMI_")]
for count in (1, 300_000):
    assert dl_comm.gradients([np.full(count, rank, np.float32)])[0][0] == (size - 1) / 2
os.write(1, b"fine\\n")
"""
    )
    options = ["--nnodes=2", "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=10.77.0.1:29513"]
    command = [*TORCHRUN, *options, str(program)]
    finished = two.each([command, command], 150, SETTINGS)
    assert finished.returncode == 0, finished.output
    assert finished.output.count("fine\n") == 4, finished.output


@pytest.mark.heavy
def test_the_doctor_checks_the_ranks() -> None:
    command = [*TORCHRUN, "--standalone", "--nproc-per-node", "2", "-m", "dl_comm.doctor", "--quick"]
    finished = run(command, 150, SETTINGS)
    assert finished.returncode == 0, finished.output
    assert "ok   launcher: torchrun started this process" in finished.output, finished.output
    assert "ok   thread level: MPI is not used" in finished.output, finished.output
    assert "placement: 2 on 1 host" in finished.output, finished.output


def test_which_variables_make_a_rank() -> None:
    ranks = {"TORCHELASTIC_RUN_ID": "none", "RANK": "1", "WORLD_SIZE": "4"}

    def found(extra: dict[str, str], *connections: int, open_mpi: bool = False) -> tuple[int, int] | None:
        return numbers({**ranks, **extra}, lambda descriptor: descriptor in connections, open_mpi)

    assert found({}) == (1, 4)
    assert numbers({"RANK": "1", "WORLD_SIZE": "4"}, lambda _: True, False) is None
    assert found({"DL_COMM_ALONE": "1"}) is None
    assert found({"PMI_RANK": "0", "PMI_SIZE": "2", "PMI_FD": "5"}) == (1, 4), "srun has started the agent"
    assert found({"PMI_RANK": "1", "PMI_SIZE": "4", "PMI_FD": "5"}) == (1, 4), "an agent for each rank"
    assert found({"PMI_RANK": "0", "PMI_SIZE": "2", "PMI_FD": "5"}, 5) is None, "a rank has started mpiexec"
    assert found({"PMI_RANK": "1", "PMI_SIZE": "4"}) is None
    same = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}
    assert found(same, open_mpi=True) is None, "mpirun sets torch's too"
    assert found(same) == (1, 4), "another MPI cannot use Open MPI's launcher"
    assert found({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, open_mpi=True) == (1, 4)
    assert found({"RANK": "x"}) is None
    assert found({"RANK": "\u00b2"}) is None


def test_a_connection_is_a_connected_stream_socket() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, tempfile.TemporaryFile() as file, socket.socket() as other, socket.socket(type=2) as datagrams:
        datagrams.connect(("127.0.0.1", 9))
        assert is_connected(ours.fileno())
        for descriptor in (file.fileno(), other.fileno(), datagrams.fileno(), 1_000_000, -1):
            assert not is_connected(descriptor)


def test_an_agent_for_each_rank_started_by_a_launcher(program: Path) -> None:
    """The agent has the numbers of its rank, and a connection to the launcher that the rank does not have."""
    launcher, agent = socket.socketpair()
    program.write_text(TRAIN + "os.write(1, b'fine\\n')\n")
    env = {**SETTINGS, "PMI_RANK": "0", "PMI_SIZE": "1", "PMI_FD": str(agent.fileno()), "DL_COMM_TIMEOUT_S": "20"}
    with launcher, agent:
        finished = run([*TORCHRUN, "--standalone", "--nproc-per-node=1", str(program)], 100, env)
    assert finished.returncode == 0, finished.output
    assert finished.output.count("fine\n") == 1, finished.output


@pytest.mark.heavy
def test_more_ranks_find_each_other_in_the_store_of_killed_ones(program: Path) -> None:
    """As when torchrun gets another node: all ranks start again, with the same part of the store."""
    program.write_text(
        """
import os, signal, subprocess, sys
import dl_comm
from torch.distributed import TCPStore
if len(sys.argv) > 1:
    dl_comm.init()
    assert dl_comm.get_nranks() == int(sys.argv[1])
    dl_comm.barrier()
    if sys.argv[1] == "2":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit()
store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
for size in (2, 3):
    env = {**os.environ, "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0"}
    env["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(size), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, str(size)]
    # Rank 0 comes last: the others find the old job first.
    ranks = [subprocess.Popen(command, env={**env, "RANK": str(rank)}) for rank in range(size - 1, -1, -1)]
    for rank in ranks: rank.wait()
print([rank.returncode for rank in ranks])
"""
    )
    finished = run([sys.executable, str(program)], 100, {**SETTINGS, "DL_COMM_TIMEOUT_S": "30"})
    assert "[0, 0, 0]" in finished.output, finished.output


def test_an_unreachable_store_is_an_error(program: Path) -> None:
    program.write_text(
        "import dl_comm\ntry: dl_comm.init()\nexcept dl_comm.CommError as error: print(error)\n"
        "else: raise SystemExit(1)"
    )
    env = {"TORCHELASTIC_RUN_ID": "a", "RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    finished = run([sys.executable, str(program)], 60, {**SETTINGS, **env, "DL_COMM_TIMEOUT_S": "2"})
    assert finished.returncode == 0, finished.output
    assert "cannot reach torchrun's store at 127.0.0.1:1" in finished.output
