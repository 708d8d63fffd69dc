"""Plain processes become ranks by DL_COMM_RANK, DL_COMM_SIZE and DL_COMM_ADDR, or by a store of the program."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import dl_comm
from launch import launch
from plain_ranks import Ranks

ANYONES_PYTHON = shutil.which("python3", path="/usr/bin:/usr/local/bin")


@pytest.mark.parametrize("size", [1, 2, 3])
def test_averages_and_starts_again(ranks: Ranks, size: int) -> None:
    ranks.run(
        size,
        """
def counts():  # without the threads of the interpreter's libraries
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
before = None
for start in range(6):
    dl_comm.init_mpi()
    assert (dl_comm.get_rank(), dl_comm.get_nranks(), dl_comm.num_hosts()) == (rank, size, 1)
    dl_comm.init()
    assert dl_comm.topology()["launcher"] == "variables"
    check_mean()
    kept = dl_comm.shared_zeros(3 if start % 2 else 100_000, np.float32) if start < 3 else None
    dl_comm.barrier()
    assert not json.loads(_dl_comm.describe())["mpi"]["initialized"]
    dl_comm.finalize()
    assert dl_comm.get_rank() == rank, "still known"
    if kept is not None:
        kept += 1  # memory of an ended job
    del kept
    until = time.monotonic() + 5
    if before is None:
        time.sleep(0.1)  # a thread that has ended is listed for a moment longer
        before = counts()
    while counts() != before and time.monotonic() < until:
        before = tuple(map(min, before, counts()))  # the first count may have had a thread that had not quite ended
        time.sleep(0.01)
    assert counts() == before, (start, counts(), before)
""",
    )


def test_ranks_may_come_late_and_in_any_order(ranks: Ranks) -> None:
    text = "dl_comm.init()\ncheck_mean()\ndl_comm.finalize()"
    processes = []
    for rank in (2, 1, 0):
        processes.append(ranks.start(rank, 3, text))
        time.sleep(0.5)
    for process in processes:
        ranks.succeeds(process)


def test_a_rank_that_never_comes_is_named_by_all(ranks: Ranks) -> None:
    short = {"DL_COMM_TIMEOUT_S": "3"}
    others = [ranks.start(rank, 4, "meet(rank, 0, 1)\nstart_fails('rank 2, rank 3')", short) for rank in (0, 1)]
    for process in others:
        assert "rank 0" not in ranks.succeeds(process).split("waiting for")[1]
    alone = ranks.start(1, 2, "start_fails('waiting for rank 0')", short)
    ranks.succeeds(alone)


def test_a_rank_killed_during_the_start_is_named(ranks: Ranks) -> None:
    """Long before the deadline: the others lose its connection."""
    for killed in (0, 1):
        ranks.forget("up.0", "up.1", "up.2")
        # Rank 3 never comes.
        text = """
meet(rank, 0, 1, 2)
try: dl_comm.init()
except dl_comm.PeerLostError as error: print(error, flush=True)
"""
        processes = [ranks.start(rank, 4, text) for rank in range(3)]
        ranks.wait_for("up.0", "up.1", "up.2")
        ranks.wait_for_connections(2)
        time.sleep(0.1)
        processes[killed].send_signal(signal.SIGKILL)
        for rank in {0, 1, 2} - {killed}:
            assert f"rank {killed}" in ranks.succeeds(processes[rank])
        processes[killed].wait(60)


def test_ranks_that_create_different_groups_learn_it(ranks: Ranks) -> None:
    """Other names, other members, another order: long before the deadline. They go on afterwards."""
    text = """
def fails(ranks, name, *words):
    try: dl_comm.Group(ranks, name)
    except dl_comm.MismatchError as error: assert all(word in str(error) for word in words), error
    else: raise SystemExit("no error")
def works(ranks, name):
    with dl_comm.Group(ranks, name) as group:
        assert dl_comm.allreduce(1, group=group) == len(ranks)
dl_comm.init()
both = ("rank 0: group 'a' of ranks [0, 1]", "rank 1: group 'b' of ranks [0, 1]")
if rank < 2:
    fails([0, 1], "ab"[rank], *both)
    works([0, 1], "b")
    works([0, 1], "a")
