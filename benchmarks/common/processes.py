"""Starts a contender's processes, runs trials over sockets, and stops them with all their children."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

_MARK = "BENCH_JOB"
_BARRIER_BYTES = 1 << 16  # SPIN_BYTES or more
_TAIL = 600


class Lost(Exception):
    """A job ended, or did not start; its remaining processes were killed."""


class TimedOut(Lost):
    """A trial exceeded its deadline."""


class Refused(Exception):
    """The contender does not support this trial."""


class Wrong(Exception):
    """The contender's result is wrong."""


@dataclass(frozen=True)
class Launch:
    """Commands that together start all ranks, and their environments besides the benchmark's own variables."""

    commands: Sequence[Sequence[str]]
    environments: Sequence[Mapping[str, str]]


@dataclass(frozen=True)
class Answer:
    """The result of a trial: numbers as an array (ranks, numbers), and the text of each rank."""

    numbers: np.ndarray
    words: Sequence[str]


class Processes:
    """The processes of one contender. Not thread-safe."""

    def __init__(self, name: str, ranks: int, launch: Launch, folder: Path, cwd: Path) -> None:
        """Starts the processes in `cwd`; `ready` waits for them. `folder` needs a short path for Unix sockets."""
        self.name, self.ranks = name, ranks
        self._mark = uuid.uuid4().hex
        self._connections: list[socket.socket] = []
        self._folder = folder / self._mark[:8]
        self._folder.mkdir()
        (self._folder / "barrier").write_bytes(bytes(_BARRIER_BYTES))
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self._folder / "socket"))
        self._listener.listen(ranks)
        self._processes = []
        with (self._folder / "output").open("wb") as output:
            for command, environment in zip(launch.commands, launch.environments, strict=True):
                shared = {"BENCH_SOCKET": "socket", "BENCH_BARRIER": "barrier", "BENCH_STORE": "store"}
                own = {key: str(self._folder / name) for key, name in shared.items()}
                process = subprocess.Popen(
                    command,
                    cwd=cwd,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **environment, **own, _MARK: self._mark},
                    start_new_session=True,
                )
                self._processes.append(process)

    def ready(self, seconds: float) -> None:
        """Waits until all ranks have connected; raises Lost after `seconds`."""
        until = time.monotonic() + seconds
        found: dict[int, socket.socket] = {}
        self._listener.settimeout(0.1)
        while len(found) < self.ranks:
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                if time.monotonic() > until:
                    raise self._lost(f"{len(found)} of {self.ranks} ranks connected in {seconds:g} s") from None
                if any(process.poll() not in (None, 0) for process in self._processes):
                    raise self._lost("it exited before its ranks had connected") from None
                continue
            connection.settimeout(max(0.1, until - time.monotonic()))
            try:
                words = connection.makefile("r").readline().split()
            except TimeoutError:
                words = []
            if len(words) != 2 or words[0] != "rank":
                connection.close()
                raise self._lost("a connection did not send its rank")
            found[int(words[1])] = connection
        if sorted(found) != list(range(self.ranks)):
            raise self._lost(f"its ranks are {sorted(found)}")
        self._connections = [found[rank] for rank in range(self.ranks)]
        for connection in self._connections:
            connection.settimeout(None)

    def trial(self, line: str, numbers: int, seconds: float) -> Answer:
        """Sends a line to all ranks and reads `numbers` float64 values from each.

        A rank answers with a line, "ok WORDS", "unsupported WHY" or "wrong WHY", and after "ok" its numbers in binary.
        Raises Refused, Wrong, Lost (a rank exited) or TimedOut.
        """
        texts = [bytearray() for _ in range(self.ranks)]
        until = time.monotonic() + seconds
        try:
            for connection in self._connections:
                connection.sendall(line.encode())
        except OSError as error:
            raise self._lost(f"a rank has ended ({error})") from error
        with selectors.DefaultSelector() as selector:
            for rank, connection in enumerate(self._connections):
                selector.register(connection, selectors.EVENT_READ, rank)
            while selector.get_map():
                if not (events := selector.select(max(0.0, until - time.monotonic()))):
                    self.kill()
                    raise TimedOut(f"a trial exceeded {seconds:g} s")
                for key, _ in events:
                    try:
                        part = key.fileobj.recv(1 << 20)  # type: ignore[union-attr]
                    except OSError as error:
                        raise self._lost(f"rank {key.data} has ended ({error})") from error
                    if not part:
                        raise self._lost(f"rank {key.data} has ended")
                    texts[key.data] += part
                    if _complete(texts[key.data], numbers):
                        selector.unregister(key.fileobj)
        heads, bodies = zip(*(bytes(text).split(b"\n", 1) for text in texts), strict=True)
        for head in heads:
            word, _, rest = head.decode().partition(" ")
            if word != "ok":
                raise {"unsupported": Refused, "wrong": Wrong}[word](rest)
        words = [head.decode().partition(" ")[2] for head in heads]
        return Answer(np.stack([np.frombuffer(body) for body in bodies]), words)

    def cpu_seconds(self) -> float:
        """The processor time of the job's processes, in seconds."""
        ticks = 0
        for pid in self._pids():
            with suppress(OSError):
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def stop(self, seconds: float = 20) -> None:
        """Waits for the processes to exit, and kills them after `seconds`."""
        for connection in self._connections:
            connection.close()
        until = time.monotonic() + seconds
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """Kills the process groups and all processes with the job's mark in their environment."""
        for connection in [*self._connections, self._listener]:
            connection.close()
        for process in self._processes:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        for pid in self._pids():
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        for process in self._processes:
            process.wait()

    def _lost(self, why: str) -> Lost:
        self.kill()
        output = (self._folder / "output").read_text(errors="replace").strip()
        return Lost(f"{why}; it printed: ...{output[-_TAIL:]}" if output else why)

    def _pids(self) -> list[int]:
        needle = f"{_MARK}={self._mark}".encode()
        found = []
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                with suppress(OSError):
                    if needle in (folder / "environ").read_bytes().split(b"\0"):
                        found.append(int(folder.name))
        return found


def _complete(text: bytearray, numbers: int) -> bool:
    end = text.find(b"\n")
    if end < 0:
        return False
    return not text.startswith(b"ok ") or len(text) - end - 1 >= 8 * numbers
