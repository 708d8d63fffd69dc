"""``dl_comm.rc``: what a start changes in the process, and that an import changes nothing."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import dl_comm
from launch import QUIET, run

SETTINGS = ("signal_dump", "stack_dump", "excepthook", "exit_handler", "torch_variables", "logging")

# The handler at exit that is registered first runs last.
PROGRAM = """
import atexit, glob, json, logging, os, signal, sys

def name_of(path):
    try:
        return open(path).read().strip()
    except OSError:
        return ""  # the thread has just ended

def installed():
    (caught,) = [line.split()[1] for line in open("/proc/self/status") if line.startswith("SigCgt")]
    threads = [name_of(path) for path in glob.glob("/proc/self/task/*/comm")]
    return {
        # MPI has a handler of its own.
        "signal_dump": "dlcomm-signal" in threads or signal.getsignal(signal.SIGUSR1) != signal.SIG_DFL,
        "stack_dump": bool(int(caught, 16) >> (signal.SIGRTMAX - 9 - 1) & 1),
        "excepthook": sys.excepthook is not sys.__excepthook__,
        "torch_variables": "RANK" in os.environ,
        "logging": "dlcomm-log" in threads,
    }

def at_exit():
    seen.append({"exit_handler": not dl_comm.is_initialized()})
    print(json.dumps(seen))

atexit.register(at_exit)
os.environ.pop("RANK", None)
logging.basicConfig()
import dl_comm
from dl_comm import init
seen = [installed()]
dl_comm.rc(**json.loads(sys.argv[1]))
seen.append(installed())
init()
seen.append(installed())
try:
    dl_comm.rc.excepthook = not dl_comm.rc.excepthook
except dl_comm.StateError as error:
    seen.append(str(error))
"""


@pytest.mark.parametrize("off", [None, *SETTINGS])
def test_a_setting_leaves_out_one_change(off: str | None) -> None:
    finished = run([sys.executable, "-c", PROGRAM, json.dumps({off: False} if off else {})], 60, QUIET)
    assert finished.returncode == 0, finished.output
    imported, set_up, started, refused, ended = json.loads(finished.output)
    nothing = dict.fromkeys(started, False)
    assert imported == set_up == nothing
    assert {**started, **ended} == {name: name != off for name in SETTINGS}
    assert "set it before init()" in refused


def test_sigusr1_is_the_program_s(tmp_path: Path) -> None:
    text = (
        "import os, signal\nimport dl_comm as mc\nreceived = []\n"
        "signal.signal(signal.SIGUSR1, lambda *_: received.append(1))\nmc.rc.signal_dump = False\nmc.init()\n"
        "os.kill(os.getpid(), signal.SIGUSR1)\nassert received == [1]\nmc.barrier()\nmc.finalize()\n"
    )
    finished = run([sys.executable, "-c", text], 60, {"DL_COMM_DUMP_DIR": str(tmp_path)})
    assert finished.returncode == 0, finished.output
    assert not list(tmp_path.rglob("*.json"))


def test_what_is_no_setting_is_refused() -> None:
    with pytest.raises(dl_comm.ArgumentError, match="no setting 'exceptionhook'.*one of signal_dump, stack_dump"):
        dl_comm.rc.exceptionhook = False  # type: ignore[attr-defined]
    for wrong in ("no", 2, None):
        with pytest.raises(dl_comm.ArgumentError, match=r"rc\.excepthook: .*True or False"):
            dl_comm.rc.excepthook = wrong  # type: ignore[assignment]
    with pytest.raises(dl_comm.ArgumentError):
        dl_comm.rc(excepthook=False, other=False)
    with pytest.raises(dl_comm.ArgumentError):
        del dl_comm.rc.excepthook
    assert repr(dl_comm.rc) == f"dl_comm.rc({', '.join(f'{name}=True' for name in SETTINGS)})"
