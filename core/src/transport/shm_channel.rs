//! The channels of a group on one host: per channel and rank, three flags with payloads and a *window* of slots of data,
//! used in turn.
//!
//! A channel works in rounds, numbered equally on all ranks ([`super::counter`]); [`super::rounds`] has their states as
//! types. In a round every rank packs its data into its slot and raises `Packed`. The shard owners reduce their slices
//! and raise `Reduced`. Every rank unpacks the results and raises `Unpacked`. With a window of w slots, round s uses
//! slot s mod w. So a rank may pack round s only when all ranks have unpacked round s - w. Ownership: a rank owns its
//! slot from its own `Unpacked` of round s - w to its `Packed` of round s. From all `Packed` to all `Reduced`, the
//! owner of shard l owns slice l of all slots. Then all slots are read-only until `Unpacked`.
//!
//! On a host of many ranks notices take a tree ([`super::flag_tree`]): a rank that waits for all others passes on what it
//! knows of them ([`super::notices`]). Thread rule: each channel is used by one thread.

use std::cell::{Cell, OnceCell};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::flag::Flag;
use super::flag_tree::FlagTree;
use super::rank_flags::{LOOKAHEAD_WORDS, Note, Notices, RankFlags, Scope};
use super::rank_memory::RankMemory;
use super::shm_region::{OPENED, ShmRegion};
use super::spin::{Spins, Waiter};
use super::sync::prefetch;
use super::wait_context::WaitContext;
use super::window::{MAX_WINDOW, SMALL_WINDOW};
use crate::error::{Error, Result};
use crate::timings::WaitTarget;
use crate::topology::LocalRanks;

/// A rank waits this much longer for a shard owner than the owner waits for others.
const OWNER_GRACE: Duration = Duration::from_millis(200);

/// Progress of a rank: before the first round, and in a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Its slots are made.
    Opened,
    /// Its data is in its slot.
    Packed,
    /// Its shard is reduced.
    Reduced,
    /// It has copied the results out.
    Unpacked,
}

/// What a slot holds: one bit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum SlotContent {
    /// The data of the rank's tensors.
    #[default]
    Data = 0b1,
    /// Where the tensors are in the rank's [`PeerMemory`](super::peer_memory::PeerMemory).
    PeerMemory = 0b10,
    /// The addresses of the tensors in the rank's process.
    PrivateMemory = 0b100,
}

/// What the slots of all ranks hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SlotContents(u32);

impl SlotContents {
    /// Whether all of them hold this.
    pub fn are_all(self, content: SlotContent) -> bool {
        self.0 == content as u32
    }

    /// Whether some slot holds this.
    pub fn has(self, content: SlotContent) -> bool {
        self.0 & content as u32 != 0
    }
}

/// What a rank adds to a call for which there are two paths; of all ranks: the longest time, and whether one decides so.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PathNote {
    /// Whether the next call of the kind takes the second path, as the rank that decides says.
    pub second: bool,
    /// How long the rank has packed; at most a quarter of a second.
    pub packing: Duration,
}

impl ShmRegion {
    /// Channel `channel` of this region.
    pub fn channel(self: &Arc<ShmRegion>, channel: usize) -> ShmChannel {
        assert!(channel < self.layout.channels, "channel {channel} of {}", self.layout.channels);
        let tree = FlagTree::new(self.me, self.layout.ranks, self.layout.fan_out);
        let memory = self.all_memory(channel, &tree).map_or_else(OnceCell::new, OnceCell::from);
        let turns = self.layout.window as u32 - 1;
        ShmChannel {
            region: Arc::clone(self),
            channel,
            memory,
            tree,
            turns,
            reserved: Default::default(),
            spins: Spins::new(self.max_spins),
            waiter: Cell::new(Waiter::Thread),
            #[cfg(test)]
            read: Default::default(),
        }
    }
}

