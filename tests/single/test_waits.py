"""Deadlocks between ranks, and exits that others wait for, are detected within seconds and name both sides."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from imported import TORCH, python
from launch import Finished, ending_together, launch
from plain_ranks import MEET

Script = Callable[..., Finished]
PREAMBLE = """
import os, signal, sys, time
import numpy as np
import dl_comm as mc

def attempt(name, what):
    start = time.monotonic()
    try:
        what()
        error = "nothing"
    except (mc.CommError, KeyboardInterrupt) as caught:
        error = f"{type(caught).__name__}: {caught}"
    print(f"<{name} after {time.monotonic() - start:.1f} s: {error}>", flush=True)

def ones():
    return [np.ones(3, np.float32)]
"""
# Far above the time to detect a mismatch, far below the deadline.
SOON = 20


@pytest.fixture(params=["one host", pytest.param("two hosts", marks=pytest.mark.heavy)])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., Finished]:
    """Runs Python text on two ranks; ``together``: the launcher kills none until both have ended.

    ``modules``: imported beforehand, on one host.
    """
    there = request.getfixturevalue("two") if request.param == "two hosts" else None

    def start(body: str, together: bool = True, modules: tuple[str, ...] = (), **env: str) -> Finished:
        path = tmp_path / "script.py"
        path.write_text(PREAMBLE + body)
        command = [*(python(*modules) if modules and there is None else [sys.executable]), str(path), str(tmp_path)]
        if together:
            command = ending_together(command, tmp_path, 2)
        env = {"DL_COMM_TIMEOUT_S": "100", **env}
        finished = launch(2, command, 150, env) if there is None else there.launch(1, command, 150, env)
        assert not finished.timed_out, finished.output
        assert not finished.left, finished.left
        return finished

    return start


def seen(finished: Finished, name: str, count: int) -> list[str]:
    """The output of ``attempt`` for ``name`` on ``count`` ranks; checks the time."""
    found = re.findall(rf"<{name} after (\d+)\.\d s: (.*?)>", finished.output, re.DOTALL)
    assert len(found) == count, finished.output
    assert all(int(seconds) < SOON for seconds, _ in found), finished.output
    return [text for _, text in found]


@pytest.mark.parametrize(
    ("here", "there", "words"),
    [
        ("mc.gradients(ones(), 0, name='step')", "mc.barrier()", ["average 'step' on team 0", "barrier"]),
        ("mc.gradients(ones(), 0, name='step')", "mc.average(1.5)", ["average 'step' on team 0", "average "]),
        ("mc.gradients(ones(), 0, name='a')", "mc.gradients(ones(), 1, name='b')", ["'a' on team 0", "'b' on team 1"]),
        ("mc.check_buffers_match(ones())", "mc.gradients(ones(), 0)", ["check_buffers_match", "average on team 0"]),
        (
            "mc.create_team(2)",
            "mc.gradients(ones(), 0)",
            ["create_team(team=2, nthreads=2, prec_level=0)", "average on team 0"],
        ),
    ],
)
def test_ranks_that_wait_in_different_teams(
    run: Callable[..., Finished], here: str, there: str, words: list[str]
) -> None:
    finished = run(f"""
mc.init(nteams=2)
for _ in range(5):
    mc.gradients(ones(), 0)
attempt("wait", (lambda: {here}) if mc.get_rank() == 0 else (lambda: {there}))
mc.gradients(ones(), 0)
mc.barrier()
print("continues", flush=True)
""")
    assert finished.returncode == 0, finished.output
    for text in seen(finished, "wait", 2):
        assert text.startswith("MismatchError: "), text
        assert all(word in text for word in words), text
        assert "rank 0: " in text, text
        assert "rank 1: " in text, text
    assert "has made 5 calls on team 0" in finished.output, finished.output
    assert finished.output.count("continues") == 2, finished.output


CREATIONS = [
    ("mc.Group([0, 1], 'a')", "mc.Group([0, 1], 'b')", ["group 'a' of ranks [0, 1]", "group 'b' of ranks [0, 1]"]),
    ("mc.Group(name='all')", "mc.Group([1, 0])", ["group 'all' of ranks [0, 1]", "group '' of ranks [1, 0]"]),
    ("mc.allreduce(ones()[0])", "mc.Group([1, 0], 'c')", ["on team 0", "group 'c'"]),
    ("mc.create_team(3)", "mc.Group(name='d')", ["the control team", "group 'd'"]),
]


def test_ranks_that_wait_in_creations_of_groups_and_in_calls(run: Callable[..., Finished]) -> None:
    steps = "".join(
        f"attempt('step {i}', (lambda: {here}) if mc.get_rank() == 0 else (lambda: {there}))\nmc.barrier()\n"
        for i, (here, there, _) in enumerate(CREATIONS)
    )
    finished = run(f"""
