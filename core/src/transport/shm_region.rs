//! The memory that the ranks of one host share, as a team uses it: per channel and rank three flags, notes, and two
//! slots of data used in turn.
//!
//! A channel goes in steps, numbered alike on all ranks ([`super::step`]). In a step every rank fills its slot and raises
//! `Packed`; the shards combine their slices and raise `Reduced`; every rank takes the results and raises `Unpacked`. Step s
//! uses slot s mod 2, so it may be packed when all have unpacked step s - 2.
//! Who owns what: between its own `Unpacked` of step s - 2 and `Packed` of step s a rank owns its slot; between all `Packed`
//! and all `Reduced` shard l owns slice l of all slots; then all slots are read-only until `Unpacked`.
//! The memory may come from `/dev/shm` (processes) or the heap (threads); everything in it is valid when zero.
//! Thread rule: a `ShmRegion` is shared by the team's threads; each channel is used by one of them.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::arena::PeerMemory;
use super::flag::Flag;
use super::region_layout::{CallHeader, FAILURE_TEXT, Failure, RankFlags, RegionHeader};
use super::step::reached;
use super::sync::AtomicU32;
use super::wait_context::WaitContext;
use crate::error::{Error, Result};
use crate::timings::WaitTarget;
use crate::wire_layout::ALIGN;

pub use super::region_layout::{RegionLayout, RegionMemory};

/// How much longer a rank waits for a shard's driver than the driver for others.
const OWNER_GRACE: Duration = Duration::from_millis(200);

/// Tells a departed rank from none.
const DEPARTED: u64 = 1 << 63;
/// Tells a step from none.
const STALLED: u64 = 1 << 32;

/// What a rank has done in a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Its data is in its slot.
    Packed,
    /// Its shard's slice is complete.
    Reduced,
    /// It has taken the results.
    Unpacked,
}

/// Tells of peers that ended.
pub trait Liveness: Send + Sync {
    /// Words about the end of the peer with this local rank, if it has ended.
    fn lost(&self, local_rank: usize) -> Option<String>;
}

/// A rank of the host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LocalPeer {
    /// Its rank in the job.
    pub rank: usize,
    /// Its name in messages.
    pub name: String,
}

/// A region and where it begins, which short calls ask so often that the way through the provider would tell.
struct MappedRegion {
    base: *mut u8,
    memory: Box<dyn RegionMemory>,
}

// SAFETY: the address is that of `memory`, which may be used from any thread.
unsafe impl Send for MappedRegion {}
// SAFETY: as above.
unsafe impl Sync for MappedRegion {}

/// One rank's view of the shared memory of a team on its host.
pub struct ShmRegion {
    region: MappedRegion,
    layout: RegionLayout,
    me: usize,
    peers: Vec<LocalPeer>,
    watch: Box<dyn Liveness>,
    spins: u32,
    peer_memory: Option<Arc<dyn PeerMemory>>,
}

impl ShmRegion {
    /// A view on `memory`, which is zero when the first rank gets here. `peers` are the ranks, by local rank;
    /// `spins` is how often waits look, at most, before they sleep.
    ///
    /// # Errors
    /// [`Error::Internal`] when the memory is too small for the geometry.
    pub fn new(
        memory: Box<dyn RegionMemory>,
        layout: RegionLayout,
        me: usize,
        peers: Vec<LocalPeer>,
        watch: Box<dyn Liveness>,
        spins: u32,
    ) -> Result<ShmRegion> {
        let region = MappedRegion { base: memory.base(), memory };
        let fits = region.memory.len() >= layout.bytes() && region.base.addr().is_multiple_of(ALIGN);
        if !fits || peers.len() != layout.ranks || me >= layout.ranks {
            return Err(Error::Internal("the shared memory does not fit the team".into()));
        }
        Ok(ShmRegion { region, layout, me, peers, watch, spins, peer_memory: None })
    }

    /// The same region, whose ranks see `shared` in each other.
    pub fn with_peer_memory(self, shared: Option<Arc<dyn PeerMemory>>) -> ShmRegion {
        ShmRegion { peer_memory: shared, ..self }
    }

    /// What the ranks see in each other beside the region's own memory.
    pub fn shared(&self) -> Option<&dyn PeerMemory> {
        self.peer_memory.as_deref()
    }

    /// The same, for who keeps it.
    pub fn peer_memory_arc(&self) -> Option<Arc<dyn PeerMemory>> {
        self.peer_memory.clone()
    }

