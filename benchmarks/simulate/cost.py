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
"""Seconds that a lane takes to add up a byte that has come."""
HEADER = LINE = 64
"""Bytes of a message's header, and of what pieces are made of."""


@dataclass(frozen=True)
class Network:
    """Constants of the LogGP kind, in seconds, as in `core/src/transport/network.rs`.

    `latency`: from the call of the sender until the receiver has an empty message. `message`: what each further message
    that a host sends and receives at the same time adds. `byte`: a byte, to and from a host at the same time.
    """

    latency: float
    message: float
    byte: float


def seconds(
    network: Network, algorithm: str, hosts: int, finished: float, carried: float, first: bool, lanes: int = 1
) -> float:
    """The seconds of `algorithm` on `hosts` hosts.

    `finished` are the bytes of a host's result, `carried` those of its part, which may be wider, both of all `lanes`
    together; `first`: the hosts find out on the way whether they called the same.
    """
    n = hosts
    rounds = n.bit_length() - 1
    power = 1 << rounds
    folds = 0 if power == n else 1
    meeting = rounds + 2 * folds if first else 0
    headers = lanes * HEADER
    width = carried / max(finished, 1)

    def both_ways(piece: int) -> float:
        lines = -(-piece // LINE) * LINE
        return lanes * (lines * (width + 1) + 2 * HEADER)

    lane = int(finished) // lanes
    given = folds * (carried + finished + 2 * headers)
    latencies, messages = {
        "doubling": (rounds + 2 * folds, 0),
        "halving": (2 * (rounds + folds), 0),
        "pairwise": (meeting + 2, 2 * (n - 2)),
        "ring": (meeting + 2 * (n - 1), 0),
    }[algorithm]
    if algorithm == "doubling":
        sent, added = rounds * (carried + headers) + given, (rounds + folds) * carried
    elif algorithm == "halving":
        sent = sum(both_ways(lane >> i) for i in range(1, rounds + 1)) + given
        added = ((power - 1) / power + folds) * carried
    else:
        sent, added = (n - 1) * both_ways(lane // n), (n - 1) / n * carried
    return network.latency * latencies + max(network.message * messages, network.byte * sent) + ADD * added / lanes


def best(network: Network, hosts: int, finished: float, carried: float, first: bool, lanes: int = 1) -> str:
    """The cheapest of the algorithms that give the same bits."""
    return min(SAME_BITS, key=lambda algorithm: seconds(network, algorithm, hosts, finished, carried, first, lanes))