dl_comm.barrier()
if rank == 2: time.sleep(3)
fails([0, 1] if rank == 0 else [2, 1, 0], "c", "group 'c' of ranks [0, 1]", "group 'c' of ranks [2, 1, 0]")
works([2, 1, 0], "c")
dl_comm.barrier()
if rank == 0:
    try: dl_comm.Group([0, 1], "d", timeout=1)
    except dl_comm.TimeoutError as error: assert "rank 1" in str(error), error
    else: raise SystemExit("no error")
dl_comm.barrier()
dl_comm.finalize()
"""
    processes = [ranks.start(rank, 3, text, {"DL_COMM_TIMEOUT_S": "300"}) for rank in range(3)]
    outputs = [process.communicate(timeout=100)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * 3, "\n".join(outputs)


@pytest.mark.parametrize("rank", [0, 1])
def test_ctrl_c_ends_the_wait_for_other_ranks(ranks: Ranks, rank: int) -> None:
    # A program that a shell has started in the background ignores Ctrl-C.
    text = """
signal.signal(signal.SIGINT, signal.default_int_handler)
# Loads the package: Python ends by a signal that came during an import, even if the program catches the exception.
init = dl_comm.init
try:
    mark("started")
    init()
except KeyboardInterrupt: print('interrupted')
else: raise SystemExit('no error')
"""
    process = ranks.start(rank, 2, text)
    ranks.wait_for("started")
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    assert "interrupted" in ranks.succeeds(process)


def test_a_lost_rank_is_noticed(ranks: Ranks) -> None:
    text = """
dl_comm.init()
check_mean()
if rank == LOST:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    for _ in range(3): check_mean()
except dl_comm.PeerLostError as error:
    assert f"rank {LOST}" in str(error), error
    print("noticed", flush=True)
os._exit(0)
"""
    for lost in (0, 1):
        processes = [ranks.start(rank, 3, f"LOST = {lost}\n{text}") for rank in range(3)]
        for rank, process in enumerate(processes):
            if rank != lost:
                assert "noticed" in ranks.succeeds(process)
        processes[lost].wait(60)


def test_a_job_after_a_failed_one_in_the_same_processes(ranks: Ranks) -> None:
    """The second start of rank 0 and rank 1 meets a rank 2 of its own."""
    text = """
meet(rank, 0, 1)
os.environ["DL_COMM_TIMEOUT_S"] = "2"
start_fails("rank 2")
mark(f"failed.{rank}")
os.environ["DL_COMM_TIMEOUT_S"] = "60"
dl_comm.init()
check_mean()
dl_comm.finalize()
"""
    processes = [ranks.start(rank, 3, text) for rank in (0, 1)]
    ranks.wait_for("failed.0", "failed.1")
    processes.append(ranks.start(2, 3, "dl_comm.init()\ncheck_mean()\ndl_comm.finalize()"))
    for process in processes:
        ranks.succeeds(process)


@pytest.mark.parametrize(
    ("env", "text"),
    [
        ({"DL_COMM_ADDR": ""}, "not set: DL_COMM_ADDR"),
        ({"DL_COMM_RANK": "7"}, "DL_COMM_RANK is 7"),
        ({"DL_COMM_ADDR": "nowhere"}, "host:port"),
        ({"DL_COMM_ADDR": "192.0.2.1:7000"}, "DL_COMM_JOB_KEY"),
        ({"DL_COMM_ADDR": "192.0.2.1:7000", "DL_COMM_JOB_KEY": "x"}, "cannot listen there"),
    ],
)
def test_wrong_variables_are_named(ranks: Ranks, env: dict[str, str], text: str) -> None:
    ranks.succeeds(ranks.start(0, 2, f"start_fails({text!r})", env))


def test_disagreements_end_the_start_on_all_ranks(ranks: Ranks) -> None:
    for env, text in (
        ({"DL_COMM_SIZE": "3"}, "rank 1 was started as one of 3 ranks"),
        ({"DL_COMM_CHUNK_KB": "-1"}, "DL_COMM_CHUNK_KB is '-1'"),
    ):
        processes = [ranks.start(rank, 2, f"start_fails({text!r})", env if rank else None) for rank in (0, 1)]
        for process in processes:
            ranks.succeeds(process)


def test_a_given_local_rank_is_checked(ranks: Ranks) -> None:
    both = [ranks.start(rank, 2, "dl_comm.init()\ncheck_mean()", {"DL_COMM_LOCAL_RANK": str(rank)}) for rank in (0, 1)]
    assert not any("LOCAL_RANK" in ranks.succeeds(process) for process in both), "a known variable"
    wrong = "start_fails('rank 1', 'DL_COMM_LOCAL_RANK is 0', 'number 1 of 2')"
    for process in [ranks.start(rank, 2, wrong, {"DL_COMM_LOCAL_RANK": "0"}) for rank in (0, 1)]:
        ranks.succeeds(process)


def test_ranks_without_common_memory_are_on_different_hosts(ranks: Ranks, tmp_path: Path) -> None:
    """They start MPI for their messages."""
    text = """
