"""dl-comm-run's options, hosts and command lines, without starting a rank."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import pytest

from dl_comm._base.network import addresses, variables
from dl_comm._base.text import runs_text
from dl_comm.run._banner import Banner
from dl_comm.run._find import BuiltFor, built_for
from dl_comm.run._hosts import Host, assign_ranks, parse_hostfile, parse_hosts, slurm
from dl_comm.run._listener import Rank, missed_deadline
from dl_comm.run._report import outcome
from launch import Finished, run

RUN = [sys.executable, "-m", "dl_comm.run"]
VERSIONS = {
    "mpich": "HYDRA build details:",
    "openmpi": "mpiexec (Open MPI) 5.0.11",
    "openmpi4": "mpirun (Open MPI) 4.1.6",
    "srun": "slurm 23.11.4",
    "plain": "a launcher 1.0",
}
BATCH = ("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_TASKS_PER_NODE", "PBS_NODEFILE", "OMP_NUM_THREADS")


@pytest.fixture(autouse=True)
def _outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*BATCH, *(name for name in os.environ if name.startswith("DL_COMM_"))]:
        monkeypatch.delenv(name, raising=False)


def fake(folder: Path, kind: str) -> str:
    """A fake launcher with the version text of ``kind``."""
    path = folder / ("srun" if kind == "srun" else f"mpiexec.{kind}")
    path.write_text(f"#!/bin/sh\necho '{VERSIONS[kind]}'\n")
    path.chmod(0o755)
    return str(path)


def words(folder: Path, kind: str, *options: str, env: dict[str, str] | None = None) -> str:
    """The printed command line, without the launcher's path."""
    path = fake(folder, kind)
    finished = run([*RUN, "--dry-run", "--mpiexec", path, *options], 60, env)
    assert finished.returncode == 0, finished.output
    before, _, line = finished.output.strip().partition(path)
    # Open MPI's command line has all DL_COMM_* variables, also the test's own.
    return f"{before.strip()} {line.strip()}".replace("-x DL_COMM_TEST_LAUNCH ", "").strip()


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        ("mpich", "-n 4 -hosts a:2,b:2 -bind-to core -iface eth9 -v prog 1"),
        (
            "openmpi",
            "-n 4 --host a:2,b:2 --bind-to core:overload-allowed --mca btl_tcp_if_include eth9 "
            "--prtemca prte_if_include eth9 NAMES -v prog 1",
        ),
        (
            "openmpi4",
            "-n 4 --host a:2,b:2 --bind-to core:overload-allowed --mca btl_tcp_if_include eth9 "
            "--mca oob_tcp_if_include eth9 NAMES -v prog 1",
        ),
        (
            "srun",
            "-n 4 --kill-on-bad-exit=1 --export=ALL -N 2 -w a,b --ntasks-per-node=2 --cpu-bind=cores -v prog 1",
        ),
    ],
)
def test_the_command_line_of_each_launcher(tmp_path: Path, kind: str, line: str) -> None:
    options = ("-H", "a:2,b:4", "-n", "4", "--bind", "core", "--network", "eth9", "-x", "V=w", "--mpi-args=-v")
    variables_set = {"DL_COMM_SOCKET_IFNAME": "eth9", "FI_TCP_IFACE": "eth9", "UCX_NET_DEVICES": "eth9"}
    variables_set |= {"OMPI_MCA_btl_tcp_if_include": "eth9", "V": "w"}
    before = "env " + " ".join(f"{name}={value}" for name, value in variables_set.items())
    line = line.replace("NAMES", " ".join(f"-x {name}" for name in sorted(variables_set)))
    # With srun, a:2,b:4 and four ranks are two on each.
    assert words(tmp_path, kind, *options, "prog", "1") == f"{before} {line}"


