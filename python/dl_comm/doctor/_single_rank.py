"""Without a launcher: checks this machine, then runs the same program on two ranks if an mpiexec is available."""

from __future__ import annotations

import json
import sys
from typing import Any

from dl_comm import _dl_comm
from dl_comm.doctor import _bandwidth, _local
from dl_comm.doctor._checks import Check, worst
from dl_comm.doctor._job import JOB_LIMIT_S, ONE_RANK
from dl_comm.doctor._mpi import interpreter_mpiexec
from dl_comm.doctor._probes import LIMIT_S, Failed, Process
from dl_comm.doctor._report import Report

# Open MPI 4 and 5 need these settings for more ranks than processors.
_OVERSUBSCRIBE = {
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}

_MAX_OUTPUT = 4000  # characters of the output of failed ranks


def run(as_json: bool, quick: bool, starts: bool) -> int:
    """Checks and reports; returns the exit status. ``starts``: whether to start two ranks."""
    report = Report(as_json, prints=True)
    described: dict[str, Any] = json.loads(_dl_comm.describe())
    for checks in _local.checks(described, None, imports=not quick):
        report.add(checks)
    mpiexec = interpreter_mpiexec()
    if starts and mpiexec and worst(report.checks) != "bad":
        report.add(_two_ranks(str(mpiexec), quick))
    else:
        report.add([Check("ranks", "placement", "ok", ONE_RANK, {"ranks": [], "hosts": 1})])
        report.add([] if quick else [_bandwidth.check_single_rank()])
    healthy = worst(report.checks) != "bad"
    report.end(described, healthy)
    return 0 if healthy else 1


def _two_ranks(mpiexec: str, quick: bool) -> list[Check]:
    """Runs this program on two ranks with the interpreter's mpiexec, and returns its checks."""
    command = [mpiexec, "-n", "2", sys.executable, "-m", "dl_comm.doctor", "--json", "--ranks-only"]
    try:
        ended = Process([*command, *["--quick"] * quick], JOB_LIMIT_S + LIMIT_S, _OVERSUBSCRIBE).end()
    except Failed as error:
        return [Check("ranks", "two ranks", "bad", f"{mpiexec} -n 2 {error}", {"command": command})]
    result = next((line for line in ended.text.splitlines() if line.startswith('{"healthy"')), None)
    if result is None:
        text = f"{mpiexec} -n 2 gave no report and {ended.summary()}"
        facts = {"command": command, "output": ended.text[-_MAX_OUTPUT:]}
        return [Check("ranks", "two ranks", "bad", text, facts)]
    checks = [Check(**check) for group in json.loads(result)["groups"].values() for check in group]
    if ended.code not in (0, 1):
        text = f"{mpiexec} -n 2 {ended.summary()}, after its report: a rank was stopped before it had finished"
        facts = {"command": command, "output": ended.text.replace(result, "")[-_MAX_OUTPUT:]}
        return [Check("ranks", "two ranks", "warn", text, facts), *checks]
    text = f"started with {mpiexec} (--no-launch skips this)"
    return [Check("ranks", "two ranks", "ok", text, {"command": command}), *checks]
