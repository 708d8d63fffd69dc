//! The control block of a group on one host: its failure, stalled and departed ranks, where the memory of its ranks is,
//! and its members.
//!
//! The failure detector reads and writes control blocks of groups that its own rank is no member of.
//! Thread rule: any thread of any process of the host.

use std::sync::atomic::Ordering;

use super::counter::reached;
use super::region_layout::{FAILURE_TEXT, Failure, RankState, RegionHeader, RegionLayout};
use super::sync::AtomicU32;
use super::window::HOST_WINDOW;
use crate::error::Error;
use crate::wire_layout::ALIGN;

/// Marks the departed rank as set.
const DEPARTED: u64 = 1 << 63;
/// Marks the stalled round as set.
const STALLED: u64 = 1 << 32;

/// A view on a control block.
#[derive(Clone, Copy)]
pub struct RegionControl {
    base: *mut u8,
    layout: RegionLayout,
}

// SAFETY: all fields of the block are atomics; whoever made the view keeps the block alive.
unsafe impl Send for RegionControl {}
// SAFETY: as above.
unsafe impl Sync for RegionControl {}

impl RegionControl {
    /// Initializes a new block of zeros. `members` are the world ranks of all members; `None` for all ranks of the job.
    ///
    /// # Safety
    /// `base` is at a multiple of [`ALIGN`], with `layout.control_bytes(members)` bytes that stay valid during all uses of the view.
    pub unsafe fn create(base: *mut u8, layout: RegionLayout, members: Option<&[u32]>) -> RegionControl {
        debug_assert!(base.addr().is_multiple_of(ALIGN));
        let control = RegionControl { base, layout };
        let header = control.header();
        let number = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
        header.ranks.store(number(layout.ranks), Ordering::Relaxed);
        header.channels.store(number(layout.channels), Ordering::Relaxed);
        for (index, &rank) in members.into_iter().flatten().enumerate() {
            control.member(index).store(rank, Ordering::Relaxed);
        }
        header.listed.store(number(members.map_or(0, <[u32]>::len)), Ordering::Release);
        control
    }

    /// A view on a block that another process has created.
    ///
    /// # Safety
    /// `base` is the address of an initialized block, which stays valid during all uses of the view.
    pub unsafe fn attach(base: *mut u8) -> RegionControl {
        // SAFETY: the caller's promise.
        let header = unsafe { &*base.cast::<RegionHeader>() };
        let ranks = header.ranks.load(Ordering::Acquire) as usize;
        let channels = header.channels.load(Ordering::Relaxed) as usize;
        RegionControl {
            base,
            layout: RegionLayout { ranks, channels, slot: ALIGN, window: HOST_WINDOW, fan_out: None },
        }
    }

    /// Whether the block was created for `layout`.
    pub fn fits(&self, layout: RegionLayout) -> bool {
        (self.layout.ranks, self.layout.channels) == (layout.ranks, layout.channels)
    }

    fn header(&self) -> &RegionHeader {
        // SAFETY: the promise of the constructors; valid when zero, and all fields are atomics.
        unsafe { &*self.base.cast::<RegionHeader>() }
    }

    pub(super) fn state(&self, rank: usize) -> &RankState {
        debug_assert!(rank < self.layout.ranks);
        // SAFETY: as above.
        unsafe { &*self.base.add(self.layout.state_offset(rank)).cast::<RankState>() }
    }

    fn member(&self, index: usize) -> &AtomicU32 {
        // SAFETY: as above.
        unsafe { &*self.base.add(self.layout.members_offset()).cast::<AtomicU32>().add(index) }
    }

    /// Whether the world rank `rank` is a member.
    pub fn contains(&self, rank: usize) -> bool {
        let listed = self.header().listed.load(Ordering::Acquire) as usize;
        listed == 0 || (0..listed).any(|index| self.member(index).load(Ordering::Relaxed) as usize == rank)
    }

    /// The departed ranks of this host (ranks of the group), each with its last round.
    pub fn departed_ranks(&self) -> Vec<(usize, u32)> {
        let departed = |&local: &usize| self.has_departed(local);
        let last = |local: usize| {
            let state = self.state(local);
            (state.rank.load(Ordering::Relaxed) as usize, state.last_round.load(Ordering::Relaxed))
        };
        (0..self.layout.ranks).filter(departed).map(last).collect()
    }