mc.init()
{steps}
with mc.Group([1, 0], 'c') as group:
    assert mc.allreduce(np.ones(2), group=group)[0] == 2, "the next generation"
if mc.get_rank() == 0:
    mc.finalize()
else:
    attempt("end", lambda: mc.Group([0, 1], "late"))
""")
    assert finished.returncode == 0, finished.output
    for i, (_, _, words) in enumerate(CREATIONS):
        for text in seen(finished, f"step {i}", 2):
            assert text.startswith("MismatchError: "), text
            assert all(word in text for word in [*words, "rank 0: ", "rank 1: "]), text
    (text,) = seen(finished, "end", 1)
    assert text.startswith("MismatchError: "), text
    assert "rank 0: finalize" in text, text
    assert "rank 1: group 'late'" in text, text


def test_a_rank_that_waits_for_a_message_of_one_that_waits_in_a_call(run: Callable[..., Finished]) -> None:
    """The call fails and the receive goes on. Before, a sender that is late, then one whose other thread sends."""
    finished = run("""
import threading
mc.init()
here, out = mc.get_rank(), np.zeros(3, np.float32)
def send(seconds):
    time.sleep(seconds)
    mc.send(ones()[0], 0)
if here == 1:
    send(7)
    thread = threading.Thread(target=lambda: [send(0), send(7)])
    thread.start()
else:
    for _ in range(3):
        mc.recv(out, 1)
print("sum", mc.allreduce(ones()[0])[0], flush=True)
if here == 0:
    attempt("message", lambda: mc.recv(out, 1))
    print("received", out[0], flush=True)
else:
    attempt("call", lambda: mc.allreduce(ones()[0]))
    mc.send(ones()[0] * 5, 0)
print("sum", mc.allreduce(ones()[0])[0], flush=True)
""")
    assert finished.returncode == 0, finished.output
    (text,) = seen(finished, "call", 1)
    assert text.startswith("MismatchError: "), text
    assert "rank 0: has made 1 call on team 0, and waits in receive (any tag) from rank 1" in text, text
    assert "rank 1: allreduce" in text, text
    assert "received 5.0" in finished.output, finished.output
    assert finished.output.count("sum 2.0") == 4, finished.output


@pytest.mark.parametrize("late", ["call", "message"])
def test_two_groups_may_wait_for_a_rank_that_waits_for_a_late_one(late: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"""
import time
import numpy as np
import dl_comm as mc
mc.init()
here = mc.get_rank()
groups = {{other: mc.Group([0, other], str(other)) for other in (1, 2, 3) if here in (0, other)}}
def call(other):
    assert mc.allreduce(np.ones(1), group=groups[other])[0] == 2
def late():
    if {late == "call"}:
        call(2)
    elif here == 0:
        mc.recv(np.ones(1), 2)
    else:
        mc.send(np.ones(1), 0)
if here == 2:
    time.sleep(8)
    late()
elif here == 0:
    late()
    call(1)
    call(3)
else:
    call(here)
mc.barrier()
print("all right", flush=True)
""")
    finished = launch(4, [sys.executable, str(script)], 100)
    assert finished.returncode == 0, finished.output
    assert finished.output.count("all right") == 4, finished.output


def test_a_mismatch_that_ends_the_script_is_a_mismatch_on_all_ranks(run: Callable[..., Finished]) -> None:
    finished = run("""
mc.init()
mc.gradients(ones(), 0) if mc.get_rank() == 0 else mc.barrier()
""")
    assert finished.returncode != 0
    # Lines of two ranks may interleave.
    assert len(re.findall(r"dl_comm\S*MismatchError: collective mismatch", finished.output)) == 2, finished.output


def test_a_computing_rank_is_not_a_mismatch(run: Callable[..., Finished]) -> None:
    finished = run(
        """
mc.init(nteams=2)
import threading
def other():
    mc.gradients(ones(), 1, name="other")
for _ in range(2):
    thread = threading.Thread(target=other)
    thread.start()
    time.sleep(4 if mc.get_rank() == 1 else 0)
    mc.gradients(ones(), 0, name="mine")
    thread.join()
    # Waits for a rank that does not wait itself.
    if mc.get_rank() == 1:
        time.sleep(4)
    mc.barrier()