    /// Channel `channel` of `region`.
    pub fn channel(self: &Arc<ShmRegion>, channel: usize) -> ShmChannel {
        assert!(channel < self.layout.channels, "channel {channel} of {}", self.layout.channels);
        let slot = |rank, parity| {
            // SAFETY: inside the region, as checked in `ShmRegion::new`.
            unsafe { self.region.base.add(self.layout.slot_at(channel, rank, parity)) }
        };
        let slots = [0, 1].map(|parity| (0..self.layout.ranks).map(|rank| slot(rank, parity)).collect());
        ShmChannel { region: Arc::clone(self), channel, slots: Slots(slots), spins: Cell::new(self.spins) }
    }

    /// The end of another rank's process, for waits that are not for this host's ranks.
    pub fn lost_rank(&self) -> Option<Error> {
        let lost = |rank: usize| Some(format!("{} {}", self.peers[rank].name, self.watch.lost(rank)?));
        (0..self.layout.ranks).filter(|&rank| rank != self.me).find_map(lost).map(Error::PeerLost)
    }

    /// The geometry.
    pub fn layout(&self) -> RegionLayout {
        self.layout
    }

    fn control(&self, channel: usize, rank: usize) -> &RankFlags {
        debug_assert!(channel < self.layout.channels && rank < self.layout.ranks);
        // SAFETY: inside the region (checked in `new`), aligned, zero is valid, and all fields are atomics.
        unsafe { &*self.region.base.add(self.layout.control_at(channel, rank)).cast::<RankFlags>() }
    }

    fn head(&self) -> &RegionHeader {
        // SAFETY: as in `control`; it is at the start.
        unsafe { &*self.region.base.cast::<RegionHeader>() }
    }

    fn failure_block(&self) -> &Failure {
        &self.head().failure
    }

    /// The ranks of this host that make no further steps, by their numbers in the job, and the last step of each.
    pub fn left(&self) -> Vec<(usize, u32)> {
        let left = |&local: &usize| self.control(0, local).unpacked.payload.load(Ordering::Acquire) == 1;
        let last = |local: usize| (self.peers[local].rank, self.control(0, local).packed.flag.raised());
        (0..self.layout.ranks).filter(left).map(last).collect()
    }

    /// Tells the ranks of this host that rank `rank` of another one makes no further steps after `step`; the earliest
    /// counts. Used by one process of the host.
    pub fn depart(&self, rank: usize, step: u32) {
        let departed = &self.head().departed;
        let before = departed.load(Ordering::Relaxed);
        if before & DEPARTED == 0 || !reached(step, before as u32) {
            let rank = (rank as u64 & 0x7fff_ffff) << 32;
            departed.store(DEPARTED | rank | u64::from(step), Ordering::Relaxed);
        }
    }

    /// The rank of another host for which this rank's current step waits in vain, as it made its last step before.
    pub fn departed(&self) -> Option<usize> {
        let told = self.head().departed.load(Ordering::Relaxed);
        let (rank, last) = ((told & !DEPARTED) >> 32, told as u32);
        (told & DEPARTED != 0 && !reached(last, self.step())).then_some(rank as usize)
    }

    /// The step of channel 0 to which this rank has packed.
    pub fn step(&self) -> u32 {
        self.control(0, self.me).packed.flag.raised()
    }

    /// Tells the ranks of the host that somebody has waited long in step `step` of channel 0.
    pub fn stall(&self, step: u32) {
        self.head().stalled.store(STALLED | u64::from(step), Ordering::Relaxed);
    }

    /// The last step of which that was told.
    pub fn stalled(&self) -> Option<u32> {
        let told = self.head().stalled.load(Ordering::Relaxed);
        (told & STALLED != 0).then_some((told & !STALLED) as u32)
    }

    /// Tells every rank of the host that the team has failed; the first to say so is heard.
    pub fn set_failure(&self, error: &Error) {
        let block = self.failure_block();
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
        for channel in 0..self.layout.channels {
            for rank in 0..self.layout.ranks {
                self.wake(channel, rank);
            }
        }
    }

    /// Tells every rank of the host that this one will make no further steps.
    pub fn set_departed(&self) {
        for channel in 0..self.layout.channels {
            self.control(channel, self.me).unpacked.payload.store(1, Ordering::Release);
            self.wake(channel, self.me);
        }
    }

    fn wake(&self, channel: usize, rank: usize) {
        self.control(channel, rank).flags().into_iter().for_each(Flag::wake);
    }

