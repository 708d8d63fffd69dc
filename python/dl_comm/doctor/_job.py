"""Under a launcher: the first rank of each host checks it, then all ranks check the job; rank 0 reports."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import Any

from dl_comm import _dl_comm
from dl_comm._api.init import init
from dl_comm._base.errors import CommError
from dl_comm.doctor import _bandwidth, _local, _ranks
from dl_comm.doctor._checks import Check, worst
from dl_comm.doctor._gather import gather
from dl_comm.doctor._launcher import Launch
from dl_comm.doctor._mpi import check_thread_level
from dl_comm.doctor._probes import LIMIT_S
from dl_comm.doctor._report import Report

JOB_LIMIT_S = 240.0
"""Limit of the start of MPI, and of all later checks; includes waits for other ranks' probes."""

ONE_RANK = "one rank: no paths between ranks to test; run again with 'mpiexec -n 2'"

# How long a rank that fails before MPI starts waits for rank 0's report.
_GRACE_S = 5.0


def run(launch: Launch, as_json: bool, quick: bool, ranks_only: bool) -> int:
    """Checks and reports; returns the exit status. ``ranks_only`` skips checks that need no other rank."""
    report = Report(as_json, prints=None if launch.rank is None else launch.rank == 0)
    described: dict[str, Any] = json.loads(_dl_comm.describe())
    first = _local.quick_checks(described, launch)
    if any(check.name == "launcher" and check.verdict == "bad" for check in first):
        # Some libraries abort the whole job when they start under another MPI's launcher.
        report.add(first)
        _fail(report, described, launch.rank, "start", "MPI was not started")
        return 1
    local: list[Check] = []
    if launch.first_on_host and not ranks_only:
        for checks in _local.checks(described, launch, imports=not quick):
            local += checks
            report.add(checks)
    try:
        with _Watchdog(report, described, launch, "starting MPI"):
            init()
        described = json.loads(_dl_comm.describe())
        report.set_prints(described["rank"] == 0)
        with _Watchdog(report, described, launch, "the check of the ranks"):
            _check_ranks(report, described, local, quick)
            healthy = not any(gather(worst(report.checks) == "bad", "verdict"))
    except (CommError, OSError) as error:
        _fail(report, described, described.get("rank", launch.rank), "start", str(error))
        return 1
    report.end(described, healthy)
    return 0 if healthy else 1


class _Watchdog:
    """Reports and exits if the ``with`` block takes too long: MPI may hang without a deadline."""

    def __init__(self, report: Report, described: dict[str, Any], launch: Launch, what: str) -> None:
        self._report, self._described, self._what = report, described, what
        self._rank = described.get("rank", launch.rank)
        # mpiexec ends all ranks after the first exit, so the rank with the report must time out first.
        limit = JOB_LIMIT_S if self._rank in (None, 0) else JOB_LIMIT_S + 2 * LIMIT_S
        self._timer = threading.Timer(limit, self._end)
        self._timer.daemon = True

    def __enter__(self) -> None:
        self._timer.start()

    def __exit__(self, *error: object) -> None:
        self._timer.cancel()

    def _end(self) -> None:
        text = f"{self._what} took more than {JOB_LIMIT_S:.0f} s: a rank hangs, or a network blocks"
        _fail(self._report, self._described, self._rank, "deadline", text)
        os._exit(1)


def _fail(report: Report, described: dict[str, Any], rank: int | None, name: str, text: str) -> None:
    """Adds the error and ends the report; a rank without a known number prints it itself."""
    where = f"process {os.getpid()}" if rank is None else f"rank {rank}"
    report.add([Check("ranks", name, "bad", f"{where}: {text}", {"error": text})])
    report.set_prints(rank in (None, 0))
    if rank:
        # Some launchers end the job after the first failed process: let rank 0 report first.
        time.sleep(_GRACE_S if described["state"] == "not_started" else 0)
        print(f"dl_comm.doctor, {where}: {text}", file=sys.stderr, flush=True)
    report.end(described, healthy=False)


def _check_ranks(report: Report, described: dict[str, Any], local: list[Check], quick: bool) -> None:
    """Checks that need all ranks. Collective; rank 0 also gets the checks of the other hosts."""
    _dl_comm.barrier()  # opens the connections between the hosts
    level = described["mpi"]["thread_level"]
    if described["mpi"]["initialized"]:
        report.add([check_thread_level("ranks", "thread level", level, f"{level} granted")])
    else:
        report.add([Check("ranks", "thread level", "ok", "MPI is not used: all ranks are on one host", {})])
    facts = {"launcher": described["launcher"]}
    report.add([Check("ranks", "started by", "ok", f"{described['launcher']} (dl_comm.topology()['launcher'])", facts)])
    # From other hosts: checks that are not ok, and the number of GPUs.
    devices = [check.facts.get("devices", 0) for check in local if check.name == "CUDA"]
    mine = {"checks": [check.to_json() for check in local if check.verdict != "ok"], "gpus": sum(devices)}
    gathered = gather({**_ranks.mine(described), **mine}, "ranks")
    gpus: dict[int, int] = {}
    speakers = {0: 0}  # of each host, the first rank that checked it
    for rank, place in zip(gathered, described["ranks"], strict=True):
        host = place["host_index"]
        gpus[host] = max(gpus.get(host, 0), rank["gpus"])
        checks = [Check(**check) for check in rank.pop("checks")]
        if checks and described["rank"] == 0 and speakers.setdefault(host, place["rank"]) == place["rank"] != 0:
            report.add(_named(check, place["host"]) for check in checks)
    report.add(_ranks.check(described, gathered, gpus))
    if described["size"] == 1:
        report.add([Check("ranks", "one rank", "ok", ONE_RANK)])
    if not quick:
        report.add([_bandwidth.check(described) if described["size"] > 1 else _bandwidth.check_single_rank()])


def _named(check: Check, host: str) -> Check:
    return Check("ranks", f"{check.group}, {check.name} on {host}", check.verdict, check.text, check.facts)
