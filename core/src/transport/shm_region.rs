//! The shared memory of a group on one host: its control block, the ranks that share it, and the slots and flags that each
//! rank makes. [`super::shm_channel`] has the rounds in it.
//!
//! The memory is `/dev/shm` (processes) or the heap (threads). The slots get memory as calls need it; each rank makes that
//! of its own, so that it is near it.
//! Thread rule: the group's threads share a `ShmRegion`.

use std::slice;
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};

use super::counter::START;
use super::flag::Flag;
use super::peer_memory::PeerMemory;
use super::rank_flags::RankFlags;
use super::region_control::RegionControl;
use super::spin::MaxSpins;
use crate::error::{Error, Result};

pub use super::region_layout::{RegionLayout, RegionMemory};

/// The value of the flag of a rank whose memory is made.
pub(super) const OPENED: u32 = START.wrapping_add(1);

/// Detects exited peers.
pub trait Liveness: Send + Sync {
    /// Describes the exit of the peer with this local rank; `None` while it runs.
    fn lost(&self, local_rank: usize) -> Option<String>;
}

/// A rank of this host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LocalPeer {
    /// Its rank in the group.
    pub rank: usize,
    /// Its rank in the job.
    pub world: usize,
    /// Display name for messages.
    pub name: String,
}

/// The view of one rank on the shared memory of a group on its host.
pub struct ShmRegion {
    /// The address is kept here: a virtual call would slow small messages.
    pub(super) control: RegionControl,
    pub(super) memory: Box<dyn RegionMemory>,
    pub(super) layout: RegionLayout,
    pub(super) me: usize,
    pub(super) peers: Vec<LocalPeer>,
    pub(super) liveness: Box<dyn Liveness>,
    pub(super) max_spins: MaxSpins,
    peer_memory: Option<Arc<dyn PeerMemory>>,
    pub(super) departure: &'static str,
    /// Whether this rank has made its memory.
    opened: OnceLock<Result<()>>,
}

impl ShmRegion {
    /// Wraps `memory`, whose control block is initialized for `layout`. `peers` are the host's ranks by local rank;
    /// `max_spins` limits the checks before a wait sleeps.
    ///
    /// # Errors
    /// [`Error::Internal`] when the block is of another layout.
    pub fn new(
        memory: Box<dyn RegionMemory>,
        layout: RegionLayout,
        me: usize,
        peers: Vec<LocalPeer>,
        liveness: Box<dyn Liveness>,
        max_spins: MaxSpins,
    ) -> Result<ShmRegion> {
        // SAFETY: the memory lives as long as the region.
        let control = unsafe { RegionControl::attach(memory.control()) };
        if !control.fits(layout) || peers.len() != layout.ranks || me >= layout.ranks {
            return Err(Error::Internal("the shared memory does not fit the group".into()));
        }
        control.state(me).rank.store(u32::try_from(peers[me].rank).unwrap_or(0), Ordering::Relaxed);
        Ok(ShmRegion {
            control,
            memory,
            layout,
            me,
            peers,
            liveness,
            max_spins,
            peer_memory: None,
            departure: "has left",
            opened: OnceLock::new(),
        })
    }

    /// Makes the memory of this rank, once, of the slots only the addresses, and shows it to the other ranks of the host. A
    /// failure is that of the group.
    ///
    /// # Errors
    /// [`Error::System`] when there is not enough shared memory.
    pub fn open(&self) -> Result<()> {
        let open = || {
            let place = self.memory.make(self.me, self.layout.rank_bytes())?;
            self.memory.reserve(self.layout.flags())?;
            let state = self.control.state(self.me);
            state.memory.store(place, Ordering::Relaxed);
            state.opened.raise(OPENED);
            Ok(())
        };
        self.opened.get_or_init(|| open().inspect_err(|error| self.set_failure(error))).clone()
    }

