//! What a message between two hosts costs, in the terms of the LogGP model (Alexandrov, Ionescu, Schauser and Scheiman, 1995):
//! its latency, the time that a further message at once adds, and the time that a byte takes.

/// Constants of the network between the hosts of a job, in seconds.
#[derive(Debug, Clone, Copy, PartialEq)]
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

    /// The figures as text.
    pub fn encode(&self) -> String {
        format!("{:e} {:e} {:e}", self.latency_s, self.message_gap_s, self.byte_s)
    }

    /// The figures from [`NetworkModel::encode`]; `None` for any other text.
    pub fn decode(text: &str) -> Option<NetworkModel> {
        let figures: Vec<f64> = text.split(' ').map(|word| word.parse().ok()).collect::<Option<_>>()?;
        match figures[..] {
            [latency, message, byte] => Some(NetworkModel { latency_s: latency, message_gap_s: message, byte_s: byte }),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_travel_as_text_and_the_slowest_count() {
        let one = NetworkModel { latency_s: 1.25e-5, message_gap_s: 3e-7, byte_s: 8e-9 };
        assert_eq!(NetworkModel::decode(&one.encode()), Some(one));
        assert_eq!(NetworkModel::decode("1 2"), None);
        assert_eq!(NetworkModel::decode("1 2 x"), None);
        let other = NetworkModel { latency_s: 1e-5, message_gap_s: 4e-7, byte_s: 9e-9 };
        let slowest = NetworkModel { latency_s: 1.25e-5, message_gap_s: 4e-7, byte_s: 9e-9 };
        assert_eq!(NetworkModel::slowest([one, other]), slowest);
        assert_eq!(NetworkModel::slowest([]), NetworkModel::UNKNOWN);
    }
}