def test_short_lines(tmp_path: Path) -> None:
    assert words(tmp_path, "mpich", "-n", "2", "p") == "-n 2 p"
    assert words(tmp_path, "mpich", "-n", "2", "--ppn", "1", "p") == "-n 2 -ppn 1 p"
    assert words(tmp_path, "openmpi", "-n", "2", "p") == "-n 2 --map-by slot:OVERSUBSCRIBE --bind-to none p"
    assert words(tmp_path, "openmpi", "-n", "2", "--ppn", "1", "p") == "-n 2 --map-by ppr:1:node --bind-to none p"
    assert words(tmp_path, "plain", "-n", "2", "train.py") == f"-n 2 {sys.executable} train.py"
    assert words(tmp_path, "plain", "-n", "2", "--", "-p") == "-n 2 -p"


def test_batch_systems_name_the_hosts(tmp_path: Path) -> None:
    (tmp_path / "nodes").write_text("n1\nn1\nn2\nn2\n")
    pbs = {"PBS_NODEFILE": str(tmp_path / "nodes")}
    assert words(tmp_path, "mpich", "p", env=pbs) == "-n 4 -hosts n1:2,n2:2 p"
    assert words(tmp_path, "mpich", "--ppn", "1", "p", env=pbs) == "-n 2 -hosts n1:1,n2:1 p"
    assert words(tmp_path, "mpich", "-n", "3", "p", env=pbs) == "-n 3 -hosts n1:2,n2:1 p"
    inside = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_TASKS_PER_NODE": "4(x3)"}
    assert words(tmp_path, "mpich", "p", env=inside) == "-n 12 p"
    assert words(tmp_path, "srun", "--ppn", "2", "p", env=inside).startswith("-n 6 --kill-on-bad-exit=1")


def refused(*options: str, env: dict[str, str] | None = None) -> Finished:
    finished = run([*RUN, *options], 60, env)
    assert finished.returncode == 2, finished.output
    return finished


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["-n", "2"], "no program to run"),
        (["program"], "how many ranks?"),
        (["-n", "0", "p"], "-n 0: must be at least 1"),
        (["-n", "two", "p"], "invalid int value: 'two'"),
        (["-H", "a:x", "p"], "'a:x': the number of slots"),
        (["-H", "a:1,b:1", "-n", "3", "p"], "3 ranks, but the hosts have 2 slots"),
        (["-H", "a", "--hostfile", "b", "p"], "not both"),
        (["--hostfile", "/nowhere/hosts", "p"], "cannot read /nowhere/hosts"),
        (["-n", "2", "-x", "NOT_SET_HERE", "p"], "-x NOT_SET_HERE: the variable is not set here"),
        (["-n", "2", "-x", "1X=2", "p"], "not a variable name"),
        (["-n", "2", "--env-file", "/dev/null", "--mpiexec", "/nowhere/mpiexec", "p"], "no such program"),
        (["-n", "2", "--bind", "socket", "p"], "invalid choice: 'socket'"),
        (["-n", "2", "--output-dir", "/dev/null/x", "p"], "--output-dir /dev/null/x"),
        (["-n", "2", "--grace", "-1", "p"], "--grace -1.0"),
    ],
)
def test_bad_input_is_refused(options: list[str], text: str) -> None:
    assert text in refused(*options).output


def test_unsupported_launcher_options_are_refused(tmp_path: Path) -> None:
    plain, srun = fake(tmp_path, "plain"), fake(tmp_path, "srun")
    assert "pass hosts, --bind" in refused("--mpiexec", plain, "-H", "a", "--bind", "core", "p").output
    assert "same number of ranks on each host" in refused("--mpiexec", srun, "-H", "a:1,b:2", "p").output


