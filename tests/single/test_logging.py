"""Log lines: through ``logging`` where the program uses it, else on standard error."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dl_comm._base import log
from launch import Finished

Script = Callable[..., Finished]

SLOW = """
import os, time
import numpy as np
import dl_comm
dl_comm.init()
if dl_comm.rank() == 1:
    time.sleep(2.5)
dl_comm.allreduce(np.ones(3))
"""
WARNS = {"DL_COMM_STALL_WARN_S": "1", "DL_COMM_TIMEOUT_S": "60", "DL_COMM_UNKNOWN_NAME": "1"}


def test_the_handlers_of_the_program_get_the_lines(script: Script) -> None:
    finished = script(
        2, "import logging\nlogging.basicConfig(format='<%(name)s %(levelname)s> %(message)s')\n" + SLOW, env=WARNS
    )
    lines = [line for line in finished.output.splitlines() if "dl_comm" in line.lower()]
    assert any(line.startswith("<dl_comm WARNING>") and "DL_COMM_STALL_WARN_S" in line for line in lines), lines
    assert any(line.startswith("<dl_comm WARNING>") and "DL_COMM_UNKNOWN_NAME" in line for line in lines), lines
    assert not [line for line in lines if line.startswith("dl_comm:")]
    assert finished.returncode == 0


@pytest.mark.parametrize(
    "setting", ["", "import dl_comm, logging\nlogging.basicConfig()\ndl_comm.rc.logging = False\n"]
)
def test_without_a_handler_they_are_on_standard_error(script: Script, setting: str) -> None:
    finished = script(2, setting + SLOW, env=WARNS)
    assert "dl_comm: " in finished.output
    assert "DL_COMM_STALL_WARN_S" in finished.output
    assert "WARNING" not in finished.output
    assert finished.returncode == 0


def test_a_program_may_drop_or_redirect_them(script: Script) -> None:
    text = (
        "import logging, os, sys\n"
        "class Kept(logging.Handler):\n"
        "    def emit(self, record): os.write(1, b'kept ' + record.getMessage().encode() + b'\\n')\n"
        "logging.getLogger('dl_comm').addHandler(Kept())\n"
        "logging.getLogger('dl_comm').propagate = False\n"
        + SLOW
        + "dl_comm.finalize()\ndl_comm.init(2)\ndl_comm.init(3)\n"
    )
    finished = script(2, text, env=WARNS)
    assert "kept " in finished.output, finished.output
    assert "kept init(threads=3) holds for new teams" in finished.output, finished.output
    assert "dl_comm: " not in finished.output


def test_a_handler_that_fails_hides_nothing(script: Script) -> None:
    text = (
        "import logging\n"
        "class Bad(logging.Handler):\n"
        "    def emit(self, record): raise RuntimeError('bad handler')\n"
        "logging.getLogger('dl_comm').addHandler(Bad())\n" + SLOW
    )
    finished = script(2, text, env=WARNS)
    assert "DL_COMM_STALL_WARN_S" in finished.output, finished.output
    assert finished.returncode == 0


def test_the_last_lines_of_a_rank_come_out(script: Script) -> None:
    """One that never reaches its end, and one that is killed by its launcher."""
    text = (
        "import logging, os, time\n"
        "logging.basicConfig(format='<%(name)s> %(message)s')\n"
        "import dl_comm\n"
        "if os.environ['PMI_RANK'] == '1': time.sleep(20)\n"
        "dl_comm.init()\n"
    )
    finished = script(2, text, env={"DL_COMM_TIMEOUT_S": "2"}, timeout=60)
    assert "MPI_Init was not complete after 2 s" in finished.output, finished.output


def test_a_forked_child_logs_too(script: Script) -> None:
    text = (
        "import logging, os\n"
        "logging.basicConfig(format='<%(name)s> %(message)s')\n"
        "import dl_comm\n"
        "dl_comm.init()\n"
        "from dl_comm._base import log\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    log.warn('from the child')\n"
        "    os._exit(0)\n"
        "os.waitpid(pid, 0)\n"
    )
    finished = script(1, text)
    assert "<dl_comm> from the child" in finished.output


def test_a_record_for_pytest_is_a_line_too(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> None:
    log.warn("both")
    assert capfd.readouterr().err == "dl_comm: both\n"
    (record,) = caplog.records
    assert (record.name, record.levelname, record.getMessage()) == ("dl_comm", "WARNING", "both")
