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

    /// Numbers whose maxima over several models are those of the slowest network.
    pub fn to_bits(self) -> [u64; 4] {
        // The bits of positive numbers have their order.
        [self.latency_s, self.message_gap_s, self.byte_s, 0.0].map(f64::to_bits)
    }

    /// The model of these numbers; without a measurement they are 0.
    pub fn from_bits(bits: [u64; 4]) -> NetworkModel {
        let [latency_s, message_gap_s, byte_s, _] = bits.map(f64::from_bits);
        if byte_s > 0.0 { NetworkModel { latency_s, message_gap_s, byte_s } } else { NetworkModel::UNKNOWN }
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
        let (ones, others) = (one.to_bits(), other.to_bits());
        assert_eq!(NetworkModel::from_bits(std::array::from_fn(|index| ones[index].max(others[index]))), slowest);
        assert_eq!(NetworkModel::from_bits([0; 4]), NetworkModel::UNKNOWN);
    }
}
