//! The allocator of an arena: page ranges and slabs. Pure.
//!
//! Ranges of whole pages are allocated first fit, each in one of the areas that the allocator has got. Small allocations are slots of a *slab*, a range of slots of equal
//! size. So thousands of small tensors neither take a page each nor start in the same cache sets.
//! Thread rule: plain data.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

use crate::wire_layout::ALIGN;

/// Start and length of ranges are multiples of this.
const PAGE: usize = 4096;
/// Size of a huge page; longer ranges are aligned to it.
pub(super) const HUGE: usize = 2 << 20;
/// Maximum size of an allocation in a slab.
pub(super) const SMALL: usize = PAGE / 2;
/// Size of a slab.
pub(super) const SLAB: usize = 16 * PAGE;

/// An allocation and its size in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Allocation {
    /// A range of pages.
    Pages(usize),
    /// A slot of a slab.
    SlabSlot(usize),
}

/// An allocation in use.
struct Used {
    allocation: Allocation,
    /// While others may access it, it is not given away again.
    holds: u32,
    /// Whether its owner has freed it, meanwhile.
    is_freed: bool,
}

impl Used {
    fn new(allocation: Allocation) -> Used {
        Used { allocation, holds: 0, is_freed: false }
    }
}

/// The allocator; offsets start at 0.
pub(super) struct RangeAllocator {
    /// Free ranges: start to end. Adjacent ranges are merged.
    free: BTreeMap<usize, usize>,
    /// Allocations by start. Contains the slots of a slab, not the slab.
    used: BTreeMap<usize, Used>,
    /// Free slots by size.
    free_slots: HashMap<usize, Vec<usize>>,
}

impl RangeAllocator {
    /// An allocator with nothing to allocate.
    pub fn new() -> RangeAllocator {
        RangeAllocator { free: BTreeMap::new(), used: BTreeMap::new(), free_slots: HashMap::new() }
    }

    /// Adds a free area, at multiples of [`HUGE`]. An allocation lies in one area: the areas do not touch.
    pub fn add(&mut self, area: Range<usize>) {
        self.free.insert(area.start, area.end);
    }

    /// Allocates a page range for `len` bytes.
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
        self.used.insert(range.start, Used::new(Allocation::Pages(len)));
        Some(range)
    }

    /// Allocates a free slot for `len` bytes, at most [`SMALL`].
    pub fn alloc_slot(&mut self, len: usize) -> Option<usize> {
        let slot_size = slot_size_for(len);
        let offset = self.free_slots.get_mut(&slot_size)?.pop()?;
        self.used.insert(offset, Used::new(Allocation::SlabSlot(slot_size)));
        Some(offset)
    }

    /// Splits an allocated range of [`SLAB`] bytes into slots for `len` bytes. Returns the first slot, allocated.
    pub fn split_slab(&mut self, start: usize, len: usize) -> usize {
        let slot_size = slot_size_for(len);
        let slots = self.free_slots.entry(slot_size).or_default();
        slots.extend((1..SLAB / slot_size).rev().map(|index| start + index * slot_size));
        self.used.insert(start, Used::new(Allocation::SlabSlot(slot_size)));
        start
    }

    /// The allocation that starts at `offset`, unless it was freed.
    pub fn find(&self, offset: usize) -> Option<Allocation> {
        self.used.get(&offset).filter(|used| !used.is_freed).map(|used| used.allocation)
    }

    /// Holds the allocation that `offset` is in. Returns its start.
    pub fn hold(&mut self, offset: usize) -> Option<usize> {
        let (&start, used) = self.used.range_mut(..=offset).next_back()?;
        let (Allocation::Pages(len) | Allocation::SlabSlot(len)) = used.allocation;
        used.holds += u32::from(offset < start + len);
        (offset < start + len).then_some(start)
    }

    /// Ends a hold of the allocation that starts at `offset`. Returns the allocation if it can be freed now.
    pub fn end_hold(&mut self, offset: usize) -> Option<Allocation> {
        let used = self.used.get_mut(&offset)?;
        used.holds -= 1;
        (used.holds == 0 && used.is_freed).then_some(used.allocation)
    }

    /// If the allocation that starts at `offset` is held, marks it as freed by its owner, and returns true.
    pub fn free_later(&mut self, offset: usize) -> bool {
        let Some(used) = self.used.get_mut(&offset).filter(|used| used.holds > 0) else { return false };
        used.is_freed = true;
        true
    }

    /// Frees the allocation that starts at `offset`; ignores other offsets.
    pub fn free(&mut self, offset: usize) {
        match self.used.remove(&offset).map(|used| used.allocation) {
            None => {}
            Some(Allocation::SlabSlot(slot_size)) => self.free_slots.entry(slot_size).or_default().push(offset),
            Some(Allocation::Pages(len)) => {
                let (mut start, mut end) = (offset, offset + len);
                if let Some(after) = self.free.remove(&end) {
                    end = after;
                }
                if let Some((&before, &to)) = self.free.range(..offset).next_back()
                    && to == offset
                {
                    self.free.remove(&before);
                    start = before;
                }
                self.free.insert(start, end);
            }
        }
    }
}