for start in range(2):
    dl_comm.init()
    assert (dl_comm.num_hosts(), dl_comm.local_size()) == (2, 1)
    assert json.loads(_dl_comm.describe())["mpi"]["initialized"]
    check_mean()
    dl_comm.finalize()
"""
    folders = ["/dev/shm", str(tmp_path)]
    processes = [ranks.start(rank, 2, text, {"DL_COMM_SHM_DIR": folders[rank]}) for rank in range(2)]
    for process in processes:
        ranks.succeeds(process)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_program_passes_its_numbers(ranks: Ranks, size: int) -> None:
    """As with Ray. The variables of another job have no effect."""
    ranks.run(
        size,
        """
address = os.environ["DL_COMM_ADDR"]
os.environ.update(DL_COMM_RANK="0", DL_COMM_SIZE="1")
assert json.loads(_dl_comm.describe())["launcher"] is None
for start in range(3):
    dl_comm.init(rank=rank, size=size, address=address, key="secret")
    assert (dl_comm.get_rank(), dl_comm.get_nranks()) == (rank, size)
    assert dl_comm.topology()["launcher"] == "arguments"
    check_mean()
    dl_comm.init(nteams=2, rank=rank, size=size, address=address, key="secret")
    try: dl_comm.init_mpi(rank=rank, size=size + 1, address=address)
    except dl_comm.StateError as error: assert f"rank {rank} of {size} already" in str(error)
    else: raise SystemExit("no error")
    dl_comm.finalize()
for given, text in (
    ({"rank": 0}, "size=None"),
    ({"key": "a"}, "need both"),
    ({"rank": 0, "size": 2}, "address is None"),
    ({"rank": 2, "size": 2, "address": address}, "rank 2 of 2"),
    ({"rank": 0, "size": 2, "address": "nowhere"}, "host:port"),
    ({"rank": 0, "size": 2, "address": 7}, "invalid address"),
    ({"rank": 0, "size": 2, "address": "192.0.2.1:7000"}, "key=..."),
):
    try: dl_comm.init(**given)
    except dl_comm.ArgumentError as error: assert text in str(error), error
    else: raise SystemExit("no error")
""",
    )


def test_an_indexed_job_of_kubernetes(ranks: Ranks) -> None:
    text = """