print("all right", flush=True)
""",
        DL_COMM_MATCH_TIMEOUT_S="3",
    )
    assert finished.returncode == 0, finished.output
    assert finished.output.count("all right") == 2, finished.output


@pytest.mark.xdist_group("torch")
def test_torch_averages_and_metrics_that_differ(run: Callable[..., Finished]) -> None:
    pytest.importorskip("torch")
    finished = run(
        """
import torch
import dl_comm.torch as cdl
torch.manual_seed(0)
mc.init()
model = torch.nn.Linear(3, 1)
optimizer = cdl.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
def step():
    optimizer.zero_grad()
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
for _ in range(5):
    step()
attempt("uneven", step if mc.get_rank() == 0 else (lambda: cdl.average(torch.ones(1), "loss")))
""",
        modules=TORCH,
    )
    for text in seen(finished, "uneven", 2):
        assert text.startswith("MismatchError: "), text
        assert "gradients of SGD.0, bucket 0" in text, text
        assert "loss" in text, text


@pytest.mark.xdist_group("tensorflow")
def test_keras_fit_with_other_numbers_of_steps(run: Callable[..., Finished]) -> None:
    """The rank with fewer steps continues with a metric. TensorFlow's waits are invisible: match timeout applies."""
    pytest.importorskip("keras", minversion="3.0")
    finished = run(
        """
import keras
import dl_comm.keras as dk
from dl_comm._base.errors import translate
mc.init(framework="keras")
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile(dk.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
x, y = np.ones((24, 4)), np.ones((24, 1))
def train(rows):
    model.fit(x[:rows], y[:rows], batch_size=4, verbose=0)
train(8)
mc.barrier()
start = time.monotonic()
try:
    train(24 if mc.get_rank() == 0 else 20)
    mc.average(1.0)
except Exception as error:
    print(f"<fit after {time.monotonic() - start:.1f} s: {translate(error)}>", flush=True)
""",
        modules=("tensorflow",),
        DL_COMM_MATCH_TIMEOUT_S="3",
    )
    for text in seen(finished, "fit", 2):
        assert "collective mismatch" in text, text
        assert "average 'DistributedOptimizer'" in text, text
    assert "rank 1: has made 8 calls on team 0, and waits in average" in finished.output, finished.output


def test_a_timeout_has_the_calls_of_other_ranks(run: Callable[..., Finished]) -> None:
    """One rank waits in another team while its main thread computes: this is no mismatch before the deadline."""
    finished = run("""
import threading
mc.init(nteams=2)
if mc.get_rank() == 0:
    attempt("late", lambda: mc.gradients(ones(), 0, timeout=9))
else:
    thread = threading.Thread(target=attempt, args=("other", lambda: mc.gradients(ones(), 1, timeout=12)))
    thread.start()
    while thread.is_alive():
        sum(range(10**5))
""")
    (text,) = seen(finished, "late", 1)
    assert text.startswith("TimeoutError: "), text
    assert "rank 1 has made no such call and computes" in text, text


def test_init_with_other_numbers_of_teams(run: Callable[..., Finished]) -> None:
    finished = run("""
attempt("init", lambda: mc.init(nteams=2 if os.environ["PMI_RANK"] == "0" else 1))
""")
    for text in seen(finished, "init", 2):
        assert text.startswith("MismatchError: "), text
        assert "init(nteams=2, threads=2)" in text, text
        assert "init(nteams=1, threads=2)" in text, text


@pytest.mark.parametrize(
    ("variable", "value"),
    [("DL_COMM_TIMEOUT_S", "soon"), ("DL_COMM_AFFINITY", "4000,4001"), ("DL_COMM_TIMELINE", "/proc/nowhere")],
)
def test_invalid_settings_on_one_rank(run: Callable[..., Finished], variable: str, value: str) -> None:
    finished = run(f"""
if os.environ["PMI_RANK"] == "1":
    os.environ["{variable}"] = "{value}"
attempt("init", mc.init)
os._exit(0)
""")
    for text in seen(finished, "init", 2):
        assert "rank 1 on " in text, text
        assert value in text or "4000" in text, text


def test_a_rank_that_finalizes_early(run: Callable[..., Finished]) -> None:
    """A waiting call gets an error, and the launcher does not report success."""
    body = """
mc.init()
mc.gradients(ones())
if mc.get_rank() == 1:
    sys.exit(0)
start = time.monotonic()
try:
    mc.gradients(ones())
finally:
    print(f"<early after {time.monotonic() - start:.1f} s: ended>", flush=True)
"""
    for _ in range(3):
        finished = run(body, together=False)
        assert finished.returncode != 0, finished.output
        seen(finished, "early", 1)
        assert re.search(r"PeerLostError: rank 1 on \S+( \(pid \d+\))? has called finalize", finished.output)


