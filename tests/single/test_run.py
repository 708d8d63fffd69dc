"""Real launches of dl-comm-run on this host, and on two hosts (network namespaces): output, exits, reports."""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from hosts import Hosts, possible
from launch import Finished, run

Runner = Callable[..., Finished]
RUN = [sys.executable, "-m", "dl_comm.run"]

PROGRAM = """
import os, signal, sys, time
rank = int(os.environ["PMI_RANK"])
print("hello from", rank)
print("noted by", rank, file=sys.stderr)
"""
MPI = "import sys, time, os\nimport dl_comm as mc\nmc.init()\nrank = mc.get_rank()\nprint('hello from', rank)\n"


# A line written in pieces is shown when complete; the prompt stays incomplete until the test has seen it.
PIECES = """
import os, sys, time
for word in ("one", " line\\n", "prompt> "):
    print(word, end="")
until = time.monotonic() + 50
while not os.path.exists(sys.argv[1]) and time.monotonic() < until:
    time.sleep(0.01)
print("answered" if os.path.exists(sys.argv[1]) else "nobody saw it")
"""


@pytest.fixture
def ranks(tmp_path: Path) -> Runner:
    """Runs Python text on two ranks: ``ranks(text, options...)``."""

    def start(text: str, *options: str, env: dict[str, str] | None = None) -> Finished:
        script = tmp_path / "script.py"
        script.write_text(text)
        return run([*RUN, "-n", "2", *options, str(script)], 60, env)

    return start


def test_default_output(ranks: Runner) -> None:
    finished = ranks(PROGRAM)
    assert finished.returncode == 0, finished.output
    assert sorted(finished.output.splitlines()) == ["[1] noted by 1", "hello from 0", "noted by 0"]


def test_incomplete_lines_are_shown_after_a_delay(tmp_path: Path) -> None:
    (script := tmp_path / "script.py").write_text(PIECES)
    (log := tmp_path / "log").touch()

    ended = threading.Event()

    def answer() -> None:
        while "prompt> " not in log.read_text() and not ended.wait(0.01):
            pass
        (tmp_path / "seen").touch()

    (answering := threading.Thread(target=answer)).start()
    command = [*RUN, "-n", "1", str(script), str(tmp_path / "seen")]
    # dl-comm-run itself makes Python's output unbuffered.
    finished = run(command, 60, {"PYTHONUNBUFFERED": ""}, log=log)
    ended.set()
    answering.join()
    assert finished.output == "one line\nprompt> answered\n", finished.output


def test_tags_and_a_file_for_each_rank(ranks: Runner, tmp_path: Path) -> None:
    text = PROGRAM + "print('x' * 3000, end='')\n"
    finished = ranks(text, "--tag-output", "--output-dir", str(tmp_path / "logs"))
    long = "x" * 3000
    lines = [f"[{rank}] {words}" for rank in (0, 1) for words in (f"hello from {rank}", f"noted by {rank}", long)]
    assert sorted(finished.output.splitlines()) == sorted(lines)
    for rank in (0, 1):
        kept = (tmp_path / f"logs/rank-{rank}.log").read_text().replace(long, "")
        assert sorted(kept.splitlines()) == [f"hello from {rank}", f"noted by {rank}"]


