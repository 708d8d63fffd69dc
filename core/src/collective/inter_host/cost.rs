//! A cost model of the algorithms, from the constants of the [`NetworkModel`] and the number of hosts. Pure.
//!
//! `benchmarks/simulate` has the same formulas for whole jobs; `docs/performance.md` compares them with measurements.

use crate::collective::algorithm::Algorithm;
use crate::transport::NetworkModel;
use crate::wire_layout::{ALIGN, HEADER};

/// Algorithms that give the same bits.
const SAME_BITS: [Algorithm; 3] = [Algorithm::Pairwise, Algorithm::Halving, Algorithm::Doubling];

/// Seconds that a shard needs to add one received byte.
const ADD_S_PER_BYTE: f64 = 1e-10;

/// The data of all shards of a host.
#[derive(Debug, Clone, Copy)]
pub(super) struct CostInput {
    /// Bytes of the result.
    pub result_bytes: usize,
    /// Bytes of a host's partial sums, which may have a wider type.
    pub partial_bytes: usize,
    /// Whether a pairwise exchange sends elements, as many bytes as a result, instead of partial sums.
    pub sends_elements: bool,
    /// The number of chunks of a channel that hide each other's latencies.
    pub overlap: usize,
    /// The number of shards. They share the host's link and add in parallel.
    pub shards: usize,
}

/// The fastest algorithm for `load` on each of `hosts` hosts; `first`: the call also needs the handshake.
pub(super) fn fastest(network: &NetworkModel, hosts: usize, load: CostInput, first: bool) -> Algorithm {
    let cost = |algorithm: &Algorithm| seconds(network, *algorithm, hosts, load, first);
    SAME_BITS.into_iter().min_by(|one, other| cost(one).total_cmp(&cost(other))).unwrap_or(Algorithm::Pairwise)
}

/// Estimated seconds of a chunk with `algorithm`: the latencies in sequence, then the larger of message gaps and transfer time (a
/// host issues messages while its link transfers others), then the additions.
pub(super) fn seconds(network: &NetworkModel, algorithm: Algorithm, hosts: usize, load: CostInput, first: bool) -> f64 {
    let n = hosts as f64;
    let rounds = f64::from(hosts.ilog2());
    let power = rounds.exp2();
    let (partial_bytes, result_bytes) = (load.partial_bytes as f64, load.result_bytes as f64);
    // Hosts beyond the power of two send their data to a partner and receive the result.
    let folds = if power == n { 0.0 } else { 1.0 };
    let handshake = if first { rounds + 2.0 * folds } else { 0.0 };
    let (latencies, added) = match algorithm {
        Algorithm::Doubling => (rounds + 2.0 * folds, (rounds + folds) * partial_bytes),
        Algorithm::Halving => (2.0 * (rounds + folds), ((power - 1.0) / power + folds) * partial_bytes),
        Algorithm::Pairwise => (handshake + 2.0, (n - 1.0) / n * partial_bytes),
        Algorithm::Ring => (handshake + 2.0 * (n - 1.0), (n - 1.0) / n * partial_bytes),
    };
    // The first chunk runs alone.
    let latencies = if first { latencies } else { latencies / load.overlap as f64 };
    let extra_messages = if algorithm == Algorithm::Pairwise { 2.0 * (n - 2.0) } else { 0.0 };
    let header_bytes = (HEADER * load.shards) as f64;
    // The hosts of a pair take turns to send the rounds, shard by shard and chunk by chunk.
    let take_turns = load.shards > 1 || (!first && load.overlap > 2);
    let with_fold = |rounds: f64| match (folds > 0.0, take_turns) {
        (false, _) => rounds,
        (true, true) => rounds.max((rounds + partial_bytes + result_bytes + 2.0 * header_bytes) / 2.0),
        (true, false) => rounds + partial_bytes.max(result_bytes) + header_bytes,
    };
    let sent = match algorithm {
        Algorithm::Doubling => with_fold(rounds * (partial_bytes + header_bytes)),
        Algorithm::Halving => with_fold(halving_traffic(hosts.ilog2(), load)),
        Algorithm::Pairwise | Algorithm::Ring => {
            let narrow = load.sends_elements && algorithm == Algorithm::Pairwise;
            let partial_bytes = if narrow { load.result_bytes } else { load.partial_bytes };
            (n - 1.0) * piece_traffic(CostInput { partial_bytes, ..load }, load.result_bytes / load.shards / hosts)
        }
    };
    network.latency_s * latencies
        + (network.message_gap_s * extra_messages).max(network.byte_s * sent)
        + ADD_S_PER_BYTE * added / load.shards as f64
}

