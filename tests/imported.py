"""Programs that begin with a framework already imported: its import costs seconds of processor time.

``launch(2, [*python("torch"), "script.py", "argument"])`` does what ``[sys.executable, "script.py", "argument"]`` would
do. The first call imports the modules in one process, a server without threads. Each program is a fork of it that
``imported_start/client.py`` asks for: the child has the client's arguments, environment, folder and open files, and the
client ends as the child ends. So launchers, their connections to ranks, and the limits of ``launch.run`` work as usual.
Programs share nothing else, and a failure of one is its own.

Each process of pytest has its own servers. With ``--dist loadgroup``, ``pytest.mark.xdist_group`` keeps the tests that
share one in one process.

What the modules read from the environment when they are imported is given to ``python``. A test whose subject is the
import, or the start of the interpreter, uses ``sys.executable``.
"""

from __future__ import annotations

import atexit
import functools
import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

TORCH = ("torch", "torch.distributed.fsdp", "torch._dynamo")
"""Of torch, what dl_comm.torch uses."""
_FOLDER = Path(__file__).with_name("imported_start")
# Of libraries that would start threads, or print, when they are imported.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}


@functools.cache
def python(*modules: str, run_module: str = "") -> list[str]:
    """The command line of an interpreter that has imported ``modules``; a script and its arguments follow.

    ``run_module``: as with ``python -m run_module``, which gets all arguments. The server ends with this process.
    """
    folder = tempfile.TemporaryDirectory(prefix="dl_comm_test_")
    address = os.path.join(folder.name, "socket")
    program = ["-m", run_module] if run_module else [str(_FOLDER / "script.py")]
    variables = {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(_FOLDER), os.environ.get("PYTHONPATH")])),
        "PYTHONUNBUFFERED": "1",
        "DL_COMM_TEST_IMPORTED": f"{address} {' '.join(modules)}",
    }
    server = subprocess.Popen(
        [sys.executable, *program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **_ENVIRONMENT, **variables},
        start_new_session=True,
    )
    assert server.stdin is not None
    assert server.stdout is not None
    pipe = server.stdin

    def end() -> None:
        with suppress(OSError):
            pipe.close()
        server.wait(60)
        folder.cleanup()

    atexit.register(end)
    assert server.stdout.readline() == b"ready\n", f"no server with {modules}"
    return [sys.executable, "-IS", str(_FOLDER / "client.py"), address]