def test_a_log_file_that_is_a_link_is_left_alone(ranks: Runner, tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("kept")
    (tmp_path / "rank-1.log").symlink_to(tmp_path / "kept")
    finished = ranks(PROGRAM, "--output-dir", str(tmp_path))
    assert f"cannot write {tmp_path}/rank-1.log: it is a link" in finished.output
    assert "hello from 0" in (tmp_path / "rank-0.log").read_text()
    assert (tmp_path / "kept").read_text() == "kept"


def test_all_output(ranks: Runner) -> None:
    finished = ranks(PROGRAM, "--all-output")
    assert sorted(finished.output.splitlines()) == ["hello from 0", "hello from 1", "noted by 0", "noted by 1"]


def test_variables_reach_the_ranks(ranks: Runner, tmp_path: Path) -> None:
    (tmp_path / "vars").write_text("# of the file\n\nONE=1 = one\nTWO=file\n")
    names = ("ONE", "TWO", "THREE", "OMP_NUM_THREADS", "DL_COMM_RUN_CONFIG")
    text = f"import os\nprint([os.environ.get(n) for n in {names}])"
    given = ("--env-file", str(tmp_path / "vars"), "-x", "TWO=2 2", "-x", "THREE", "--omp-threads", "3")
    finished = ranks(text, *given, env={"THREE": "3"})
    assert finished.output.strip() == "['1 = one', '2 2', '3', '3', None]"


def test_threads_share_the_cores_of_the_host(ranks: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    finished = ranks("import os\nprint(os.environ['OMP_NUM_THREADS'])")
    assert finished.output.strip() == str(max(1, len(os.sched_getaffinity(0)) // 2))


def test_averages_under_dl_comm_run(ranks: Runner) -> None:
    text = MPI + "import numpy as np\nprint('mean', mc.gradients([np.full(3, rank, np.float32)], 0)[0][0])"
    finished = ranks(text, "--all-output", "--bind", "none")
    assert finished.returncode == 0, finished.output
    assert finished.output.count("mean 0.5") == 2


@pytest.mark.parametrize(
    ("fault", "status", "words"),
    [
        ("raise ValueError('boom')", 1, ["exit status 1", "| ValueError: boom"]),
        ("os.kill(os.getpid(), 9)", 137, ["killed by SIGKILL (signal 9)", "| hello from 1"]),
        (
            "os.kill(os.getpid(), 11)",
            139,
            ["killed by SIGSEGV (signal 11)", "| Fatal Python error: Segmentation fault"],
        ),
        ("os._exit(3)", 3, ["exit status 3", "| hello from 1"]),
    ],
)
def test_the_first_failure_is_named(ranks: Runner, fault: str, status: int, words: list[str]) -> None:
    """The other rank waits in a barrier."""
    finished = ranks(MPI + f"if rank == 1:\n    time.sleep(0.3)\n    {fault}\nmc.barrier()\ntime.sleep(100)")
    assert finished.returncode == status, finished.output
    summary = finished.output[finished.output.index("dl-comm-run: rank 1 on ") :]
    assert re.search(r"rank 1 on \S+ failed first, after \d+\.\d s", summary), finished.output
    assert all(word in summary for word in words), finished.output
    assert "rank(s) 0 " in summary


def test_later_failures_print_one_line_each(ranks: Runner) -> None:
    finished = ranks(MPI + "if rank == 1: raise ValueError('boom')\nmc.barrier()", "-n", "3", "--all-output")
    before, verdict = finished.output.split("dl-comm-run: ", 1)
    assert before.count("Traceback") == 1, before
    for rank in (0, 2):
        assert re.search(rf"^dl_comm: rank {rank} ends in .*script.py, line \d+: PeerLostError: .*rank 1", before, re.M)
    assert verdict.startswith("rank 1 on ")


def test_the_launchers_banner_is_removed(ranks: Runner) -> None:
    text = MPI + "sys.stdout.flush()\nif rank == 1: os.kill(os.getpid(), 9)\ntime.sleep(100)"
    finished = ranks(text)
    assert finished.output.splitlines()[0] == "hello from 0"
    assert "BAD TERMINATION" not in finished.output
    assert "=====" not in finished.output
    assert "rank 1 on " in finished.output


def test_a_common_failure_is_reported_once(ranks: Runner) -> None:
    finished = ranks("raise ValueError('everywhere')")
    assert finished.returncode == 1
    assert len(re.findall(r"failed first", finished.output)) == 1, finished.output
    assert re.search(r"^dl-comm-run: same failure on 1 more: rank\(s\) [01]$", finished.output, re.MULTILINE), (
        finished.output
    )


HANG = (
    MPI
    + """
import numpy as np

def load_batch():
    time.sleep(60)

mc.gradients([np.ones(4)])
if rank == 1:
    load_batch()
mc.gradients([np.ones(4)])
"""
)


# The second job has no warning before its deadline, and finds the dumps of the first.
@pytest.mark.parametrize(("warn", "how"), [("0.5", "seen at the warning"), ("60", "seen at the deadline")])
def test_a_hang_names_the_rank_and_its_line(ranks: Runner, tmp_path: Path, warn: str, how: str) -> None:
    folder = tmp_path / "dumps"
    limits = {"DL_COMM_STALL_WARN_S": warn, "DL_COMM_TIMEOUT_S": "4", "DL_COMM_DUMP_DIR": str(folder)}
    finished = ranks(HANG, env=limits)
    assert finished.returncode == 1, finished.output
    verdict = [line for line in finished.output.splitlines() if line.startswith("dl-comm-run: ")]
    assert len(verdict) == 1, finished.output
    assert re.search(
        r"rank 1 on \S+ \(pid \d+\) has not called average on team 0 .*, in which rank 0 has waited .*"
        r"it runs user code \(script.py, line 10 in load_batch, called from script.py, line 14 in <module>\); "
        r"rank\(s\) 0 gave up then: exit status 1",
        verdict[0],
    ), verdict[0]
    assert finished.output.count("Traceback") == 1, finished.output
    assert {path.name for path in folder.iterdir()} == {"rank0.json", "rank1.json"}, how


def test_dumps_of_an_earlier_job_are_no_hang(ranks: Runner, tmp_path: Path) -> None:
    folder = str(tmp_path / "dumps")
    assert ranks(MPI + "mc.dump()\n", env={"DL_COMM_DUMP_DIR": folder}).returncode == 0
    failing = "if rank == 1: raise TimeoutError('DL_COMM_TIMEOUT_S')\nmc.barrier()\n"
    finished = ranks(MPI + failing, env={"DL_COMM_DUMP_DIR": folder})
    assert re.search("dl-comm-run: rank 1 on .* failed first", finished.output), finished.output


def test_an_abort_is_reported(ranks: Runner) -> None:
    pytest.importorskip("mpi4py")
    text = "from mpi4py import MPI\nimport time\nif MPI.COMM_WORLD.rank == 1: MPI.COMM_WORLD.Abort(7)\ntime.sleep(100)"
    finished = ranks(text)
    assert finished.returncode == 7, finished.output
    assert re.search(r"dl-comm-run: rank 1 on \S+ called MPI_Abort", finished.output), finished.output


def test_a_missing_program() -> None:
    finished = run([*RUN, "-n", "2", "/nowhere/program"], 60)
    assert finished.returncode == 127, finished.output
    assert "cannot start /nowhere/program: No such file or directory" in finished.output


def test_stdin_goes_to_rank_0(tmp_path: Path) -> None:
    (tmp_path / "in").write_text("a line\n")
    text = "import os, sys\nif os.environ['PMI_RANK'] == '0': print('read', sys.stdin.read().strip())"
    finished = run(
        ["sh", "-c", 'exec "$@" < "$0"', str(tmp_path / "in"), *RUN, "-n", "2", sys.executable, "-c", text], 60
    )
    assert finished.output.strip() == "read a line"


LAUNCHER = """
import os, signal, subprocess, sys, time
from pathlib import Path
folder, number, program = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
job = subprocess.Popen(program)
def pids(): return [int(word) for file in folder.glob("pids-*.done") for word in file.read_text().split()]
while len(pids()) < 4:
    time.sleep(0.05)
if number != signal.SIGKILL:
    job.send_signal(signal.SIGUSR1)
    while len(list(folder.glob("usr1-*"))) < 2:
        time.sleep(0.05)
job.send_signal(number)
status = job.wait()
def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
for _ in range(400):
    if not any(alive(pid) for pid in pids()):
        print("status", status, "all gone")
        break
    time.sleep(0.05)
"""


@pytest.mark.parametrize(("number", "status"), [(9, -9), (15, 143), (2, 130)])
def test_no_process_survives_a_stop(tmp_path: Path, number: int, status: int) -> None:
    """No rank and no child of a rank survives; other signals reach the ranks."""
    (tmp_path / "rank.py").write_text(
        "import os, signal, subprocess, time\nfrom pathlib import Path\n"
        f"folder, rank = Path({str(tmp_path)!r}), os.environ['PMI_RANK']\n"
        "signal.signal(signal.SIGUSR1, lambda *_: (folder / f'usr1-{rank}').touch())\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        "(folder / f'pids-{rank}').write_text(f'{os.getpid()} {child.pid}')\n"
        "(folder / f'pids-{rank}').rename(folder / f'pids-{rank}.done')\n"
        "while True: time.sleep(0.1)\n"
    )
    driver = [sys.executable, "-c", LAUNCHER, str(tmp_path), str(number)]
    finished = run([*driver, *RUN, "-n", "2", str(tmp_path / "rank.py")], 60)
    assert f"status {status} all gone" in finished.output, finished
    if number != 9:
        assert "dl-comm-run: stopped by SIG" in finished.output


PLAIN = """#!/bin/sh
shift 2
PMI_RANK=0 "$@" & first=$!
PMI_RANK=1 "$@" & second=$!
trap 'kill $first $second' TERM
wait $second; wait $first; wait $first
exit 0
"""


def test_a_launcher_that_kills_no_rank_is_stopped(ranks: Runner, tmp_path: Path) -> None:
    """An unknown launcher is sufficient."""
    plain = tmp_path / "start"
    plain.write_text(PLAIN)
    plain.chmod(0o755)
    text = PROGRAM + "if rank == 1: sys.exit('no more')\ntime.sleep(100)"
    finished = ranks(text, "--mpiexec", str(plain), "--grace", "0.5")
    assert finished.returncode == 1, finished.output
    assert re.search(r"rank 1 on \S+ failed first.*exit status 1", finished.output), finished.output
    assert "  | no more" in finished.output
    assert "rank(s) 0 were stopped then" in finished.output


def test_a_check_that_fails_stops_the_launch(tmp_path: Path) -> None:
    doctor = tmp_path / "mpiexec"
    doctor.write_text('#!/bin/sh\necho "asked: $*"\nexit 1\n')
    doctor.chmod(0o755)
    options = ["--launcher", "mpich", "--mpiexec", str(doctor), "-H", "far:4,away:4", "--check"]
    finished = run([*RUN, *options, "program"], 60)
    assert finished.returncode == 1
    assert f"asked: -n 2 -hosts far:1,away:1 {sys.executable} -m dl_comm.doctor" in finished.output
    assert "nothing was started" in finished.output
    assert finished.output.count("asked") == 1


@pytest.mark.skipif(not possible(), reason="needs root and iproute2 to make network namespaces")
def test_two_hosts(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(MPI + "assert mc.num_hosts() == 2\nif rank == 1: raise ValueError('boom')\nmc.barrier()")
    with Hosts(2) as hosts:
        slots = ",".join(f"{name}:1" for name in hosts.names)
        options = ["-H", slots, "--network", "eth0", "--grace", "1", "--mpi-args", hosts.ssh]
        finished = hosts.run([*RUN, *options, str(script)], 100)
    assert finished.returncode == 1, finished.output
    assert f"rank 1 on {hosts.names[1]} failed first" in finished.output, finished.output
    assert "  | ValueError: boom" in finished.output