    /// Ends the naps of all flags; the model has no clock.
    #[cfg(loom)]
    pub fn end_waits(&self) {
        for (channel, rank) in
            (0..self.layout.channels).flat_map(|channel| (0..self.layout.ranks).map(move |rank| (channel, rank)))
        {
            self.control(channel, rank).flags().into_iter().for_each(Flag::end_waits);
        }
    }

    /// The failure of the team on this host, if there is one.
    pub fn failure(&self) -> Option<Error> {
        let block = self.failure_block();
        if block.state.load(Ordering::Acquire) != 2 {
            return None;
        }
        let len = (block.len.load(Ordering::Relaxed) as usize).min(FAILURE_TEXT);
        let bytes: Vec<u8> = block.text[..len].iter().map(|cell| cell.load(Ordering::Relaxed)).collect();
        Some(Error::from_code(block.code.load(Ordering::Relaxed), String::from_utf8_lossy(&bytes).into_owned()))
    }
}

/// A sleep shorter than this was not worth it: looking on would have cost no more than falling asleep and waking up.
const SPIN_MAX: Duration = Duration::from_micros(50);
/// A wait looks that often at least before it sleeps, where looking is worth it at all.
const MIN_SPINS: u32 = 64;

/// Where the slots of a channel are, by step parity and local rank.
struct Slots([Box<[*mut u8]>; 2]);

// SAFETY: addresses in the region of the channel's region, which may be used from any thread.
unsafe impl Send for Slots {}

/// One channel of a [`ShmRegion`].
pub struct ShmChannel {
    region: Arc<ShmRegion>,
    channel: usize,
    slots: Slots,
    /// How often a wait looks before it sleeps: as often as has paid lately, up to the region's number.
    spins: Cell<u32>,
}

impl ShmChannel {
    /// The region.
    pub fn region(&self) -> &Arc<ShmRegion> {
        &self.region
    }

    /// The slots of all ranks in step `step`, by local rank; [`RegionLayout::slot`] bytes each. See the module's text for who may
    /// use them when.
    pub fn slots(&self, step: u32) -> &[*mut u8] {
        &self.slots.0[parity(step)]
    }

    /// The slot of the rank with local rank `rank` in step `step`.
    pub fn slot(&self, rank: usize, step: u32) -> *mut u8 {
        self.slots(step)[rank]
    }

    /// Raises this rank's flag of `phase` to `step`.
    pub fn raise(&self, phase: Phase, step: u32) {
        self.flag(self.region.me, phase).raise(step);
    }

    /// Raises this rank's flag of `phase` to `step`, looks for a while whether all ranks of the host have, and only then
    /// wakes who sleeps for it; whether all have.
    pub fn post_and_spin(&self, phase: Phase, step: u32) -> bool {
        let own = self.flag(self.region.me, phase);
        own.raise_no_wake(step);
        let all = (0..self.region.layout.ranks).all(|rank| self.spin(self.flag(rank, phase), step));
        own.wake_sleepers();
        all
    }

    /// The step to which this rank has raised its flag of `phase`.
    pub fn own(&self, phase: Phase) -> u32 {
        self.flag(self.region.me, phase).raised()
    }

    /// Waits until each of the ranks below `ranks` (local ranks) has come to `step` in `phase`.
    ///
    /// # Errors
    /// What the wait context says; [`Error::PeerLost`] when one of them has ended.
    pub fn wait(&self, phase: Phase, step: u32, ranks: usize, wait_ctx: &WaitContext<'_>) -> Result<()> {
        for rank in 0..ranks {
            let flag = self.flag(rank, phase);
            if flag.reached(step) {
                continue;
            }
            let from = Instant::now();
            let result = if self.spin(flag, step) {
                Ok(())
            } else {
                flag.sleep(step, &mut || self.check_wait(phase, step, ranks, wait_ctx))
            };
            let now = Instant::now();
            self.adapt(now - from < SPIN_MAX);
            wait_ctx.log().waited(self.region.peers[rank].rank, from, now);
            result?;
        }
        Ok(())
    }

    /// Looks for a while whether `flag` has come to `step`.
    fn spin(&self, flag: &Flag, step: u32) -> bool {
        flag.spin(step, self.spins.get())
    }

    /// Looks longer from now on where that `pays`, and not so long where it does not.
    fn adapt(&self, pays: bool) {
        let (spins, most) = (self.spins.get(), self.region.spins);
        let wanted = if pays { spins.saturating_mul(2) } else { spins / 2 };
        self.spins.set(wanted.clamp(MIN_SPINS.min(most), most));
    }

