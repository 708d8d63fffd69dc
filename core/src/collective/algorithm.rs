//! Algorithms between hosts and their names.

use crate::error::{Error, Result};

/// The algorithm for a slice between hosts; `docs/performance.md` compares them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Algorithm {
    /// Recursive doubling: the whole slice in each of log n rounds. Lowest latency.
    Doubling,
    /// Recursive halving, then doubling (Rabenseifner, 2004; Thakur, Rabenseifner and Gropp, 2005): 2 log n rounds.
    /// Fewest bytes if n is a power of two.
    Halving,
    /// Pairwise exchange: a piece to each host at once, then the completed pieces. Two rounds of n - 1 messages. Fewest
    /// bytes for any n.
    Pairwise,
    /// Ring (Patarasuk and Yuan, 2009): 2 (n - 1) rounds, fewest bytes; each host receives only from its neighbor. The
    /// order of addition differs by piece, so bits depend on the position of an element in the call.
    Ring,
}

/// The algorithm setting of a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum AlgorithmSetting {
    /// The fastest by the cost model, among those that give the same bits.
    #[default]
    Auto,
    /// Always this algorithm.
    Always(Algorithm),
}

/// The values of `DL_COMM_ALGORITHM`.
const NAMES: [(&str, AlgorithmSetting); 5] = [
    ("auto", AlgorithmSetting::Auto),
    ("doubling", AlgorithmSetting::Always(Algorithm::Doubling)),
    ("halving", AlgorithmSetting::Always(Algorithm::Halving)),
    ("pairwise", AlgorithmSetting::Always(Algorithm::Pairwise)),
    ("ring", AlgorithmSetting::Always(Algorithm::Ring)),
];

impl AlgorithmSetting {
    /// The setting called `name`.
    ///
    /// # Errors
    /// [`Error::Invalid`] if there is none.
    pub fn parse(name: &str) -> Result<AlgorithmSetting> {
        let found = NAMES.iter().find(|(other, _)| *other == name);
        found.map(|(_, choice)| *choice).ok_or_else(|| {
            let names = NAMES.map(|(name, _)| format!("'{name}'")).join(", ");
            Error::Invalid(format!("'{name}' is no algorithm between hosts; these are {names}"))
        })
    }

    /// The name in `DL_COMM_ALGORITHM`.
    pub fn name(self) -> &'static str {
        NAMES.iter().find(|(_, choice)| *choice == self).map_or("auto", |(name, _)| name)
    }
}
