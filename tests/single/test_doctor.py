"""``python -m dl_comm.doctor`` without a launcher, on ranks and on hosts, and with injected problems."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dl_comm._base.text import runs_text
from dl_comm.doctor import _frameworks, _host
from dl_comm.doctor._checks import numbers_of
from dl_comm.doctor._launcher import launch_of, without_launcher
from dl_comm.doctor._network import _address
from dl_comm.doctor._probes import Failed
from dl_comm.doctor._ranks import check as check_ranks
from dl_comm.doctor._ranks import path
from dl_comm.doctor._single_rank import _two_ranks
from dl_comm.doctor._tested import TESTED, is_tested
from hosts import Hosts, possible
from launch import Finished, launch, run

DOCTOR = [sys.executable, "-m", "dl_comm.doctor"]
GROUPS = ["build", "mpi", "frameworks", "host", "gpu", "ranks", "bandwidth"]


def report(finished: Finished) -> dict[str, Any]:
    """The printed JSON object."""
    (line,) = [line for line in finished.output.splitlines() if line.startswith('{"healthy"')]
    return json.loads(line)


def found(content: dict[str, Any], group: str, name: str) -> dict[str, Any]:
    """The check ``name``."""
    (check,) = [check for check in content["groups"][group] if check["name"] == name]
    return check


def test_all_checks_without_a_launcher() -> None:
    finished = run([*DOCTOR, "--json"], 200)
    assert finished.returncode == 0, finished.output
    content = report(finished)
    assert content["healthy"] is True
    assert content["summary"].startswith("healthy")
    assert list(content["groups"]) == GROUPS
    assert all(content["groups"].values())
    library = found(content, "mpi", "library")["facts"]
    assert os.path.exists(library["library"])
    assert library["family"] in ("mpich", "openmpi")
    assert found(content, "mpi", "one rank")["facts"]["thread_level"].startswith("MPI_THREAD_")
    assert [rank["rank"] for rank in found(content, "ranks", "placement")["facts"]["ranks"]] == [0, 1]
    (row,) = found(content, "ranks", "paths")["facts"]["rows"]
    assert (row["inside"], row["outside"], row["ranks_each"]) == ("shared memory", None, 2)
    bandwidth = found(content, "bandwidth", "average")["facts"]
    assert bandwidth["bytes"] >= 1 << 20
    assert bandwidth["ratio"] == pytest.approx(bandwidth["average_s"] / bandwidth["limit_s"], rel=0.01)
    assert content["process"]["settings"]["DL_COMM_SHM_DIR"] == "/dev/shm"
    for framework in ("torch", "tensorflow"):
        check = found(content, "frameworks", framework)
        assert check["verdict"] != "bad"
        assert not check["facts"]["installed"] or check["facts"]["import_s"] > 0
    check = found(content, "frameworks", "torch.distributed")
    assert check["verdict"] == "ok"
    assert check["facts"]["library"] is None or check["facts"]["all_reduce_is_right"] is True


@pytest.mark.parametrize(
    ("result", "text"),
    [(Failed("was killed by signal 11"), "was killed by signal 11"), ({"all_reduce_is_right": False}, "is wrong")],
)
def test_a_backend_that_does_not_work(
    result: Failed | dict[str, bool], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Fake:
        def __init__(self, *arguments: str) -> None:
            self._is_backend = arguments == ("distributed",)

        def result(self) -> Any:
            if self._is_backend and isinstance(result, Failed):
                raise result
            return result if self._is_backend else {"import_s": 1.0, "cuda_build": None}

    monkeypatch.setattr(_frameworks, "Probe", Fake)
    monkeypatch.setattr(_frameworks, "existing_library", lambda name: Path("/there") / name)
    monkeypatch.setattr(_frameworks, "is_installed", lambda name: name == "torch")
    monkeypatch.setattr(_frameworks, "framework_version", lambda name: f"{name}-2.15.0")
    (check,) = [each for each in _frameworks.Frameworks(True).check() if each.name == "torch.distributed"]
    assert check.verdict == "bad"
    assert text in check.text


def test_leftovers_and_unknown_variables_are_named(tmp_path: Path) -> None:
    left = tmp_path / f"dl_comm.{7:032x}"
    left.write_bytes(b"0")
    env = {"DL_COMM_SHM_DIR": str(tmp_path), "DL_COMM_TIMEOUT": "5"}
    content = report(run([*DOCTOR, "--json", "--quick"], 200, env))
    check = found(content, "host", "left behind")
    assert check["verdict"] == "warn"
    assert str(left) in check["facts"]["segments"]
    settings = found(content, "build", "settings")
    assert (settings["verdict"], settings["facts"]["unknown"]) == ("warn", {"DL_COMM_TIMEOUT": "DL_COMM_TIMEOUT_S"})


@pytest.mark.parametrize(
    ("prints", "verdict", "text"),
    [
        ('{"healthy": true, "groups": {}}', "warn", "ended with status 9: Killed (signal 9), after its report"),
        ("rank 1 said this", "bad", "gave no report and ended with status 9: Killed (signal 9)"),
    ],
)
def test_two_ranks_with_a_killed_one(tmp_path: Path, prints: str, verdict: str, text: str) -> None:
    mpiexec = tmp_path / "mpiexec"
    lines = [prints, "=   EXIT CODE: 9", "Killed (signal 9)", "Please see the FAQ page for debugging suggestions"]
    mpiexec.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in lines) + "exit 9\n")
    mpiexec.chmod(0o755)
    (check,) = _two_ranks(str(mpiexec), quick=True)
    assert check.verdict == verdict
    assert text in check.text
    assert "EXIT CODE" in check.facts["output"]


def test_one_of_two_ranks_reports() -> None:
    finished = launch(2, [*DOCTOR, "--quick"], 120)
    assert finished.returncode == 0, finished.output
    assert len(re.findall(r"^healthy", finished.output, re.MULTILINE)) == 1, finished.output
    assert re.findall(r"^ +rank (\d): ", finished.output, re.MULTILINE) == ["0", "1"]
    assert re.search(r"^  ok   paths: .*shared memory", finished.output, re.MULTILINE)
    assert "BAD" not in finished.output


def test_a_single_launched_rank_reports_missing_tests() -> None:
    finished = launch(1, [*DOCTOR, "--ranks-only"], 120)
    assert finished.returncode == 0, finished.output
    assert "mpiexec -n 2" in finished.output
    assert "GB/s" in finished.output


@pytest.mark.parametrize(
    ("env", "text"),
    [
        ({"PMI_SIZE": "2"}, "MPI sees only this one|an mpiexec of the MPICH"),
        ({"DL_COMM_TIMEOUT_S": "soon"}, "DL_COMM_TIMEOUT_S is 'soon'"),
        ({"DL_COMM_SHM_DIR": "/nonexistent"}, "/nonexistent cannot be used"),
    ],
)
def test_problems_are_bad_and_first(env: dict[str, str], text: str) -> None:
    finished = run([*DOCTOR, "--quick", "--json", "--no-launch"], 120, env)
    assert finished.returncode == 1, finished.output
    content = report(finished)
    assert content["healthy"] is False
    assert re.search(text, content["summary"])


def test_the_launcher_of_another_mpi_is_bad_on_every_process() -> None:
    """MPI is not started, because that may abort the job; rank 0 reports, and all exit with the same status."""
    content = report(run([*DOCTOR, "--quick", "--json", "--no-launch"], 120))
    family = found(content, "mpi", "library")["facts"]["family"]
    names = ("PMI_RANK", "PMI_SIZE") if family == "openmpi" else ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
    outputs = []
    for rank in ("0", "1"):
        finished = run([*DOCTOR, "--quick"], 120, dict(zip(names, (rank, "2"), strict=True)))
        assert finished.returncode == 1, finished.output
        outputs.append(finished.output)
    assert "NOT healthy; first: mpi, launcher: " in outputs[0]
    assert "NOT healthy" not in outputs[1]
    assert "dl_comm.doctor, rank 1: MPI was not started" in outputs[1]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a small file system")
def test_too_small_shared_memory_is_bad_on_two_ranks(tmp_path: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)], check=True)
    try:
        finished = launch(2, [*DOCTOR, "--quick"], 120, {"DL_COMM_SHM_DIR": str(tmp_path)})
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
    assert finished.returncode == 1, finished.output
    assert f"BAD  shared memory: {tmp_path}: tmpfs, 1 MiB" in finished.output
    assert "BAD  start: rank 0: " in finished.output


def test_the_memory_that_a_job_needs_is_known_with_invalid_settings_too() -> None:
    text = "from dl_comm import _dl_comm; print(_dl_comm.describe())"
    described = json.loads(run([sys.executable, "-c", text], 60, {"DL_COMM_TIMEOUT_S": "soon"}).output)
    assert "soon" in described["settings_error"]
    (memory,) = (check for check in _host.check(described, 2) if check.name == "shared memory")
    assert memory.facts["needed_bytes"] == 2 * described["group_bytes"][1] > 8 << 20


def test_a_crashing_framework_is_bad_without_side_effects(tmp_path: Path) -> None:
    for name, text in (
        ("torch", "import os\nos.abort()\n"),
        ("tensorflow", "raise ImportError('lib.so is not there')\n"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(text)
    finished = run([*DOCTOR, "--json", "--no-launch"], 120, {"PYTHONPATH": str(tmp_path)})
    assert finished.returncode == 1, finished.output
    content = report(finished)
    assert "was killed by signal 6" in found(content, "frameworks", "torch")["text"]
    assert "lib.so is not there" in found(content, "frameworks", "tensorflow")["text"]
    assert found(content, "mpi", "one rank")["verdict"] == "ok"


def test_an_mpi_start_that_hangs_times_out(tmp_path: Path) -> None:
    script = tmp_path / "late.py"
    script.write_text(
        "import os, sys, time\nfrom dl_comm.doctor import _job, __main__ as doctor\n"
        "if os.environ.get('PMI_RANK', os.environ.get('OMPI_COMM_WORLD_RANK')) == '1':\n    time.sleep(100)\n"
        "_job.JOB_LIMIT_S = 2.0\nsys.exit(doctor.main())\n"
    )
    finished = launch(2, [sys.executable, str(script), "--ranks-only", "--json"], 90)
    assert not finished.timed_out
    assert finished.returncode != 0
    assert "starting MPI took more than 2 s" in report(finished)["summary"]


@pytest.fixture(scope="module")
def two_hosts() -> Iterator[Hosts]:
    with Hosts(2) as hosts:
        yield hosts


@pytest.mark.skipif(not possible(), reason="needs root and iproute2 to make network namespaces")
def test_two_hosts_report_network_and_common_machine(two_hosts: Hosts) -> None:
    finished = two_hosts.launch(2, [*DOCTOR, "--ranks-only", "--json"])
    assert finished.returncode == 0, finished.output
    content = report(finished)
    ranks = found(content, "ranks", "placement")["facts"]["ranks"]
    assert [(rank["host_index"], rank["local_rank"]) for rank in ranks] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    (row,) = found(content, "ranks", "paths")["facts"]["rows"]
    assert row["names"] == two_hosts.names
    assert (row["inside"], row["outside"], row["network"]) == ("shared memory", "messages", "TCP on eth0")
    split = found(content, "ranks", "split machine 0")
    assert split["verdict"] == "warn"
    assert "the host names differ" in split["text"]
    assert found(content, "bandwidth", "average")["facts"]["hosts"] == 2


def test_the_tested_range_is_that_of_the_table() -> None:
    table = (Path(__file__).parents[2] / "docs/wheels.md").read_text()
    for name, row in (("python", "Python"), ("torch", "torch"), ("tensorflow", "tensorflow-cpu")):
        (listed,) = re.findall(rf"^\| {row} \| (.*) \|$", table, re.MULTILINE)
        versions = [tuple(map(int, version.split(".")[:2])) for version in listed.split(", ")]
        assert (min(versions), max(versions)) == TESTED[name]
    assert is_tested("torch", "2.11.0+cpu")
    assert not is_tested("torch", "2.9.1")
    assert not is_tested("torch", "nightly")


def test_launchers_are_distinguished() -> None:
    assert launch_of({"HOME": "/", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}) is None
    mpich = launch_of({"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1"})
    assert mpich is not None
    assert (mpich.family, mpich.rank, mpich.size, mpich.first_on_host) == ("mpich", 3, 4, False)
    openmpi = launch_of({"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "0"})
    assert openmpi is not None
    assert (openmpi.family, openmpi.first_on_host) == ("openmpi", True)
    slurm = launch_of(
        {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "1", "PMI_RANK": "1"}
    )
    assert slurm is not None
    assert (slurm.family, slurm.local_rank) == (None, 1)
    torchrun = {"TORCHELASTIC_RUN_ID": "none", "RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}
    found = launch_of({**torchrun, "PMI_RANK": "0", "PMI_SIZE": "2"})
    assert found
    assert (found.launcher, found.rank, found.size, found.first_on_host) == ("torchrun", 1, 4, False)
    job = {"DL_COMM_SIZE": "3", "DL_COMM_ADDR": "job-0.job:29500", "JOB_COMPLETION_INDEX": "2"}
    found = launch_of(job)
    assert found
    assert (found.launcher, found.rank, found.size) == ("Kubernetes", 2, 3)
    found = launch_of({**job, "DL_COMM_RANK": "1"})
    assert found
    assert (found.launcher, found.rank) == ("something that sets DL_COMM_RANK", 1)
    assert without_launcher({"PMI_FD": "7", "PATH": "/bin", "SLURM_PROCID": "0"}) == {"PATH": "/bin"}


def test_lists_of_numbers_and_addresses() -> None:
    assert runs_text([8, 0, 1, 2, 3, 10], ",") == "0-3,8,10"
    assert numbers_of("0-3,8,10\n") == {0, 1, 2, 3, 8, 10}
    assert numbers_of("") == set()
    if sys.byteorder == "little":
        assert str(_address("0100007F")) == "127.0.0.1"
        assert str(_address("0000000000000000FFFF00000100007F")) == "127.0.0.1"
        assert str(_address("00000000000000000000000001000000")) == "::1"


def place(rank: int, host: str) -> dict[str, Any]:
    boot = {"host": host, "host_index": "abc".index(host), "boot_id": host, "shm_device": "1", "pid_namespace": "x"}
    return {"rank": rank, "local_rank": rank % 2, "pid": rank} | boot


def test_the_reason_of_each_path() -> None:
    assert path(place(0, "a"), place(1, "a"))[0] == "shared memory"
    assert path(place(0, "a"), place(2, "b")) == ("messages", "different machines")
    one_machine = path(place(0, "a"), place(2, "b") | {"boot_id": "a", "host": "a", "shm_device": "2"})
    assert one_machine == ("messages", "one machine, but the file systems for shared memory differ")


def test_equal_hosts_are_one_row_and_oversubscription_is_found() -> None:
    ranks = [place(rank, host) for rank, host in enumerate("aabbcc")]
    ranks[5]["pid_namespace"] = "y"
    quiet = {"tcp": [{"interface": "ib0", "peers": []}], "devices": ["verbs (/dev/infiniband/uverbs0)"]}
    content = [
        {"processors": "0-1", "numa_nodes": [0], "cuda_visible_devices": None, "cgroup_cpus": None, "network": quiet}
        for _ in ranks
    ]
    content[2]["processors"] = content[3]["processors"] = "4"
    content[0]["cuda_visible_devices"] = "5"
    checks = {check.name: check for check in check_ranks({"ranks": ranks}, content, {0: 4, 1: 4, 2: 0})}
    (row,) = checks["paths"].facts["rows"]
    assert row["names"] == ["a", "b", "c"]
    assert row["network"] == "verbs (/dev/infiniband/uverbs0) and TCP on ib0"
    assert [rank["gpu"] for rank in checks["placement"].facts["ranks"]] == ["5", "1", "0", "1", "none", "none"]
    assert {name for name, check in checks.items() if check.verdict == "warn"} == {"oversubscribed b", "namespaces c"}
