"""Shorter output for uncaught errors that other ranks caused, or that TensorFlow repeats.

A lost peer is one line: the rank that failed prints the traceback. For an error in a session or a `tf.function`, prints
our message once with the script's lines; TensorFlow prints both several times, with its own frames.
"""

from __future__ import annotations

import functools
import os
import sys
import traceback
from types import FrameType, TracebackType
from typing import Any

from dl_comm import _dl_comm
from dl_comm._base.errors import PeerLostError, translate
from dl_comm._base.paths import PACKAGE


@functools.cache
def install() -> None:
    """Installs the hook; once. Other uncaught errors go to the previous hook."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        lost = translate(error)
        if not isinstance(lost, PeerLostError):
            if lost is not error and _is_tensorflow_error(error):
                error = _short_error(error, str(lost))
                trace = _script_frames(trace)
            before(kind, error, trace)
            return
        rank = _dl_comm.rank() if _dl_comm.is_up() else None
        who = "dl_comm" if rank is None else f"dl_comm: rank {rank}"
        text = str(lost).strip().splitlines()[0]
        print(f"{who} ends{_location(trace)}: PeerLostError: {text}", file=sys.stderr, flush=True)

    sys.excepthook = hook


def _is_tensorflow_error(error: BaseException) -> bool:
    return type(error).__module__.partition(".")[0] == "tensorflow" and hasattr(error, "node_def")


def _short_error(error: Any, text: str) -> BaseException:
    """The same exception type with our message once, and the script line that created the operation."""
    text = text.partition("\n\t [[")[0].partition(" [Op:")[0]
    made = [] if error.op is None else [each for each in error.op.traceback if _is_script(each.filename)]
    if made:
        text += f"\nThe operation {error.op.name!r} was created in {made[-1].filename}, line {made[-1].lineno}."
    short: BaseException = type(error)(None, None, text)
    return short


def _script_frames(trace: TracebackType | None) -> TracebackType | None:
    """The traceback without library frames."""
    if trace is None:
        return None
    following = _script_frames(trace.tb_next)
    frame: FrameType = trace.tb_frame
    if not _is_script(frame.f_code.co_filename):
        return following
    return TracebackType(following, frame, trace.tb_lasti, trace.tb_lineno)


def _location(trace: TracebackType | None) -> str:
    """The innermost line of the script, without frames of dl_comm and libraries."""
    lines = [frame for frame in traceback.extract_tb(trace) if _is_script(frame.filename)]
    return f" in {lines[-1].filename}, line {lines[-1].lineno}" if lines else ""


def _is_script(filename: str) -> bool:
    libraries = (str(PACKAGE) + os.sep, *(folder + os.sep for folder in sys.path if folder.endswith("-packages")))
    return not filename.startswith((*libraries, "<"))
