"""``dl_comm.run(function)``: starts ranks, runs a function on each, and returns the results.

The launcher is a process of its own, in a session of its own (``python -m dl_comm.run``); its ranks run ``_rank.py``.
The function, the results and the exceptions are pickles in a private folder. The launcher ends with this process.

Imports neither a framework nor the compiled module.
"""

from __future__ import annotations

import codecs
import contextlib
import json
import os
import pickle
import re
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, TypeVar

from dl_comm._base.errors import ArgumentError, CommError, RankFailedError, StateError, TimeoutError  # noqa: A004
from dl_comm._base.text import runs_text
from dl_comm._base.torch_variables import launched
from dl_comm.run._files import CALL, REPORT, read, result_name, write
from dl_comm.run._hosts import allocation
from dl_comm.run._pickles import MainError, dumps

Result = TypeVar("Result")

is_rank = False
"""Whether this process is a rank that ``run`` has started."""
_GRACE_S = 2.0  # the other ranks after a failure
_STOP_S = 5.0  # from SIGTERM to SIGKILL
_POLL_S = 0.2


def run(
    function: Callable[..., Result],
    ranks: int = 4,
    args: Sequence[Any] = (),
    *,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float | None = None,
    env: Mapping[str, str] | None = None,
) -> list[Result]:
    """Starts ranks on this host, calls a function on each, and returns the results by rank.

    For notebooks, interactive sessions and scripts, which are no ranks themselves. The function is not called in this
    process. Its ranks are new processes, which end with it::

        def train(rate):
            optimizer = dl_comm.torch.DistributedOptimizer(...)

        losses = dl_comm.run(train, ranks=4, args=(0.1,))

    The function, its arguments and its results are pickled. Functions of a script or a notebook need cloudpickle, which
    takes them by value: the ranks do not run the script again. What the ranks print appears in ``sys.stdout`` and
    ``sys.stderr``.

    Args:
        function: The function.
        ranks: The number of ranks.
        args: Its positional arguments, the same on all ranks; ``dl_comm.rank()`` tells a rank which one it is.
        kwargs: Its keyword arguments.
        timeout: In seconds, from the start of the ranks to their end; None, 0: no limit.
        env: Environment variables of the ranks, beside those of this process.

    Returns:
        The results, in the order of the ranks.

    Raises:
        ArgumentError: An argument is invalid or cannot be pickled. Nothing was started.
        CommError: The ranks cannot be started.
        RankFailedError: The function raised an exception on a rank, its result cannot be pickled, or the rank was
            killed. The other ranks were stopped.
        StateError: This process is a rank. Nothing was started.
        TimeoutError: The timeout has passed. The ranks were killed.

    Ctrl-C kills all ranks. Thread rule: any thread, several at a time; Ctrl-C reaches the main thread only.
    """
    from dl_comm._base.checks import checked_int, seconds

    _refuse_on_rank()
    count = checked_int("ranks", ranks, 1)
    limit = None if timeout is None else seconds(timeout) or None
    variables = _checked_variables(env)
    call = _call(function, args, kwargs)
    folder = Path(tempfile.mkdtemp(prefix="dl_comm_run_"))
    try:
        path = [each or os.getcwd() for each in sys.path]
        write(folder / CALL, pickle.dumps({"path": path, "argv": sys.argv, "call": call}))
        if not _launch(folder, count, variables, limit):
            left = [rank for rank in range(count) if not (folder / result_name(rank)).exists()]
            what = f"rank(s) {runs_text(left)} had not returned" if left else "all ranks had returned, but not ended,"
            raise TimeoutError(f"dl_comm.run: {what} after {limit:g} s (timeout); all ranks were killed")
        return _results(folder, count)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _refuse_on_rank() -> None:
    """Raises StateError in a rank and in a helper of one. A process that is a job of its own, of one rank, is none."""
    found = _position()
    if found is not None:
        raise StateError(
            f"dl_comm.run was called on rank {found}, and starts ranks itself: call the function there, or call "
            "dl_comm.run in a process that no launcher has started"
        )