    /// Writes down the call's signature, and whether the slot holds places (`direct`) instead of content, right before
    /// `Packed`.
    pub fn post_signature(&self, step: u32, signature: u64, direct: bool) {
        let note = self.note(self.region.me, step);
        note.signature.store(signature, Ordering::Relaxed);
        note.direct.store(u32::from(direct), Ordering::Relaxed);
    }

    /// Of how many ranks the slots hold places, after all `Packed`.
    pub fn zero_copy_ranks(&self, step: u32) -> usize {
        let direct = |rank: &usize| self.note(*rank, step).direct.load(Ordering::Relaxed) == 1;
        (0..self.region.layout.ranks).filter(direct).count()
    }

    /// Whether all ranks of the host signed the same, after all `Packed`.
    pub fn same_signatures(&self, step: u32) -> bool {
        let signature = |rank| self.note(rank, step).signature.load(Ordering::Relaxed);
        (1..self.region.layout.ranks).all(|rank| signature(rank) == signature(0))
    }

    /// Writes down whether this shard found all ranks agreed, before `Reduced`.
    pub fn agree(&self, step: u32, agreed: bool) {
        self.agreed(self.region.me, step).store(u32::from(agreed), Ordering::Relaxed);
    }

    /// Whether the drivers of all shards found agreement, after their `Reduced`.
    pub fn all_agreed(&self, step: u32, shards: usize) -> bool {
        (0..shards).all(|rank| self.agreed(rank, step).load(Ordering::Relaxed) == 1)
    }

    fn flag(&self, rank: usize, phase: Phase) -> &Flag {
        let control = self.region.control(self.channel, rank);
        match phase {
            Phase::Packed => &control.packed.flag,
            Phase::Reduced => &control.reduced.flag,
            Phase::Unpacked => &control.unpacked.flag,
        }
    }

    fn note(&self, rank: usize, step: u32) -> &CallHeader {
        &self.region.control(self.channel, rank).packed.payload[parity(step)]
    }

    fn agreed(&self, rank: usize, step: u32) -> &AtomicU32 {
        &self.region.control(self.channel, rank).reduced.payload[parity(step)]
    }

    /// Asked while a wait sleeps.
    fn check_wait(&self, phase: Phase, step: u32, ranks: usize, wait_ctx: &WaitContext<'_>) -> Result<()> {
        let is_late = |rank: usize| !self.flag(rank, phase).reached(step);
        for rank in (0..ranks).filter(|&rank| is_late(rank)) {
            let left = self.region.control(self.channel, rank).unpacked.payload.load(Ordering::Acquire) == 1;
            let how = if left { Some("has called finalize".to_owned()) } else { self.region.watch.lost(rank) };
            // It may have made the step just before it left.
            if let Some(how) = how
                && is_late(rank)
            {
                // Who left after a failure said so before.
                let lost = || Error::PeerLost(format!("{} {how}", self.region.peers[rank].name));
                return Err(self.region.failure().unwrap_or_else(lost));
            }
        }
        let rank = |local: usize| WaitTarget::Rank(self.region.peers[local].rank);
        wait_ctx.log().set_waiting((0..ranks).filter(|&rank| is_late(rank)).map(rank).collect());
        // Who waits for a shard waits for its driver, who knows better for whom and may say it first.
        let grace = if phase == Phase::Reduced { OWNER_GRACE } else { Duration::ZERO };
        let late = || (0..ranks).filter(|&rank| is_late(rank)).map(|rank| self.region.peers[rank].name.as_str());
        wait_ctx.check(grace, &|| late().collect::<Vec<_>>().join(", "))
    }
}

fn parity(step: u32) -> usize {
    (step % 2) as usize
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    struct NoWatch;

    impl Liveness for NoWatch {
        fn lost(&self, _local_rank: usize) -> Option<String> {
            None
        }
    }

    #[test]
    fn waits_look_as_long_as_it_pays() {
        for (most, least) in [(2000, MIN_SPINS), (10, 10)] {
            let layout = RegionLayout { ranks: 1, channels: 1, slot: 64 };
            let memory = Box::new(super::super::memory::Aligned::new(layout.bytes()));
            let peers = vec![LocalPeer { rank: 0, name: "rank 0".into() }];
            let region = Arc::new(ShmRegion::new(memory, layout, 0, peers, Box::new(NoWatch), most).unwrap());
            let channel = region.channel(0);
            assert_eq!(channel.spins.get(), most);
            (0..20).for_each(|_| channel.adapt(false));
            assert_eq!(channel.spins.get(), least);
            (0..20).for_each(|_| channel.adapt(true));
            assert_eq!(channel.spins.get(), most);
        }
    }
}
