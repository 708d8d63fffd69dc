//! Which parts of an arena are in use. Pure.
//!
//! Ranges of whole pages are given out first fit. Small pieces share a range, a *slab* of pieces of one length: thousands of
//! small tensors need not take a page each, nor all begin in the same sets of a cache.
//! Thread rule: plain data.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

use crate::wire_layout::ALIGN;

/// Ranges start at a multiple of this, and are as long as one.
const PAGE: usize = 4096;
/// The size of a huge page, at a multiple of which longer ranges start.
const HUGE: usize = 2 << 20;
/// The longest piece that shares a range with others.
pub(super) const SMALL: usize = PAGE / 2;
/// The length of a range of pieces.
pub(super) const SLAB: usize = 16 * PAGE;

/// What is in use at some place, and its bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Allocation {
    /// A range of pages.
    Pages(usize),
    /// A piece of a slab.
    SlabSlot(usize),
}

/// An arena's bytes, numbered from 0.
pub(super) struct RangeAllocator {
    /// Ranges that nobody has, by start: the end. No two touch.
    free: BTreeMap<usize, usize>,
    /// What is in use, by start. A slab is not, its pieces are.
    used: HashMap<usize, Allocation>,
    /// Pieces that nobody has, by length.
    free_slots: HashMap<usize, Vec<usize>>,
}

impl RangeAllocator {
    pub fn new(len: usize) -> RangeAllocator {
        let free = if len == 0 { BTreeMap::new() } else { BTreeMap::from([(0, len)]) };
        RangeAllocator { free, used: HashMap::new(), free_slots: HashMap::new() }
    }

    /// A range for `len` bytes, if there is one.
    pub fn alloc(&mut self, len: usize) -> Option<Range<usize>> {
        let align = if len >= HUGE { HUGE } else { PAGE };
        let len = len.max(1).checked_next_multiple_of(PAGE)?;
        let fits = |(&from, &to): (&usize, &usize)| {
            let start = from.checked_next_multiple_of(align)?;
            let end = start.checked_add(len).filter(|&end| end <= to)?;
            Some((from..to, start..end))
        };
        let (hole, range) = self.free.iter().find_map(fits)?;
        self.free.remove(&hole.start);
        for rest in [hole.start..range.start, range.end..hole.end] {
            if !rest.is_empty() {
                self.free.insert(rest.start, rest.end);
            }
        }
        self.used.insert(range.start, Allocation::Pages(len));
        Some(range)
    }

    /// A spare piece of a slab for `len` bytes, up to [`SMALL`].
    pub fn piece(&mut self, len: usize) -> Option<usize> {
        let piece = rounded(len);
        let at = self.free_slots.get_mut(&piece)?.pop()?;
        self.used.insert(at, Allocation::SlabSlot(piece));
        Some(at)
    }

    /// Cuts a range of [`SLAB`] bytes that was taken into pieces for `len` bytes; returns the first of them, in use.
    pub fn split_slab(&mut self, start: usize, len: usize) -> usize {
        let piece = rounded(len);
        let spare = self.free_slots.entry(piece).or_default();
        spare.extend((1..SLAB / piece).rev().map(|index| start + index * piece));
        self.used.insert(start, Allocation::SlabSlot(piece));
        start
    }

    /// What is in use from `at` on.
    pub fn find(&self, at: usize) -> Option<Allocation> {
        self.used.get(&at).copied()
    }

    /// Takes back what [`RangeAllocator::find`] finds from `at` on; nothing else.
    pub fn free(&mut self, at: usize) {
        match self.used.remove(&at) {
            None => {}
            Some(Allocation::SlabSlot(piece)) => self.free_slots.entry(piece).or_default().push(at),
            Some(Allocation::Pages(len)) => {
                let (mut start, mut end) = (at, at + len);
                if let Some(after) = self.free.remove(&end) {
                    end = after;
                }
                if let Some((&before, &to)) = self.free.range(..at).next_back()
                    && to == at
                {
                    self.free.remove(&before);
                    start = before;
                }
                self.free.insert(start, end);
            }
        }
    }
}

/// The length of the pieces for `len` bytes.
fn rounded(len: usize) -> usize {
    len.max(1).next_multiple_of(ALIGN)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const LEN: usize = 64 * HUGE;

    fn alloc(space: &mut RangeAllocator, len: usize) -> Option<Range<usize>> {
        if len > SMALL {
            return space.alloc(len);
        }
        let start = space.piece(len).or_else(|| {
            let slab = space.alloc(SLAB)?.start;
            Some(space.split_slab(slab, len))
        })?;
        Some(start..start + len)
    }

    /// The bytes of ranges that were cut into pieces, none of which is in use.
    fn cut(space: &RangeAllocator) -> usize {
        space.free_slots.iter().map(|(piece, spare)| spare.len() / (SLAB / piece) * SLAB).sum()
    }

    proptest! {
        #[test]
        fn what_is_in_use_never_meets(
            steps in prop::collection::vec((prop_oneof![1usize..2 * SMALL, 1usize..5 * HUGE], 0usize..8), 1..200),
        ) {
            let mut space = RangeAllocator::new(LEN);
            let mut held: Vec<Range<usize>> = Vec::new();
            for (len, free) in steps {
                if let Some(range) = alloc(&mut space, len) {
                    prop_assert!(range.len() >= len && range.end <= LEN && range.start.is_multiple_of(ALIGN));
                    prop_assert!(len <= SMALL || range.start.is_multiple_of(PAGE));
                    prop_assert!(len < HUGE || range.start.is_multiple_of(HUGE));
                    prop_assert!(held.iter().all(|other| range.end <= other.start || other.end <= range.start));
                    held.push(range);
                }
                if free < held.len() {
                    let range = held.swap_remove(free);
                    prop_assert!(space.find(range.start + 1).is_none());
                    space.free(range.start);
                    prop_assert!(space.find(range.start).is_none());
                }
            }
            held.iter().for_each(|range| space.free(range.start));
            // What is left are slabs: between them everything is in one piece again.
            let free: usize = space.free.iter().map(|(start, end)| end - start).sum();
            prop_assert_eq!(free, LEN - cut(&space));
            let ends: Vec<usize> = space.free.values().copied().collect();
            prop_assert!(space.free.keys().all(|start| !ends.contains(start)));
        }
    }

    #[test]
    fn small_pieces_share_pages() {
        let mut space = RangeAllocator::new(LEN);
        let places: Vec<usize> = (0..100_000).map(|_| alloc(&mut space, 40).unwrap().start).collect();
        assert!(places.iter().all(|place| place.is_multiple_of(ALIGN)));
        places.iter().for_each(|&place| space.free(place));
        assert_eq!(cut(&space), (100_000 * ALIGN).next_multiple_of(SLAB));
        assert_eq!(alloc(&mut space, 64).unwrap().start, *places.last().unwrap());
    }
}
