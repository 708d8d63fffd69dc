"""A rank of ``dl_comm.run``: ``python -m dl_comm.run._rank FOLDER``. Main thread.

Writes its result, or its exception, to a file in the folder. After an exception it ends as after an uncaught one, but
prints nothing: the caller has the text.
"""

from __future__ import annotations

import os
import pickle
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from dl_comm._base.errors import PeerLostError, error_of
from dl_comm._base.torch_variables import rank_of
from dl_comm.run import _function
from dl_comm.run._files import CALL, read, result_name, write
from dl_comm.run._pickles import dumps


def main(folder: Path) -> int:
    """Calls the function; returns the exit status."""
    rank = rank_of(os.environ) or 0
    file = folder / result_name(rank)
    _function.is_rank = True
    what = "cannot load the function"
    try:
        job = pickle.loads(read(folder / CALL))
        sys.path[:] = job["path"]
        sys.argv[:] = job["argv"]
        function, args, kwargs = pickle.loads(job["call"])
        what = "failed"
        value = function(*args, **kwargs)
        what = f"has a result of type {_type_name(value)} that cannot be pickled"
        found = {"value": dumps(value)}
    except BaseException as error:
        write(file, pickle.dumps(_failure(what, error)))
        # As for Python itself after an uncaught exception: dl_comm's exit handler sends it to the other ranks.
        sys.last_value = error
        return 1
    write(file, pickle.dumps(found))
    return 0


def _failure(what: str, error: BaseException) -> dict[str, Any]:
    trace = error.__traceback__.tb_next if error.__traceback__ and what == "failed" else error.__traceback__
    lost = error_of(error)
    return {
        "what": what,
        "line": traceback.format_exception_only(type(error), error)[-1].strip(),
        "text": "".join(traceback.format_exception(type(error), error, trace)),
        "exception": _pickled(error),
        "is_lost": isinstance(lost, PeerLostError),
        "time": time.monotonic(),
    }


def _pickled(error: BaseException) -> bytes | None:
    """The pickle of an exception; None if it cannot be restored."""
    try:
        data = dumps(error)
        return data if isinstance(pickle.loads(data), BaseException) else None
    except Exception:
        return None


def _type_name(value: Any) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
