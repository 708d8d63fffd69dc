"""Files of a job: one rank writes or reads, and all ranks get the outcome.

Thread rule: all ranks call the collective functions in the same order; any thread may call them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from dl_comm import _dl_comm
from dl_comm._arrays.agreement import failing_together
from dl_comm._arrays.collectives import broadcast_in
from dl_comm._arrays.groups import Group, given, unless_world
from dl_comm._base.checks import checked_path
from dl_comm._base.errors import ArgumentError, CommError
from dl_comm._job.ranks import get_rank

Location = str | os.PathLike[str]


def rank0_path(path: Location) -> Path | None:
    """``path`` on rank 0, None on other ranks: for functions that write nothing when the path is None."""
    path = Path(checked_path("path", path))
    return path if get_rank() == 0 else None


def rank_path(path: Location) -> Path:
    """``path`` with the rank before its suffix: one file per rank, such as ``log.rank2.txt``."""
    path = Path(checked_path("path", path))
    if not path.name:
        raise ArgumentError(f"invalid path: {str(path)!r} (expected that of a file)")
    return path.with_name(f"{path.stem}.rank{get_rank()}{path.suffix}")


def write_on_rank0(path: Location, write: Callable[[Path], Any], *, group: Group | None = None) -> None:
    """Writes a file on rank 0; the other ranks wait until it exists. Collective.

    Args:
        path: The file. The complete new file replaces it atomically, so no reader sees a partial file. A device such as
            ``/dev/null`` or a pipe stays, and is written to.
        write: Called on rank 0 only, with a temporary path in the same folder and with the same suffix. It creates that
            file. It must not call collective functions.
        group: The ranks that take part, of which rank 0 writes; None: all.

    Raises:
        CommError: On other ranks, when rank 0 failed; rank 0 raises its own exception. An existing file stays.
        TimeoutError: Writing took longer than ``DL_COMM_TIMEOUT_S``; or, as ``PeerLostError``, a call of this job was
            lost on a GPU (see ``synchronize``), and nothing is written.
        StateError: ``init`` was not called, or ``finalize`` was.
    """
    group = unless_world(group)
    path = _checked(path, "write_on_rank0", group)
    with failing_together("write_on_rank0", None if group is None else given(group)):
        # What is written must not come from a call that a GPU has lost.
        _dl_comm.synchronize()

    def replace() -> None:
        if path.exists() and not path.is_file() and not path.is_dir():
            write(path)
            return
        unfinished = path.with_name(f".{os.getpid()}.{path.name}")
        try:
            write(unfinished)
            with unfinished.open("rb") as file:
                os.fsync(file.fileno())
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)

    _on_rank0(replace, f"write {path}", group)


def read_on_rank0(path: Location, *, group: Group | None = None) -> bytes:
    """The content of a file that rank 0 reads, on all ranks. Collective.

    Args:
        path: The file.
        group: The ranks that take part, of which rank 0 reads; None: all.

    Raises:
        CommError: On other ranks, when rank 0 failed; rank 0 raises its own exception.
        StateError: ``init`` was not called, or ``finalize`` was.
    """
    group = unless_world(group)
    content = _on_rank0(_checked(path, "read_on_rank0", group).read_bytes, f"read {path}", group)
    return _bytes_of_rank0(content, "read_on_rank0", group)


def _checked(path: Any, function: str, group: Group | None) -> Path:
    with failing_together(function, None if group is None else given(group)):
        return Path(checked_path("path", path))


def _on_rank0(action: Callable[[], Any], description: str, group: Group | None) -> Any:
    """The result of ``action`` on rank 0; None on other ranks. Its exception raises one on every rank."""
    name, result, failure = description.partition(" ")[0] + "_on_rank0", None, None
    if _is_first(group):
        try:
            result = action()
        except Exception as error:
            failure = error
    text = "" if failure is None else f"{type(failure).__name__}: {failure}"
    text = _bytes_of_rank0(text.encode(errors="replace"), f"{name}: outcome", group).decode()
    if failure is not None:
        raise failure
    if text:
        raise CommError(f"rank 0 could not {description}: {text}")
    return result


def _broadcast(array: np.ndarray, name: str, group: Group | None) -> None:
    if group is None:
        _dl_comm.broadcast([array], 0, name)
    else:
        broadcast_in([array], 0, group, name=name)


def _is_first(group: Group | None) -> bool:
    return (get_rank() if group is None else group.rank) == 0


def _bytes_of_rank0(content: bytes | None, name: str, group: Group | None) -> bytes:
    mine = _is_first(group)
    length = np.array([len(content) if mine and content is not None else 0])
    _broadcast(length, f"{name}, length", group)
    data = np.frombuffer(content or b"", np.uint8).copy() if mine else np.empty(int(length[0]), np.uint8)
    if length[0]:
        _broadcast(data, name, group)
    return content if mine and content is not None else data.tobytes()