dl_comm.init()
assert (dl_comm.get_rank(), dl_comm.get_nranks()) == (int(os.environ["JOB_COMPLETION_INDEX"]), size)
assert dl_comm.topology()["launcher"] == "kubernetes"
check_mean()
child = "import dl_comm; dl_comm.init(); print(dl_comm.get_rank(), dl_comm.get_nranks())"
output = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, check=True).stdout
assert output.split() == [str(dl_comm.get_rank()), str(size)], output
"""
    index = [{"JOB_COMPLETION_INDEX": str(rank)} for rank in range(2)]
    text = "del os.environ['DL_COMM_RANK']\n" + text
    for process in [ranks.start(rank, 2, text, index[rank]) for rank in range(2)]:
        ranks.succeeds(process)


def test_a_name_that_is_not_known_yet(ranks: Ranks) -> None:
    """A cluster may publish the name of rank 0 when it has started: the others wait, up to the deadline."""
    env = {"DL_COMM_ADDR": "rank-0.invalid:7000", "DL_COMM_TIMEOUT_S": "2", "DL_COMM_JOB_KEY": "secret"}
    ranks.succeeds(ranks.start(1, 2, "start_fails('rank-0.invalid:7000', 'still waiting for')", env))


def test_a_wrong_key_is_refused(ranks: Ranks) -> None:
    zero = ranks.start(0, 2, "mark('up.0')\ndl_comm.init()\ncheck_mean()", {"DL_COMM_JOB_KEY": "secret"})
    wrong = {"DL_COMM_JOB_KEY": "other", "DL_COMM_TIMEOUT_S": "4"}
    ranks.succeeds(ranks.start(1, 2, "wait_for('up.0')\nstart_fails('key of the job')", wrong))
    ranks.succeeds(ranks.start(1, 2, "dl_comm.init()\ncheck_mean()", {"DL_COMM_JOB_KEY": "secret"}))
    ranks.succeeds(zero)


@pytest.mark.skipif(os.geteuid() != 0 or not ANYONES_PYTHON, reason="needs root to be another user, and its Python")
def test_another_user_of_the_host_is_no_rank(ranks: Ranks) -> None:
    """Without a key: neither as a rank, nor as rank 0."""
    stranger = f"""
import socket, sys, time
host, port = {ranks.address!r}.split(":")
if sys.argv[1] == "serves":
    server = socket.create_server((host, int(port)))
    print("serves", flush=True)
    client, _ = server.accept()
    print("got", len(client.recv(100)), flush=True)
else:
    client = socket.create_connection((host, int(port)))
    client.sendall(bytes(16) + (1).to_bytes(8, "little"))  # the handshake of rank 1
    client.settimeout(20)
    try: print("got", len(client.recv(100)), flush=True)
    except ConnectionError: print("got 0", flush=True)
"""

    def other(what: str) -> subprocess.Popen[str]:
        command = [str(ANYONES_PYTHON), "-c", stranger, what]
        return subprocess.Popen(command, user=65534, group=65534, extra_groups=[], stdout=subprocess.PIPE, text=True)

    with other("serves") as server:
        assert server.stdout is not None
        assert server.stdout.readline() == "serves\n"
        ranks.succeeds(ranks.start(1, 2, "start_fails('a program of user 65534', 'DL_COMM_JOB_KEY')"))
        assert server.stdout.read() == "got 0\n", "nothing is sent to it"
    zero = ranks.start(0, 2, "mark('up.0')\ndl_comm.init()\ncheck_mean()")
    ranks.wait_for("up.0")
    time.sleep(1)
    with other("connects") as client:
        assert client.stdout is not None
        assert client.stdout.read() == "got 0\n", "no answer"
    ranks.succeeds(ranks.start(1, 2, "dl_comm.init()\ncheck_mean()"))
    assert "refused a connection: a program of user 65534" in ranks.succeeds(zero)


def test_a_key_lets_ranks_use_any_address(ranks: Ranks) -> None:
    ranks.run(2, "dl_comm.init()\ncheck_mean()", {"DL_COMM_JOB_KEY": "secret"})


@pytest.mark.parametrize("size", [1, 2, pytest.param(3, marks=pytest.mark.heavy)])
def test_every_collective_of_the_c_interface(ranks: Ranks, tmp_path: Path, size: int) -> None:
    program, package = tmp_path / "collectives", Path(dl_comm.__file__).parent
    links = [f"-L{package}", "-l:libdl_comm.so.0", f"-Wl,-rpath,{package},--allow-shlib-undefined"]
    source = Path(__file__).parent.parent / "c" / "collectives.c"
    subprocess.run(
        ["cc", f"-I{dl_comm.get_include()}", str(source), "-o", str(program), *links], check=True, timeout=60
    )
    ranks.run(size, f"os.execv({str(program)!r}, ['collectives'])")


def test_a_child_of_a_rank_is_a_helper(ranks: Ranks) -> None:
    ranks.run(
        2,
        """