/// One channel of a [`ShmRegion`].
pub struct ShmChannel {
    pub(super) region: Arc<ShmRegion>,
    channel: usize,
    /// Set once all ranks have made theirs.
    memory: OnceCell<RankMemory>,
    pub(super) tree: FlagTree,
    /// The bits of the number of a round that are its turn.
    turns: u32,
    /// For each slot of this rank, the parts ([`ShmChannel::part_bytes`]) that have memory, as bits.
    reserved: [Cell<u64>; MAX_WINDOW],
    pub(super) spins: Spins,
    /// Whose waits are next.
    pub(super) waiter: Cell<Waiter>,
    /// The flags of other ranks that this rank has read, by their addresses.
    #[cfg(test)]
    pub(super) read: std::cell::RefCell<std::collections::HashSet<usize>>,
}

impl ShmChannel {
    /// The region of this channel.
    pub fn region(&self) -> &Arc<ShmRegion> {
        &self.region
    }

    /// Sets who waits from now on.
    pub fn set_waiter(&self, waiter: Waiter) {
        self.waiter.set(waiter);
    }

    /// Makes the memory of this rank, if needed, and waits for that of the other ranks. Before the first round.
    ///
    /// # Errors
    /// As for [`ShmRegion::open`] and [`ShmChannel::wait`].
    pub fn open(&self, wait_ctx: &WaitContext<'_>) -> Result<()> {
        if self.memory.get().is_some() {
            return Ok(());
        }
        self.region.open()?;
        let region = &self.region;
        (0..region.layout.ranks).try_for_each(|rank| {
            let flag = &region.control.state(rank).opened;
            if flag.reached(OPENED) {
                return Ok(());
            }
            let from = Instant::now();
            let result = flag
                .sleep(OPENED, &mut || self.check_wait(Phase::Opened, OPENED, region.layout.ranks.into(), wait_ctx));
            wait_ctx.log().waited(region.peers[rank].rank, from, Instant::now());
            result
        })?;
        let memory = region.all_memory(self.channel, &self.tree);
        let memory = memory.ok_or_else(|| Error::Internal("the slots of a rank are not shared memory".into()))?;
        // Nobody else sets it: a channel is used by one thread.
        let _set = self.memory.set(memory);
        Ok(())
    }

    /// The memory of all ranks.
    ///
    /// # Panics
    /// Before [`ShmChannel::open`].
    #[inline]
    fn memory(&self) -> &RankMemory {
        match self.memory.get() {
            Some(memory) => memory,
            None => panic!("a round before the channel is open"),
        }
    }

    /// The flags of a rank for itself, or where notices take a tree, for others.
    #[inline]
    pub(super) fn flags(&self, rank: usize, scope: Scope) -> &RankFlags {
        debug_assert!((scope as usize) < self.region.layout.scopes());
        // SAFETY: the region keeps the memory; the flags are valid when zero, and all fields are atomics.
        let flags = unsafe { &*self.memory().flags[rank].add(scope as usize) };
        self.note_read(rank, flags);
        flags
    }

    /// For a test that counts what a round touches.
    #[inline]
    fn note_read(&self, _rank: usize, _flags: &RankFlags) {
        #[cfg(test)]
        if _rank != self.region.me {
            self.read.borrow_mut().insert(std::ptr::from_ref(_flags).addr());
        }
    }

    /// What this rank waits for if it waits for the first `ranks` ranks: the flags, and the rank that raises them.
    #[inline]
    pub(super) fn sources(&self, ranks: usize) -> impl Iterator<Item = (usize, &RankFlags)> + Clone {
        let sources = self.memory().sources.iter().take_while(move |source| source.0 < ranks);
        sources.map(|&(rank, flags)| {
            // SAFETY: as above.
            let flags = unsafe { &*flags };
            self.note_read(rank, flags);
            (rank, flags)
        })
    }

