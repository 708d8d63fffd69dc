//! What an algorithm costs, by a small model: the constants of the [`Network`] and the number of hosts. Pure.
//!
//! `benchmarks/simulate` has the same formulas for whole jobs, and `docs/performance.md` compares them with measurements.

use super::Algorithm;
use crate::transport::Network;

/// The algorithms that give the same bits.
const SAME_BITS: [Algorithm; 3] = [Algorithm::Pairwise, Algorithm::Halving, Algorithm::Doubling];

/// Seconds that a host's lanes take to add up a byte that has come.
const ADD: f64 = 1e-10;

/// What the lanes of a host bring.
#[derive(Debug, Clone, Copy)]
pub(super) struct Load {
    /// Bytes of the result.
    pub finished: usize,
    /// Bytes of a host's part, which may be wider.
    pub carried: usize,
}

/// The fastest algorithm for such a load of each of `hosts` hosts; `first` where the hosts have to find out on the way
/// whether they called the same.
pub(super) fn best(network: &Network, hosts: usize, load: Load, first: bool) -> Algorithm {
    let cost = |algorithm: &Algorithm| seconds(network, *algorithm, hosts, load, first);
    SAME_BITS.into_iter().min_by(|one, other| cost(one).total_cmp(&cost(other))).unwrap_or(Algorithm::Pairwise)
}

/// The seconds of `algorithm`.
pub(super) fn seconds(network: &Network, algorithm: Algorithm, hosts: usize, load: Load, first: bool) -> f64 {
    let Network { latency, message, byte } = *network;
    let n = hosts as f64;
    let parts = load.carried as f64 * (byte + ADD);
    let results = load.finished as f64 * byte;
    let rounds = f64::from(hosts.ilog2());
    let power = rounds.exp2();
    // Hosts beyond the power of two give their part to another one, and get the result back.
    let folds = if power == n { 0.0 } else { 2.0 * latency + parts + results };
    let meeting = if first { rounds * latency + if power == n { 0.0 } else { 2.0 * latency } } else { 0.0 };
    match algorithm {
        Algorithm::Doubling => rounds * (latency + parts) + folds,
        Algorithm::Halving => 2.0 * rounds * latency + (power - 1.0) / power * (parts + results) + folds,
        Algorithm::Pairwise => meeting + 2.0 * (latency + (n - 2.0) * message) + (n - 1.0) / n * (parts + results),
        Algorithm::Ring => meeting + 2.0 * (n - 1.0) * latency + (n - 1.0) / n * (parts + results),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use Algorithm::{Doubling, Halving, Pairwise};

    const TCP: Network = Network { latency: 30e-6, message: 5e-6, byte: 1e-9 };

    fn float32(bytes: usize) -> Load {
        Load { finished: bytes, carried: bytes }
    }

    #[test]
    fn small_calls_take_few_rounds_and_long_ones_few_bytes() {
        for hosts in [2, 4, 8, 64, 1024] {
            assert_eq!(best(&TCP, hosts, float32(64), true), Doubling, "{hosts} hosts");
        }
        // The verdict alone would take as long as half of the way.
        for hosts in [2, 8] {
            assert_eq!(best(&TCP, hosts, float32(1 << 20), true), Halving, "{hosts} hosts");
        }
        for hosts in [2, 3, 5, 24] {
            assert_eq!(best(&TCP, hosts, float32(1 << 20), false), Pairwise, "{hosts} hosts");
        }
        // So many messages take longer than so many rounds.
        assert_eq!(best(&TCP, 1024, float32(1 << 20), false), Halving);
    }

    #[test]
    fn what_is_wide_on_its_way_takes_halves_sooner() {
        let bfloat16 = |bytes: usize| Load { finished: bytes, carried: 2 * bytes };
        assert_eq!(best(&TCP, 2, float32(64 << 10), true), Doubling);
        assert_eq!(best(&TCP, 2, bfloat16(64 << 10), true), Halving);
    }

    #[test]
    fn two_hosts_in_one_round_or_two() {
        let of = |algorithm| (seconds(&TCP, algorithm, 2, float32(1000), true) * 1e9).round();
        assert_eq!((of(Doubling), of(Halving), of(Pairwise)), (31_100.0, 61_050.0, 91_050.0));
    }
}
