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

/// How a call in a list shares memory with the others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct SharedMemory {
    /// Equal for calls that are connected by memory that they share; 0 for one that shares none.
    pub part: u32,
    /// Whether it conflicts with a call before it.
    pub conflicts: bool,
}

/// How each of `calls` shares memory with the others.
pub(super) fn shared_memory<'a>(calls: impl ExactSizeIterator<Item = &'a Call> + Clone) -> Vec<SharedMemory> {
    let mut before = MemoryUse::default();
    let mut conflicts_before = |call: &Call| {
        let conflicts = before.conflicts_with(call);
        before.add(call);
        conflicts
    };
    let conflicts: Vec<bool> = calls.clone().map(&mut conflicts_before).collect();
    let mut parts = vec![0; calls.len()];
    if conflicts.contains(&true) {
        let ranges = calls.enumerate().flat_map(|(index, call)| call.memory().map(move |(range, _)| (range, index)));
        parts = connected(ranges.collect(), parts.len());
    }
    parts.into_iter().zip(conflicts).map(|(part, conflicts)| SharedMemory { part, conflicts }).collect()
}

/// For each of `count` owners of `ranges` the number of its part, equal for owners that are connected by ranges that
/// overlap; 0 if it has no such range.
fn connected(mut ranges: Vec<(Range<usize>, usize)>, count: usize) -> Vec<u32> {
    ranges.sort_unstable_by_key(|(range, _)| range.start);
    let mut owners: Vec<usize> = (0..count).collect();
    let find = |owners: &mut Vec<usize>, mut index: usize| {
        while owners[index] != index {
            owners[index] = owners[owners[index]];
            index = owners[index];
        }
        index
    };
    let (mut end, mut last) = (0, 0);
    for (range, index) in ranges {
        if range.start < end {
            let (one, other) = (find(&mut owners, last), find(&mut owners, index));
            owners[one.max(other)] = one.min(other);
        }
        (end, last) = (end.max(range.end), index);
    }
    let roots: Vec<usize> = (0..count).map(|index| find(&mut owners, index)).collect();
    let mut sizes = vec![0; count];
    roots.iter().for_each(|&root| sizes[root] += 1);
    let part = |&root: &usize| if sizes[root] > 1 { u32::try_from(root + 1).unwrap_or(u32::MAX) } else { 0 };
    roots.iter().map(part).collect()
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
        fn owners_of_overlapping_ranges_are_connected(
            ranges in prop::collection::vec((0usize..60, 1usize..9, 0usize..8), 0..20),
        ) {
            let overlap = |a: &(usize, usize, usize), b: &(usize, usize, usize)| a.0 < b.0 + b.1 && b.0 < a.0 + a.1;
            let mut expected: Vec<usize> = (0..8).collect();
            for _ in 0..8 {
                for a in &ranges {
                    for b in ranges.iter().filter(|b| overlap(a, b)) {
                        let least = expected[a.2].min(expected[b.2]);
                        (expected[a.2], expected[b.2]) = (least, least);
                    }
                }
            }
            let parts = connected(ranges.iter().map(|&(start, len, owner)| (start..start + len, owner)).collect(), 8);
            for a in 0..8 {
                for b in (0..8).filter(|&b| b != a) {
                    prop_assert_eq!(parts[a] != 0 && parts[a] == parts[b], expected[a] == expected[b], "{:?}", parts);
                }
            }
        }

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
