"""What an algorithm between hosts costs by formula, and the choice that follows. Pure.

The original is `core/src/collective/cluster/cost.rs`, with the algorithms of `algorithm.rs` beside it; this is a copy
in Python, to be kept equal, so that the simulation chooses as dl_comm does.
"""

from __future__ import annotations

from dataclasses import dataclass

ALGORITHMS = ("doubling", "halving", "pairwise", "ring")
"""All of them, as `DL_COMM_ALGORITHM` has them."""
SAME_BITS = ("pairwise", "halving", "doubling")
"""Those that `auto` chooses from; where two cost the same the first one wins."""
ADD = 1e-10
"""Seconds that a shard takes to add up a byte that has come."""
HEADER = LINE = 64
"""Bytes of a message's header, and of what pieces are made of."""


@dataclass(frozen=True)
class NetworkModel:
    """Constants of the LogGP kind, in seconds, as in `core/src/transport/network.rs`.

    `latency`: from the call of the sender until the receiver has an empty message. `message`: what each further message
    that a host sends and receives at the same time adds. `byte`: a byte, to and from a host at the same time.
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
) -> float:
    """The seconds of `algorithm` on `hosts` hosts.

    `result_bytes` and `partial_bytes` are the bytes of a host's result and of its partial sum (which may be wider), for
    all `shards` together. `first`: the call's first chunk, whose messages also match the calls of the hosts.
    """
    n = hosts
    rounds = n.bit_length() - 1
    power = 1 << rounds
    folds = 0 if power == n else 1
    handshake = rounds + 2 * folds if first else 0
    headers = shards * HEADER
    width = partial_bytes / max(result_bytes, 1)

    def both_ways(piece: int) -> float:
        lines = -(-piece // LINE) * LINE
        return shards * (lines * (width + 1) + 2 * HEADER)

    shard = int(result_bytes) // shards
    given = folds * (partial_bytes + result_bytes + 2 * headers)
    latencies, messages = {
        "doubling": (rounds + 2 * folds, 0),
        "halving": (2 * (rounds + folds), 0),
        "pairwise": (handshake + 2, 2 * (n - 2)),
        "ring": (handshake + 2 * (n - 1), 0),
    }[algorithm]
    if algorithm == "doubling":
        sent, added = rounds * (partial_bytes + headers) + given, (rounds + folds) * partial_bytes
    elif algorithm == "halving":
        sent = sum(both_ways(shard >> i) for i in range(1, rounds + 1)) + given
        added = ((power - 1) / power + folds) * partial_bytes
    else:
        sent, added = (n - 1) * both_ways(shard // n), (n - 1) / n * partial_bytes
    return (
        network.latency_s * latencies
        + max(network.message_gap_s * messages, network.byte_s * sent)
        + ADD * added / shards
    )


def best(
    network: NetworkModel, hosts: int, result_bytes: float, partial_bytes: float, first: bool, shards: int = 1
) -> str:
    """The cheapest of the algorithms that give the same bits."""
    return min(
        SAME_BITS, key=lambda algorithm: seconds(network, algorithm, hosts, result_bytes, partial_bytes, first, shards)
    )
