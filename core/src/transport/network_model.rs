//! What a message between two hosts costs, in the terms of the LogGP model (Alexandrov, Ionescu, Schauser and Scheiman, 1995):
//! its latency, the time that a further message at once adds, and the time that a byte takes.

use serde::{Deserialize, Serialize};

/// Constants of the network between the hosts of a job, in seconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct NetworkModel {
    /// From the call of the sender until the receiver has an empty message.
    pub latency_s: f64,
    /// What each further message that a host sends and receives at the same time adds.
    pub message_gap_s: f64,
    /// A byte, to and from a host at the same time.
    pub byte_s: f64,
}

impl NetworkModel {
    /// Where nothing was measured: a gigabyte a second, and the latencies of TCP.
    pub const UNKNOWN: NetworkModel = NetworkModel { latency_s: 30e-6, message_gap_s: 5e-6, byte_s: 1e-9 };

    /// The slowest of what several hosts measured, each figure for itself.
    pub fn slowest(measured: impl IntoIterator<Item = NetworkModel>) -> NetworkModel {
        let most = |one: NetworkModel, other: NetworkModel| NetworkModel {
            latency_s: one.latency_s.max(other.latency_s),
            message_gap_s: one.message_gap_s.max(other.message_gap_s),
            byte_s: one.byte_s.max(other.byte_s),
        };
        measured.into_iter().reduce(most).unwrap_or(NetworkModel::UNKNOWN)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_slowest_figures_count() {
        let one = NetworkModel { latency_s: 1.25e-5, message_gap_s: 3e-7, byte_s: 8e-9 };
        let other = NetworkModel { latency_s: 1e-5, message_gap_s: 4e-7, byte_s: 9e-9 };
        let slowest = NetworkModel { latency_s: 1.25e-5, message_gap_s: 4e-7, byte_s: 9e-9 };
        assert_eq!(NetworkModel::slowest([one, other]), slowest);
        assert_eq!(NetworkModel::slowest([]), NetworkModel::UNKNOWN);
    }
}
