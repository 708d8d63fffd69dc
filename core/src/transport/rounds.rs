//! The rounds of a channel as types: what a rank may do in a round follows from how far it and the others are.
//!
//! ```text
//! begin -> Open -> Packed -> AllPacked -> Reduced -> AllReduced -> end
//! ```
//!
//! While a round is [`Open`], this rank owns its slot: it packs, and posts what the others need to know of its call.
//! Once it is [`Packed`], it waits for the others. When [`AllPacked`] exists, all of the host's ranks have posted:
//! their slots and what they have posted may be read, and each shard owner reduces its slices. Other ranks may reduce parts
//! of them before. [`Reduced`]: this rank's slices are complete. [`AllReduced`]: all slices are; every rank takes the results, and ends the round. A round may
//! also end once all have packed: if every rank takes what it needs from the slots, or if the calls differ.
//!
//! The window of slots, the flags and their order are those of [`super::shm_channel`].
//! Thread rule: used by one thread.

use std::ops::Range;

use super::counter::{REFRESH, START, reached};
use super::rank_flags::LOOKAHEAD_WORDS;
use super::shm_channel::{PathNote, Phase, ShmChannel, SlotContent, SlotContents};
use super::wait_context::WaitContext;
use super::window::SMALL_WINDOW;
use crate::error::Result;
use crate::topology::LocalRanks;

/// A round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Round {
    /// Equal on all ranks.
    number: u32,
    /// Whether it is that of a small call, in the slots of these.
    is_small: bool,
}

/// This rank owns its slot.
#[derive(Debug, Clone, Copy)]
pub struct Open(Round);

/// This rank has packed, and does not touch its slot.
#[derive(Debug, Clone, Copy)]
pub struct Packed(Round);

/// All ranks of the host have packed: what they have posted may be read, and the shard owners own their slices.
#[derive(Debug, Clone, Copy)]
pub struct AllPacked(Round);

/// This rank has reduced its slices.
#[derive(Debug, Clone, Copy)]
pub struct Reduced(Round);

/// All shard owners have reduced theirs: all slots are read-only until this rank ends the round.
#[derive(Debug, Clone, Copy)]
pub struct AllReduced(Round);

/// A state of a round.
pub trait InRound: Copy {
    /// The round.
    fn round(self) -> Round;
}

macro_rules! in_round {
    ($($state:ident)*) => {
        $(impl InRound for $state {
            fn round(self) -> Round {
                self.0
            }
        })*
    };
}

in_round!(Open Packed AllPacked Reduced AllReduced);

impl Round {
    /// The number, equal on all ranks; it wraps.
    pub fn number(self) -> u32 {
        self.number
    }
}

/// Flags of other ranks that this rank waits for.
#[derive(Debug, Clone, Copy)]
pub struct Awaited {
    phase: Phase,
    number: u32,
    ranks: LocalRanks,
}

/// The rounds of a channel.
pub struct Rounds {
    shm: ShmChannel,
    /// The last round.
    last: u32,
    /// All ranks of the host have unpacked this round.
    freed: u32,
    /// This rank has ended this round, but may not have raised its flag for it.
    ended: u32,
    /// This rank has raised all its flags for this round or a later one.
    refreshed: u32,
    /// The same of the flags by which it passes notices on.
    passed_on: u32,
}

impl Rounds {
    /// Before the first round.
    pub fn new(shm: ShmChannel) -> Rounds {
        Rounds { shm, last: START, freed: START, ended: START, refreshed: START, passed_on: START }
    }

    /// Its channel of the shared memory.
    pub fn shm(&self) -> &ShmChannel {
        &self.shm
    }

    /// The number of the next round.
    pub fn next(&self) -> u32 {
        self.last.wrapping_add(1)
    }

    /// Raises the flags that small and mismatched calls skip, before they lag so far that wraparound makes them look
    /// newer. Call it between calls, after this rank has ended all rounds.
    #[inline]
    pub fn refresh(&mut self) {
        if self.last.wrapping_sub(self.refreshed) >= REFRESH {
            self.shm.raise(Phase::Reduced, self.last);
            self.shm.raise(Phase::Unpacked, self.ended);
            self.refreshed = self.last;
        }
        self.keep_up(self.last);
    }

