//! The memory layout of a [`super::shm_region`]: failure block, flags and payloads of the ranks, slots.
//!
//! Thread rule: the fields are atomics; [`super::shm_region`] defines who may access a slot when.

use super::flag::Flag;
use super::sync::{AtomicI32, AtomicU8, AtomicU32, AtomicU64};

/// Maximum length of an error text sent to the other ranks.
pub(super) const FAILURE_TEXT: usize = if cfg!(loom) { 4 } else { 2048 };

/// The memory of a region. It is valid as long as this object lives.
pub trait RegionMemory: Send + Sync {
    /// The address of the first byte, a multiple of 64.
    fn base(&self) -> *mut u8;
    /// Length in bytes.
    fn len(&self) -> usize;
    /// Whether the length is 0.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl RegionMemory for super::memory::Aligned {
    fn base(&self) -> *mut u8 {
        self.as_ptr()
    }
    fn len(&self) -> usize {
        self.len()
    }
}

/// The sizes that determine the layout of a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RegionLayout {
    /// Number of ranks on the host.
    pub ranks: usize,
    /// Number of channels, one per group thread.
    pub channels: usize,
    /// Size of a slot in bytes, a multiple of [`ALIGN`](crate::wire_layout::ALIGN).
    pub slot: usize,
}

impl RegionLayout {
    /// Size of the whole region in bytes.
    pub fn bytes(self) -> usize {
        self.slots_offset() + self.channels * self.ranks * 2 * self.slot
    }

    pub(super) fn flags_offset(self, channel: usize, rank: usize) -> usize {
        size_of::<RegionHeader>() + (channel * self.ranks + rank) * size_of::<RankFlags>()
    }

    pub(super) fn slots_offset(self) -> usize {
        self.flags_offset(self.channels, 0).next_multiple_of(4096)
    }

    pub(super) fn slot_offset(self, channel: usize, rank: usize, parity: usize) -> usize {
        self.slots_offset() + ((channel * self.ranks + rank) * 2 + parity) * self.slot
    }
}

/// The flags of one rank in one channel. Each flag shares a cache line with its payload: a waiter reads both at once,
/// without false sharing.
#[repr(C)]
#[derive(Default)]
pub(super) struct RankFlags {
    pub packed: CacheLine<[CallHeader; 2]>,
    /// Whether the shard owner found all signatures equal, by parity of the round.
    pub reduced: CacheLine<[AtomicU32; 2]>,
    /// Whether the rank has departed: it takes part in no further round.
    pub unpacked: CacheLine<AtomicU32>,
}

/// A flag and its payload, which the owner writes before it raises the flag.
#[repr(C, align(64))]
#[derive(Default)]
pub(super) struct CacheLine<T> {
    pub flag: Flag,
    pub payload: T,
}

impl RankFlags {
    pub fn flags(&self) -> [&Flag; 3] {
        [&self.packed.flag, &self.reduced.flag, &self.unpacked.flag]
    }
}

/// The payload of `Packed`, by parity of the round.
#[repr(C)]
#[derive(Default)]
pub(super) struct CallHeader {
    /// The signature of the call.
    pub signature: AtomicU64,
    /// Whether the slot holds the offsets of the rank's tensors (zero-copy) instead of data.
    pub zero_copy: AtomicU32,
}

/// The fields that exist once per region.
#[repr(C, align(64))]
pub(super) struct RegionHeader {
    pub failure: Failure,
    /// The last round in which a rank has waited long, below a bit that marks the value as set.
    pub stalled: AtomicU64,
    /// A departed rank of another host and its last round, below a bit that marks the value as set.
    pub departed: AtomicU64,
}

/// The first failure of the group on this host. State: 0 none, 1 being written, 2 complete.
#[repr(C, align(64))]
pub(super) struct Failure {
    pub state: AtomicU32,
    pub code: AtomicI32,
    pub len: AtomicU32,
    pub text: [AtomicU8; FAILURE_TEXT],
}

#[cfg(loom)]
impl RegionLayout {
    /// Initializes the control blocks of a new region, because Loom's atomics are invalid when zero, and tracks the
    /// slots.
    pub fn prepare(self, region: &dyn RegionMemory) {
        let base = region.base();
        // SAFETY: the region is new and `bytes` long; the blocks need no drop.
        unsafe {
            base.cast::<RegionHeader>().write(RegionHeader {
                failure: Failure {
                    state: AtomicU32::new(0),
                    code: AtomicI32::new(0),
                    len: AtomicU32::new(0),
                    text: std::array::from_fn(|_| AtomicU8::new(0)),
                },
                stalled: AtomicU64::new(0),
                departed: AtomicU64::new(0),
            });
            for block in 0..self.channels * self.ranks {
                base.add(self.flags_offset(0, block)).cast::<RankFlags>().write(RankFlags::default());
            }
        }
        let base = base.addr();
        super::sync::track(base + self.slots_offset()..base + self.bytes());
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::wire_layout::ALIGN;

    #[test]
    fn parts_do_not_overlap() {
        let layout = RegionLayout { ranks: 3, channels: 2, slot: 128 };
        let mut ranges = vec![(0, size_of::<RegionHeader>())];
        for channel in 0..2 {
            for rank in 0..3 {
                let offset = layout.flags_offset(channel, rank);
                ranges.push((offset, offset + size_of::<RankFlags>()));
                for parity in 0..2 {
                    let offset = layout.slot_offset(channel, rank, parity);
                    ranges.push((offset, offset + layout.slot));
                }
            }
        }
        ranges.sort_unstable();
        assert!(ranges.windows(2).all(|pair| pair[0].1 <= pair[1].0), "{ranges:?}");
        assert_eq!(ranges.last().unwrap().1, layout.bytes());
        assert!(ranges.iter().all(|range| range.0.is_multiple_of(ALIGN)));
    }
}
