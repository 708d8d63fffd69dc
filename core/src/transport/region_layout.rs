//! The memory layout of a [`super::shm_region`]: the control block (header, states of the ranks, members), and the memory
//! of each rank, which that rank makes: its slots, then its flags ([`super::rank_flags`]). So its flags are near it, too.
//!
//! Thread rule: the fields are atomics; [`super::shm_channel`] defines who may access a slot when.

use std::ops::Range;

use super::flag::Flag;
use super::flag_tree::FAN_OUT;
use super::rank_flags::{RankFlags, SCOPES, Scope};
use super::sync::{AtomicI32, AtomicU8, AtomicU32, AtomicU64};
use super::window::HOST_WINDOW;
use crate::error::Result;
use crate::wire_layout::ALIGN;

/// Maximum length of an error text sent to the other ranks.
pub(super) const FAILURE_TEXT: usize = if cfg!(loom) { 4 } else { 2048 };

/// The flags of a rank begin at a multiple of it.
const PAGE: usize = 4096;

/// Default sizes of slots are multiples of it.
const SLOT_STEP: usize = 64 << 10;

/// The number of places in a slot on one host, at which shorter chunks can start.
const SLOT_PLACES: usize = 16;

/// Size of a slot between hosts, and the most on one host, in bytes.
pub const MAX_DEFAULT_SLOT: usize = 512 << 10;
/// The least on one host: beyond 8 ranks.
const MIN_DEFAULT_SLOT: usize = 128 << 10;
/// The slots of all ranks of a host in all channels that a call uses, if there are at most 8 ranks. If they leave the
/// caches, 8 ranks on 2 processors take 1.2 times as long for 8 MiB.
const ALL_SLOTS_BYTES: usize = 8 << 20;

/// The most channels that a call of a group with `threads` threads uses. Threads that outnumber the processors only take
/// turns: with two threads a rank on 2 processors, 64 MiB take 1.04 times as long on 2 ranks and 1.3 times on 4, 32 MiB
/// 1.3 times on 8.
pub fn max_channels(threads: usize, cpus_per_rank: usize) -> usize {
    threads.min(cpus_per_rank.max(1))
}

/// Size of the slots of a group on `hosts` hosts, with `ranks` ranks on this one, whose calls use up to `channels`
/// channels, unless a size is set.
pub fn default_slot(hosts: usize, ranks: usize, channels: usize) -> usize {
    if hosts > 1 {
        return MAX_DEFAULT_SLOT;
    }
    let share = ALL_SLOTS_BYTES / HOST_WINDOW / ranks / channels;
    (share / SLOT_STEP * SLOT_STEP).clamp(MIN_DEFAULT_SLOT, MAX_DEFAULT_SLOT)
}

/// The memory of a region: the control block, and the memory of each rank, which that rank makes. All of it is valid as
/// long as this object lives.
pub trait RegionMemory: Send + Sync {
    /// The control block, [`RegionLayout::control_bytes`] long, at a multiple of 64.
    fn control(&self) -> *mut u8;

    /// Makes room for the memory of this rank, local rank `me`: `len` zero bytes. Returns the place that the other ranks
    /// [find](RegionMemory::of_rank) it by.
    ///
    /// # Errors
    /// [`Error::System`](crate::error::Error::System) when there is not enough room.
    fn make(&self, me: usize, len: usize) -> Result<u64>;

    /// Makes this part of the memory of this rank, which must not be used before.
    ///
    /// # Errors
    /// [`Error::System`](crate::error::Error::System) when there is not enough memory.
    fn reserve(&self, _part: Range<usize>) -> Result<()> {
        Ok(())
    }

    /// Frees what ended groups have left, so that other ranks have room.
    fn collect(&self) {}

    /// The address in this process of the memory of local rank `rank`, which returned `place` for it.
    fn of_rank(&self, rank: usize, place: u64, len: usize) -> Option<*mut u8>;
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
    /// Number of slots of a rank and channel: a power of two up to [`MAX_WINDOW`](super::window::MAX_WINDOW).
    pub window: usize,
    /// Of the tree that notices take ([`super::flag_tree`]), if there is one.
    pub fan_out: Option<usize>,
}

impl RegionLayout {
    /// Size of the control block of a group with a list of `listed` members, in bytes.
    pub fn control_bytes(self, listed: usize) -> usize {
        (self.members_offset() + listed * size_of::<AtomicU32>()).next_multiple_of(ALIGN)
    }

    /// The most shared memory of a group with `threads` threads on one host with `ranks` ranks, whose slots have `slot` bytes
    /// if that is set.
    pub fn bytes_on_one_host(ranks: usize, threads: usize, slot: Option<usize>) -> usize {
        let slot = slot.unwrap_or_else(|| default_slot(1, ranks, threads));
        let layout = RegionLayout { ranks, channels: threads, slot, window: HOST_WINDOW, fan_out: Some(FAN_OUT) };
        ranks * layout.rank_bytes() + layout.control_bytes(0)
    }

    /// Size of the memory of a rank in bytes.
    pub fn rank_bytes(self) -> usize {
        self.flags_offset(self.channels, Scope::Own)
    }

    /// Where the flags of a rank are in its memory.
    pub fn flags(self) -> Range<usize> {
        self.flags_offset(0, Scope::Own)..self.rank_bytes()
    }

    /// The number of places in a slot, at which shorter chunks can start: 1 between hosts.
    pub fn places(self) -> usize {
        if self.window == HOST_WINDOW { SLOT_PLACES } else { 1 }
    }

