"""``dl_comm.run(function)``: results, output and errors of ranks that a script starts; nothing is left of them."""

from __future__ import annotations

import inspect
import os
import signal
import sys
from pathlib import Path

import pytest

import dl_comm
from dl_comm.run import _files
from launch import Finished, run

# A script without `if __name__ == "__main__"`: the ranks must not run it again.
START = """
import atexit, contextlib, io, os, signal, sys, time
import dl_comm
print("script")

def error_of(*arguments, **options):
    try:
        dl_comm.run(*arguments, **options)
    except dl_comm.CommError as error:
        return error
    raise AssertionError("no error")
"""


def start(folder: Path, text: str, **env: str) -> Finished:
    """Runs a script that finds its temporary files in ``folder / "tmp"``; checks that it leaves nothing."""
    (folder / "tmp").mkdir()
    script = folder / "script.py"
    script.write_text(START + text)
    finished = run([sys.executable, str(script)], 60, {"TMPDIR": str(folder / "tmp"), "DL_COMM_DUMP_DIR": "none"} | env)
    assert finished.left == ()
    assert list((folder / "tmp").iterdir()) == [], finished.output
    return finished


def test_results_and_output_by_rank(tmp_path: Path) -> None:
    text = """
class Point:
    def __init__(self, x): self.x = x

def work(point, scale, offset=0):
    import numpy as np
    dl_comm.init()
    print("rank", dl_comm.rank(), os.environ["NAME"], "\u00fc")
    print("noted", file=sys.stderr)
    assert sys.stdin.read() == ""
    total = dl_comm.allreduce(np.full(3, dl_comm.rank() + 1.0))
    return Point(point.x * scale + offset + dl_comm.rank()), total, os.getpid()

run = dl_comm.run
shown, noted = io.StringIO(), io.StringIO()
with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(noted):
    found = dl_comm.run(work, ranks=2, args=(Point(3), 2), kwargs={"offset": 0.5}, env={"NAME": "a b=c"})
assert "dl_comm._dl_comm" not in sys.modules and "torch" not in sys.modules
assert [point.x for point, _, _ in found] == [6.5, 7.5] and all(type(point) is Point for point, _, _ in found)
assert all(total.tolist() == [3.0] * 3 for _, total, _ in found)
assert len({os.getpid(), *(pid for _, _, pid in found)}) == 3
assert sorted(shown.getvalue().splitlines()) == ["rank 0 a b=c \u00fc", "rank 1 a b=c \u00fc"], shown.getvalue()
assert noted.getvalue() == "noted\\n" * 2, noted.getvalue()
import dl_comm.run as package
import dl_comm.run
from dl_comm import run as named
assert package is run is named is dl_comm.run is sys.modules["dl_comm.run"] and callable(package.main)
# A function may refer to the package, and a job may have one rank.
assert dl_comm.run(lambda: named.__name__, 1) == ["dl_comm.run"]
dl_comm.init()  # a job of one rank may start another one
assert dl_comm.run(lambda: (dl_comm.init(), dl_comm.size())[1], 2) == [2, 2]
print("fine")
"""
    finished = start(tmp_path, text, DL_COMM_ALONE="0")
    assert finished.output == "script\nfine\n", finished.output