    /// As [`Rounds::refresh`], of the flags by which this rank passes notices on. The slot of round `round` is free: all
    /// ranks have ended the one that used it before.
    #[inline]
    fn keep_up(&mut self, round: u32) {
        let ended = round.wrapping_sub(self.shm.window());
        if self.shm.region().layout().fan_out.is_some() && reached(ended, self.passed_on.wrapping_add(REFRESH)) {
            self.shm.keep_up(ended);
            self.passed_on = ended;
        }
    }

    /// Begins the next round, once its slot is free. Also raises `Unpacked`: other ranks may need it before they can
    /// make progress.
    ///
    /// # Errors
    /// Those of [`ShmChannel::wait`].
    pub fn begin(&mut self, wait_ctx: &WaitContext<'_>) -> Result<Open> {
        self.post_ended(wait_ctx);
        self.wait_until_freed(self.awaited_slot(), wait_ctx)?;
        self.keep_up(self.next());
        Ok(self.open(false))
    }

    /// As [`Rounds::begin`], without waiting: `None` if the slot is not free.
    pub fn try_begin(&mut self, wait_ctx: &WaitContext<'_>) -> Option<Open> {
        self.post_ended(wait_ctx);
        let awaited = self.awaited_slot();
        if !reached(self.freed, awaited.number) {
            if !awaited.is_reached(&self.shm) {
                return None;
            }
            self.freed = awaited.number;
        }
        self.keep_up(self.next());
        Some(self.open(false))
    }

    /// What must come before the next round: the last one that used its slot, apart from small ones. These need no
    /// wait: all ranks have posted the last small round, so they have ended those before it; the round after it uses
    /// another slot, since the last bits differ; and this round, the first of its call, ends before the second begins.
    pub fn awaited_slot(&self) -> Awaited {
        self.awaited_unpacked(self.shm.window())
    }

    /// As [`Rounds::begin`], for a small call.
    ///
    /// # Errors
    /// As there.
    pub fn begin_small(&mut self, wait_ctx: &WaitContext<'_>) -> Result<Open> {
        self.wait_until_freed(self.awaited_unpacked(SMALL_WINDOW), wait_ctx)?;
        Ok(self.open(true))
    }

    /// As [`Rounds::begin_small`], without waiting: `None` if some rank has not ended the round before.
    pub fn try_begin_small(&mut self) -> Option<Open> {
        reached(self.freed, self.awaited_unpacked(SMALL_WINDOW).number).then(|| self.open(true))
    }

    fn open(&mut self, is_small: bool) -> Open {
        self.last = self.next();
        Open(Round { number: self.last, is_small })
    }

    fn awaited_unpacked(&self, window: u32) -> Awaited {
        let (number, ranks) = (self.next().wrapping_sub(window), self.ranks());
        Awaited { phase: Phase::Unpacked, number, ranks: ranks.into() }
    }

    fn wait_until_freed(&mut self, awaited: Awaited, wait_ctx: &WaitContext<'_>) -> Result<()> {
        if !reached(self.freed, awaited.number) {
            awaited.wait(&self.shm, wait_ctx)?;
            self.freed = awaited.number;
        }
        Ok(())
    }

    fn post_ended(&self, wait_ctx: &WaitContext<'_>) {
        if self.shm.own(Phase::Unpacked) != self.ended {
            self.shm.raise(Phase::Unpacked, self.ended);
            wait_ctx.log().flag();
        }
    }

    /// The number of ranks of the host.
    fn ranks(&self) -> usize {
        self.shm.region().layout().ranks
    }

    /// Addresses in the slots of all ranks, by local rank: of place `place`, which small calls do not have. The state
    /// of the round says who may access them.
    pub fn slots(&self, state: impl InRound, place: usize) -> &[*mut u8] {
        let round = state.round();
        if round.is_small { self.shm.small_slots(round.number) } else { self.shm.slots_at(round.number, place) }
    }

    /// Ends a round: this rank has read what it needs of the others.
    fn end(&mut self, round: Round) {
        self.ended = round.number;
        self.shm.raise(Phase::Unpacked, round.number);
    }
}

