//! The flags of a rank in one channel, with what they announce.
//!
//! Thread rule: the fields are atomics, which their rank writes.

use super::flag::Flag;
use super::sync::{AtomicU32, AtomicU64};
use super::window::{HOST_WINDOW, MAX_WINDOW};

/// The words that a rank posts about the calls behind the one that starts, between hosts.
pub const LOOKAHEAD_WORDS: usize = 5;

/// The flags. Each shares a cache line with the start of its payload: a waiter reads both at once, without false sharing.
#[repr(C)]
#[derive(Default)]
pub(super) struct RankFlags {
    /// By turn of the round. On one host the flag and all turns are in one cache line.
    pub packed: CacheLine<[CallHeaders; MAX_WINDOW / HOST_WINDOW]>,
    /// What the shard owner found ([`super::shm_channel::ShmChannel::agree`]), by turn of the round.
    pub reduced: CacheLine<[AtomicU32; MAX_WINDOW]>,
    pub unpacked: CacheLine<()>,
    /// What the rank posts with `packed` about the calls behind the one that starts, by turn of the round. Only between
    /// hosts; `packed` has no room for it.
    pub lookaheads: Lookaheads,
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

/// The payload of `packed`, for as many turns as share a cache line with the flag.
#[repr(C)]
#[derive(Default)]
pub(super) struct CallHeaders {
    /// The signatures of the calls.
    pub signatures: [AtomicU64; HOST_WINDOW],
    /// What the slots hold ([`super::shm_channel::SlotContent`]), and above that what the choice of a path needs, in calls
    /// that have one ([`super::shm_channel::PathNote`]).
    pub notes: [AtomicU32; HOST_WINDOW],
}

const _: () = assert!(cfg!(loom) || size_of::<Flag>() + size_of::<CallHeaders>() <= 64, "see `RankFlags::packed`");

/// By turn of the round.
#[repr(C, align(64))]
#[derive(Default)]
pub(super) struct Lookaheads(pub [[AtomicU64; LOOKAHEAD_WORDS]; MAX_WINDOW]);