def test_failures_name_the_rank(tmp_path: Path) -> None:
    text = """
class Wrong(Exception): pass
class Unloadable(Exception):
    def __init__(self, one, two): super().__init__(f"{one} and {two}")

def fails():
    dl_comm.init()
    if dl_comm.rank() == 1: raise Wrong("boom", 7)
    dl_comm.barrier()

error = error_of(fails, 2)
assert type(error) is dl_comm.RankFailedError and (error.rank, error.signal) == (1, None)
assert str(error).startswith("dl_comm.run: rank 1 of 2 failed: Wrong: ('boom', 7)\\n\\nTraceback "), error
assert "in fails" in str(error) and "_rank.py" not in str(error), error
assert type(error.__cause__) is Wrong and error.__cause__.args == ("boom", 7)

def is_killed():
    dl_comm.init()
    if dl_comm.rank() == 1: os.kill(os.getpid(), signal.SIGKILL)
    dl_comm.barrier()

error = error_of(is_killed, 2)
assert type(error) is dl_comm.RankFailedError and (error.rank, error.signal) == (1, 9)
assert "rank 1 of 2 failed: killed by SIGKILL (signal 9)" in str(error), error

def differs():
    how = os.environ["HOW"]
    if os.environ["RANK"] == "1":
        if how == "result": return (number for number in [])
        if how == "unloadable": raise Unloadable(1, 2)
        if how == "exit": os._exit(0)
        if how == "status": os._exit(3)
        if how == "stop": sys.exit(4)
        if how == "at exit": atexit.register(os._exit, 5)
        if how == "nested": dl_comm.run(differs, 1)
    return 1

expected = {
    "result": "rank 1 of 2 has a result of type generator that cannot be pickled: TypeError: ",
    "unloadable": "rank 1 of 2 failed: Unloadable: 1 and 2",
    "exit": "rank(s) 1 ended before the function returned: exit status 0",
    "status": "rank 1 of 2 failed: exit status 3",
    "stop": "rank 1 of 2 failed: SystemExit: 4",
    "at exit": "rank 1 of 2 has returned, and failed then: exit status 5",
    "nested": "dl_comm.run was called on rank 1 of 2, and starts ranks itself: call the function there",
}
for how, words in expected.items():
    error = error_of(differs, 2, env={"HOW": how})
    assert type(error) is dl_comm.RankFailedError and error.rank == 1 and words in str(error), error
    assert (how == "unloadable") <= (error.__cause__ is None)

before = time.monotonic()
error = error_of(time.sleep, 2, (60,), timeout=1)
assert type(error) is dl_comm.TimeoutError and isinstance(error, TimeoutError)
assert str(error) == "dl_comm.run: rank(s) 0-1 had not returned after 1 s (timeout); all ranks were killed", error
assert time.monotonic() < before + 6
print("fine")
"""
    finished = start(tmp_path, text)
    # MPICH's banner has an empty line before it.
    assert finished.output.split() == ["script", "fine"], finished.output


def test_what_is_refused_before_a_start(tmp_path: Path) -> None:
    text = """
import subprocess
subprocess.Popen = None  # nothing is started
for words, arguments, options in [
    ("invalid function: 3", (3,), {}),
    ("invalid ranks: 0", (print, 0), {}),
    ("invalid args: 'ab'", (print, 1, "ab"), {}),
    ("invalid kwargs: [1]", (print,), {"kwargs": [1]}),
    ("invalid timeout: -1", (print,), {"timeout": -1}),
    ("invalid env: 'A': 1", (print,), {"env": {"A": 1}}),
    ("invalid env: 'A=B': 'c'", (print,), {"env": {"A=B": "c"}}),
    ("cannot be pickled: TypeError: ", (print, 1, [sys._getframe()]), {}),
]:
    error = error_of(*arguments, **options)
    assert type(error) is dl_comm.ArgumentError and words in str(error), error
for words, variables in [
    ("rank 1 of 2, ", {"PMI_RANK": "1", "PMI_SIZE": "2"}),
    ("rank 1 of 2 (torchrun), ", {"RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"}),
    ("rank 0 of 3 (DL_COMM_SIZE), ", {"DL_COMM_RANK": "0", "DL_COMM_SIZE": "3"}),
    ("rank of another job, ", {"DL_COMM_HELPER_OF": "x"}),
]:
    os.environ.update(variables)
    error = error_of(print)
    assert type(error) is dl_comm.StateError and f"dl_comm.run was called on {words}" in str(error), error
    for name in variables: del os.environ[name]
print("fine")
"""
    finished = start(tmp_path, text)
    assert finished.output == "script\nfine\n", finished.output


