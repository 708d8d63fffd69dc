//! What a rank has contributed since it joined ([`super::join`]), and which rank was the last. Plain data.

use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};

/// More than the calls of any job.
const START: i64 = 1 << 62;

/// What a rank has contributed since it joined.
pub(super) struct JoinState {
    /// The input, and at the end the result of the join's call.
    position: AtomicI64,
    contributions: AtomicU64,
}

impl JoinState {
    /// That of `rank`, which has contributed nothing.
    pub fn new(rank: usize) -> JoinState {
        JoinState { position: AtomicI64::new(position(rank, 0)), contributions: AtomicU64::new(0) }
    }

    /// The memory of the call.
    pub fn memory(&self) -> *mut i64 {
        self.position.as_ptr()
    }

    /// The call's input or result.
    pub fn position(&self) -> i64 {
        self.position.load(Ordering::Relaxed)
    }

    /// The number of contributions.
    pub fn contributions(&self) -> u64 {
        self.contributions.load(Ordering::Relaxed)
    }

    /// Counts a contribution to a call of the other ranks.
    pub fn count(&self) {
        self.position.fetch_sub(1 << 32, Ordering::Relaxed);
        self.contributions.fetch_add(1, Ordering::Relaxed);
    }
}

/// A number of a rank whose maximum over the ranks tells which one has the fewest `contributions`; see [`last`].
pub fn position(rank: usize, contributions: u64) -> i64 {
    START - (contributions << 32).cast_signed() + rank as i64
}

/// The rank of the greatest [`position`].
pub fn last(position: i64) -> usize {
    (position & i64::from(u32::MAX)) as usize
}
