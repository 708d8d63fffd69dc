"""Plain processes on two "hosts" (network namespaces): they start MPI through their store, without a launcher."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

import dl_comm
from hosts import Hosts, possible

TESTS = Path(__file__).parent.parent

pytestmark = pytest.mark.skipif(not possible(), reason="needs root and iproute2 to make network namespaces")

HEAD = """
import json, os, signal, subprocess, sys, threading, time
import numpy as np
import dl_comm
from dl_comm import _dl_comm
def check_mean():
    for count in (3, 300_000):
        (mean,) = dl_comm.gradients([np.full(count, dl_comm.get_rank(), np.float32)])
        assert (mean == (dl_comm.get_nranks() - 1) / 2).all(), mean
def fine(): os.write(1, b"fine\\n")
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    return tmp_path / "script.py"


@pytest.mark.parametrize("name", ["collectives", "p2p"])
@pytest.mark.parametrize(
    "per_host", [1, pytest.param(2, marks=pytest.mark.heavy), pytest.param((2, 1), marks=pytest.mark.heavy)]
)
def test_every_collective_and_message(two: Hosts, tmp_path: Path, per_host: int | tuple[int, int], name: str) -> None:
    package = Path(dl_comm.__file__).parent
    links = [f"-L{package}", "-l:libdl_comm.so.0", f"-Wl,-rpath,{package},--allow-shlib-undefined"]
    binary, source = tmp_path / name, str(TESTS / "c" / f"{name}.c")
    subprocess.run(["cc", f"-I{dl_comm.get_include()}", source, "-o", str(binary), *links], check=True, timeout=60)
    # Long, because ranks that outnumber the processors share them with an MPI that does not sleep.
    finished = two.ranks(per_host, [str(binary)], 200)
    assert finished.returncode == 0, finished.output


def test_a_process_starts_again_with_the_mpi_that_it_has(two: Hosts, program: Path) -> None:
    """Its children are not ranks, and nothing of the start stays."""
    program.write_text(
        HEAD
        + """
counts = None
for start in range(4):
    dl_comm.init()
    assert (dl_comm.get_nranks(), dl_comm.num_hosts(), dl_comm.local_size()) == (4, 2, 2)
    assert json.loads(_dl_comm.describe())["mpi"]["initialized"]
    check_mean()
    assert not [name for name in _dl_comm.environment() if name.startswith(b"PMI_")]
    child = "import dl_comm; dl_comm.init(); print(dl_comm.get_rank(), dl_comm.get_nranks())"
    output = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, check=True).stdout
    assert output.split() == [str(dl_comm.get_rank()), "4"], output
    dl_comm.finalize()
    now = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
    counts = counts or now
    assert now == counts, (start, now, counts)
assert not [name for name in os.listdir("/dev/shm")], os.listdir("/dev/shm")
fine()
"""
    )
    finished = two.ranks(2, [sys.executable, str(program)])
    assert finished.output == "fine\n" * 4, finished.output


def test_other_ranks_cannot_use_that_mpi(two: Hosts, program: Path) -> None:
    program.write_text(
        HEAD
        + """
dl_comm.init()
check_mean()
dl_comm.finalize()
os.environ.update(DL_COMM_RANK=str(1 - dl_comm.get_rank()), DL_COMM_ADDR="10.77.0.2:29511")
try: dl_comm.init()
except dl_comm.CommError as error: assert "MPI runs in this process already, as rank" in str(error), error
else: raise SystemExit("no error")
fine()
"""
    )
    finished = two.ranks(1, [sys.executable, str(program)])
    assert finished.output == "fine\n" * 2, finished.output