/// Bytes on a host's link if each shard sends and receives a piece of `piece` bytes, with headers.
fn piece_traffic(load: CostInput, piece: usize) -> f64 {
    // Pieces are whole cache lines.
    let piece = piece.next_multiple_of(ALIGN) as f64;
    let width = load.partial_bytes as f64 / load.result_bytes.max(1) as f64;
    (piece * (width + 1.0) + 2.0 * HEADER as f64) * load.shards as f64
}

/// The same for recursive halving and doubling.
fn halving_traffic(rounds: u32, load: CostInput) -> f64 {
    let shard = load.result_bytes / load.shards;
    (1..=rounds).map(|round| piece_traffic(load, shard >> round)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use Algorithm::{Doubling, Halving, Pairwise};

    const TCP: NetworkModel = NetworkModel { latency_s: 30e-6, message_gap_s: 5e-6, byte_s: 1e-9 };

    fn float32(bytes: usize) -> CostInput {
        CostInput { result_bytes: bytes, partial_bytes: bytes, overlap: 1, sends_elements: false, shards: 1 }
    }

    #[test]
    fn small_calls_minimize_rounds_and_large_ones_bytes() {
        for hosts in [2, 4, 8, 64, 1024] {
            assert_eq!(fastest(&TCP, hosts, float32(64), true), Doubling, "{hosts} hosts");
        }
        // The handshake takes as many rounds as recursive halving. With two hosts, halving sends the data along.
        assert_eq!(fastest(&TCP, 2, float32(1 << 20), true), Halving);
        assert_eq!(fastest(&TCP, 8, float32(1 << 20), true), Pairwise);
        for hosts in [2, 3, 5, 24] {
            assert_eq!(fastest(&TCP, hosts, float32(1 << 20), false), Pairwise, "{hosts} hosts");
        }
        // With 1024 hosts the gaps of 1023 messages cost more than 20 rounds.
        assert_eq!(fastest(&TCP, 1024, float32(1 << 20), false), Halving);
    }

    #[test]
    fn wide_partial_sums_favor_halving() {
        let bfloat16 = |bytes: usize, shards| CostInput {
            partial_bytes: 2 * bytes,
            sends_elements: shards == 1,
            shards,
            ..float32(bytes)
        };
        assert_eq!(fastest(&TCP, 2, float32(64 << 10), true), Doubling);
        assert_eq!(fastest(&TCP, 2, bfloat16(64 << 10, 2), true), Halving);
        assert_eq!(fastest(&TCP, 2, bfloat16(64 << 10, 1), true), Pairwise);
    }

    #[test]
    fn cost_of_two_hosts_matches_the_formula() {
        let of = |algorithm| (seconds(&TCP, algorithm, 2, float32(1024), true) * 1e9).round();
        // A header has 64 bytes; adding a byte takes 0.1 ns.
        let expected_nanos =
            |rounds: f64, headers: f64, added: f64| (rounds * 3e4 + 1024.0 + headers * 64.0 + added / 10.0).round();
        assert_eq!(of(Doubling), expected_nanos(1.0, 1.0, 1024.0));
        assert_eq!(of(Halving), expected_nanos(2.0, 2.0, 512.0));
        assert_eq!(of(Pairwise), expected_nanos(3.0, 2.0, 512.0));
    }

    #[test]
    fn shards_add_in_parallel_and_share_the_link() {
        let load = |shards| CostInput {
            result_bytes: 1 << 20,
            partial_bytes: 1 << 20,
            overlap: 1,
            sends_elements: false,
            shards,
        };
        let of = |shards| seconds(&TCP, Halving, 2, load(shards), false);
        let (added, header) = (ADD_S_PER_BYTE * f64::from(1 << 19), 64.0 * TCP.byte_s);
        assert!((of(1) - of(4) - (0.75 * added - 6.0 * header)).abs() < 1e-12);
    }
}
