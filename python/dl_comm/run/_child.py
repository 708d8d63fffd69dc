"""The wrapper of each rank: runs the program, forwards its output, and reports its exit to the launcher.

Sets the variables that torchrun sets (``_base/torch_variables.py``). Run by path with the standard library only:
 ``python -I -S _child.py PROGRAM...``. Two processes:

- the *parent*, which the launcher started. It runs the program in a new process group, forwards signals to it, and
  exits with the program's status or signal;
- the *forwarder*, in a new session, which reads the program's output. Launchers kill all other ranks when one fails;
  the forwarder survives that long enough to report the last lines and to kill leftover processes.

The parent writes the program's pid and its exit to the forwarder through a pipe, and waits for the forwarder. So
``dl-comm-run`` learns of an exit before the launcher reacts, and the first report is the first failure.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import errno
import json
import os
import re
import resource
import selectors
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

if __name__ == "__main__":
    # Only for the modules of this package: those of the program's environment must not be found.
    sys.path.append(str(Path(__file__).parents[2]))
from dl_comm._base.master import MasterError, Start
from dl_comm._base.torch_variables import Position, launched, rank_of
from dl_comm._base.visible_gpus import visible_gpus

FORWARDED = ("SIGHUP", "SIGINT", "SIGQUIT", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGTSTP", "SIGCONT")
TOKEN_BYTES = 32  # length of the token that begins a connection to dl-comm-run
TAIL_LINES = 30
LINE_BYTES = 2000
SILENCE_S = 2.0  # how long to wait for output of leftover processes after the program has ended
FAILED_SILENCE_S = 0.3  # the same after a failure, when they are killed
ANSWER_S = 5.0  # limit of the launcher's answer
PARTIAL_LINE_S = 0.1  # how long an incomplete line is held
SIGNAL_THREAD = "dlcomm-signal"  # core/src/dump.rs names it
STALL_MARK = "(DL_COMM_STALL_WARN_S)"  # the end of the core's warning of a long wait
DUMPS_LINE = re.compile(r"dl_comm: the last calls of each rank are in (.*); python -m dl_comm\.analyze_dumps ")
PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main() -> NoReturn:
    """Runs the program on the command line with the settings in ``DL_COMM_RUN_CONFIG``."""
    job = json.loads(base64.urlsafe_b64decode(os.environ.pop("DL_COMM_RUN_CONFIG")))
    position = position_of(os.environ, job)
    rank = position.rank
    out, err, life = os.pipe(), os.pipe(), os.pipe()
    forwarder = os.fork()
    if forwarder == 0:
        try:
            OutputForwarder(job, rank, out[0], err[0], life[0]).run()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    for reader in (out[0], err[0], life[0]):
        os.close(reader)
    env = environment(job, position)
    start = torch_start(env, job, position, err[1])
    end: dict[str, Any] = {"status": 1, "signal": 0, "asked": 0, "pid": 0, "seconds": 0.0, "oom": False}
    if start is not None:
        variables = start.apply(env)
        end = run_program(sys.argv[1:], variables, lambda note: write_note(life[1], note), out[1], err[1], rank == 0)
    for writer in (out[1], err[1]):
        os.close(writer)
    write_note(life[1], end)
    os.close(life[1])
    os.waitpid(forwarder, 0)
    has_failed = bool(end["status"] or end["signal"])
    if has_failed:
        kill_group(end["pid"])
    if start is not None:
        # After the report: the launcher may end the job now.
        start.close(not has_failed)
    exit_as(end)


def exit_as(end: dict[str, Any]) -> NoReturn:
    """Ends this process as the program has ended."""
    if end["signal"]:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the program has dumped its own core
        signal.signal(end["signal"], signal.SIG_DFL) if end["signal"] != signal.SIGKILL else None
        os.kill(os.getpid(), end["signal"])
    os._exit(128 + end["signal"] if end["signal"] else end["status"])


def write_note(life: int, note: dict[str, Any]) -> None:
    """Writes a line for the forwarder."""
    with contextlib.suppress(BrokenPipeError):  # the forwarder was killed
        os.write(life, json.dumps(note).encode() + b"\n")


def position_of(env: Mapping[str, str], job: dict[str, Any]) -> Position:
    """The position of this rank."""
    # A launcher of kind "plain" may tell the rank only.
    position = launched(env) or Position(rank_of(env) or 0, job["size"] or 1, launcher="the launcher")
    if position.local_size is None and job["here"]:
        position = position._replace(local_rank=position.rank, local_size=position.size)
    return position


def torch_start(env: Mapping[str, str], job: dict[str, Any], position: Position, err: int) -> Start | None:
    """The variables that name this rank to torch; None after an error, which is written to ``err``."""
    try:
        return Start(env, position, job["master"] and tuple(job["master"]), is_needed=False)
    except MasterError as error:
        os.write(err, f"dl-comm-run: {error}\n".encode())
        return None


def one_gpu(environ: Mapping[str, str], position: Position, local_size: int) -> dict[str, str]:
    """The variable that selects the GPU of a rank; empty without a GPU or a known local rank.

    ``local_size``: the ranks of this host if the launcher does not tell.
    """
    local = position.local_rank
    gpus = visible_gpus(environ)
    if local is None or not gpus:
        if local in (None, 0):
            why = "there is no GPU" if not gpus else "the launcher sets no local rank"
            print(f"dl-comm-run: --pin-gpu does nothing on {socket.gethostname()}: {why}", file=sys.stderr)
        return {}
    size = position.local_size or local_size
    if local == 0 and size > len(gpus):
        shared = "a GPU" if len(gpus) == 1 else f"{len(gpus)} GPUs"
        print(f"dl-comm-run: {size} ranks share {shared} on {socket.gethostname()}", file=sys.stderr)
    return {"CUDA_VISIBLE_DEVICES": gpus[local % len(gpus)]}


def environment(job: dict[str, Any], position: Position) -> dict[str, str]:
    """The program's environment: unbuffered output, and Python's stack after a fatal signal."""
    found = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", **os.environ}
    if job.get("pin_gpu"):
        found |= one_gpu(found, position, job["local"])
    if "OMP_NUM_THREADS" not in found:
        local = position.local_size or job["local"]
        allowed = len(os.sched_getaffinity(0))
        # A bound rank owns its processors; otherwise the ranks of the host share them.
        share = (os.cpu_count() or 1) // local if job["bound"] else allowed // local
        found["OMP_NUM_THREADS"] = str(max(1, min(allowed, share)))
    return found


def run_program(
    command: list[str],
    env: dict[str, str],
    on_start: Callable[[dict[str, Any]], None],
    out: int = 1,
    err: int = 2,
    reads: bool = True,
) -> dict[str, Any]:
    """Runs ``command`` to its end in a process group of its own, with output to ``out`` and ``err``. Forwards signals.

    Args:
        command: The command line.
        env: Its environment.
        on_start: Gets the ``pid``.
        out: Its standard output.
        err: Its standard error.
        reads: Whether it gets standard input, as rank 0 does. Elsewhere some launchers leave it open without an end.

    Returns:
        ``status`` or ``signal``; ``asked``: the first signal forwarded to it; ``seconds``; ``oom``: whether the system
        killed a process meanwhile because it was out of memory.
    """
    started, killed = time.monotonic(), oom_kills()
    parent = os.getpid()
    libc = ctypes.CDLL(None)

    def prepare() -> None:
        os.setpgid(0, 0)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    # Remove Python's handler, so that an early signal is not lost.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    end: dict[str, Any] = {"status": 0, "signal": 0, "asked": 0, "pid": 0}
    try:
        # The program inherits PMI's descriptors: close_fds=False.
        stdin = None if reads else subprocess.DEVNULL
        program = subprocess.Popen(
            command, env=env, stdin=stdin, stdout=out, stderr=err, close_fds=False, preexec_fn=prepare
        )
    except OSError as error:
        os.write(err, f"dl-comm-run: cannot start {command[0]}: {error.strerror}\n".encode())
        end["status"] = 127 if isinstance(error, FileNotFoundError) else 126
    else:
        end["pid"] = program.pid
        on_start({"pid": program.pid})

        def forward(number: int, _frame: FrameType | None) -> None:
            if number not in (signal.SIGCONT, signal.SIGTSTP, signal.SIGUSR1, signal.SIGUSR2):
                end["asked"] = end["asked"] or number
            if program.returncode is None:
                os.kill(program.pid, number)

        for name in FORWARDED:
            number = signal.Signals[name]
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, forward)
        code = program.wait()
        end["status"], end["signal"] = (0, -code) if code < 0 else (code, 0)
    return {**end, "seconds": time.monotonic() - started, "oom": oom_kills() > killed}


def kill_group(pid: int) -> None:
    """Kills the remaining processes of the program's group; 0: no program."""
    if pid:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def oom_kills() -> int:
    """How many processes the system has killed since boot because it was out of memory (Linux >= 4.13)."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def descendants(pid: int) -> list[int]:
    """Process ``pid`` and its descendants on this host, nearest first."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):  # already ended
                # pid (name) state ppid: the name may contain any character.
                parent = int(Path(f"/proc/{name}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(name))
    found = [pid]
    for each in found:
        found += children.get(each, [])
    return found


def rank_processes(pid: int) -> list[int]:
    """The descendants that run dl_comm: they have its SIGUSR1 thread."""
    found = []
    for each in descendants(pid):
        with contextlib.suppress(OSError):
            threads = Path(f"/proc/{each}/task").iterdir()
            if any((thread / "comm").read_text(errors="replace").strip() == SIGNAL_THREAD for thread in threads):
                found.append(each)
    return found


class Stream:
    """An output stream of the program: its target, and whether it is raw, by line, or by line with a rank tag."""

    def __init__(self, rank: int, number: int, show: str) -> None:
        self.target = number
        others = rank > 0 and show == "first"
        self.shown = not others or number == 2
        self.raw = rank == 0 and show != "tag"
        self.tag = f"[{rank}] ".encode() if show == "tag" or others else b""
        self.rest = b""
        self.held = b""

    def lines(self, data: bytes, last: bool = False) -> list[bytes]:
        """The lines that ``data`` completes. A line over 64 KiB, and the ``last`` one, count as complete."""
        *whole, self.rest = (self.rest + data).split(b"\n")
        if self.rest and (last or len(self.rest) > 1 << 16):
            whole.append(self.rest)
            self.rest = b""
        return whole

    def show(self, data: bytes, lines: list[bytes]) -> None:
        """Writes shown output; stops after a write error."""
        if not self.raw:
            self._write(b"".join(self.tag + line + b"\n" for line in lines))
            return
        # Hold incomplete lines, because other ranks' output could interleave.
        self.held += data
        cut = max(self.held.rfind(b"\n"), self.held.rfind(b"\r")) + 1 if data else len(self.held)
        self._write(self.held[:cut])
        self.held = self.held[cut:]

    def flush(self) -> None:
        """Writes an incomplete line: a prompt or a progress bar."""
        self._write(self.held)
        self.held = b""

    def _write(self, data: bytes) -> None:
        while self.shown and data:
            try:
                data = data[os.write(self.target, data) :]
            except OSError:
                self.shown = False


class OutputForwarder:
    """Forwards the program's output until its end, and reports to the launcher."""

    def __init__(self, job: dict[str, Any], rank: int, out: int, err: int, life: int) -> None:
        self.job, self.rank, self.life = job, rank, life
        self.streams = {number: Stream(rank, target, job["show"]) for number, target in ((out, 1), (err, 2))}
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self.partial_note = b""
        self.pid = 0
        self.end: dict[str, Any] = {"killed": True}
        self.launcher: socket.socket | None = None
        self.received = b""
        self.answers = 0

    def run(self) -> None:
        """Runs until the program has ended and its output is complete."""
        os.setsid()
        for name in FORWARDED:
            signal.signal(signal.Signals[name], signal.SIG_IGN)
        self._close_fds()
        file = self._open_file()
        self._connect()
        left = set(self.streams)
        with selectors.DefaultSelector() as selector:
            for number in (*left, self.life, *([self.launcher.fileno()] if self.launcher else [])):
                selector.register(number, selectors.EVENT_READ)
            alive = True
            while alive or left:
                held = [stream for stream in self.streams.values() if stream.held]
                silence = None if alive else FAILED_SILENCE_S if self._failed() else SILENCE_S
                ready = selector.select(PARTIAL_LINE_S if held else silence)
                if not ready and not held:
                    break
                if not ready:
                    for stream in held:
                        stream.flush()
                for key, _events in ready:
                    if self.launcher and key.fd == self.launcher.fileno():
                        if not self._read_launcher():
                            selector.unregister(key.fd)
                        continue
                    data = os.read(key.fd, 1 << 16)
                    if not data:
                        selector.unregister(key.fd)
                    if key.fd == self.life:
                        alive = alive and self._read_parent(data)
                        continue
                    self._handle_output(self.streams[key.fd], data, file)
                    if not data:
                        left.discard(key.fd)
        for number in left:
            self._handle_output(self.streams[number], b"", file)
        self._finish()

    def _close_fds(self) -> None:
        """Closes inherited descriptors that must close when the rank ends, such as PMI's socket."""
        kept = {1, 2, self.life, *self.streams}
        for number in [int(name) for name in os.listdir("/proc/self/fd")]:
            if number not in kept:
                try:
                    os.close(number)
                except OSError:  # the descriptor of the listing
                    continue
        os.open(os.devnull, os.O_RDONLY)  # as 0

    def _open_file(self) -> int | None:
        if not self.job["output_dir"]:
            return None
        digits = len(str(max(self.job["size"] - 1, 0)))
        path = Path(self.job["output_dir"], f"rank-{self.rank:0{digits}}.log")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Somebody else may write in the folder: a link there could name any file of this user.
            return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o666)
        except OSError as error:
            why = "it is a link" if error.errno == errno.ELOOP else error.strerror
            self._log(f"cannot write {path}: {why}")
            return None

    def _read_parent(self, data: bytes) -> bool:
        """Reads the parent's notes; returns whether the program still runs."""
        self.partial_note += data
        *notes, self.partial_note = self.partial_note.split(b"\n")
        for note in map(json.loads, notes):
            self.pid = note["pid"]
            if "seconds" in note:
                self.end = note
                return False
        return bool(data)

    def _failed(self) -> bool:
        return bool(self.end.get("killed") or self.end["status"] or self.end["signal"])

    def _handle_output(self, stream: Stream, data: bytes, file: int | None) -> None:
        lines = stream.lines(data, last=not data)
        # Keep only the last state of a progress bar.
        last = [line.rstrip(b"\r").rpartition(b"\r")[2][:LINE_BYTES].decode(errors="replace") for line in lines]
        self.tail.extend(last)
        for line in last:
            if line.startswith("dl_comm: "):
                self._tell(line)
        stream.show(data, lines)
        while file is not None and data:
            data = data[os.write(file, data) :]

    def _tell(self, line: str) -> None:
        """Tells the launcher of a rank that waits for long, and where the dumps are. There is no answer."""
        dumps = DUMPS_LINE.match(line)
        if self.launcher is None or not (dumps or line.endswith(STALL_MARK)):
            return
        note = {"dumps": dumps[1]} if dumps else {"stalled": True}
        with contextlib.suppress(OSError):  # noticed at the end
            self.launcher.sendall(json.dumps(note).encode() + b"\n")

    def _finish(self) -> None:
        if self._failed():
            kill_group(self.pid)  # if the parent was killed before it could
        if not self._send({**self.end, "tail": list(self.tail) if self._failed() else []}) and self._failed():
            number = self.end.get("signal")
            how = f"signal {number}" if number else f"exit status {self.end.get('status', 'unknown')}"
            self._log("\n  ".join([f"exited with {how}; its last lines:", *self.tail]))

    def _connect(self) -> None:
        for address in self.job["report"]:
            host, _, port = address.rpartition(":")
            try:
                self.launcher = socket.create_connection((host, int(port)), timeout=ANSWER_S / 2)
            except OSError:
                continue
            if self._send({"rank": self.rank, "host": socket.gethostname()}, self.job["token"].encode()):
                return
        self._log(
            f"cannot reach the launcher at {', '.join(self.job['report'])}: its report will not include this rank"
        )

    def _send(self, message: dict[str, Any], before: bytes = b"") -> bool:
        """Sends a line to the launcher, with the token before the first; returns whether it answered."""
        if self.launcher is None:
            return False
        try:
            self.launcher.settimeout(ANSWER_S)
            self.launcher.sendall(before + json.dumps(message).encode() + b"\n")
            answers = self.answers
            while self.answers == answers and self._read_launcher():
                continue
            answered = self.answers > answers
        except OSError:
            answered = False
        if not answered:
            self.launcher.close()
            self.launcher = None
        return answered

    def _read_launcher(self) -> bool:
        """Reads answers and dump requests of the launcher; returns False at the end of the stream."""
        try:
            data = self.launcher.recv(64) if self.launcher else b""
        except ConnectionError:
            data = b""
        *lines, self.received = (self.received + data).split(b"\n")
        self.answers += lines.count(b"ok")
        if b"dump" in lines:
            for pid in rank_processes(self.pid) if self.pid else []:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGUSR1)
        return bool(data)

    def _log(self, text: str) -> None:
        os.write(2, f"dl-comm-run: rank {self.rank} on {socket.gethostname()}: {text}\n".encode())


if __name__ == "__main__":
    main()
