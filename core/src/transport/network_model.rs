//! Cost of messages between two hosts in the LogGP model (Alexandrov, Ionescu, Schauser and Scheiman, 1995): latency,
//! gap per additional message, and time per byte.

use serde::{Deserialize, Serialize};

/// Constants of the network between the hosts of a job, in seconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct NetworkModel {
    /// Latency of an empty message, from the send call to its reception.
    pub latency_s: f64,
    /// Additional time for each further concurrent message.
    pub message_gap_s: f64,
    /// Time per byte when a host sends and receives at once.
    pub byte_s: f64,
}

impl NetworkModel {
    /// The default without a measurement: 1 GB/s, and the latencies of TCP.
    pub const UNKNOWN: NetworkModel = NetworkModel { latency_s: 30e-6, message_gap_s: 5e-6, byte_s: 1e-9 };

    /// The slowest value of each constant over all `measured` models.
    pub fn slowest(measured: impl IntoIterator<Item = NetworkModel>) -> NetworkModel {
        let max = |one: NetworkModel, other: NetworkModel| NetworkModel {
            latency_s: one.latency_s.max(other.latency_s),
            message_gap_s: one.message_gap_s.max(other.message_gap_s),
            byte_s: one.byte_s.max(other.byte_s),
        };
        measured.into_iter().reduce(max).unwrap_or(NetworkModel::UNKNOWN)
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
