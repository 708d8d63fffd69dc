//! What a message between two hosts costs, in the terms of the LogGP model (Alexandrov, Ionescu, Schauser and Scheiman, 1995):
//! its latency, the time that a further message at once adds, and the time that a byte takes.

/// Constants of the network between the hosts of a job, in seconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Network {
    /// From the call of the sender until the receiver has an empty message.
    pub latency: f64,
    /// What each further message that a host sends and receives at the same time adds.
    pub message: f64,
    /// A byte, to and from a host at the same time.
    pub byte: f64,
}

impl Network {
    /// Where nothing was measured: a gigabyte a second, and the latencies of TCP.
    pub const UNKNOWN: Network = Network { latency: 30e-6, message: 5e-6, byte: 1e-9 };

    /// The slowest of what several hosts measured, each figure for itself.
    pub fn slowest(measured: impl IntoIterator<Item = Network>) -> Network {
        let most = |one: Network, other: Network| Network {
            latency: one.latency.max(other.latency),
            message: one.message.max(other.message),
            byte: one.byte.max(other.byte),
        };
        measured.into_iter().reduce(most).unwrap_or(Network::UNKNOWN)
    }

    /// The figures as text.
    pub fn encode(&self) -> String {
        format!("{:e} {:e} {:e}", self.latency, self.message, self.byte)
    }

    /// The figures from [`Network::encode`]; `None` for any other text.
    pub fn decode(text: &str) -> Option<Network> {
        let figures: Vec<f64> = text.split(' ').map(|word| word.parse().ok()).collect::<Option<_>>()?;
        match figures[..] {
            [latency, message, byte] => Some(Network { latency, message, byte }),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_travel_as_text_and_the_slowest_count() {
        let one = Network { latency: 1.25e-5, message: 3e-7, byte: 8e-9 };
        assert_eq!(Network::decode(&one.encode()), Some(one));
        assert_eq!(Network::decode("1 2"), None);
        assert_eq!(Network::decode("1 2 x"), None);
        let other = Network { latency: 1e-5, message: 4e-7, byte: 9e-9 };
        let slowest = Network { latency: 1.25e-5, message: 4e-7, byte: 9e-9 };
        assert_eq!(Network::slowest([one, other]), slowest);
        assert_eq!(Network::slowest([]), Network::UNKNOWN);
    }
}
