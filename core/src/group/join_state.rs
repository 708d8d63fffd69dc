//! What a rank has contributed since it joined ([`super::join`]), and which rank was the last. Plain data.

use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};

/// What the ranks compare: the negative number of contributions, then the time of the join.
pub type Position = [i64; 2];

/// What a rank has contributed since it joined.
pub(super) struct JoinState {
    /// The input of the join's call, a [`Position`].
    own: [AtomicI64; 2],
    /// At the end, those of all ranks.
    all: Vec<AtomicI64>,
    contributions: AtomicU64,
}

impl JoinState {
    /// That of a rank which joins `at` this time, and has contributed nothing, in a group of `ranks`.
    pub fn new(ranks: usize, at: i64) -> JoinState {
        let all = (0..2 * ranks).map(|_| AtomicI64::new(0)).collect();
        JoinState { own: position(0, at).map(AtomicI64::new), all, contributions: AtomicU64::new(0) }
    }

    /// The memory of the call: input and result.
    pub fn memory(&self) -> (*const i64, *mut i64) {
        (self.own.as_ptr().cast(), self.all.as_ptr().cast_mut().cast())
    }

    /// The call's result.
    pub fn positions(&self) -> Vec<Position> {
        let value = |number: &AtomicI64| number.load(Ordering::Relaxed);
        self.all.chunks_exact(2).map(|pair| [value(&pair[0]), value(&pair[1])]).collect()
    }

    /// The number of contributions.
    pub fn contributions(&self) -> u64 {
        self.contributions.load(Ordering::Relaxed)
    }

    /// Counts a contribution to a call of the other ranks.
    pub fn count(&self) {
        self.own[0].fetch_sub(1, Ordering::Relaxed);
        self.contributions.fetch_add(1, Ordering::Relaxed);
    }
}

/// The position of a rank that has joined `at` this time of the job.
pub fn position(contributions: u64, at: i64) -> Position {
    [-i64::try_from(contributions).unwrap_or(i64::MAX), at]
}

/// The rank that has joined last, by rank: it has contributed the least; of several, the last in time. The order of calls
/// is exact, and the clocks of hosts are not.
pub fn last(positions: &[Position]) -> usize {
    positions.iter().enumerate().max_by_key(|(_, position)| **position).map_or(0, |(rank, _)| rank)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contributions_count_before_the_time() {
        assert_eq!(last(&[position(1, 9), position(0, 3), position(0, 5), position(0, 4)]), 2);
        let state = JoinState::new(3, 7);
        (0..2).for_each(|_| state.count());
        assert_eq!((state.contributions(), state.positions()), (2, vec![[0, 0]; 3]));
        // SAFETY: the state's own memory.
        assert_eq!(unsafe { state.memory().0.cast::<Position>().read() }, [-2, 7]);
    }
}