def _position() -> str | None:
    """The rank that this process is or belongs to, as text."""
    env = os.environ
    core = sys.modules.get("dl_comm._dl_comm")
    if core is not None and core.is_up():
        return f"{core.rank()} of {core.size()}" if is_rank or core.size() > 1 else None
    position = launched(env)
    if position is not None:
        return f"{position.rank} of {position.size}" if is_rank or position.size > 1 else None
    if env.get("DL_COMM_ALONE", "").strip() == "1" and not is_rank:
        return None
    if "TORCHELASTIC_RUN_ID" in env and env.get("WORLD_SIZE", "1") != "1":
        return f"{env.get('RANK')} of {env['WORLD_SIZE']} (torchrun)"
    number = env.get("DL_COMM_RANK", env.get("JOB_COMPLETION_INDEX"))
    if number is not None and env.get("DL_COMM_SIZE", "1").strip() != "1":
        return f"{number} of {env['DL_COMM_SIZE']} (DL_COMM_SIZE)"
    if "DL_COMM_HELPER_OF" in env:
        return "of another job, as a process that a rank has started"
    return "that dl_comm.run has started" if is_rank else None


def _checked_variables(env: Mapping[str, str] | None) -> dict[str, str]:
    if env is not None and not isinstance(env, Mapping):
        raise ArgumentError(f"invalid env: {env!r} (expected a dictionary of names and values)")
    variables = dict(env or {})
    for name, value in variables.items():
        is_name = isinstance(name, str) and re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name)
        if not is_name or not isinstance(value, str) or "\0" in value:
            raise ArgumentError(f"invalid env: {name!r}: {value!r} (expected a name of a variable, and text)")
    return variables


def _call(function: Any, args: Any, kwargs: Any) -> bytes:
    """The pickle of the call."""
    if not callable(function):
        raise ArgumentError(f"invalid function: {function!r} (expected a function)")
    if isinstance(args, (str, bytes)) or not hasattr(args, "__iter__"):
        raise ArgumentError(f"invalid args: {args!r} (expected a list or tuple of arguments)")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise ArgumentError(f"invalid kwargs: {kwargs!r} (expected a dictionary of arguments)")
    try:
        return dumps((function, tuple(args), dict(kwargs or {})))
    except MainError as error:
        raise ArgumentError(f"dl_comm.run: {error}") from None
    except Exception as error:
        name = getattr(function, "__qualname__", repr(function))
        raise ArgumentError(
            f"dl_comm.run: {name} or its arguments cannot be pickled: {type(error).__name__}: {error}"
        ) from error


