//! The names of the algorithms between hosts.

use crate::error::{Error, Result};

/// How a slice is averaged between hosts; `docs/performance.md` compares them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Algorithm {
    /// Recursive doubling: the whole slice in each of log n rounds. Least latency.
    Doubling,
    /// Recursive halving, then doubling (Rabenseifner, 2004; Thakur, Rabenseifner and Gropp, 2005): 2 log n rounds, the least
    /// bytes where n is a power of two.
    Halving,
    /// Pairwise exchange: a piece to each host at once, then the finished pieces. Two rounds, the least bytes for any n, n - 1
    /// messages a round.
    Pairwise,
    /// A ring (Patarasuk and Yuan, 2009): 2 (n - 1) rounds, the least bytes, each host hears only its neighbour. The order of
    /// addition differs by piece, so that bits depend on where in a call an element lies.
    Ring,
}

/// Which algorithm a team takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum AlgorithmSetting {
    /// The fastest by the model, among those that give the same bits.
    #[default]
    Auto,
    /// That one.
    Always(Algorithm),
}

/// The names of the choices, as `DL_COMM_ALGORITHM` has them.
const NAMES: [(&str, AlgorithmSetting); 5] = [
    ("auto", AlgorithmSetting::Auto),
    ("doubling", AlgorithmSetting::Always(Algorithm::Doubling)),
    ("halving", AlgorithmSetting::Always(Algorithm::Halving)),
    ("pairwise", AlgorithmSetting::Always(Algorithm::Pairwise)),
    ("ring", AlgorithmSetting::Always(Algorithm::Ring)),
];

impl AlgorithmSetting {
    /// The choice of that name.
    ///
    /// # Errors
    /// [`Error::Invalid`] when there is none.
    pub fn parse(name: &str) -> Result<AlgorithmSetting> {
        let found = NAMES.iter().find(|(other, _)| *other == name);
        found.map(|(_, choice)| *choice).ok_or_else(|| {
            let names = NAMES.map(|(name, _)| format!("'{name}'")).join(", ");
            Error::Invalid(format!("DL_COMM_ALGORITHM is '{name}'; set it to one of {names}"))
        })
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        NAMES.iter().find(|(_, choice)| *choice == self).map_or("auto", |(name, _)| name)
    }
}