    /// What says what all ranks have posted, once they have.
    #[inline]
    fn posted(&self) -> impl Notices<'_> {
        // SAFETY: as above.
        self.memory().posted.iter().map(|&flags| unsafe { &*flags })
    }

    /// The slots of round `round` of a small call, of which two are under way at most: the first two of the window, so
    /// that they stay in the nearest caches.
    pub(super) fn small_slots(&self, round: u32) -> &[*mut u8] {
        self.slots_at(round % SMALL_WINDOW, 0)
    }

    /// The addresses of place `place` in the slots of all ranks in round `round`; see [`RegionLayout::places`].
    pub(super) fn slots_at(&self, round: u32, place: usize) -> &[*mut u8] {
        let ranks = self.region.layout.ranks;
        &self.memory().slots[self.turn(round)][place * ranks..][..ranks]
    }

    /// Makes the memory of these bytes of this rank's slot of round `round`, if they have none.
    ///
    /// # Errors
    /// [`Error::System`] when there is not enough memory, which is a failure of the group.
    #[inline]
    pub(super) fn reserve(&self, round: u32, bytes: Range<usize>) -> Result<()> {
        let part = self.part_bytes();
        let parts = bytes.start / part..bytes.end.div_ceil(part);
        if parts.is_empty() {
            return Ok(());
        }
        let bits = (u64::MAX >> (64 - parts.len())) << parts.start;
        let reserved = &self.reserved[self.turn(round)];
        if reserved.get() & bits == bits {
            return Ok(());
        }
        self.make_parts(round, parts)?;
        reserved.set(reserved.get() | bits);
        Ok(())
    }

    /// As [`ShmChannel::reserve`], of all slots of small calls.
    ///
    /// # Errors
    /// As for [`ShmChannel::reserve`].
    pub fn reserve_small(&self, bytes: &Range<usize>) -> Result<()> {
        (0..SMALL_WINDOW).try_for_each(|round| self.reserve(round, bytes.clone()))
    }

    /// A slot has up to 64 parts of this size, of whole pages.
    fn part_bytes(&self) -> usize {
        self.region.layout.slot.div_ceil(64).next_multiple_of(4096)
    }

    #[cold]
    fn make_parts(&self, round: u32, parts: Range<usize>) -> Result<()> {
        let (layout, part) = (self.region.layout, self.part_bytes());
        let start = layout.slot_offset(self.channel, self.turn(round));
        let bytes = start + parts.start * part..start + (parts.end * part).min(layout.slot);
        self.region.memory.reserve(bytes).inspect_err(|error| self.region.set_failure(error))
    }

    /// Raises this rank's flag of `phase` to round `round`.
    pub fn raise(&self, phase: Phase, round: u32) {
        self.flag(self.region.me, phase).raise(round);
    }

    /// In a round of a small call: raises this rank's `Packed`, spins as [`ShmChannel::spin_small`], then wakes
    /// sleepers. Returns whether all ranks have raised the flag.
    pub(super) fn post_and_spin(&self, round: u32, spins: u32) -> bool {
        let own_flag = self.flag(self.region.me, Phase::Packed);
        own_flag.raise_no_wake(round);
        if self.tree.is_tree {
            // This rank may wait for one that sleeps on its flag.
            own_flag.wake_sleepers();
        }
        let all = self.spin_small(round, spins);
        own_flag.wake_sleepers();
        all
    }

    /// In a round of a small call: spins until all ranks of the host have raised `Packed` or the spins, at most
    /// `spins`, are used up; returns whether they have. The start of a slot comes with the flag of its rank: in two
    /// steps it took 0.05 of 0.6 µs between processors that share no cache.
    #[inline]
    pub(super) fn spin_small(&self, round: u32, spins: u32) -> bool {
        let slots = self.small_slots(round);
        let spins = self.spins.get(self.waiter.get()).min(spins);
        let ranks = self.region.layout.ranks;
        if self.tree.is_tree && self.spin_in_tree(Phase::Packed, round, ranks, spins) {
            return true;
        }
        let spin = |rank| {
            let flag = self.flag(rank, Phase::Packed);
            flag.spin(round, spins, self.spins.yield_interval(), || {
                slots.get(rank).copied().into_iter().for_each(prefetch);
            })
        };
        let all = (0..ranks).all(spin);
        all && (!self.tree.is_tree || self.adopt(Phase::Packed, round, ranks))
    }

    /// The value of this rank's flag of `phase`.
    pub(super) fn own(&self, phase: Phase) -> u32 {
        self.flag(self.region.me, phase).raised()
    }

    /// Waits until `ranks` have reached round `round` in `phase`.
    ///
    /// # Errors
    /// Errors of the wait context; [`Error::PeerLost`] when one of the ranks was lost.
    pub fn wait(
        &self,
        phase: Phase,
        round: u32,
        ranks: impl Into<LocalRanks>,
        wait_ctx: &WaitContext<'_>,
    ) -> Result<()> {
        let ranks = ranks.into();
        if self.in_tree(ranks).is_some_and(|ranks| self.wait_in_tree(phase, round, ranks, wait_ctx)) {
            return Ok(());
        }
        for rank in ranks.iter() {
            let flag = self.flag(rank, phase);
            if flag.reached(round) {
                continue;
            }
            let from = Instant::now();
            let result = if self.spin(flag, round, || {}) {
                Ok(())
            } else {
                flag.sleep(round, &mut || self.check_wait(phase, round, ranks, wait_ctx))
            };
            let now = Instant::now();
            self.spins.adapt(self.waiter.get(), now - from);
            wait_ctx.log().waited(self.region.peers[rank].rank, from, now);
            result?;
        }
        if let Some(ranks) = self.in_tree(ranks) {
            self.adopt(phase, round, ranks);
        }
        Ok(())
    }

    /// The number of `ranks`, if their notices take a tree: those of the first ranks of a large host do.
    fn in_tree(&self, ranks: LocalRanks) -> Option<usize> {
        ranks.count_of_first().filter(|_| self.tree.is_tree)
    }

    /// Whether `ranks` have reached round `round` in `phase`.
    pub(super) fn all_reached(&self, phase: Phase, round: u32, ranks: impl Into<LocalRanks>) -> bool {
        let ranks = ranks.into();
        match self.in_tree(ranks) {
            Some(ranks) => self.all_reached_in_tree(phase, round, ranks),
            None => self.pending(phase, round, ranks).next().is_none(),
        }
    }

    /// Those of `ranks` that have not reached round `round` in `phase`.
    fn pending(&self, phase: Phase, round: u32, ranks: LocalRanks) -> impl Iterator<Item = usize> {
        ranks.iter().filter(move |&rank| !self.flag(rank, phase).reached(round))
    }

    /// The first of them, as its rank in the group.
    pub(super) fn first_pending(&self, phase: Phase, round: u32, ranks: LocalRanks) -> Option<usize> {
        self.pending(phase, round, ranks).next().map(|rank| self.region.peers[rank].rank)
    }

    /// Spins until `flag` reaches `round` or the spins are used up; see [`Flag::spin`].
    fn spin(&self, flag: &Flag, round: u32, between: impl Fn()) -> bool {
        flag.spin(round, self.spins.get(self.waiter.get()), self.spins.yield_interval(), between)
    }

    /// The number of rounds that may overlap.
    pub fn window(&self) -> u32 {
        self.turns + 1
    }

    /// Writes this rank's note.
    pub(super) fn post_path_note(&self, round: u32, note: PathNote) {
        let place = self.own_flags().note(self.turn(round));
        let content = Note(place.load(Ordering::Relaxed) & Note::CONTENTS | if note.second { Note::SECOND } else { 0 });
        let nanos = u32::try_from(note.packing.as_nanos()).unwrap_or(u32::MAX);
        place.store(content.with_nanos(nanos).0, Ordering::Relaxed);
    }

    /// The notes of all ranks of the host.
    pub(super) fn path_note(&self, round: u32) -> PathNote {
        let note = self.posted().merged_note(self.turn(round));
        PathNote { second: note.0 & Note::SECOND != 0, packing: Duration::from_nanos(note.nanos().into()) }
    }

    /// Writes the call's signature and what the slot holds.
    pub(super) fn post_signature(&self, round: u32, signature: u64, content: SlotContent) {
        let (flags, turn) = (self.own_flags(), self.turn(round));
        // 0 says that signatures differ.
        flags.signature(turn).store(signature.max(1), Ordering::Relaxed);
        let place = flags.note(turn);
        place.store(place.load(Ordering::Relaxed) & !Note::CONTENTS | content as u32, Ordering::Relaxed);
    }

    /// What the slot of a rank holds.
    pub(super) fn content(&self, rank: usize, round: u32) -> SlotContent {
        let note = self.flags(rank, Scope::Own).note(self.turn(round)).load(Ordering::Relaxed);
        match SlotContents(note & Note::CONTENTS) {
            contents if contents.has(SlotContent::PeerMemory) => SlotContent::PeerMemory,
            contents if contents.has(SlotContent::PrivateMemory) => SlotContent::PrivateMemory,
            _ => SlotContent::Data,
        }
    }

    /// What the slots of all ranks hold.
    pub(super) fn contents(&self, round: u32) -> SlotContents {
        SlotContents(self.posted().merged_note(self.turn(round)).0 & Note::CONTENTS)
    }

    /// Whether all ranks of the host posted the same signature.
    #[inline]
    pub(super) fn same_signatures(&self, round: u32) -> bool {
        self.posted().common_signature(self.turn(round)) != 0
    }

    /// Posts what this shard owner found: if all signatures are equal, how many of the next calls are, too.
    pub(super) fn agree(&self, round: u32, agreed: Option<usize>) {
        let number = |ahead| u32::try_from(ahead).unwrap_or(0) + 1;
        self.own_flags().reduced.payload[self.turn(round)].store(agreed.map_or(0, number), Ordering::Relaxed);
    }

    /// What the owners of the first `shards` shards all posted.
    pub(super) fn all_agreed(&self, round: u32, shards: usize) -> Option<usize> {
        let agreed = self.posted().take(shards).least_agreed(self.turn(round));
        agreed.checked_sub(1).map(|ahead| ahead as usize)
    }

    /// Posts what this rank has behind the call that starts.
    pub(super) fn post_lookahead(&self, round: u32, words: [u64; LOOKAHEAD_WORDS]) {
        self.own_flags().set_lookahead(self.turn(round), words);
    }

    /// The words that all ranks of the host posted; 0 for each in which they differ.
    pub(super) fn common_lookahead(&self, round: u32) -> [u64; LOOKAHEAD_WORDS] {
        self.posted().common_lookahead(self.turn(round))
    }

    /// The flags that this rank raises for itself.
    fn own_flags(&self) -> &RankFlags {
        self.flags(self.region.me, Scope::Own)
    }

    /// The flag that a rank raises for itself.
    pub(super) fn flag(&self, rank: usize, phase: Phase) -> &Flag {
        match phase {
            Phase::Opened => &self.region.control.state(rank).opened,
            phase => self.flags(rank, Scope::Own).flag(phase),
        }
    }

    /// The turn of round `round` in the window.
    pub(super) fn turn(&self, round: u32) -> usize {
        (round & self.turns) as usize
    }

    /// Checks for lost ranks and limits during a wait for `ranks`.
    ///
    /// # Errors
    /// As for [`ShmChannel::wait`].
    pub(super) fn check_wait(&self, phase: Phase, round: u32, ranks: LocalRanks, ctx: &WaitContext<'_>) -> Result<()> {
        // Another rank may wait for this memory.
        self.region.memory.collect();
        for rank in self.pending(phase, round, ranks) {
            let departed = self.region.control.has_departed(rank);
            let how = if departed { Some(self.region.departure.to_owned()) } else { self.region.liveness.lost(rank) };
            // It may have raised the flag before it departed.
            if let Some(how) = how
                && !self.flag(rank, phase).reached(round)
            {
                // If it departed after a failure, it reported the failure first.
                let lost = || Error::PeerLost(format!("{} {how}", self.region.peers[rank].name));
                return Err(self.region.control.failure().unwrap_or_else(lost));
            }
        }
        let in_tree = self.in_tree(ranks).filter(|_| phase != Phase::Opened);
        if in_tree.is_some_and(|ranks| self.adopt(phase, round, ranks)) {
            return Ok(());
        }
        let pending = || self.pending(phase, round, ranks).map(|rank| &self.region.peers[rank]);
        ctx.log().set_waiting(pending().map(|peer| WaitTarget::Rank(peer.rank)).collect());
        // The shard owner knows which rank is missing, so let it report first.
        let awaits_owners = phase == Phase::Reduced && ranks.count_of_first().is_some();
        let grace = if awaits_owners { OWNER_GRACE } else { Duration::ZERO };
        ctx.check(grace, &|| pending().map(|peer| peer.name.as_str()).collect::<Vec<_>>().join(", "))
    }
}
