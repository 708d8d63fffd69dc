//! The flags of a rank in one channel, with what they announce. A rank announces for itself, and where notices take a tree
//! ([`super::flag_tree`]), for others, too: then the notice says what these have in common.
//!
//! Thread rule: the fields are atomics, which their rank writes.

use std::array;
use std::sync::atomic::Ordering;

use super::flag::Flag;
use super::sync::{AtomicU32, AtomicU64};
use super::window::{HOST_WINDOW, MAX_WINDOW};

/// The words that a rank posts about the calls behind the one that starts, between hosts.
pub const LOOKAHEAD_WORDS: usize = 5;

/// For which ranks a rank raises a flag.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Scope {
    /// Itself.
    Own,
    /// Its subtree.
    Subtree,
    /// All ranks of the host.
    All,
}

/// The number of scopes.
pub(super) const SCOPES: usize = 3;

/// The flags of a scope. Each shares a cache line with the start of its payload: a waiter reads both at once, without false
/// sharing.
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

/// What a call header says beside the signature: bits for the contents of slots, the flag and the time of a
/// [`PathNote`](super::shm_channel::PathNote).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Note(pub u32);

impl Note {
    /// The bits of the contents: one for each [`SlotContent`](super::shm_channel::SlotContent).
    pub const CONTENTS: u32 = 0b111;
    /// The flag.
    pub const SECOND: u32 = 0b1000;
    /// The lowest bit of the time in nanoseconds.
    const NANOS: u32 = 4;
    /// The longest time.
    pub const MAX_NANOS: u32 = u32::MAX >> Note::NANOS;

    pub fn nanos(self) -> u32 {
        self.0 >> Note::NANOS
    }

    pub fn with_nanos(self, nanos: u32) -> Note {
        Note(self.0 & (Note::CONTENTS | Note::SECOND) | nanos.min(Note::MAX_NANOS) << Note::NANOS)
    }

    /// Of two ranks, or groups of ranks: the contents of any, the flag of any, the longest time.
    pub fn merge(self, other: Note) -> Note {
        Note((self.0 | other.0) & (Note::CONTENTS | Note::SECOND)).with_nanos(self.nanos().max(other.nanos()))
    }
}

/// What ranks have in common: one value, or 0.
fn common(one: u64, other: u64) -> u64 {
    if one == other { one } else { 0 }
}

/// What ranks have in common of their words about the calls behind the one that starts.
pub fn common_words(one: [u64; LOOKAHEAD_WORDS], other: [u64; LOOKAHEAD_WORDS]) -> [u64; LOOKAHEAD_WORDS] {
    array::from_fn(|word| common(one[word], other[word]))
}

impl RankFlags {
    pub fn flags(&self) -> [&Flag; 3] {
        [&self.packed.flag, &self.reduced.flag, &self.unpacked.flag]
    }

    /// The place of the signature in the rounds of a turn.
    pub fn signature(&self, turn: usize) -> &AtomicU64 {
        &self.packed.payload[turn / HOST_WINDOW].signatures[turn % HOST_WINDOW]
    }

    /// The place of the [`Note`] in the rounds of a turn.
    pub fn note(&self, turn: usize) -> &AtomicU32 {
        &self.packed.payload[turn / HOST_WINDOW].notes[turn % HOST_WINDOW]
    }

    /// Sets the words about later calls in the rounds of a turn.
    pub fn set_lookahead(&self, turn: usize, words: [u64; LOOKAHEAD_WORDS]) {
        self.lookaheads.0[turn].iter().zip(words).for_each(|(place, word)| place.store(word, Ordering::Relaxed));
    }
}

/// The flags of some ranks, each for itself or for others.
pub(super) trait Notices<'a>: Iterator<Item = &'a RankFlags> + Sized {
    /// The signature that all have posted, or 0.
    fn common_signature(self, turn: usize) -> u64 {
        self.map(|flags| flags.signature(turn).load(Ordering::Relaxed)).reduce(common).unwrap_or(0)
    }

    /// The notes of all.
    fn merged_note(self, turn: usize) -> Note {
        self.map(|flags| Note(flags.note(turn).load(Ordering::Relaxed))).reduce(Note::merge).unwrap_or(Note(0))
    }

    /// The least number of [`RankFlags::reduced`].
    fn least_agreed(self, turn: usize) -> u32 {
        self.map(|flags| flags.reduced.payload[turn].load(Ordering::Relaxed)).min().unwrap_or(1)
    }

    /// The words that all have posted, each 0 if they differ.
    fn common_lookahead(self, turn: usize) -> [u64; LOOKAHEAD_WORDS] {
        let words = |flags: &RankFlags| flags.lookaheads.0[turn].each_ref().map(|word| word.load(Ordering::Relaxed));
        self.map(words).reduce(common_words).unwrap_or_default()
    }
}

impl<'a, I: Iterator<Item = &'a RankFlags>> Notices<'a> for I {}

/// The payload of `packed`, for as many turns as share a cache line with the flag.
#[repr(C)]
#[derive(Default)]
pub(super) struct CallHeaders {
    /// The signatures of the calls, which are not 0.
    pub signatures: [AtomicU64; HOST_WINDOW],
    /// As [`Note`].
    pub notes: [AtomicU32; HOST_WINDOW],
}

const _: () = assert!(cfg!(loom) || size_of::<Flag>() + size_of::<CallHeaders>() <= 64, "see `RankFlags::packed`");

/// By turn of the round.
#[repr(C, align(64))]
#[derive(Default)]
pub(super) struct Lookaheads(pub [[AtomicU64; LOOKAHEAD_WORDS]; MAX_WINDOW]);

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const TURN: usize = MAX_WINDOW - 1;

    type Posted = (u64, u32, u32, [u64; LOOKAHEAD_WORDS]);

    fn flags((signature, note, agreed, words): Posted) -> RankFlags {
        let flags = RankFlags::default();
        flags.signature(TURN).store(signature, Ordering::Relaxed);
        flags.note(TURN).store(note, Ordering::Relaxed);
        flags.reduced.payload[TURN].store(agreed, Ordering::Relaxed);
        flags.set_lookahead(TURN, words);
        flags
    }

    fn merged(all: &[RankFlags]) -> Posted {
        let note = all.iter().merged_note(TURN).0;
        let (signature, words) = (all.iter().common_signature(TURN), all.iter().common_lookahead(TURN));
        (signature, note, all.iter().least_agreed(TURN), words)
    }

    proptest! {
        /// In any grouping, also if ranks are counted twice.
        #[test]
        fn what_groups_of_ranks_have_in_common_is_what_all_have(
            posted in prop::collection::vec((1u64..3, any::<u32>(), 0u32..4, prop::array::uniform5(0u64..2)), 1..12),
            size in 1usize..5,
        ) {
            let all: Vec<RankFlags> = posted.iter().copied().map(flags).collect();
            let mut groups: Vec<RankFlags> = all.chunks(size).map(|group| flags(merged(group))).collect();
            groups.push(flags(merged(&all[..1])));
            prop_assert_eq!(merged(&groups), merged(&all));
            let same = posted.iter().all(|rank| rank.0 == posted[0].0);
            prop_assert_eq!(merged(&all).0 != 0, same);
            let contents = posted.iter().fold(0, |bits, rank| bits | rank.1 & Note::CONTENTS);
            prop_assert_eq!(merged(&all).1 & Note::CONTENTS, contents);
            prop_assert_eq!(Some(Note(merged(&all).1).nanos()), posted.iter().map(|rank| Note(rank.1).nanos()).max());
        }
    }
}
