"""Files in the private folder of one ``dl_comm.run``. Links are not followed. Any thread."""

from __future__ import annotations

import os
import stat
from pathlib import Path

CALL = "call"
REPORT = "report"


def result_name(rank: int) -> str:
    """The name of a rank's file."""
    return f"rank-{rank}"


def write(path: Path, data: bytes) -> None:
    """Writes a new file; it appears when it is complete."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    number = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(number, "wb") as file:
        file.write(data)
    unfinished.rename(path)


def read(path: Path) -> bytes:
    """The content of a file of this user.

    Raises:
        FileNotFoundError: There is none.
        OSError: It is a link, no file, or of another user.
    """
    number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(number, "rb") as file:
        status = os.fstat(number)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise OSError(f"{path} is no file of this user")
        return file.read()