    /// Adds memory that the ranks of the host share outside of this region.
    pub fn with_peer_memory(self, shared: Option<Arc<dyn PeerMemory>>) -> ShmRegion {
        ShmRegion { peer_memory: shared, ..self }
    }

    /// Sets what is said of a rank that has departed.
    pub fn with_departure(self, departure: &'static str) -> ShmRegion {
        ShmRegion { departure, ..self }
    }

    /// Memory that the ranks of the host share outside of this region.
    pub fn peer_memory(&self) -> Option<&dyn PeerMemory> {
        self.peer_memory.as_deref()
    }

    /// As [`ShmRegion::peer_memory`], with shared ownership.
    pub fn shared_peer_memory(&self) -> Option<Arc<dyn PeerMemory>> {
        self.peer_memory.clone()
    }

    /// The loss of another rank of this host, for waits on other hosts or GPUs.
    pub fn lost_rank(&self) -> Option<Error> {
        let lost = |rank: usize| Some(format!("{} {}", self.peers[rank].name, self.liveness.lost(rank)?));
        (0..self.layout.ranks).filter(|&rank| rank != self.me).find_map(lost).map(Error::PeerLost)
    }

    /// The ranks of this host, by local rank.
    pub fn peers(&self) -> &[LocalPeer] {
        &self.peers
    }

    /// The sizes of the region.
    pub fn layout(&self) -> RegionLayout {
        self.layout
    }

    /// The control block, which the failure detector uses too.
    pub fn control(&self) -> &RegionControl {
        &self.control
    }

    /// The memory of a rank, if it has made it.
    pub(super) fn of_rank(&self, rank: usize) -> Option<*mut u8> {
        let state = self.control.state(rank);
        let place = state.opened.reached(OPENED).then(|| state.memory.load(Ordering::Relaxed))?;
        self.memory.of_rank(rank, place, self.layout.rank_bytes())
    }

    /// The flags of a rank, by channel and scope, if it has made its memory.
    fn rank_flags(&self, rank: usize) -> Option<&[RankFlags]> {
        let base = self.of_rank(rank)?.wrapping_add(self.layout.flags().start);
        // SAFETY: the region keeps the memory; the flags are valid when zero, and all fields are atomics.
        Some(unsafe { slice::from_raw_parts(base.cast(), self.layout.channels * self.layout.scopes()) })
    }

    /// All flags of a rank that has made its memory.
    fn flags_of(&self, rank: usize) -> impl Iterator<Item = &Flag> {
        self.rank_flags(rank).into_iter().flatten().flat_map(RankFlags::flags)
    }

    /// The last round of channel 0 that this rank has packed.
    pub fn round(&self) -> u32 {
        self.rank_flags(self.me).map_or(START, |flags| flags[0].packed.flag.raised())
    }

    /// The round that this rank waits in: before all ranks have made their memory, the first one.
    pub fn waiting_round(&self) -> u32 {
        let opened = (0..self.layout.ranks).all(|rank| self.control.state(rank).opened.reached(OPENED));
        if opened { self.round() } else { START.wrapping_add(1) }
    }

    /// A departed rank of another host that the current round waits for: its last round is earlier.
    pub fn departed(&self) -> Option<usize> {
        self.control.departed(self.round())
    }

    /// Reports a failure of the group to this host's ranks. Only the first failure is kept.
    pub fn set_failure(&self, error: &Error) {
        self.control.set_failure(error);
        (0..self.layout.ranks).flat_map(|rank| self.flags_of(rank)).for_each(Flag::wake);
    }

    /// Reports to this host's ranks that this rank takes part in no further round.
    pub fn set_departed(&self) {
        self.control.set_departed(self.me, self.round());
        self.flags_of(self.me).for_each(Flag::wake);
    }

    /// Ends the timed waits of all flags; Loom has no clock.
    #[cfg(loom)]
    pub fn end_waits(&self) {
        for rank in 0..self.layout.ranks {
            self.control.state(rank).opened.end_waits();
            self.flags_of(rank).for_each(Flag::end_waits);
        }
    }
}