    /// The distance of the places in a slot.
    pub fn place_bytes(self) -> usize {
        self.slot / SLOT_PLACES / ALIGN * ALIGN
    }

    pub(super) fn state_offset(self, rank: usize) -> usize {
        size_of::<RegionHeader>() + rank * size_of::<RankState>()
    }

    pub(super) fn members_offset(self) -> usize {
        self.state_offset(self.ranks)
    }

    /// The offset of a slot in the memory of its rank.
    pub(super) fn slot_offset(self, channel: usize, turn: usize) -> usize {
        (channel * self.window + turn) * self.slot
    }

    /// The offset of the flags of a channel in the memory of their rank.
    pub(super) fn flags_offset(self, channel: usize, scope: Scope) -> usize {
        let slots = (self.channels * self.window * self.slot).next_multiple_of(PAGE);
        slots + (channel * self.scopes() + scope as usize) * size_of::<RankFlags>()
    }

    /// The number of scopes of flags.
    pub(super) fn scopes(self) -> usize {
        if self.fan_out.is_some() { SCOPES } else { 1 }
    }
}

/// What a rank sets once.
#[repr(C, align(64))]
#[derive(Default)]
pub(super) struct RankState {
    /// The rank in the group.
    pub rank: AtomicU32,
    /// Raised when the rank has made its memory.
    pub opened: Flag,
    /// Where its memory is ([`RegionMemory::make`]).
    pub memory: AtomicU64,
    /// Whether the rank has departed: it takes part in no further round.
    pub departed: AtomicU32,
    /// Its last round, once it has departed.
    pub last_round: AtomicU32,
}

/// The fields that exist once per region.
#[repr(C, align(64))]
pub(super) struct RegionHeader {
    pub failure: Failure,
    /// The last round in which a rank has waited long, below a bit that marks the value as set.
    pub stalled: AtomicU64,
    /// A departed rank of another host and its last round, below a bit that marks the value as set.
    pub departed: AtomicU64,
    /// The number of ranks on the host, and of channels.
    pub ranks: AtomicU32,
    pub channels: AtomicU32,
    /// The number of members in the list after the flags; 0 if all ranks of the job are members.
    pub listed: AtomicU32,
    /// Ranks that no longer use the memory of others.
    pub left: AtomicU32,
    /// Ranks that no longer use the control block.
    pub released: AtomicU32,
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
    /// Initializes the control block of a region in one piece, because Loom's atomics are invalid when zero.
    pub(super) fn prepare(self, base: *mut u8) {
        // SAFETY: the memory is new and has this layout; the blocks need no drop.
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
                ranks: AtomicU32::new(0),
                channels: AtomicU32::new(0),
                listed: AtomicU32::new(0),
                left: AtomicU32::new(0),
                released: AtomicU32::new(0),
            });
            for rank in 0..self.ranks {
                base.add(self.state_offset(rank)).cast::<RankState>().write(RankState::default());
            }
        }
    }

    /// As `prepare`, for the memory of a rank.
    pub(super) fn prepare_rank(self, base: *mut u8) {
        let flags = base.wrapping_add(self.flags().start).cast::<RankFlags>();
        // SAFETY: as there.
        (0..self.channels * self.scopes()).for_each(|index| unsafe { flags.add(index).write(RankFlags::default()) });
        super::sync::track(base.addr()..base.addr() + self.flags().start);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_do_not_overlap() {
        let layout = RegionLayout { ranks: 3, channels: 2, slot: 128, window: 2, fan_out: None };
        let mut ranges = vec![(0, size_of::<RegionHeader>())];
        ranges
            .extend((0..3).map(|rank| (layout.state_offset(rank), layout.state_offset(rank) + size_of::<RankState>())));
        ranges.push((layout.members_offset(), layout.control_bytes(5)));
        assert!(ranges.windows(2).all(|pair| pair[0].1 <= pair[1].0), "{ranges:?}");
        assert!(ranges.iter().all(|range| range.0.is_multiple_of(ALIGN)));
        assert!(layout.control_bytes(5) >= layout.members_offset() + 5 * size_of::<AtomicU32>());
        let slots = [(0, 0), (0, 1), (1, 0), (1, 1)].map(|(channel, turn)| layout.slot_offset(channel, turn));
        assert_eq!(slots, [0, 128, 256, 384]);
        assert_eq!(layout.flags(), PAGE..PAGE + 2 * size_of::<RankFlags>());
        assert_eq!(layout.flags_offset(1, Scope::Own), PAGE + size_of::<RankFlags>());
        let tree = RegionLayout { fan_out: Some(8), ..layout };
        assert_eq!(tree.flags_offset(1, Scope::All), PAGE + 5 * size_of::<RankFlags>());
        assert_eq!(tree.flags(), PAGE..PAGE + 6 * size_of::<RankFlags>());
    }

    #[test]
    fn the_slots_of_up_to_eight_ranks_stay_in_a_cache() {
        let sizes = |channels| [1, 2, 3, 4, 8, 64].map(|ranks| default_slot(1, ranks, channels) >> 10);
        assert_eq!(sizes(2), [512, 512, 320, 256, 128, 128]);
        assert_eq!(sizes(1), [512, 512, 512, 512, 256, 128]);
        assert_eq!(default_slot(2, 8, 2), MAX_DEFAULT_SLOT);
    }

    #[test]
    fn threads_that_outnumber_the_processors_have_no_channel() {
        assert_eq!([0, 1, 2, 5].map(|cpus_per_rank| max_channels(2, cpus_per_rank)), [1, 1, 2, 2]);
    }
}