@pytest.mark.parametrize("killed", [0, 3])
def test_a_rank_that_ends_after_the_start_of_mpi(two: Hosts, program: Path, killed: int) -> None:
    """MPI's first communicators wait for it without end; the others notice it long before the deadline of 300 s."""
    program.write_text(
        HEAD
        + f"""
def name_of(thread):
    try: return open(f"/proc/self/task/{{thread}}/comm").read().strip()
    except OSError: return ""  # it has just ended
def threads(): return [name_of(each) for each in os.listdir("/proc/self/task")]
def kill():
    while "dlcomm-start" not in threads(): time.sleep(0.0005)
    while "dlcomm-start" in threads(): time.sleep(0.0005)
    os.kill(os.getpid(), signal.SIGKILL)
if os.environ["DL_COMM_RANK"] == "{killed}": threading.Thread(target=kill, daemon=True).start()
try: dl_comm.init()
except dl_comm.PeerLostError as error: print(error, flush=True)
else:
    try:
        while True: check_mean()
    except dl_comm.PeerLostError as error: print(error, flush=True)
"""
    )
    finished = two.ranks(2, [sys.executable, str(program)], 120)
    assert not finished.timed_out, finished.output
    assert f"rank {killed}" in finished.output, finished.output


def test_a_rank_that_ends_makes_the_others_raise(two: Hosts, program: Path) -> None:
    program.write_text(
        HEAD
        + """
dl_comm.init()
check_mean()
if dl_comm.get_rank() == 3: os.kill(os.getpid(), signal.SIGKILL)
start = time.monotonic()
try:
    while True: check_mean()
except dl_comm.PeerLostError as error:
    assert "rank 3" in str(error), error
assert time.monotonic() - start < 20
fine()
os._exit(0)
"""
    )
    finished = two.ranks(2, [sys.executable, str(program)])
    assert finished.output.count("fine\n") == 3, finished.output


def preloaded(folder: Path, program: str) -> dict[str, str]:
    """Environment variables with which the C program is loaded before all others."""
    source, library = folder / "end.c", folder / "libend.so"
    source.write_text(program)
    subprocess.run(["cc", "-shared", "-fPIC", str(source), "-o", str(library)], check=True, timeout=60)
    return {"LD_PRELOAD": str(library), "DL_COMM_TIMEOUT_S": "0"}


@pytest.fixture
def end_in_mpi_init(tmp_path: Path) -> dict[str, str]:
    """Environment variables with which the last rank is killed where it calls MPI_Init."""
    return preloaded(
        tmp_path,
        r"""
#include <dlfcn.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
int MPI_Init_thread(int *argc, char ***argv, int required, int *provided) {
  void *mpi = dlopen("libmpi.so.12", RTLD_LAZY | RTLD_NOLOAD);
  int (*init)(int *, char ***, int, int *) = dlsym(mpi, "MPI_Init_thread");
  if (atoi(getenv("DL_COMM_RANK")) == atoi(getenv("DL_COMM_SIZE")) - 1) {
    printf("killed at %ld\n", (long)time(NULL));
    fflush(stdout);
    raise(SIGKILL);
  }
  return init(argc, argv, required, provided);
}
""",
    )


@pytest.mark.parametrize("per_host", [1, (2, 1)])
def test_a_rank_that_ends_during_mpi_init_ends_the_start(
    two: Hosts, program: Path, per_host: int | tuple[int, int], end_in_mpi_init: dict[str, str]
) -> None:
    """It is alone on its host: its connection ends, and the others learn it within about a second."""
    program.write_text(HEAD + "dl_comm.init()\n")
    finished = two.ranks(per_host, [sys.executable, str(program)], 60, env=end_in_mpi_init)
    ended = time.time()
    assert finished.returncode != 0
    assert not finished.timed_out, finished.output
    killed = re.search(r"killed at (\d+)", finished.output)
    assert killed, finished.output
    assert ended - int(killed[1]) < 6, finished.output
    last = 1 if per_host == 1 else 2
    lines = re.findall(r"MPI_Init.*; this process ends with status 1", finished.output)
    assert len(lines) == last, finished.output
    # Rank 0 has the store: its end may be the first that its neighbour sees.
    assert f"MPI_Init cannot complete: rank {last} on " in lines[0], finished.output


