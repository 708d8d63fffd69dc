"""Properties of the simulation of many hosts that hold for all constants."""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT))

from benchmarks.simulate import notices, ranks  # noqa: E402
from benchmarks.simulate.check import byte_seconds  # noqa: E402
from benchmarks.simulate.constants import NETWORKS, SERVER, measure_host  # noqa: E402
from benchmarks.simulate.cost import ALGORITHMS, SAME_BITS, NetworkModel, best, seconds  # noqa: E402
from benchmarks.simulate.events import Clock, Resource  # noqa: E402
from benchmarks.simulate.model import Call, Host, JobSpec, chunks, limit, simulate  # noqa: E402

from launch import QUIET, Finished, run  # noqa: E402

TCP = NetworkModel(30e-6, 5e-6, 1e-9)
SIZES = [64 * 8**power for power in range(8)]


def test_the_formulas_are_those_of_the_core() -> None:
    """Uses the numbers of the tests in cost.rs."""
    found = [seconds(TCP, algorithm, 2, 1024, 1024, first=True) for algorithm in ("doubling", "halving", "pairwise")]
    expected = [30_000 + 1024 + 64 + 102.4, 60_000 + 1024 + 128 + 51.2, 90_000 + 1024 + 128 + 51.2]
    assert [value * 1e9 for value in found] == pytest.approx(expected)
    assert all(best(TCP, hosts, 64, 64, first=True) == "doubling" for hosts in (2, 4, 8, 64, 1024))
    assert [best(TCP, hosts, 1 << 20, 1 << 20, first=True) for hosts in (2, 8)] == ["halving", "pairwise"]
    assert all(best(TCP, hosts, 1 << 20, 1 << 20, first=False) == "pairwise" for hosts in (2, 3, 5, 24))
    assert best(TCP, 1024, 1 << 20, 1 << 20, first=False) == "halving"
    assert best(TCP, 2, 64 << 10, 64 << 10, first=True) == "doubling"
    assert best(TCP, 2, 64 << 10, 128 << 10, first=True, shards=2) == "halving"
    assert best(TCP, 2, 64 << 10, 128 << 10, first=True) == "pairwise"


@pytest.mark.parametrize("ranks", notices.RANKS)
def test_the_tree_of_flags_is_that_of_the_core(ranks: int) -> None:
    source = ROOT / "core" / "src"
    assert f"FAN_OUT: usize = {notices.FAN_OUT};" in (source / "transport" / "flag_tree.rs").read_text()
    row = f'"notices.flat", "flags on a host", RANKS, {notices.FLAT_RANKS},'
    assert row in (source / "collective" / "selection.rs").read_text()
    flat, tree = notices.flat(ranks), notices.in_tree(ranks)
    assert (flat.lines, tree.lines) == (ranks * (ranks - 1), 2 * (ranks - 1))
    # The limit is where neither is much faster.
    assert tree.seconds < 1.1 * flat.seconds or ranks <= notices.FLAT_RANKS
    assert flat.seconds < 1.1 * tree.seconds or ranks > notices.FLAT_RANKS
    above = {rank: notices.parent(rank) for rank in range(1, ranks)}
    assert all(up < rank for rank, up in above.items())


def test_a_resource_serves_in_order_and_has_a_burst() -> None:
    link = Resource()
    assert [link.reserve(1.0, 2.0), link.reserve(1.5, 1.0), link.reserve(9.0, 1.0)] == [3.0, 4.0, 10.0]
    bucket = Resource(burst=2.0)
    assert [bucket.reserve(5.0, 2.0), bucket.reserve(5.0, 1.0), bucket.reserve(20.0, 3.0)] == [5.0, 6.0, 21.0]


def test_a_message_without_a_sender_is_an_error() -> None:
    clock = Clock()
    clock.begin(iter(["lost"]))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="lost"):
        clock.run()


@pytest.mark.parametrize("size", [0, 64, 70_000, 4 << 20, 102_228_128])
def test_chunks_are_the_call(size: int) -> None:
    job = JobSpec(2, TCP)
    lengths = chunks(job, Call(size))
    assert sum(lengths) == size
    assert max(lengths) <= job.slot
    assert len(lengths) == 1 or len(lengths) >= 2 * job.channels or max(lengths) == 64 << 10


def test_a_short_call_takes_its_latencies() -> None:
    """Log n latencies; link and host take almost no time."""
    host = Host(add=0, memory=0, barrier_s=0)
    for hosts, rounds in ((2, 1), (8, 3), (12, 3 + 2), (8192, 13)):
        outcome = simulate(JobSpec(hosts, NetworkModel(30e-6, 5e-6, 0), host), Call(64), "doubling")
        assert outcome.seconds == pytest.approx(rounds * 30e-6)


@pytest.mark.parametrize("per_host", [1, 4])
@pytest.mark.parametrize("algorithm", ["halving", "pairwise", "ring"])
def test_long_algorithms_send_the_least_bytes(algorithm: str, per_host: int) -> None:
    for hosts in (2, 4, 64, 256):
        size = 4 << 20
        outcome = simulate(JobSpec(hosts, TCP, ranks=per_host), Call(size), algorithm)
        assert outcome.sent == 2 * (hosts - 1) / hosts * size
        assert outcome.seconds > limit(JobSpec(hosts, TCP), Call(size))
    # Partial sums of twice the width send twice the bytes; results and elements do not.
    width = 1 if algorithm == "pairwise" and per_host == 1 else 2
    outcome = simulate(JobSpec(4, TCP, ranks=per_host), Call(4 << 20, width=2), algorithm)
    assert outcome.sent == 3 / 4 * (width + 1) * (4 << 20)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("hosts", [96, 512, 8192])