impl Open {
    /// Makes the memory of these bytes of this rank's slot.
    ///
    /// # Errors
    /// Those of [`ShmChannel::reserve`].
    pub fn reserve(self, rounds: &Rounds, bytes: Range<usize>) -> Result<()> {
        rounds.shm.reserve(self.0.number, bytes)
    }

    /// Posts what this rank has behind the call that starts.
    pub fn post_lookahead(self, rounds: &Rounds, words: [u64; LOOKAHEAD_WORDS]) {
        rounds.shm.post_lookahead(self.0.number, words);
    }

    /// Posts this rank's note.
    pub fn post_path_note(self, rounds: &Rounds, note: PathNote) {
        rounds.shm.post_path_note(self.0.number, note);
    }

    /// Posts this rank's slot: its call has this signature, and the slot holds `content`.
    pub fn pack(self, rounds: &Rounds, signature: u64, content: SlotContent) -> Packed {
        rounds.shm.post_signature(self.0.number, signature, content);
        self.pack_values(rounds)
    }

    /// Posts this rank's slot, of which the ranks know what it holds.
    pub fn pack_values(self, rounds: &Rounds) -> Packed {
        rounds.shm.raise(Phase::Packed, self.0.number);
        Packed(self.0)
    }

    /// As [`Open::pack`], for a small call. Then spins at most `spins` times for the other ranks; the second is `None`
    /// if some rank has not packed.
    #[inline]
    pub fn pack_small(self, rounds: &Rounds, signature: u64, spins: u32) -> (Packed, Option<AllPacked>) {
        rounds.shm.post_signature(self.0.number, signature, SlotContent::Data);
        let all = rounds.shm.post_and_spin(self.0.number, spins);
        (Packed(self.0), all.then_some(AllPacked(self.0)))
    }
}

impl Packed {
    /// What comes before [`AllPacked`].
    pub fn awaited(self, rounds: &Rounds) -> Awaited {
        Awaited { phase: Phase::Packed, number: self.0.number, ranks: rounds.ranks().into() }
    }

    /// Waits until all ranks of the host have packed.
    ///
    /// # Errors
    /// Those of [`ShmChannel::wait`].
    pub fn wait(self, rounds: &Rounds, wait_ctx: &WaitContext<'_>) -> Result<AllPacked> {
        self.awaited(rounds).wait(&rounds.shm, wait_ctx).map(|()| AllPacked(self.0))
    }

    /// As [`Packed::wait`], without waiting: `None` if some rank has not packed.
    pub fn try_all(self, rounds: &Rounds) -> Option<AllPacked> {
        self.awaited(rounds).is_reached(&rounds.shm).then_some(AllPacked(self.0))
    }

    /// As [`Packed::wait`] in the round of a small call, but only spins.
    pub fn spin(self, rounds: &Rounds) -> Option<AllPacked> {
        rounds.shm.spin_small(self.0.number, u32::MAX).then_some(AllPacked(self.0))
    }
}

impl AllPacked {
    /// Whether all ranks of the host have the same call.
    pub fn same_signatures(self, rounds: &Rounds) -> bool {
        rounds.shm.same_signatures(self.0.number)
    }

    /// What the slot of a rank holds.
    pub fn content(self, rounds: &Rounds, rank: usize) -> SlotContent {
        rounds.shm.content(rank, self.0.number)
    }

    /// What the slots of all ranks of the host hold.
    pub fn contents(self, rounds: &Rounds) -> SlotContents {
        rounds.shm.contents(self.0.number)
    }

    /// The words that all ranks of the host have posted; 0 for each in which they differ.
    pub fn common_lookahead(self, rounds: &Rounds) -> [u64; LOOKAHEAD_WORDS] {
        rounds.shm.common_lookahead(self.0.number)
    }

    /// The notes of all ranks of the host.
    pub fn path_note(self, rounds: &Rounds) -> PathNote {
        rounds.shm.path_note(self.0.number)
    }

    /// What comes before the owner of a shard exchanges a slice of which `others` reduce parts.
    pub fn awaited_reducers(self, others: LocalRanks) -> Awaited {
        Awaited { phase: Phase::Reduced, number: self.0.number, ranks: others }
    }