def test_a_rank_that_ends_during_mpi_init_ends_all_ranks_without_a_deadline(
    two: Hosts, program: Path, end_in_mpi_init: dict[str, str]
) -> None:
    """Its neighbour on the host sees it, and informs the other host."""
    program.write_text(HEAD + "dl_comm.init()\n")
    finished = two.ranks(2, [sys.executable, str(program)], 60, env=end_in_mpi_init)
    assert not finished.timed_out, finished.output
    assert len(re.findall("MPI_Init.*rank 3 on .* has ended: killed by signal 9", finished.output)) >= 2, (
        finished.output
    )


@pytest.mark.parametrize("is_dialed", [True, pytest.param(False, marks=pytest.mark.heavy)])
def test_a_rank_that_ends_before_it_connects_ends_the_start(program: Path, tmp_path: Path, is_dialed: bool) -> None:
    """A host that has dialed it sees its end, and tells the others. If none has, a limit ends the start."""
    killed = preloaded(
        tmp_path,
        r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
int connect(int fd, const struct sockaddr *address, socklen_t length) {
  int (*next)(int, const struct sockaddr *, socklen_t) = dlsym(RTLD_NEXT, "connect");
  const struct sockaddr_in *other = (const struct sockaddr_in *)address;
  const char *rank = getenv("DL_COMM_RANK");
  int is_link = address->sa_family == AF_INET && ntohs(other->sin_port) != 29511;
  if (is_link && rank) {
    sleep(strcmp(rank, getenv("DL_COMM_TEST_SLOW")) == 0 ? 3 : 0);
    if (strcmp(rank, "1") == 0) raise(SIGKILL);
  }
  return next(fd, address, length);
}
""",
    )
    program.write_text(
        HEAD
        + """
try: dl_comm.init()
except (dl_comm.PeerLostError, dl_comm.TimeoutError) as error: print(repr(error))
"""
    )
    with Hosts(3) as three:
        started = time.time()
        slow = {"DL_COMM_TEST_SLOW": "1" if is_dialed else "0"}
        finished = three.ranks(1, [sys.executable, str(program)], 100, env={**killed, **slow})
    assert not finished.timed_out, finished.output
    # By a link, or else by the store, once the others have given up on theirs.
    expected = (
        r"PeerLostError.*rank 1 on \S+ has ended" if is_dialed else r"PeerLostError.*rank 1 has ended, or has lost"
    )
    assert len(re.findall(expected, finished.output)) == 2, finished.output
    assert time.time() - started < (15 if is_dialed else 40), finished.output


def test_the_interface_is_that_of_dl_comm(two: Hosts, program: Path) -> None:
    program.write_text(
        HEAD
        + """
dl_comm.init()
check_mean()
now = _dl_comm.environment()
assert b"FI_TCP_IFACE" not in now and now[b"UCX_NET_DEVICES"] == b"eth0,lo", now
fine()
"""
    )
    settings = {"DL_COMM_SOCKET_IFNAME": "eth0", "UCX_NET_DEVICES": "eth0,lo"}
    finished = two.ranks(1, [sys.executable, str(program)], env=settings)
    assert finished.output == "fine\n" * 2, finished.output


def test_a_store_under_a_launcher_uses_the_launchers_mpi(two: Hosts, program: Path) -> None:
    """Such as that of torch.distributed in a program that mpiexec has started."""
    program.write_text(
        HEAD
        + """
torch = __import__("torch.distributed")
from dl_comm._job.start import start_by_store
rank, size = int(os.environ["PMI_RANK"]), int(os.environ["PMI_SIZE"])
store = torch.distributed.TCPStore("10.77.0.1", 29512, size, rank == 0)
start_by_store(store, rank, size)
dl_comm.init()
assert dl_comm.num_hosts() == 2
check_mean()
assert not [name for name in os.environ if name.startswith("PMI_")]
dl_comm.finalize()
start_by_store(store, rank, size)
dl_comm.init()
check_mean()
fine()
"""
    )
    pytest.importorskip("torch")
    finished = two.launch(1, [sys.executable, str(program)])
    assert finished.output.count("fine\n") == 2, finished.output
