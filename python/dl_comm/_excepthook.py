"""What a rank prints of uncaught errors that are not its own, or that TensorFlow makes long.

One line when it has only heard that another rank has failed. Of an error in a session or a `tf.function` our text once
and the lines of the script, where TensorFlow has both two or three times, with all that it called.
"""

from __future__ import annotations

import os
import sys
import traceback
from types import FrameType, TracebackType
from typing import Any

from dl_comm import _dl_comm
from dl_comm._errors import PeerLostError, translate
from dl_comm._paths import PACKAGE


def install() -> None:
    """Has uncaught errors of these kinds printed so; all others go where they went."""
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
    """The same kind of error with our text, which TensorFlow repeats after the operation's name, and where that is."""
    text = text.partition("\n\t [[")[0].partition(" [Op:")[0]
    made = [] if error.op is None else [each for each in error.op.traceback if _is_script(each.filename)]
    if made:
        text += f"\nThe operation {error.op.name!r} was made in {made[-1].filename}, line {made[-1].lineno}."
    short: BaseException = type(error)(None, None, text)
    return short


def _script_frames(trace: TracebackType | None) -> TracebackType | None:
    """The traceback without the frames of libraries."""
    if trace is None:
        return None
    following = _script_frames(trace.tb_next)
    frame: FrameType = trace.tb_frame
    if not _is_script(frame.f_code.co_filename):
        return following
    return TracebackType(following, frame, trace.tb_lasti, trace.tb_lineno)


def _location(trace: TracebackType | None) -> str:
    """Where the script was: the innermost line that is neither ours nor a library's."""
    lines = [frame for frame in traceback.extract_tb(trace) if _is_script(frame.filename)]
    return f" in {lines[-1].filename}, line {lines[-1].lineno}" if lines else ""


def _is_script(filename: str) -> bool:
    libraries = (str(PACKAGE) + os.sep, *(folder + os.sep for folder in sys.path if folder.endswith("-packages")))
    return not filename.startswith((*libraries, "<"))
