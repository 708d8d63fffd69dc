//! The calls of a rank that have not run, as the ranks send them to each other. Plain data.

use serde::{Deserialize, Serialize};

/// Maximum encoded bytes of a call: two signatures, a key, a flag, an age, a kind, a number and a flag.
const MAX_CALL_BYTES: usize = 39;
/// Maximum encoded bytes of a list without its calls, and of a decision without its entries.
pub(super) const MAX_HEADER_BYTES: usize = 16;

/// A submitted call that has not run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct PendingCall {
    /// Equal for matching calls.
    pub signature: u64,
    /// The signature of the call in the form in which the ranks know only their own lengths; 0 if it has none.
    pub by_pairs: u64,
    /// Equal for calls of one name, with any content; 0 for calls without a name. Unless they match by name, for those of
    /// one operation only.
    pub key: u64,
    /// It matches that of its name, wherever they stand.
    pub by_name: bool,
    /// How long it has waited for its counterpart.
    pub age: Age,
    /// What ranks that have joined do about it.
    pub kind: PendingKind,
    /// Equal for the calls of the list that are connected by memory that they share; 0 for a call that shares none.
    pub memory: u32,
    /// Its memory conflicts with that of a call before it in the list. It stays behind all these that it is connected to.
    pub stays_behind: bool,
}

/// What ranks that have joined do about a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum PendingKind {
    /// They contribute zeros.
    TakesZeros,
    /// They cannot take part.
    NeedsAll,
    /// The call of a rank that has joined.
    Join,
}

/// How long a call has waited for its counterpart, by its rank's clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Age {
    /// Less than the other limits.
    New,
    /// Long enough to treat a call of the same name and other content as a conflict.
    Conflicting,
    /// Too long, even if a counterpart may still come.
    Expired,
}

/// The calls of one rank.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PendingCalls {
    /// Oldest first.
    pub calls: Vec<PendingCall>,
    /// Whether more calls can come.
    pub further_calls: FurtherCalls,
    /// Whether every thread that has called this group waits for one of these calls.
    pub quiet: bool,
    /// Whether the rank has refused a call, by an error about its arguments, and no call after it has matched.
    pub refused: bool,
}

/// Whether a rank may submit further calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum FurtherCalls {
    /// It computes or is not blocked, and may submit a call at any time.
    Busy,
    /// It is blocked, in this or another group, and may submit more.
    Open,
    /// No call before one of those that it waits for has ended.
    Settled,
    /// No call at all: it has freed its group.
    Closed,
}

impl PendingCalls {
    /// Whether the rank has joined, and its earlier calls have run.
    pub(super) fn has_joined(&self) -> bool {
        self.calls.first().is_some_and(|call| call.kind == PendingKind::Join)
    }

    /// Splits the list into parts of at most `max_bytes` encoded bytes; at least one part.
    pub fn pages(&self, max_bytes: usize) -> impl ExactSizeIterator<Item = PendingCalls> {
        let per_page = (max_bytes.saturating_sub(MAX_HEADER_BYTES) / MAX_CALL_BYTES).max(1);
        let count = self.calls.len().div_ceil(per_page).max(1);
        (0..count).map(move |page| {
            let calls = self.calls.iter().skip(page * per_page).take(per_page).copied().collect();
            PendingCalls { calls, ..*self }
        })
    }
}