dl_comm.init()
child = "import dl_comm; dl_comm.init(); print(dl_comm.get_rank(), dl_comm.get_nranks())"
output = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, check=True).stdout
assert output.split() == [str(rank), "2"], output
check_mean()
""",
    )


def test_a_launcher_comes_first(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import dl_comm\ndl_comm.init()\nassert dl_comm.get_nranks() == 2\nprint('fine')")
    env = {"DL_COMM_RANK": "0", "DL_COMM_SIZE": "5", "DL_COMM_ADDR": "127.0.0.1:1"}
    for variables in (env, {"DL_COMM_SIZE": "5"}):
        finished = launch(2, [sys.executable, str(script)], 60, variables)
        assert finished.returncode == 0, finished.output
        assert finished.output.count("fine") == 2


STORE = """
import ctypes, fcntl
from pathlib import Path
core = ctypes.CDLL(str(Path(dl_comm.__file__).parent / "libdl_comm.so.0"))
core.dl_comm_last_error.restype = ctypes.c_char_p
folder = Path(FOLDER)
void, text, double, big = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_double, ctypes.c_size_t
SET = ctypes.CFUNCTYPE(ctypes.c_int, void, text, void, big)
GET = ctypes.CFUNCTYPE(ctypes.c_int, void, text, double, void, big, ctypes.POINTER(big))
ADD = ctypes.CFUNCTYPE(ctypes.c_int, void, text, ctypes.c_int64, ctypes.POINTER(ctypes.c_int64))
REMOVE = ctypes.CFUNCTYPE(ctypes.c_int, void, text)
class Store(ctypes.Structure):
    _fields_ = [("size", big), ("context", void), ("set", SET), ("get", GET), ("add", ADD), ("remove", REMOVE)]
def path(key): return folder / key.decode().replace("/", "_")
def put(key, value):
    part = path(key + b".%d.%d" % (os.getpid(), threading.get_ident()))
    part.write_bytes(value)
    part.rename(path(key))
    return 0
@SET
def set_value(_, key, value, length): return put(key, ctypes.string_at(value, length))
@GET
def get_value(_, key, timeout, buffer, capacity, length):
    until = time.monotonic() + timeout
    while True:
        try: value = path(key).read_bytes()
        except FileNotFoundError:
            if time.monotonic() >= until: return 1
            time.sleep(0.001)
            continue
        length[0] = len(value)
        if len(value) <= capacity: ctypes.memmove(buffer, value, len(value))
        return 0
@ADD
def add_value(_, key, by, total):
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        number = path(key)
        total[0] = (int(number.read_bytes()) if number.exists() else 0) + by
        return put(key, b"%d" % total[0])
@REMOVE
def remove_key(_, key):
    path(key).unlink(missing_ok=True)
    return 0
store = Store(ctypes.sizeof(Store), None, set_value, get_value, add_value, remove_key)
def init_store(rank, size):
    code = core.dl_comm_init_store(ctypes.byref(store), rank, size)
    return code, core.dl_comm_last_error().decode()
"""


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_store_of_the_program(ranks: Ranks, tmp_path: Path, size: int) -> None:
    """Ranks may change from start to start, also after a job that left its keys in the store."""
    keys = tmp_path / "keys"
    keys.mkdir()
    text = """
me = rank
for start in range(4):
    rank = (me + start) % size
    assert init_store(rank, size)[0] == 0, init_store(rank, size)
    assert dl_comm.get_rank() == rank
    assert "initialized already" in init_store(rank, size)[1]
    dl_comm.init()
    check_mean()
    dl_comm.finalize()
"""
    prepared = STORE.replace("FOLDER", repr(str(keys)))
    ranks.run(size, prepared + text)
    assert [file.name for file in keys.iterdir() if file.name != "lock"] == []
    killed = prepared + "assert init_store(rank, size)[0] == 0\ndl_comm.init()\ncheck_mean()\nos._exit(0)"
    ranks.run(size, killed)
    ranks.run(size, prepared + text)


def test_a_broken_store_is_an_error(ranks: Ranks, tmp_path: Path) -> None:
    prepared = STORE.replace("FOLDER", repr(str(tmp_path)))
    ranks.succeeds(
        ranks.start(
            0,
            2,
            prepared
            + """
assert "ranks go from 0" in init_store(2, 2)[1]
store.set = SET(lambda *_: -7)
code, message = init_store(0, 2)
assert code == -8 and "failed with -7" in message, message
store.size = 3
assert "sizeof" in init_store(0, 2)[1]
""",
        )
    )
