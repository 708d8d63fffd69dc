"""The cost formulas of the algorithms between hosts, and the choice of `auto`. Pure.

A copy of `inter_host/cost.rs` and `algorithm.rs` in `core/src/collective`. Keep both equal, so that the simulation
chooses like dl_comm.
"""

from __future__ import annotations

from dataclasses import dataclass

ALGORITHMS = ("doubling", "halving", "pairwise", "ring")
"""The values of `DL_COMM_ALGORITHM`."""
SAME_BITS = ("pairwise", "halving", "doubling")
"""The choices of `auto`; of two with equal cost, the first wins."""
ADD = 1e-10
"""Seconds to add a received byte."""
HEADER = LINE = 64
"""Bytes of a message header, and of a line, the unit of pieces."""
WINDOW = 8
"""The most chunks of a channel that are under way between hosts."""


def chunks_under_way(hosts: int, length: int) -> int:
    """The chunks with `length` bytes for a shard that are under way, as in `core/src/collective/selection.rs`."""
    return min(max(((1 + hosts.bit_length()) << 19) // max(length, 1), 2), WINDOW)


@dataclass(frozen=True)
class NetworkModel:
    """LogGP constants in seconds, as in `core/src/transport/network_model.rs`.

    `latency_s`: from the sender's call until the receiver has an empty message. `message_gap_s`: extra time of each
    further message that a host sends and receives concurrently. `byte_s`: a byte, in both directions at the same time.
    """

    latency_s: float
    message_gap_s: float
    byte_s: float


def seconds(
    network: NetworkModel,
    algorithm: str,
    hosts: int,
    result_bytes: float,
    partial_bytes: float,
    first: bool,
    shards: int = 1,
    overlap: int = WINDOW,
) -> float:
    """The seconds of a chunk with `algorithm` on `hosts` hosts.

    `result_bytes` and `partial_bytes` are the bytes of a host's result and of its partial sum (which may be wider), for
    all `shards` together; with one shard, a host's only rank sends elements in `pairwise`, which are no wider. `first`:
    the call's first chunk, whose messages also match the calls of the hosts.
    `overlap`: the chunks of a channel that hide each other's latencies.
    """
    n = hosts
    rounds = n.bit_length() - 1
    power = 1 << rounds
    folds = 0 if power == n else 1
    handshake = rounds + 2 * folds if first else 0
    headers = shards * HEADER
    width = partial_bytes / max(result_bytes, 1)

    def both_ways(piece: int, width: float = width) -> float:
        lines = -(-piece // LINE) * LINE
        return shards * (lines * (width + 1) + 2 * HEADER)

    shard = int(result_bytes) // shards

    def with_fold(sent: float) -> float:
        """The bytes of the rounds, which the hosts of a pair send in turns, shard by shard and chunk by chunk."""
        if not folds:
            return sent
        if shards > 1 or (not first and overlap > 2):
            return max(sent, (sent + partial_bytes + result_bytes + 2 * headers) / 2)
        return sent + max(partial_bytes, result_bytes) + headers

    latencies, messages = {
        "doubling": (rounds + 2 * folds, 0),
        "halving": (2 * (rounds + folds), 0),
        "pairwise": (handshake + 2, 2 * (n - 2)),
        "ring": (handshake + 2 * (n - 1), 0),
    }[algorithm]
    if algorithm == "doubling":
        sent, added = with_fold(rounds * (partial_bytes + headers)), (rounds + folds) * partial_bytes
    elif algorithm == "halving":
        sent = with_fold(sum(both_ways(shard >> i) for i in range(1, rounds + 1)))
        added = ((power - 1) / power + folds) * partial_bytes
    else:
        sends_elements = shards == 1 and algorithm == "pairwise"
        sent = (n - 1) * both_ways(shard // n, 1 if sends_elements else width)
        added = (n - 1) / n * partial_bytes
    return (
        network.latency_s * (latencies if first else latencies / overlap)
        + max(network.message_gap_s * messages, network.byte_s * sent)
        + ADD * added / shards
    )


def best(
    network: NetworkModel,
    hosts: int,
    result_bytes: float,
    partial_bytes: float,
    first: bool,
    shards: int = 1,
    overlap: int = WINDOW,
) -> str:
    """The cheapest of the algorithms that give the same bits."""

    def cost(algorithm: str) -> float:
        return seconds(network, algorithm, hosts, result_bytes, partial_bytes, first, shards, overlap)

    return min(SAME_BITS, key=cost)
