//! What an algorithm costs, by a small model: the constants of the [`NetworkModel`] and the number of hosts. Pure.
//!
//! `benchmarks/simulate` has the same formulas for whole jobs, and `docs/performance.md` compares them with measurements.

use super::algorithm::Algorithm;
use crate::transport::NetworkModel;
use crate::wire_layout::{ALIGN, HEADER};

/// The algorithms that give the same bits.
const SAME_BITS: [Algorithm; 3] = [Algorithm::Pairwise, Algorithm::Halving, Algorithm::Doubling];

/// Seconds that a shard takes to add up a byte that has come.
const ADD: f64 = 1e-10;

/// What the shards of a host bring, together.
#[derive(Debug, Clone, Copy)]
pub(super) struct CostInput {
    /// Bytes of the result.
    pub finished: usize,
    /// Bytes of a host's part, which may be wider.
    pub carried: usize,
    /// The shards, which share the link of their host and add side by side.
    pub shards: usize,
}

/// The fastest algorithm for such a load of each of `hosts` hosts; `first` where the hosts have to find out on the way
/// whether they called the same.
pub(super) fn fastest(network: &NetworkModel, hosts: usize, load: CostInput, first: bool) -> Algorithm {
    let cost = |algorithm: &Algorithm| seconds(network, *algorithm, hosts, load, first);
    SAME_BITS.into_iter().min_by(|one, other| cost(one).total_cmp(&cost(other))).unwrap_or(Algorithm::Pairwise)
}

/// The seconds of `algorithm`: its latencies, one after the other; then its messages or their bytes, whichever take longer,
/// because a host makes the ones while its link is at the others; then the adding.
pub(super) fn seconds(network: &NetworkModel, algorithm: Algorithm, hosts: usize, load: CostInput, first: bool) -> f64 {
    let n = hosts as f64;
    let rounds = f64::from(hosts.ilog2());
    let power = rounds.exp2();
    let (carried, finished) = (load.carried as f64, load.finished as f64);
    // Hosts beyond the power of two give their part to another one, and get the result back.
    let folds = if power == n { 0.0 } else { 1.0 };
    let meeting = if first { rounds + 2.0 * folds } else { 0.0 };
    let (latencies, added) = match algorithm {
        Algorithm::Doubling => (rounds + 2.0 * folds, (rounds + folds) * carried),
        Algorithm::Halving => (2.0 * (rounds + folds), ((power - 1.0) / power + folds) * carried),
        Algorithm::Pairwise => (meeting + 2.0, (n - 1.0) / n * carried),
        Algorithm::Ring => (meeting + 2.0 * (n - 1.0), (n - 1.0) / n * carried),
    };
    let further = if algorithm == Algorithm::Pairwise { 2.0 * (n - 2.0) } else { 0.0 };
    let given = folds * (carried + finished + 2.0 * (HEADER * load.shards) as f64);
    let sent = match algorithm {
        Algorithm::Doubling => rounds * (carried + (HEADER * load.shards) as f64) + given,
        Algorithm::Halving => in_halves(hosts.ilog2(), load) + given,
        Algorithm::Pairwise | Algorithm::Ring => (n - 1.0) * both_ways(load, load.finished / load.shards / hosts),
    };
    network.latency_s * latencies
        + (network.message_gap_s * further).max(network.byte_s * sent)
        + ADD * added / load.shards as f64
}

/// The bytes on a host's link when each shard sends and gets back so many bytes of results, and their headers.
fn both_ways(load: CostInput, piece: usize) -> f64 {
    // A piece is whole lines.
    let piece = piece.next_multiple_of(ALIGN) as f64;
    let width = load.carried as f64 / load.finished.max(1) as f64;
    (piece * (width + 1.0) + 2.0 * HEADER as f64) * load.shards as f64
}

/// The same for halves of halves, there and back.
fn in_halves(rounds: u32, load: CostInput) -> f64 {
    let shard = load.finished / load.shards;
    (1..=rounds).map(|round| both_ways(load, shard >> round)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use Algorithm::{Doubling, Halving, Pairwise};

    const TCP: NetworkModel = NetworkModel { latency_s: 30e-6, message_gap_s: 5e-6, byte_s: 1e-9 };

    fn float32(bytes: usize) -> CostInput {
        CostInput { finished: bytes, carried: bytes, shards: 1 }
    }

    #[test]
    fn small_calls_take_few_rounds_and_long_ones_few_bytes() {
        for hosts in [2, 4, 8, 64, 1024] {
            assert_eq!(fastest(&TCP, hosts, float32(64), true), Doubling, "{hosts} hosts");
        }
        // The hosts meet first, in as many rounds as there are halves: two hosts take them along.
        assert_eq!(fastest(&TCP, 2, float32(1 << 20), true), Halving);
        assert_eq!(fastest(&TCP, 8, float32(1 << 20), true), Pairwise);
        for hosts in [2, 3, 5, 24] {
            assert_eq!(fastest(&TCP, hosts, float32(1 << 20), false), Pairwise, "{hosts} hosts");
        }
        // So many messages take longer than so many rounds.
        assert_eq!(fastest(&TCP, 1024, float32(1 << 20), false), Halving);
    }

    #[test]
    fn what_is_wide_on_its_way_takes_halves_sooner() {
        let bfloat16 = |bytes: usize| CostInput { finished: bytes, carried: 2 * bytes, shards: 1 };
        assert_eq!(fastest(&TCP, 2, float32(64 << 10), true), Doubling);
        assert_eq!(fastest(&TCP, 2, bfloat16(64 << 10), true), Halving);
    }

    #[test]
    fn two_hosts_in_one_round_or_two() {
        let of = |algorithm| (seconds(&TCP, algorithm, 2, float32(1024), true) * 1e9).round();
        // Headers of 64 bytes, and a tenth of a nanosecond for each byte that is added.
        let nanos =
            |rounds: f64, headers: f64, added: f64| (rounds * 3e4 + 1024.0 + headers * 64.0 + added / 10.0).round();
        assert_eq!(of(Doubling), nanos(1.0, 1.0, 1024.0));
        assert_eq!(of(Halving), nanos(2.0, 2.0, 512.0));
        assert_eq!(of(Pairwise), nanos(3.0, 2.0, 512.0));
    }

    #[test]
    fn lanes_add_side_by_side_and_share_the_link() {
        let load = |shards| CostInput { finished: 1 << 20, carried: 1 << 20, shards };
        let of = |shards| seconds(&TCP, Halving, 2, load(shards), false);
        let (added, header) = (ADD * f64::from(1 << 19), 64.0 * TCP.byte_s);
        assert!((of(1) - of(4) - (0.75 * added - 6.0 * header)).abs() < 1e-12);
    }
}
