"""Horovod's environment variables: what they set in dl_comm, and which have no effect.

Thread rule: the thread that calls ``init`` or ``shutdown``.
"""

from __future__ import annotations

import logging
import os
import re

log = logging.getLogger("horovod")

_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_USED = re.compile(
    "RANK|SIZE|(LOCAL|CROSS)_(RANK|SIZE)|HOSTNAME|CONTROLLER|CPU_OPERATIONS|SECRET_KEY|CYCLE_TIME|START_TIMEOUT|"
    "GLOO_RENDEZVOUS_(ADDR|PORT)|GLOO_IFACE|LOG_LEVEL|LOG_HIDE_TIME|TIMELINE(_MARK_CYCLES)?|DYNAMIC_PROCESS_SETS|FUSION_THRESHOLD|"
    "STALL_(CHECK_DISABLE|CHECK_TIME_SECONDS|SHUTDOWN_TIME_SECONDS)"
)
_set: list[str] = []
_named: set[str] = set()


def flag(name: str) -> bool:
    """Whether a variable is set, and not to 0."""
    return os.environ.get(name, "0").strip().lower() not in ("", "0", "false")


def number(name: str) -> int | None:
    """The integer of a variable; None if it is not set.

    Raises:
        ValueError: It is no integer.
    """
    text = os.environ.get(name)
    if text is None:
        return None
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name} is '{text}' (expected an integer)") from None


def cycle_s() -> float:
    """``HOROVOD_CYCLE_TIME`` in seconds: how long a name stays busy after its submission."""
    try:
        return max(float(os.environ.get("HOROVOD_CYCLE_TIME", "1")), 0.0) / 1000
    except ValueError:
        return 0.001


def apply() -> None:
    """Sets dl_comm's variables from Horovod's, where they are missing, and the level of the log.

    Names the variables that have no effect at debug level, once.
    """
    found = {
        "DL_COMM_STALL_WARN_S": "0" if flag("HOROVOD_STALL_CHECK_DISABLE") else _get("STALL_CHECK_TIME_SECONDS"),
        "DL_COMM_TIMEOUT_S": _get("STALL_SHUTDOWN_TIME_SECONDS") if flag("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS") else "",
        "DL_COMM_SOCKET_IFNAME": _get("GLOO_IFACE"),
    }
    for name, value in found.items():
        if value and name not in os.environ:
            os.environ[name] = value
            _set.append(name)
    level = {"TRACE": "DEBUG", "FATAL": "CRITICAL"}.get(_get("LOG_LEVEL").upper(), _get("LOG_LEVEL").upper())
    if level in _LEVELS:
        if not log.handlers:
            handler = logging.StreamHandler()
            time = "" if flag("HOROVOD_LOG_HIDE_TIME") else "%(asctime)s "
            handler.setFormatter(logging.Formatter(f"[{time}%(name)s %(levelname)s] %(message)s"))
            log.addHandler(handler)
        log.setLevel(level)
    for name in sorted(os.environ):
        if name.startswith("HOROVOD_") and not _USED.fullmatch(name[8:]) and name not in _named:
            _named.add(name)
            log.debug("%s has no effect with dl_comm", name)


def forget() -> None:
    """After the end of the job: the next one may have other settings."""
    while _set:
        os.environ.pop(_set.pop(), None)


def _get(name: str) -> str:
    return os.environ.get(f"HOROVOD_{name}", "").strip()
