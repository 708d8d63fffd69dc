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
"""Seconds that a host's lanes take to add up a byte that has come."""


@dataclass(frozen=True)
class Network:
    """Constants of the LogGP kind, in seconds, as in `core/src/transport/network.rs`.

    `latency`: from the call of the sender until the receiver has an empty message. `message`: what each further message
    that a host sends and receives at the same time adds. `byte`: a byte, to and from a host at the same time.
    """

    latency: float
    message: float
    byte: float


def seconds(network: Network, algorithm: str, hosts: int, finished: float, carried: float, first: bool) -> float:
    """The seconds of `algorithm` on `hosts` hosts.

    `finished` are the bytes of a host's result, `carried` those of its part, which may be wider; `first`: the hosts
    find out on the way whether they called the same.
    """
    n, latency = hosts, network.latency
    parts, results = carried * (network.byte + ADD), finished * network.byte
    rounds = n.bit_length() - 1
    power = 1 << rounds
    folds = 0.0 if power == n else 2 * latency + parts + results
    meeting = (rounds * latency + (0.0 if power == n else 2 * latency)) if first else 0.0
    if algorithm == "doubling":
        return rounds * (latency + parts) + folds
    if algorithm == "halving":
        return 2 * rounds * latency + (power - 1) / power * (parts + results) + folds
    if algorithm == "pairwise":
        return meeting + 2 * (latency + (n - 2) * network.message) + (n - 1) / n * (parts + results)
    return meeting + 2 * (n - 1) * latency + (n - 1) / n * (parts + results)


def best(network: Network, hosts: int, finished: float, carried: float, first: bool) -> str:
    """The cheapest of the algorithms that give the same bits."""
    return min(SAME_BITS, key=lambda algorithm: seconds(network, algorithm, hosts, finished, carried, first))