    /// Shows the other ranks that this rank's slices are complete; if it owns no shard, its owner that a part is reduced.
    pub fn post_reduced(self, rounds: &Rounds) -> Reduced {
        rounds.shm.raise(Phase::Reduced, self.0.number);
        Reduced(self.0)
    }

    /// As [`AllPacked::post_reduced`], with what this rank has found: if all calls are equal, how many of the next are,
    /// too.
    pub fn post_agreed(self, rounds: &Rounds, agreed: Option<usize>) -> Reduced {
        rounds.shm.agree(self.0.number, agreed);
        self.post_reduced(rounds)
    }

    /// For a rank that reduces nothing. Its flag follows, before it lags so far that wraparound makes it look newer in a
    /// round in which an owner waits for it.
    pub fn reduces_nothing(self, rounds: &Rounds) -> Reduced {
        if self.0.number.wrapping_sub(rounds.shm.own(Phase::Reduced)) >= REFRESH {
            rounds.shm.raise(Phase::Reduced, self.0.number);
        }
        Reduced(self.0)
    }

    /// Ends the round: this rank has taken what it needs from the slots.
    pub fn end(self, rounds: &mut Rounds) {
        rounds.end(self.0);
    }

    /// Ends the round of a small call. No flag is needed: a rank posts a call only after it has ended the one before.
    #[inline]
    pub fn end_small(self, rounds: &mut Rounds) {
        rounds.freed = self.0.number.wrapping_sub(1);
        rounds.ended = self.0.number;
    }
}

impl Reduced {
    /// What comes before [`AllReduced`]: `owners` local ranks own shards.
    pub fn awaited(self, owners: usize) -> Awaited {
        Awaited { phase: Phase::Reduced, number: self.0.number, ranks: owners.into() }
    }

    /// Waits until all owners have reduced their slices.
    ///
    /// # Errors
    /// Those of [`ShmChannel::wait`].
    pub fn wait(self, rounds: &Rounds, owners: usize, wait_ctx: &WaitContext<'_>) -> Result<AllReduced> {
        self.awaited(owners).wait(&rounds.shm, wait_ctx).map(|()| AllReduced(self.0))
    }

    /// As [`Reduced::wait`], without waiting: `None` if some owner has not reduced its slices.
    pub fn try_all(self, rounds: &Rounds, owners: usize) -> Option<AllReduced> {
        self.awaited(owners).is_reached(&rounds.shm).then_some(AllReduced(self.0))
    }
}

impl AllReduced {
    /// What the `owners` have all found, by [`AllPacked::post_agreed`].
    pub fn agreed(self, rounds: &Rounds, owners: usize) -> Option<usize> {
        rounds.shm.all_agreed(self.0.number, owners)
    }

    /// Ends the round: this rank has taken the results.
    pub fn end(self, rounds: &mut Rounds) {
        rounds.end(self.0);
    }

    /// As [`AllReduced::end`], if no rank reads a slot any more.
    pub fn end_for_all(self, rounds: &mut Rounds) {
        (rounds.ended, rounds.freed) = (self.0.number, self.0.number);
    }
}

impl Awaited {
    /// Whether the ranks are there.
    pub fn is_reached(self, shm: &ShmChannel) -> bool {
        shm.all_reached(self.phase, self.number, self.ranks)
    }

    /// Waits for the ranks.
    ///
    /// # Errors
    /// Those of [`ShmChannel::wait`].
    pub fn wait(self, shm: &ShmChannel, wait_ctx: &WaitContext<'_>) -> Result<()> {
        shm.wait(self.phase, self.number, self.ranks, wait_ctx)
    }

    /// The first rank, as its rank in the group, that is not there.
    pub fn first_pending(self, shm: &ShmChannel) -> Option<usize> {
        shm.first_pending(self.phase, self.number, self.ranks)
    }

    /// Checks the limits of a wait for the ranks.
    ///
    /// # Errors
    /// Those of [`ShmChannel::wait`].
    pub fn check(self, shm: &ShmChannel, wait_ctx: &WaitContext<'_>) -> Result<()> {
        shm.check_wait(self.phase, self.number, self.ranks, wait_ctx)
    }
}
