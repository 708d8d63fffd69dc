"""The hosts of ``horovod.run``, which are this one."""

from __future__ import annotations

import socket
from pathlib import Path


def local_slots(hosts: str | None, hostfile: str | None) -> int:
    """The ranks that ``hosts`` (``localhost:4``) or ``hostfile`` (``localhost slots=4``) allows here.

    Raises:
        ValueError: One is another host, or the text is invalid.
        OSError: The file cannot be read.
    """
    entries = [entry.partition(":")[::2] for entry in (hosts or "").split(",") if entry]
    if hostfile is not None:
        lines = (line.split("#")[0].split() for line in Path(hostfile).read_text().splitlines())
        entries = [(words[0], words[1].removeprefix("slots=") if words[1:] else "") for words in lines if words]
    names = {"localhost", "127.0.0.1", socket.gethostname()}
    others = [name for name, _ in entries if name not in names]
    if others:
        raise ValueError(f"horovod.run starts ranks on this host only, not on {', '.join(others)}: use horovodrun")
    return sum(int(slots or 1) for _, slots in entries)
