//! The memory that calls read and write.
//!
//! Thread rule: none, it is data.

use std::ops::Range;

use crate::collective::Call;

/// The memory of one or several calls.
#[derive(Default)]
pub(super) struct MemoryUse {
    read: Ranges,
    written: Ranges,
}

impl MemoryUse {
    /// That of a call.
    pub fn of(call: &Call) -> MemoryUse {
        let mut memory = MemoryUse::default();
        memory.add(call);
        memory
    }

    /// Adds that of another call.
    pub fn add(&mut self, call: &Call) {
        for (range, written) in call.memory() {
            if written { self.written.insert(range) } else { self.read.insert(range) }
        }
    }

    /// Whether `call` writes what these calls use, or uses what they write.
    pub fn conflicts_with(&self, call: &Call) -> bool {
        call.memory().any(|(range, written)| self.written.overlap(&range) || written && self.read.overlap(&range))
    }
}

/// Disjoint ranges in ascending order.
#[derive(Default)]
struct Ranges(Vec<Range<usize>>);

impl Ranges {
    /// Adds a range that is not empty, and joins it with those that it touches.
    fn insert(&mut self, mut range: Range<usize>) {
        let first = self.0.partition_point(|other| other.end < range.start);
        let touched = self.0[first..].iter().take_while(|other| other.start <= range.end).count();
        for other in &self.0[first..first + touched] {
            range = range.start.min(other.start)..range.end.max(other.end);
        }
        self.0.splice(first..first + touched, [range]);
    }

    /// Whether one of them has an address in `range`.
    fn overlap(&self, range: &Range<usize>) -> bool {
        let first = self.0.partition_point(|other| other.end <= range.start);
        self.0.get(first).is_some_and(|other| other.start < range.end)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn ranges_are_a_set(inserted in prop::collection::vec((0usize..60, 1usize..9), 0..12), asked in (0usize..60, 1usize..9)) {
            let mut ranges = Ranges::default();
            inserted.iter().for_each(|&(start, len)| ranges.insert(start..start + len));
            prop_assert!(ranges.0.windows(2).all(|pair| pair[0].end < pair[1].start), "{:?}", ranges.0);
            let asked = asked.0..asked.0 + asked.1;
            let expected = inserted.iter().any(|&(start, len)| start < asked.end && asked.start < start + len);
            prop_assert_eq!(ranges.overlap(&asked), expected);
            let total: usize = ranges.0.iter().map(ExactSizeIterator::len).sum();
            let bytes: std::collections::BTreeSet<_> = inserted.iter().flat_map(|&(start, len)| start..start + len).collect();
            prop_assert_eq!(total, bytes.len());
        }
    }
}
