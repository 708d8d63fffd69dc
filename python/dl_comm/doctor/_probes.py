"""Runs probes that may crash or hang in concurrent processes, each with a time limit.

Thread rule: one thread. A probe has its own session, so that it can be killed with its children at its limit.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dl_comm.doctor._launcher import launch_of, without_launcher
from dl_comm.doctor._probe_script import _MARK

LIMIT_S = 90.0
"""Limit of a probe; the first import of a large framework from a slow file system may take a minute."""


# Lines that MPICH's mpiexec prints after the line with the rank's exit.
_BOILERPLATE = ("=", "This typically refers to a problem", "Please see the FAQ page")


class Failed(Exception):
    """A probe or a program failed; the text has its exit and its last line."""


@dataclass(frozen=True)
class Ended:
    """How a program ended.

    Attributes:
        code: Its exit status; negative: the signal that killed it.
        text: What it printed.
    """

    code: int
    text: str

    def summary(self) -> str:
        """The exit and the last line."""
        how = f"was killed by signal {-self.code}" if self.code < 0 else f"ended with status {self.code}"
        return f"{how}{_last_line(self.text)}"


class Process:
    """A running program, with its output in a file."""

    def __init__(self, command: Sequence[str], limit: float = LIMIT_S, extra: Mapping[str, str] | None = None) -> None:
        self._limit = limit
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed in `result`
        self._ends = time.monotonic() + limit
        self._error: OSError | None = None
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                env={**_environment(), **(extra or {})},
                start_new_session=True,
            )
        except OSError as error:
            self._error = error

    def end(self) -> Ended:
        """Waits for the exit.

        Raises:
            Failed: It could not start, or exceeded its limit.
        """
        with self._output:
            if self._error is not None:
                raise Failed(str(self._error))
            timed_out = False
            try:
                self._process.wait(max(self._ends - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                timed_out = True
            finally:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
            self._output.seek(0)
            text = self._output.read().decode(errors="replace")
        if timed_out:
            raise Failed(f"did not end within {self._limit:.0f} s{_last_line(text)}")
        return Ended(self._process.returncode, text)

    def result(self) -> str:
        """Waits for the exit, and returns the output.

        Raises:
            Failed: As ``end``, or the exit status is not 0.
        """
        ended = self.end()
        if ended.code:
            raise Failed(ended.summary())
        return ended.text


class Probe:
    """A running function of ``_probe_script.py``."""

    def __init__(self, *arguments: str) -> None:
        script = str(Path(__file__).with_name("_probe_script.py"))
        self._process = Process([sys.executable, script, *arguments])

    def result(self) -> dict[str, Any]:
        """Waits for the function's result.

        Raises:
            Failed: As ``Process.result``.
        """
        text = self._process.result()
        lines = [line for line in text.splitlines() if line.startswith(_MARK)]
        if not lines:
            raise Failed(f"ended without a result{_last_line(text)}")
        result: dict[str, Any] = json.loads(lines[-1][len(_MARK) :])
        return result


def _environment() -> dict[str, str]:
    """The environment of a probe: without a launcher's variables, because a probe is not a rank."""
    return without_launcher(os.environ) if launch_of(os.environ) else dict(os.environ)


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith(_BOILERPLATE)]
    return f": {lines[-1][:400]}" if lines else ""