def _launch(folder: Path, ranks: int, variables: dict[str, str], limit: float | None) -> bool:
    """Runs the ranks to their end; returns whether it came within the limit. Leaves no process."""
    started = time.monotonic()
    python = [sys.executable, "-m"]
    options = ["-n", str(ranks), "--all-output", "--grace", str(_GRACE_S), *_this_host(ranks)]
    options += [word for name in variables for word in ("-x", name)]
    # A value of this process would make each rank a job of its own.
    env = {name: value for name, value in os.environ.items() if name != "DL_COMM_ALONE"}
    process = subprocess.Popen(
        [*python, "dl_comm.run", "--parent", str(os.getpid()), str(folder), *options]
        + [*python, "dl_comm.run._rank", str(folder)],
        env={**env, **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        return _copy_output(process, None if limit is None else started + limit)
    finally:
        _stop(process)


def _this_host(ranks: int) -> list[str]:
    """The option for this host, where the launcher would use those of the batch job: they do not share the folder."""
    try:
        batch = allocation(os.environ)
    except (ValueError, OSError):  # the launcher reports it
        return []
    return ["-H", f"{socket.gethostname()}:{ranks}"] if batch else []


def _copy_output(process: subprocess.Popen[bytes], until: float | None) -> bool:
    """Copies the output until the process has ended; returns False if that is not before ``until``."""
    assert process.stdout is not None
    assert process.stderr is not None
    with selectors.DefaultSelector() as selector:
        for pipe, target in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            selector.register(pipe, selectors.EVENT_READ, _Output(target))
        while True:
            left = _POLL_S if until is None else min(_POLL_S, until - time.monotonic())
            if left <= 0:
                return False
            has_ended = process.poll() is not None
            if not selector.get_map():
                if has_ended:
                    return True
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(left)
                continue
            ready = selector.select(left)
            for key, _events in ready:
                data = os.read(key.fd, 1 << 16)
                key.data.write(data)
                if not data:
                    selector.unregister(key.fd)
            # A process that a rank has left may still hold the pipe.
            if has_ended and not ready:
                return True


class _Output:
    """Where output goes: a notebook's ``sys.stdout`` is an object without a descriptor."""

    def __init__(self, target: IO[str] | None) -> None:
        self.target = target
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def write(self, data: bytes) -> None:
        text = self.decoder.decode(data, final=not data)
        if self.target is None or not text:
            return
        try:
            self.target.write(text)
        except UnicodeEncodeError as error:
            self.target.write(text.encode(error.encoding, "backslashreplace").decode(error.encoding))
        self.target.flush()


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ends the launcher and its ranks, if they run. A second Ctrl-C kills them at once."""
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()
    try:
        if process.poll() is None:
            process.terminate()
            process.wait(_STOP_S)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        # mpiexec is in its group; the wrappers of the ranks end them when it is gone.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _results(folder: Path, ranks: int) -> list[Any]:
    """The results, by rank.

    Raises:
        CommError: No rank was started.
        RankFailedError: A rank failed.
    """
    found: dict[int, dict[str, Any]] = {}
    for rank in range(ranks):
        with contextlib.suppress(FileNotFoundError):
            found[rank] = pickle.loads(read(folder / result_name(rank)))
    try:
        report = json.loads(read(folder / REPORT))
    except FileNotFoundError:
        report = {"status": 1, "text": "its launcher has ended without a report", "first": None}
    _raise_failure(found, ranks, report)
    results = []
    for rank in range(ranks):
        try:
            results.append(pickle.loads(found[rank]["value"]))
        except Exception as error:
            text = f"the result of rank {rank} cannot be unpickled: {type(error).__name__}: {error}"
            raise _failed(rank, f"dl_comm.run: {text}") from error
    return results


def _raise_failure(found: dict[int, dict[str, Any]], ranks: int, report: dict[str, Any]) -> None:
    """Raises the error of the rank that failed first, if one did."""
    first = report["first"]
    errors = {rank: note for rank, note in found.items() if "what" in note}
    missing = [rank for rank in range(ranks) if rank not in found]
    if first is not None and (first["rank"] in missing or not errors):
        rank = first["rank"]
        when = "failed" if rank in missing else "has returned, and failed then"
        raise _failed(rank, f"dl_comm.run: rank {rank} of {ranks} {when}: {first['why']}", first["signal"] or None)
    if errors:
        # A lost rank makes the others fail.
        rank = min(errors, key=lambda rank: (errors[rank]["is_lost"], errors[rank]["time"]))
        note = errors[rank]
        text = f"dl_comm.run: rank {rank} of {ranks} {note['what']}: {note['line']}\n\n{note['text'].rstrip()}"
        cause = None
        if note["exception"] is not None:
            with contextlib.suppress(Exception):  # its class may need what only the ranks have
                cause = pickle.loads(note["exception"])
        raise _failed(rank, text) from (cause if isinstance(cause, BaseException) else None)
    if not found and (missing or report["status"]):
        raise CommError(f"dl_comm.run: the ranks cannot be started: {report['text'] or 'they have ended at once'}")
    if missing:
        text = report["text"] or "exit status 0"
        which = f"rank(s) {runs_text(missing)}"
        raise _failed(missing[0], f"dl_comm.run: {which} ended before the function returned: {text}")
    if report["status"]:
        raise CommError(f"dl_comm.run: all ranks have returned, and then {report['text']}")


def _failed(rank: int, text: str, number: int | None = None) -> RankFailedError:
    error: RankFailedError = RankFailedError(text)
    error.rank, error.signal = rank, number
    return error