/// The slot size for `len` bytes.
fn slot_size_for(len: usize) -> usize {
    len.max(1).next_multiple_of(ALIGN)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const LEN: usize = 64 * HUGE;

    fn allocator() -> RangeAllocator {
        let mut allocator = RangeAllocator::new();
        allocator.add(0..LEN);
        allocator
    }

    fn alloc(allocator: &mut RangeAllocator, len: usize) -> Option<Range<usize>> {
        if len > SMALL {
            return allocator.alloc(len);
        }
        let start = allocator.alloc_slot(len).or_else(|| {
            let slab = allocator.alloc(SLAB)?.start;
            Some(allocator.split_slab(slab, len))
        })?;
        Some(start..start + len)
    }

    /// The total size of slabs without an allocated slot.
    fn unused_slabs(allocator: &RangeAllocator) -> usize {
        allocator.free_slots.iter().map(|(slot_size, slots)| slots.len() / (SLAB / slot_size) * SLAB).sum()
    }

    proptest! {
        #[test]
        fn allocations_never_overlap(
            steps in prop::collection::vec((prop_oneof![1usize..2 * SMALL, 1usize..5 * HUGE], 0usize..8), 1..200),
        ) {
            let mut allocator = allocator();
            let mut allocations: Vec<Range<usize>> = Vec::new();
            for (len, free) in steps {
                if let Some(range) = alloc(&mut allocator, len) {
                    prop_assert!(range.len() >= len && range.end <= LEN && range.start.is_multiple_of(ALIGN));
                    prop_assert!(len <= SMALL || range.start.is_multiple_of(PAGE));
                    prop_assert!(len < HUGE || range.start.is_multiple_of(HUGE));
                    prop_assert!(allocations.iter().all(|other| range.end <= other.start || other.end <= range.start));
                    allocations.push(range);
                }
                if free < allocations.len() {
                    let range = allocations.swap_remove(free);
                    prop_assert!(allocator.find(range.start + 1).is_none());
                    allocator.free(range.start);
                    prop_assert!(allocator.find(range.start).is_none());
                }
            }
            allocations.iter().for_each(|range| allocator.free(range.start));
            // Only slabs remain: all other ranges are merged.
            let free: usize = allocator.free.iter().map(|(start, end)| end - start).sum();
            prop_assert_eq!(free, LEN - unused_slabs(&allocator));
            let ends: Vec<usize> = allocator.free.values().copied().collect();
            prop_assert!(allocator.free.keys().all(|start| !ends.contains(start)));
        }
    }

    #[test]
    fn an_allocation_lies_in_one_area() {
        let mut allocator = RangeAllocator::new();
        assert_eq!(allocator.alloc(1), None);
        allocator.add(0..HUGE);
        allocator.add(2 * HUGE..4 * HUGE);
        assert_eq!(allocator.alloc(2 * HUGE), Some(2 * HUGE..4 * HUGE));
        assert_eq!(allocator.alloc(HUGE), Some(0..HUGE));
        allocator.free(0);
        allocator.free(2 * HUGE);
        assert_eq!(allocator.alloc(3 * HUGE), None);
    }

    #[test]
    fn what_is_held_is_freed_after_the_last_hold() {
        let mut allocator = allocator();
        for len in [64, 3 * PAGE] {
            let range = alloc(&mut allocator, len).unwrap();
            assert_eq!(allocator.hold(range.end), None);
            let allocation = allocator.find(range.start).unwrap();
            assert!(!allocator.free_later(range.start));
            assert_eq!([0, len - 1].map(|skip| allocator.hold(range.start + skip)), [Some(range.start); 2]);
            assert_eq!(allocator.end_hold(range.start), None);
            assert!(allocator.free_later(range.start));
            assert_eq!(allocator.find(range.start), None, "its owner has freed it");
            assert_ne!(alloc(&mut allocator, len).unwrap(), range);
            assert_eq!(allocator.end_hold(range.start), Some(allocation));
            allocator.free(range.start);
            assert_eq!(alloc(&mut allocator, len).unwrap(), range);
        }
    }

    #[test]
    fn small_pieces_share_pages() {
        let mut allocator = allocator();
        let offsets: Vec<usize> = (0..100_000).map(|_| alloc(&mut allocator, 40).unwrap().start).collect();
        assert!(offsets.iter().all(|offset| offset.is_multiple_of(ALIGN)));
        offsets.iter().for_each(|&offset| allocator.free(offset));
        assert_eq!(unused_slabs(&allocator), (100_000 * ALIGN).next_multiple_of(SLAB));
        assert_eq!(alloc(&mut allocator, 64).unwrap().start, *offsets.last().unwrap());
    }
}