def test_after_a_caught_deadline_all_ranks_end_their_work(run: Callable[..., Finished], tmp_path: Path) -> None:
    """The launcher ends the job after an exit without MPI_Finalize, so no rank exits before the others are done."""
    body = """
mc.init()
mc.set_timeout(2)
mc.gradients(ones())
late = mc.get_rank() == 1
if late:
    time.sleep(4)
try:
    mc.gradients(ones())
except mc.TimeoutError:
    pass
if mc.get_rank() == 0:
    time.sleep(3)
    open(sys.argv[1] + "/model", "w").write("whole")
"""
    for _ in range(3):
        (tmp_path / "model").unlink(missing_ok=True)
        finished = run(body, together=False)
        assert finished.returncode == 0, finished.output
        assert (tmp_path / "model").read_text() == "whole", finished.output


def test_a_rank_without_finalize_is_no_success(run: Callable[..., Finished]) -> None:
    finished = run(
        MEET
        + """
meet(os.environ["PMI_RANK"], 0, 1)
mc.init()
if mc.get_rank() == 1:
    time.sleep(15)
""",
        together=False,
        DL_COMM_TIMEOUT_S="3",
    )
    assert finished.returncode != 0, finished.output
    assert "this process ends with a status other than 0" in finished.output, finished.output


@pytest.mark.parametrize("end", ["time.sleep(60)", "sys.exit(0)"])
def test_init_ends_at_its_deadline_or_when_a_rank_has_ended(tmp_path: Path, end: str) -> None:
    path = tmp_path / "script.py"
    path.write_text(
        PREAMBLE
        + MEET
        + f"""
meet(os.environ["PMI_RANK"], 1)  # the deadline does not include the start of rank 1
if os.environ["PMI_RANK"] == "1":
    {end}
mc.init()
"""
    )
    limits = {"DL_COMM_TIMEOUT_S": "5", "DL_COMM_STALL_WARN_S": "2"}
    finished = launch(2, [sys.executable, str(path)], 100, limits if "sleep" in end else None)
    assert not finished.timed_out, finished.output
    assert finished.returncode != 0, finished.output
    if "exit" in end:
        assert "MPI_Init cannot complete: rank 1 has ended before it called init" in finished.output
        return
    words = "has not called init"
    assert re.search(rf"MPI_Init has waited 2 s for rank 1.*{words}", finished.output), finished.output
    assert re.search(rf"MPI_Init was not complete after 5 s.*rank 1.*{words}", finished.output), finished.output


@pytest.mark.parametrize(
    "call",
    ["mc.gradients(ones())", "mc.barrier()", pytest.param("torch", marks=pytest.mark.xdist_group("torch"))],
)
def test_ctrl_c_ends_a_wait(run: Callable[..., Finished], call: str) -> None:
    """The interrupted rank gets KeyboardInterrupt, the others an error."""
    modules: tuple[str, ...] = ()
    if call == "torch":
        pytest.importorskip("torch")
        call, modules = "cdl.average(torch.ones(1))", TORCH
    finished = run(
        f"""
import threading
if "torch" in {call!r}:
    import torch
    import dl_comm.torch as cdl
mc.init()
{call}  # a repeated call may take a shorter path
if mc.get_rank() == 0:
    threading.Timer(1, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
else:
    time.sleep(3)
attempt("wait", lambda: {call})
attempt("again", lambda: {call})
""",
        modules=modules,
    )
    interrupted, other = sorted(seen(finished, "wait", 2))
    assert interrupted.startswith("KeyboardInterrupt"), finished.output
    assert other.startswith("PeerLostError: "), other
    assert "interrupted by a signal on rank 0" in other, other
    assert all(text.startswith("PeerLostError: ") for text in seen(finished, "again", 2)), finished.output


def test_handlers_of_signals_run_while_a_call_waits(run: Callable[..., Finished]) -> None:
    finished = run("""
import threading
mc.init()
came = []
def handler(number, frame):
    came.append(time.monotonic())
    try:
        mc.barrier()
    except mc.StateError as error:
        print("refused:", error, flush=True)
signal.signal(signal.SIGTERM, handler)
mc.barrier()
start = time.monotonic()
if mc.get_rank() == 0:
    threading.Timer(1, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
else:
    time.sleep(5)
mc.gradients(ones())
if mc.get_rank() == 0:
    print(f"<handler after {came[0] - start:.1f} s: ran>", flush=True)
    assert came[0] - start < 4
""")
    assert finished.returncode == 0, finished.output
    seen(finished, "handler", 1)
    assert "refused: a handler of a signal called dl_comm" in finished.output, finished.output
