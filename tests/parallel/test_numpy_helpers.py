"""Metrics, files and schedules on 1, 2 and 3 ranks, without a framework."""

from __future__ import annotations

import json
import logging
import math
import os
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
import pytest

import dl_comm as mc
from dl_comm import _dl_comm, training


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of rank 0 that all ranks know; nobody else may write to it."""
    name = np.zeros(1000, np.uint8)
    text = str(tmp_path).encode()
    name[: len(text)] = np.frombuffer(text, np.uint8)
    mc.broadcast([name], 0)
    return Path(name.tobytes().rstrip(b"\0").decode())


def test_metrics_need_no_framework(rank: int, size: int) -> None:
    middle = (size - 1) / 2
    metrics = {"loss": 0.5 + rank, "hits": rank, "half": ml_dtypes.bfloat16(2 * rank), "flag": True}
    assert mc.average_metrics(metrics) == {"loss": 0.5 + middle, "hits": middle, "half": 2 * middle, "flag": 1.0}
    assert mc.average_metrics({}) == {}
    with pytest.raises(mc.DTypeError, match="a dict of names and numbers, not a list"):
        mc.average_metrics([("loss", 1.0)])  # type: ignore[arg-type]


def test_metrics_with_other_names_fail_everywhere(rank: int, size: int) -> None:
    if size == 1:
        pytest.skip("needs two ranks")
    with pytest.raises(mc.MismatchError) as caught:
        mc.average_metrics({"loss": 1.0, f"only_{rank}": 2.0})
    assert "only_0" in str(caught.value)
    assert "only_1" in str(caught.value)
    with pytest.raises(mc.MismatchError):
        mc.average_metrics({} if rank == 0 else {"loss": 1.0})
    assert mc.average_metrics({"loss": rank})["loss"] == (size - 1) / 2


@pytest.mark.parametrize("wrong", ["0.5", None, [1.0, 2.0], np.zeros(2), 1j, {}])
def test_a_metric_that_is_no_number(wrong: object) -> None:
    with pytest.raises(mc.DTypeError, match="'loss' is not a number"):
        mc.average_metrics({"loss": wrong})
    with pytest.raises(mc.DTypeError, match="must be a string"):
        mc.average_metrics({1: 1.0})  # type: ignore[dict-item]


class TestObjects:
    """An object that one rank cannot pickle: every rank raises, and the next call is the next one of all."""

    calls: ClassVar[dict[str, Callable[..., Any]]] = {
        "broadcast": lambda value, root, size: [mc.broadcast_object(value, root)] * size,
        "all_gather": lambda value, root, size: mc.all_gather_object(value),
        "gather": lambda value, root, size: mc.gather_object(value, root),
    }

    @pytest.mark.parametrize("name", calls)
    def test_that_cannot_be_pickled(self, name: str, rank: int, size: int) -> None:
        root = size - 1
        for step in range(3):
            if step != 1:
                found = self.calls[name]({"step": step}, root, size)
                assert found == (None if name == "gather" and rank != root else [{"step": step}] * size)
            elif rank == root:
                with pytest.raises((AttributeError, pickle.PicklingError), match="lambda"):
                    self.calls[name](lambda: 0, root, size)
            else:
                text = f"rank {root} could not pickle the object of {name}_object: .*lambda"
                with pytest.raises(mc.CommError, match=text):
                    self.calls[name]({"step": step}, root, size)

    @pytest.mark.parametrize("name", ["broadcast", "gather"])
    def test_a_root_that_is_none(self, name: str, rank: int, size: int) -> None:
        for step in range(2):
            bad = step == 0 and rank == size - 1
            if step == 0:
                with pytest.raises(mc.ArgumentError if bad else mc.MismatchError, match="invalid root: 99"):
                    self.calls[name](step, 99 if bad else 0, size)
            else:
                found = self.calls[name](step, 0, size)
                assert found == (None if name == "gather" and rank else [1] * size)


class Nameless:
    def __str__(self) -> str:
        raise ValueError("nameless")


HELPERS: dict[str, tuple[Callable[[Any], Any], Any, Any, type[Exception]]] = {
    "average": (mc.average, "no number", 1.0, mc.DTypeError),
    "split": (mc.split, "blue", 0, mc.ArgumentError),
    "push_communicator": (mc.push_communicator, Nameless(), "all", ValueError),
    "write_on_rank0": (lambda path: mc.write_on_rank0(path, Path.touch), None, os.devnull, mc.ArgumentError),
    "read_on_rank0": (mc.read_on_rank0, None, os.devnull, mc.ArgumentError),
    "any_rank": (mc.any_rank, "yes", False, mc.ArgumentError),
    "check_replicas": (mc.check_replicas, object(), 1.0, mc.DTypeError),
}


@pytest.mark.parametrize("name", HELPERS)
def test_an_argument_that_one_rank_cannot_use(name: str, rank: int, size: int) -> None:
    """The other ranks fail too, and the next call is the next one of all."""
    call, bad, good, kind = HELPERS[name]
    if rank == size - 1:
        with pytest.raises(kind):
            call(bad)
    else:
        with pytest.raises(mc.MismatchError, match=f"{name} failed on this rank: {kind.__name__}"):
            call(good)
    assert mc.average(float(rank)) == (size - 1) / 2


def test_paths(rank: int) -> None:
    assert mc.rank0_path("a/b.npz") == (Path("a/b.npz") if rank == 0 else None)
    assert mc.rank_path(Path("a/b.npz")) == Path(f"a/b.rank{rank}.npz")
    assert mc.rank_path("a/log") == Path(f"a/log.rank{rank}")


def test_one_rank_writes_and_all_read(folder: Path, rank: int, size: int) -> None:
    path = folder / "weights.npy"
    callers = []

    def write(unfinished: Path) -> None:
        callers.append(rank)
        assert unfinished.suffix == ".npy"
        np.save(unfinished, np.arange(5.0))

    for _ in range(2):  # the second replaces the first
        mc.write_on_rank0(path, write)
        assert path.exists(), "no rank is earlier than the file"
    assert callers == ([0, 0] if rank == 0 else [])
    assert os.listdir(folder) == ["weights.npy"]
    content = mc.read_on_rank0(path)
    assert content == path.read_bytes()
    mc.barrier()


def test_a_device_stays(rank: int) -> None:
    written = []
    mc.write_on_rank0(os.devnull, written.append)
    assert written == ([Path(os.devnull)] if rank == 0 else [])
    assert Path(os.devnull).is_char_device()


def test_a_failure_of_rank_0_is_everyones(folder: Path, rank: int, size: int) -> None:
    path = folder / "weights"
    mc.write_on_rank0(path, lambda unfinished: unfinished.write_text("old"))

    def write(unfinished: Path) -> None:
        unfinished.write_text("half")
        raise OSError("the disk is full")

    with pytest.raises(OSError if rank == 0 else mc.CommError, match="disk is full") as caught:
        mc.write_on_rank0(path, write)
    assert rank == 0 or f"rank 0 could not write {path}" in str(caught.value)
    assert mc.read_on_rank0(path) == b"old"
    assert os.listdir(folder) == ["weights"]
    with pytest.raises(FileNotFoundError if rank == 0 else mc.CommError, match="nowhere"):
        mc.read_on_rank0(folder / "nowhere")
    mc.write_on_rank0(path, lambda unfinished: unfinished.write_bytes(b""))
    assert mc.read_on_rank0(path) == b""
    mc.barrier()


def test_steps_and_epochs(size: int) -> None:
    assert training.max_steps(60000, 64, 2, nranks=4) == 469  # 468.75
    assert training.max_steps(60000, 64, 0.5, 4) == 118
    assert training.max_steps(1000, 10, 3) == math.ceil(3 * 1000 / (10 * size))
    assert training.steps_per_epoch(60000, 64, 1) == 938
    assert training.steps_per_epoch(100, 10) == math.ceil(100 / (10 * size))
    assert training.epoch_of(150, 1000, 10, 2) == 3.0
    assert training.epoch_of(5, 100, 10) == 0.5 * size
    for arguments in ((0, 64, 2), (60000, 0, 2), (60000, 64, -1), (60000, 64, math.nan)):
        with pytest.raises(mc.ArgumentError, match="expected > 0"):
            training.max_steps(*arguments)
    with pytest.raises(mc.ArgumentError, match="invalid nranks: 0"):
        training.steps_per_epoch(100, 10, 0)


def test_scaled_rates(size: int) -> None:
    assert training.scaled_lr(0.5) == 0.5 * size
    assert training.scaled_lr(0.5, rule="sqrt") == 0.5 * math.sqrt(size)
    assert training.scaled_lr(0.5, 16, "sqrt") == 2.0
    with pytest.raises(mc.ArgumentError, match="'linear' or 'sqrt'"):
        training.scaled_lr(0.5, 2, "cubic")


def test_decays() -> None:
    assert [training.Constant(0.25)(step) for step in (0, 10**9)] == [0.25, 0.25]
    steps = training.Piecewise([30, 60], [1.0, 0.1, 0.01])
    assert [steps(step) for step in (0, 29, 30, 59, 60, 1000)] == [1.0, 1.0, 0.1, 0.1, 0.01, 0.01]
    line = training.Polynomial(1.0, 100, end=0.5)
    assert [line(step) for step in (0, 50, 100, 1000)] == [1.0, 0.75, 0.5, 0.5]
    assert training.Polynomial(1.0, 100, power=2)(50) == 0.25
    wave = training.Cosine(2.0, 100, end=1.0)
    assert [wave(step) for step in (0, 50, 100, 200)] == pytest.approx([2.0, 1.5, 1.0, 1.0])
    assert wave(25) == pytest.approx(1 + (1 + math.sqrt(0.5)) / 2)
    assert training.Exponential(1.0, 10, 0.5)(20) == 0.25
    assert type(wave(np.int64(3))) is float


def test_warm_up(size: int) -> None:
    rate = training.WarmUp(10, training.Constant(training.scaled_lr(0.1)))
    assert rate(0) == pytest.approx(0.1)
    assert rate(5) == pytest.approx(0.1 * (1 + size) / 2)
    assert rate(10) == rate(99) == 0.1 * size
    # the decay's steps are those of the training
    rate = training.WarmUp(10, training.Piecewise([30], [1.0, 0.1]), start=0.0)
    assert [rate(step) for step in (0, 5, 10, 29, 30)] == [0.0, 0.5, 1.0, 1.0, 0.1]
    then = training.Cosine(1.0, 20)
    assert training.WarmUp(10, then)(10) == then(10)
    assert training.WarmUp(0, then)(0) == 1.0


def test_wrong_schedules() -> None:
    with pytest.raises(mc.ArgumentError, match="1 boundaries need 2 rates"):
        training.Piecewise([30], [1.0])
    with pytest.raises(mc.ArgumentError, match="do not increase"):
        training.Piecewise([30, 30], [1.0, 0.1, 0.01])
    with pytest.raises(mc.ArgumentError, match="invalid steps: 0"):
        training.Cosine(1.0, 0)
    with pytest.raises(mc.ArgumentError, match="invalid factor: -1"):
        training.Exponential(1.0, 10, -1)
    with pytest.raises(mc.ArgumentError, match="expected >= 0"):
        training.WarmUp(-1, training.Constant(1.0))


def test_the_core_tells_of_ranks_teams_and_settings(rank: int, size: int) -> None:
    description = json.loads(_dl_comm.describe())
    assert (description["state"], description["rank"], description["size"]) == ("started", rank, size)
    assert (description["hosts"], description["local_rank"], description["local_size"]) == (
        mc.num_hosts(),
        mc.local_rank(),
        mc.local_size(),
    )
    assert [place["rank"] for place in description["ranks"]] == list(range(size))
    mine = description["ranks"][rank]
    assert (mine["host"], mine["pid"], mine["local_rank"]) == (os.uname().nodename, os.getpid(), mc.local_rank())
    assert mine["boot_id"] == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert mine["shm_device"] == str(os.stat(description["settings"]["DL_COMM_SHM_DIR"]).st_dev)
    teams = {team["id"]: team for team in description["teams"]}
    assert {-1, 0, 1} <= teams.keys()
    assert description["settings"]["DL_COMM_CHUNK_KB"] is None
    # Of all slots of a host 8 MiB, shared by the channels of a call: one if ranks share processors.
    channels = min(2, max(1, len(os.sched_getaffinity(0)) // size))
    slot = (512 if mc.num_hosts() > 1 else min(512, 2048 // size // channels // 64 * 64)) << 10
    shards = min(sum(place["host_index"] == host for place in description["ranks"]) for host in range(mc.num_hosts()))
    expected = {"id": 0, "threads": 2, "prec_level": 0, "slot_bytes": slot, "shards": shards, "gpu": None}
    assert teams[0] == expected
    known = mc.topology()
    assert known["teams"][0] == {"threads": 2, "prec_level": 0, "gpu": None}
    assert (known["rank"], [place["pid"] for place in known["ranks"]][rank]) == (rank, os.getpid())
    assert known["launcher"] == description["launcher"]
    assert known["launcher"] in ("mpiexec", "none") or "TORCHELASTIC_RUN_ID" in os.environ
    assert description["settings"]["DL_COMM_TIMEOUT_S"] == float(os.environ["DL_COMM_TIMEOUT_S"])
    assert description["mpi"]["thread_level"].startswith("MPI_THREAD_")


def test_a_second_init_says_which_threads_stay(rank: int, capsys: pytest.CaptureFixture[str]) -> None:
    threads = mc.topology()["teams"][0]["threads"]
    mc.init(threads)
    assert capsys.readouterr().err == ""
    mc.init(threads=threads + 1)
    text = f"dl_comm: init(threads={threads + 1}) holds for new teams: team 0 keeps {threads}\n"
    assert capsys.readouterr().err == (text if rank == 0 else "")


def test_two_names_of_the_threads_agree() -> None:
    threads = mc.topology()["teams"][0]["threads"]
    mc.init(threads, threads=threads)
    with pytest.raises(mc.ArgumentError, match=f"threads is {threads}, and nthread_per_team, another name of it, 99"):
        mc.init(99, threads=threads)
    with pytest.raises(mc.ArgumentError, match="invalid threads: 0"):
        mc.init(threads=0)


def test_one_rank_prints(rank: int, capsys: pytest.CaptureFixture[str]) -> None:
    mc.print0("loss", 0.5, sep="=")
    mc.print0("more", end="")
    assert capsys.readouterr().out == ("loss=0.5\nmore" if rank == 0 else "")


def test_a_logger_says_the_rank(rank: int, size: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    everyone, last = mc.get_logger("train"), mc.get_logger("train", ranks=[size - 1])
    everyone.info("epoch %d", 3)
    last.info("only the last")
    last.warning("everybody")
    last.log(logging.ERROR, "an error")
    lines = ["epoch 3", *(["only the last"] if rank == size - 1 else []), "everybody", "an error"]
    assert caplog.messages == [f"rank {rank} of {size}: {line}" for line in lines]
    assert {record.name for record in caplog.records} == {"train"}
    everyone.debug("nothing")
    assert len(caplog.records) == len(lines)
    with pytest.raises(mc.ArgumentError, match="invalid ranks"):
        mc.get_logger("train", ranks=["all"])  # type: ignore[list-item]
    with pytest.raises(mc.DTypeError, match="invalid name"):
        mc.get_logger(3)  # type: ignore[arg-type]


def test_a_flag_of_one_rank_is_that_of_all(rank: int, size: int) -> None:
    for chosen in range(size):
        assert mc.any_rank(rank == chosen)
        assert mc.world().any_rank(rank == chosen)
        assert mc.any_rank(np.bool_(rank == chosen))
    assert not mc.any_rank(False)
    assert not mc.any_rank(np.zeros((1, 1)))
    half = mc.split(rank % 2)
    assert mc.any_rank(rank % 2, group=half) == bool(rank % 2)
    with pytest.raises(mc.DTypeError, match="'flag' is not a number"):
        mc.any_rank(np.zeros(2))


def test_a_rank_that_has_joined_has_no_flag(rank: int) -> None:
    for _ in range(rank):
        assert not mc.any_rank(False)
    mc.join()
    assert mc.any_rank(True)


@pytest.mark.parametrize("where", ["value", "shape", "type", "name", "number"])
def test_what_differs_between_replicas_is_named(where: str, rank: int, size: int) -> None:
    weights = {"first": np.arange(6.0).reshape(2, 3), "second": [np.float32(2), 7, None, "text"]}
    mc.check_replicas(weights, 3)
    mc.check_replicas()
    if rank == size - 1:
        first = weights["first"]
        assert isinstance(first, np.ndarray)
        changes = {"value": np.nextafter(first, 9), "shape": first[:1], "type": first.astype(np.float32)}
        weights["first"] = changes.get(where, first)
        if where == "name":
            weights["third"] = weights.pop("second")
        if where == "number":
            weights["second"][1] = 8  # type: ignore[index, call-overload]
    if size == 1:
        mc.check_replicas(weights)
        return
    with pytest.raises(mc.MismatchError) as caught:
        mc.check_replicas(weights)
    expected = {
        "value": "dict['first'] float64[2, 3]",
        "shape": "dict['first'] float64[1, 3]",
        "type": "dict['first'] float32[2, 3]",
        "name": "dict['third'][0] float32[]",
        "number": "dict['second'][1]",
    }
    assert f"{expected[where]} of rank(s) {size - 1}" in str(caught.value)
    assert all(text == str(caught.value) for text in mc.all_gather_object(str(caught.value)))
    mc.check_replicas(weights, group=mc.split(rank == size - 1))


def test_many_differences_are_counted(rank: int, size: int) -> None:
    if size == 1:
        pytest.skip("needs two ranks")
    with pytest.raises(mc.MismatchError, match="9 of 9 entries are not those of rank 0:\n(.*\n){5}  and 4 more"):
        mc.check_replicas([np.full(2, rank)] * 9)


def test_random_generators_go_on(rank: int, size: int) -> None:
    seed = training.seed_rank(5)
    assert seed == training.seed_rank(5) != training.seed_rank(6)
    training.seed_rank(5)
    assert len(set(mc.all_gather_object(seed))) == size
    assert seed == training.seed_rank(5, rank)
    np.random.normal()
    states = json.loads(json.dumps(mc.random_states()))
    expected = [random.random(), np.random.normal(), np.random.normal()]
    assert len({tuple(each) for each in mc.all_gather_object(expected)}) == size
    mc.set_random_states(states)
    assert [random.random(), np.random.normal(), np.random.normal()] == expected
    with pytest.raises(mc.ArgumentError, match=rf"those of {size + 1} ranks \(expected {size}"):
        mc.set_random_states([*states, states[0]])
    with pytest.raises(mc.ArgumentError, match="is not one of random_states"):
        mc.set_random_states(["{}"] * size)
    with pytest.raises(mc.ArgumentError, match="those of str ranks"):
        mc.set_random_states("text")  # type: ignore[arg-type]


def test_shards_of_equal_length(rank: int, size: int) -> None:
    for n in (0, 1, size, 3 * size + 1, 4 * size - 1):
        part = training.shard(n, even="drop")
        assert len(part) == n // size
        everything = [index for each in mc.all_gather_object(part) for index in each]
        assert everything == list(range(n // size * size))
    with pytest.raises(mc.ArgumentError, match="invalid even: True"):
        training.shard(3, even=True)  # type: ignore[arg-type]