def test_without_cloudpickle_functions_come_from_modules(tmp_path: Path) -> None:
    (tmp_path / "cloudpickle.py").write_text("raise ImportError\n")
    (tmp_path / "module.py").write_text("def double(x):\n    return 2 * x\n")
    # Its import starts ranks again, which is refused there.
    (tmp_path / "recursive.py").write_text("import dl_comm\n\ndef f(): pass\n\ndl_comm.run(f, 1)\n")
    text = """
def mine(): pass

import module
assert dl_comm.run(module.double, 2, args=("a",)) == ["aa", "aa"]
for function in (mine, lambda: 1):
    error = error_of(function, 2)
    assert type(error) is dl_comm.ArgumentError and str(error).endswith("pip install cloudpickle"), error
try:
    import recursive
except dl_comm.RankFailedError as error:
    assert "rank 0 of 1 cannot load the function: " in str(error), error
    assert "dl_comm.run was called on rank 0 of 1" in str(error), error
    print("fine")
"""
    finished = start(tmp_path, text)
    assert finished.output == "script\nfine\n", finished.output


STOPPED = """
import subprocess
if sys.argv[1:] == ["caller"]:
    def work():
        open(os.path.join(os.environ["FOLDER"], os.environ["RANK"]), "w").close()
        while True: time.sleep(0.1)
    try:
        dl_comm.run(work, 2)
    except KeyboardInterrupt:
        sys.exit("interrupted")
caller = subprocess.Popen([sys.executable, __file__, "caller"])
while not all(os.path.exists(os.path.join(os.environ["FOLDER"], str(rank))) for rank in (0, 1)):
    time.sleep(0.05)
caller.send_signal(int(os.environ["NUMBER"]))
print("status", caller.wait())
until = time.monotonic() + 10
while os.listdir(os.environ["TMPDIR"]) and time.monotonic() < until:
    time.sleep(0.05)
"""


@pytest.mark.parametrize(
    ("number", "text"), [(signal.SIGINT, "interrupted\nstatus 1\n"), (signal.SIGKILL, "status -9\n")]
)
def test_the_ranks_end_with_the_caller(tmp_path: Path, number: int, text: str) -> None:
    """Their programs are of other sessions: a terminal's Ctrl-C reaches the caller only."""
    finished = start(tmp_path, STOPPED, FOLDER=str(tmp_path), NUMBER=str(int(number)))
    assert finished.output.endswith(text), finished.output


def test_a_launcher_that_cannot_start_is_an_error(tmp_path: Path) -> None:
    text = """
error = error_of(print, 2)
assert type(error) is dl_comm.CommError and "the ranks cannot be started: " in str(error), error
print(error)
"""
    finished = start(tmp_path, text, SLURM_JOB_NODELIST="a", SLURM_TASKS_PER_NODE="x")
    assert "invalid SLURM_TASKS_PER_NODE: 'x'" in finished.output, finished.output


def test_links_are_not_followed(tmp_path: Path) -> None:
    _files.write(tmp_path / "file", b"data")
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600
    assert _files.read(tmp_path / "file") == b"data"
    (tmp_path / "link").symlink_to(tmp_path / "file")
    (tmp_path / "new.unfinished").symlink_to(tmp_path / "file")
    os.mkfifo(tmp_path / "pipe")
    for action in (lambda: _files.read(tmp_path / "link"), lambda: _files.read(tmp_path / "pipe")):
        with pytest.raises(OSError):
            action()
    with pytest.raises(OSError):
        _files.write(tmp_path / "new", b"other")
    assert (tmp_path / "file").read_bytes() == b"data"


def test_in_a_batch_job_the_ranks_are_on_this_host(tmp_path: Path) -> None:
    """Those of other hosts could not read the function."""
    (tmp_path / "nodes").write_text("nowhere.invalid\nnowhere.invalid\n")
    finished = start(tmp_path, "print(dl_comm.run(os.getppid, 2) and 'fine')", PBS_NODEFILE=str(tmp_path / "nodes"))
    assert finished.output == "script\nfine\n", finished.output


def test_the_package_is_documented_as_a_function() -> None:
    assert list(inspect.signature(dl_comm.run).parameters) == ["function", "ranks", "args", "kwargs", "timeout", "env"]
    assert "dl_comm.run" in (dl_comm.run.__doc__ or "")