def test_the_launcher_is_that_of_the_mpi(tmp_path: Path) -> None:
    """``libmpi.so.40`` is Open MPI's; the folder is in the core's run path."""
    core = tmp_path / "env/lib/python3/site-packages/dl_comm/libdl_comm.so.0"
    mpi = tmp_path / "mpi"
    for path in (core, mpi / "lib/libmpi.so.40", mpi / "bin/mpiexec"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    core.write_bytes(b"\x7fELF\0libmpi.so.40\0libc.so.6\0/none:" + str(mpi / "lib").encode() + b":$ORIGIN/../../..\0")
    assert built_for(core) == BuiltFor("openmpi", mpi / "bin/mpiexec")
    assert not built_for(core).bundled
    assert built_for(tmp_path / "absent") == BuiltFor()
    assert built_for().kind in ("mpich", "openmpi")


def test_the_launcher_of_another_mpi_is_refused(tmp_path: Path) -> None:
    other = "openmpi" if built_for().kind == "mpich" else "mpich"
    finished = refused("--launcher", other, "-n", "2", "p", env={"PATH": str(tmp_path)})
    assert f"no mpiexec of {other} was found" in finished.output


def test_hosts() -> None:
    assert parse_hosts("a:2,b,a:1") == (Host("a", 3), Host("b", 1))
    text = "# all\na:2 ifname=eth1\n\nb slots=4 max_slots=8 # fast\nc\nc\n"
    assert parse_hostfile(text) == (Host("a", 2), Host("b", 4), Host("c", 2))
    for wrong in ("", "a b", ":3", "a:0", "a slots=x"):
        with pytest.raises(ValueError):
            parse_hostfile(wrong)
    assert slurm("n[09-10,3]x,m", "2(x3),1") == (Host("n09x", 2), Host("n10x", 2), Host("n3x", 2), Host("m", 1))
    assert slurm("a[1-2]b[3-4]", None) == tuple(map(Host, ("a1b3", "a1b4", "a2b3", "a2b4")))
    with pytest.raises(ValueError, match="names 2 hosts"):
        slurm("n1", "1,1")
    assert assign_ranks((Host("a", 2), Host("b", 2)), 3, None) == (Host("a", 2), Host("b", 1))
    assert assign_ranks((Host("a", 2), Host("b", 2)), 1, None) == (Host("a", 1),)
    assert assign_ranks((Host("a", 2), Host("b", 2)), None, 4) == (Host("a", 4), Host("b", 4))


def test_networks(tmp_path: Path) -> None:
    (tmp_path / "ib0/device/infiniband/mlx5_0").mkdir(parents=True)
    (tmp_path / "ib0/dev_port").write_text("1\n")
    assert variables("ib0", tmp_path)["UCX_NET_DEVICES"] == "mlx5_0:2,ib0"
    assert variables("eth7", tmp_path)["UCX_NET_DEVICES"] == "eth7"
    assert addresses([], None) == addresses(["localhost", socket.gethostname()], None) == ["127.0.0.1"]
    assert "127.0.0.1" not in addresses(["elsewhere.invalid"], None)


def ended(rank: int, order: int | None, **end: object) -> Rank:
    end_report: dict[str, object] = {"tail": [], **end}
    if "killed" not in end:
        end_report = {"status": 0, "signal": 0, "asked": 0, "seconds": 1.0, "oom": False, **end_report}
    return Rank(rank, "h", 0.0, end_report if order is not None else None, order, 1.0)


def judged(*ranks: Rank, code: int = 1, asked: int | None = None) -> tuple[int, str]:
    found = outcome({rank.rank: rank for rank in ranks}, 4, "mpiexec", code, asked)
    return found.status, found.text


def test_a_lost_rank_sorts_before_ranks_that_report_it() -> None:
    lost = {"status": 1, "tail": ["dl_comm.PeerLostError: rank 2 (pid 9 on h) has ended"]}
    slow = ended(2, 2, killed=True, tail=["KeyError: 'x'"])
    status, text = judged(ended(0, 0, **lost), ended(1, 1, **lost), slow)
    assert status == 1
    assert text.splitlines()[0].startswith("rank 2 on h failed first")
    assert "  | KeyError: 'x'" in text
    assert "rank(s) 0-1 failed later: exit status 1" in text


def test_a_lost_rank_of_a_group_is_the_one_of_the_job() -> None:
    text = "dl_comm.PeerLostError: rank 1 (rank 2 on h of the job) (pid 9) has ended: killed by signal 9"
    _, text = judged(ended(1, 0, status=1, tail=[text]), ended(2, 1, signal=9))
    assert text.startswith("rank 2 on h failed first")


def test_a_traceback_is_not_repeated() -> None:
    for before in ("", "[rank1]: "):
        trace = ['  File "b.py", line 2, in <module>', "    f(", "  ^^^^", "ValueError: two", "lines"]
        _, text = judged(ended(1, 0, status=1, tail=["last step", *(before + line for line in trace)]))
        assert text.splitlines()[1:] == ["its last lines:", f"  | {before}ValueError: two", f"  | {before}lines"]
    _, text = judged(ended(1, 0, status=1, tail=["no", "traceback"]))
    assert text.splitlines()[1:] == ["its last lines:", "  | no", "  | traceback"]


@pytest.mark.parametrize("limit", ["DL_COMM_TIMEOUT_S", "the timeout of its group", "the timeout of this call"])
def test_every_missed_deadline_is_known(limit: str) -> None:
    text = f"allreduce 'x' was not complete after 8.0 s ({limit}); still waiting for rank 1 on vm"
    for error in ("dl_comm.TimeoutError", "[rank0]: torch.distributed.DistBackendError: dl_comm error -5"):
        assert missed_deadline(ended(0, 0, status=1, tail=["Traceback", f"{error}: {text}"])), error
    assert not missed_deadline(ended(0, 0, status=1, tail=["TimeoutError: no answer after 8.0 s"]))


def test_stopped_ranks_are_no_success() -> None:
    well = ended(0, 0, status=0)
    assert judged(well, ended(1, 1, status=0), code=0) == (0, "")
    for cut in (ended(1, None), ended(1, 1, killed=True)):
        status, text = judged(well, cut, code=0)
        assert status == 1
        assert "rank(s) 0 had ended with status 0 before the others" in text


def test_outcomes_without_a_failed_rank() -> None:
    assert judged(ended(0, 0), code=0) == (0, "")
    assert judged(code=-9) == (
        137,
        "mpiexec exited with status 137 before any rank had started; see its output above",
    )
    status, text = judged(ended(0, 0), ended(1, None), ended(2, 1, killed=True), code=5)
    assert status == 5
    assert "rank(s) 0 had ended with status 0 before the others" in text
    assert "rank(s) 1 were lost without a report" in text
    assert "rank(s) 3 never started" in text
    assert judged(ended(0, 0, signal=15, asked=15), asked=15)[0] == 143
    assert "out of memory" in judged(ended(0, 0, signal=9, oom=True))[1]
    assert runs_text([4, 0, 2, 3]) == "0, 2-4"


BANNER = (
    "=" * 83
    + "\n=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES\n=   EXIT CODE: 9\n"
    + "=" * 83
    + "\nYOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)\n"
    + "Please see the FAQ page for debugging suggestions\n"
)


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_a_banner_is_removed_from_any_chunks(size: int) -> None:
    for text, rest in (
        (f"loss 1\n{BANNER}", "loss 1\n"),
        (f"{BANNER}more\n", "more\n"),
        (BANNER.partition("YOUR APPLICATION TERMINATED")[0], ""),
        ("=====\n==\n" + "=" * 83 + "\n=   BAD\n", None),
        ("a" + BANNER, None),
        ("progress: " + "=" * 83, None),
        ("=" * 83, None),
        ("=" * 83 + "\n=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES\n" + "x\n" * 5000, None),
    ):
        banner, shown = Banner(), b""
        data = text.encode()
        for start in range(0, len(data), size):
            shown += banner.feed(data[start : start + size])
        assert (shown + banner.rest()).decode() == (text if rest is None else rest)
