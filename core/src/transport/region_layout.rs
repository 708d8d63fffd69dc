//! Where things lie in the memory of a [`super::region`]: the host's failure, the ranks' flags and notes, the slots.
//!
//! Thread rule: plain places; what is at them are atomics, and slots of which [`super::region`] says whose they are.

use super::flag::Flag;
use super::sync::{AtomicI32, AtomicU8, AtomicU32, AtomicU64};

/// The longest text of a failure that travels to the other ranks.
pub(super) const FAILURE_TEXT: usize = if cfg!(loom) { 4 } else { 2048 };

/// Memory that lives as long as the region, whatever provides it.
pub trait RegionMemory: Send + Sync {
    /// The first byte, at a multiple of 64.
    fn base(&self) -> *mut u8;
    /// The number of bytes.
    fn len(&self) -> usize;
    /// Whether there are none.
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

/// Where things lie in a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RegionLayout {
    /// Ranks of the host.
    pub ranks: usize,
    /// Channels: threads of the team.
    pub channels: usize,
    /// Bytes of a slot, a multiple of [`ALIGN`].
    pub slot: usize,
}

impl RegionLayout {
    /// The bytes of the whole region.
    pub fn bytes(self) -> usize {
        self.slots_at() + self.channels * self.ranks * 2 * self.slot
    }

    pub(super) fn control_at(self, channel: usize, rank: usize) -> usize {
        size_of::<RegionHeader>() + (channel * self.ranks + rank) * size_of::<RankFlags>()
    }

    pub(super) fn slots_at(self) -> usize {
        self.control_at(self.channels, 0).next_multiple_of(4096)
    }

    pub(super) fn slot_at(self, channel: usize, rank: usize, parity: usize) -> usize {
        self.slots_at() + ((channel * self.ranks + rank) * 2 + parity) * self.slot
    }
}

/// One rank's flags in one channel, each on a cache line of its own with what is said along with it: who waits for the flag
/// gets both at once, and disturbs nobody else.
#[repr(C)]
#[derive(Default)]
pub(super) struct RankFlags {
    pub packed: CacheLine<[CallHeader; 2]>,
    /// Whether the shard's driver found all ranks agreed, by step parity.
    pub reduced: CacheLine<[AtomicU32; 2]>,
    /// Whether the rank will make no further steps.
    pub unpacked: CacheLine<AtomicU32>,
}

/// A flag, and what its owner writes down right before it raises it.
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

/// What a rank says with `Packed`, by step parity.
#[repr(C)]
#[derive(Default)]
pub(super) struct CallHeader {
    /// The call's.
    pub signature: AtomicU64,
    /// Whether the slot holds the places of the rank's tensors instead of their content.
    pub direct: AtomicU32,
}

/// What is in a region once.
#[repr(C, align(64))]
pub(super) struct RegionHeader {
    pub failure: Failure,
    /// The last step that a rank has waited in for long, and a bit above it that there is one.
    pub stalled: AtomicU64,
    /// A rank of another host that makes no further steps, and its last one, under a bit that there is one.
    pub departed: AtomicU64,
}

/// The first failure of the team on this host. State: 0 none, 1 being written, 2 complete.
#[repr(C, align(64))]
pub(super) struct Failure {
    pub state: AtomicU32,
    pub code: AtomicI32,
    pub len: AtomicU32,
    pub text: [AtomicU8; FAILURE_TEXT],
}

#[cfg(loom)]
impl RegionLayout {
    /// Makes the model's control blocks, for which zero bytes are not enough, in a new region, and watches its slots.
    pub fn prepare(self, region: &dyn RegionMemory) {
        let base = region.base();
        // SAFETY: the region is new, and as long as `bytes` says; the blocks hold nothing that has to be dropped.
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
                base.add(self.control_at(0, block)).cast::<RankFlags>().write(RankFlags::default());
            }
        }
        let base = base.addr();
        super::sync::track(base + self.slots_at()..base + self.bytes());
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::wire_layout::ALIGN;

    #[test]
    fn nothing_overlaps() {
        let layout = RegionLayout { ranks: 3, channels: 2, slot: 128 };
        let mut ranges = vec![(0, size_of::<RegionHeader>())];
        for channel in 0..2 {
            for rank in 0..3 {
                let at = layout.control_at(channel, rank);
                ranges.push((at, at + size_of::<RankFlags>()));
                for parity in 0..2 {
                    let at = layout.slot_at(channel, rank, parity);
                    ranges.push((at, at + layout.slot));
                }
            }
        }
        ranges.sort_unstable();
        assert!(ranges.windows(2).all(|pair| pair[0].1 <= pair[1].0), "{ranges:?}");
        assert_eq!(ranges.last().unwrap().1, layout.bytes());
        assert!(ranges.iter().all(|range| range.0.is_multiple_of(ALIGN)));
    }
}
