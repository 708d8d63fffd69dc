//! The addresses of the slots and flags of all ranks in a channel.
//!
//! Thread rule: plain data.

use std::array;

use super::flag_tree::FlagTree;
use super::rank_flags::{RankFlags, Scope};
use super::shm_region::ShmRegion;
use super::window::MAX_WINDOW;

/// The memory of all ranks in a channel.
pub(super) struct RankMemory {
    /// The slots, by turn of the round, place and local rank.
    pub slots: [Box<[*mut u8]>; MAX_WINDOW],
    /// By local rank, for [`Scope::Own`]; those of the other scopes follow.
    pub flags: Box<[*const RankFlags]>,
    /// What this rank waits for: flags and the rank that raises them, by rank.
    pub sources: Box<[(usize, *const RankFlags)]>,
    /// What says what all ranks have posted, once they have: their flags, or those by which this rank passes it on.
    pub posted: Box<[*const RankFlags]>,
}

// SAFETY: addresses inside the channel's region, which may be used from any thread.
unsafe impl Send for RankMemory {}

impl ShmRegion {
    /// The memory of all ranks in `channel`, if all have made theirs.
    pub(super) fn all_memory(&self, channel: usize, tree: &FlagTree) -> Option<RankMemory> {
        let bases: Vec<*mut u8> = (0..self.layout.ranks).map(|rank| self.of_rank(rank)).collect::<Option<_>>()?;
        let of_turn = |turn: usize| {
            let places = if turn < self.layout.window { self.layout.places() } else { 0 };
            let of_place = |place: usize| {
                let offset = self.layout.slot_offset(channel, turn) + place * self.layout.place_bytes();
                bases.iter().map(move |base| base.wrapping_add(offset))
            };
            (0..places).flat_map(of_place).collect()
        };
        let flags = |rank: usize, scope: Scope| -> *const RankFlags {
            bases[rank].wrapping_add(self.layout.flags_offset(channel, scope)).cast_const().cast()
        };
        let own = |rank: usize| flags(rank, Scope::Own);
        Some(RankMemory {
            slots: array::from_fn(of_turn),
            flags: (0..bases.len()).map(own).collect(),
            sources: tree.sources.iter().map(|source| (source.rank, flags(source.rank, source.scope))).collect(),
            posted: match tree.is_tree {
                true => [flags(self.me, Scope::All)].into(),
                false => (0..bases.len()).map(own).collect(),
            },
        })
    }
}