    /// A rank that has departed: one of this host by its rank in the group, or one that another host has reported.
    pub fn first_departed(&self) -> Option<usize> {
        let of_local = |local: usize| self.state(local).rank.load(Ordering::Relaxed) as usize;
        let reported = || {
            let value = self.header().departed.load(Ordering::Relaxed);
            (value & DEPARTED != 0).then_some(((value & !DEPARTED) >> 32) as usize)
        };
        (0..self.layout.ranks).find(|&local| self.has_departed(local)).map(of_local).or_else(reported)
    }

    /// Whether all ranks of this host have departed.
    pub fn all_departed(&self) -> bool {
        (0..self.layout.ranks).all(|local| self.has_departed(local))
    }

    pub(super) fn has_departed(&self, local: usize) -> bool {
        self.state(local).departed.load(Ordering::Acquire) == 1
    }

    /// Reports to this host's ranks that rank `rank` of another host departs after round `round`; the earliest round
    /// wins. Used by one process of the host.
    pub fn depart(&self, rank: usize, round: u32) {
        let departed = &self.header().departed;
        let before = departed.load(Ordering::Relaxed);
        if before & DEPARTED == 0 || !reached(round, before as u32) {
            let rank = (rank as u64 & 0x7fff_ffff) << 32;
            departed.store(DEPARTED | rank | u64::from(round), Ordering::Relaxed);
        }
    }

    /// A departed rank of another host whose last round is earlier than `round`.
    pub fn departed(&self, round: u32) -> Option<usize> {
        let value = self.header().departed.load(Ordering::Relaxed);
        let (rank, last) = ((value & !DEPARTED) >> 32, value as u32);
        (value & DEPARTED != 0 && !reached(last, round)).then_some(rank as usize)
    }

    /// Reports to this host's ranks a long wait in round `round` of channel 0.
    pub fn stall(&self, round: u32) {
        self.header().stalled.store(STALLED | u64::from(round), Ordering::Relaxed);
    }

    /// The last round reported by [`RegionControl::stall`].
    pub fn stalled(&self) -> Option<u32> {
        let value = self.header().stalled.load(Ordering::Relaxed);
        (value & STALLED != 0).then_some((value & !STALLED) as u32)
    }

    /// Reports a failure of the group to this host's ranks, which look for it at times. Only the first failure is kept.
    pub fn set_failure(&self, error: &Error) {
        let block: &Failure = &self.header().failure;
        if block.state.compare_exchange(0, 1, Ordering::AcqRel, Ordering::Relaxed).is_err() {
            return;
        }
        let text = error.detail();
        let len = text.floor_char_boundary(FAILURE_TEXT);
        for (cell, byte) in block.text.iter().zip(&text.as_bytes()[..len]) {
            cell.store(*byte, Ordering::Relaxed);
        }
        block.code.store(error.code(), Ordering::Relaxed);
        block.len.store(u32::try_from(len).unwrap_or(0), Ordering::Relaxed);
        block.state.store(2, Ordering::Release);
        (0..self.layout.ranks).for_each(|local| self.state(local).opened.wake());
    }

    /// The failure of the group on this host, if any.
    pub fn failure(&self) -> Option<Error> {
        let block: &Failure = &self.header().failure;
        if !self.has_failed() {
            return None;
        }
        let len = (block.len.load(Ordering::Relaxed) as usize).min(FAILURE_TEXT);
        let bytes: Vec<u8> = block.text[..len].iter().map(|cell| cell.load(Ordering::Relaxed)).collect();
        Some(Error::from_code(block.code.load(Ordering::Relaxed), String::from_utf8_lossy(&bytes).into_owned()))
    }

    /// Whether a rank of the host has reported a failure.
    pub fn has_failed(&self) -> bool {
        self.header().failure.state.load(Ordering::Acquire) == 2
    }

    /// Reports to this host's ranks that local rank `local` takes part in no round after `last_round`.
    pub(super) fn set_departed(&self, local: usize, last_round: u32) {
        let state = self.state(local);
        state.last_round.store(last_round, Ordering::Relaxed);
        state.departed.store(1, Ordering::Release);
        state.opened.wake();
    }

    /// Counts a rank of this host that no longer uses the memory of others.
    pub fn leave(&self) {
        self.header().left.fetch_add(1, Ordering::AcqRel);
    }

    /// Whether no rank of this host uses the memory of others any more.
    pub fn all_left(&self) -> bool {
        self.header().left.load(Ordering::Acquire) as usize == self.layout.ranks
    }

    /// Counts a rank of this host that no longer uses this block.
    pub fn release(&self) {
        self.header().released.fetch_add(1, Ordering::AcqRel);
    }

    /// Whether no rank of this host uses this block any more.
    pub fn all_released(&self) -> bool {
        self.header().released.load(Ordering::Acquire) as usize == self.layout.ranks
    }
}