def test_many_chunks_hide_the_latencies(hosts: int, in_place: bool) -> None:
    """ResNet-50 on hosts of eight ranks, also if their number is no power of two."""
    for network, share in (("25 GbE, TCP", 0.9), ("100 GbE, RoCE", 0.9 if in_place else 0.5)):
        job, call = JobSpec(hosts, NETWORKS[network], SERVER, 8, in_place=in_place), Call(102_228_128)
        assert limit(job, call) / simulate(job, call).seconds > share


def test_an_idle_link_has_a_burst() -> None:
    """A call within the burst takes only latencies; a longer one the time of the bytes beyond the burst."""
    host = Host(add=0, memory=0, barrier_s=0)
    for algorithm, latencies in (("doubling", 1), ("pairwise", 3)):
        short, long = (
            simulate(JobSpec(2, TCP, host, burst=1e5), Call(size), algorithm).seconds for size in (64, 10**7)
        )
        assert short == pytest.approx(latencies * TCP.latency_s)
        assert long == pytest.approx((10**7 - 10**5) * TCP.byte_s, rel=0.05)


def test_doubling_sends_all_in_each_round() -> None:
    # The two hosts of a pair take turns to send all rounds and a result, or once.
    for hosts, times in ((2, 1), (8, 3), (1024, 10), (6, (2 + 1 + 1) / 2)):
        assert simulate(JobSpec(hosts, TCP), Call(1 << 20), "doubling").sent == times * (1 << 20)


@pytest.mark.parametrize("algorithm", ["auto", *ALGORITHMS])
def test_more_bytes_never_take_less_time(algorithm: str) -> None:
    for hosts in (2, 3, 24, 64):
        for network in NETWORKS.values():
            times = [simulate(JobSpec(hosts, network, ranks=2), Call(size), algorithm).seconds for size in SIZES]
            assert times == sorted(times), (hosts, network)


def test_on_two_hosts_pairwise_exchange_is_halving() -> None:
    for network in NETWORKS.values():
        for size in SIZES:
            one, other = (simulate(JobSpec(2, network), Call(size), each).seconds for each in ("pairwise", "halving"))
            # The handshake precedes the first chunk of one and is part of it in the other, in messages with headers.
            assert abs(one - other) < 1.01 * (network.latency_s + 4 * 64 * network.byte_s), (network, size)


def _slower_than_best(network: NetworkModel, per_host: int, hosts: int) -> float:
    job = JobSpec(hosts, network, SERVER, per_host)
    by_size = [{each: simulate(job, Call(size), each).seconds for each in ("auto", *SAME_BITS)} for size in SIZES]
    return max(times["auto"] / min(times.values()) for times in by_size)


@pytest.mark.parametrize("network", [TCP, *NETWORKS.values()], ids=["unknown", *NETWORKS])
def test_the_choice_is_near_the_best(network: NetworkModel) -> None:
    found = {hosts: _slower_than_best(network, 1, hosts) for hosts in (2, 3, 4, 8, 16, 64, 512, 4096, 8192)}
    assert max(found.values()) < 1.2, found


def test_the_choice_is_near_the_best_with_slow_messages() -> None:
    assert _slower_than_best(NETWORKS["100 GbE, RoCE"], 8, 64) < 1.2
    assert _slower_than_best(NETWORKS["1 GbE, TCP"], 1, 1000) < 1.2


@pytest.mark.parametrize("algorithm", ["auto", *ALGORITHMS])
def test_many_hosts_are_simulated_in_seconds(algorithm: str) -> None:
    began = time.process_time()
    assert simulate(JobSpec(8192, TCP, ranks=4), Call(440_000_000), algorithm).chunks.total() == 840
    assert time.process_time() - began < 30


def test_rates_are_those_of_tc() -> None:
    assert byte_seconds("100mbit") == pytest.approx(10 * byte_seconds("1gbit"))
    assert byte_seconds("1gbit") == pytest.approx(8e-9, rel=0.05)
    with pytest.raises(ValueError, match="fast"):
        byte_seconds("fast")


def test_constants_of_this_host() -> None:
    host = measure_host()
    assert 0 < host.add < 1e-7
    assert 0 < host.memory < 1e-7
    assert 0 < host.barrier_s < 0.1


def test_failed_ranks_are_reported_with_their_output() -> None:
    with pytest.raises(ranks.Failed, match="no such luck"):
        ranks._read(Finished(3, "no such luck", False))


def test_the_program(tmp_path: Path) -> None:
    words = ["--network", "2e-5", "3e-6", "1e-9", "--host", "server", "--hosts", "5", "16", "--out", str(tmp_path)]
    command = [sys.executable, "-m", "benchmarks.simulate", *words]
    finished = run(command, 200, {**QUIET, "PYTHONPATH": str(ROOT)})
    assert finished.returncode == 0, finished.output
    results = json.loads((tmp_path / "simulate.json").read_text())
    assert {row["hosts"] for row in results["rows"]} == {2, 3, 4, 5, 8, 12, 16}
    assert {row["algorithm"] for row in results["rows"]} == {"auto", *ALGORITHMS}
    assert all(row["seconds"] > row["limit_s"] > 0 for row in results["rows"])
    assert finished.output.count("BERT-base") == 2
    plots = [tmp_path / f"simulate_given.{suffix}" for suffix in ("png", "svg")]
    if importlib.util.find_spec("matplotlib"):
        assert all(plot.stat().st_size > 10_000 for plot in plots)
    else:
        assert not any(plot.exists() for plot in plots)
