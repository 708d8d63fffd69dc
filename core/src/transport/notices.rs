//! Waits in a channel whose notices take a tree ([`super::flag_tree`]).
//!
//! A rank gathers what its children and itself have posted, shows it to its parent, waits for what the parent releases,
//! and releases that to its children. It does so when it waits for all ranks, or looks for them. So notices go on as
//! quickly as ranks wait, and no rank works for another. Every flag has one writer, and says that all ranks that it is for
//! have reached a round, or a later one.
//!
//! A rank may pass nothing on for a while, or never: it computes after it has started a call, it waits for something else,
//! it ends. So a wait that takes longer than notices need is one for the flags that each rank raises for itself, as on a
//! small host ([`ShmChannel::adopt`]). Whether a slot is free is looked up there earlier: a rank whose call is another one
//! does not ask.
//! Thread rule: as for [`ShmChannel`].

use std::hint;
use std::iter;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::Instant;

use super::flag::Flag;
use super::rank_flags::{Notices, RankFlags, Scope};
use super::shm_channel::{Phase, ShmChannel};
use super::wait_context::WaitContext;
use super::window::HOST_WINDOW;

/// After so many checks a rank is late, and not only one that passes notices on.
const LATE: u32 = 1024;

impl RankFlags {
    /// The flag of a phase.
    pub(super) fn flag(&self, phase: Phase) -> &Flag {
        match phase {
            Phase::Packed => &self.packed.flag,
            Phase::Reduced => &self.reduced.flag,
            Phase::Opened | Phase::Unpacked => &self.unpacked.flag,
        }
    }
}

impl ShmChannel {
    /// Whether the first `ranks` local ranks have reached round `round` in `phase`.
    pub(super) fn all_reached_in_tree(&self, phase: Phase, round: u32, ranks: usize) -> bool {
        self.gather(phase, round, ranks).is_none() || phase == Phase::Unpacked && self.adopt(phase, round, ranks)
    }

    /// As [`ShmChannel::wait`], for a short time; returns whether the ranks are there.
    pub(super) fn wait_in_tree(&self, phase: Phase, round: u32, ranks: usize, wait_ctx: &WaitContext<'_>) -> bool {
        let Some(awaited) = self.gather(phase, round, ranks) else { return true };
        let from = Instant::now();
        let are_there = self.spin_in_tree(phase, round, ranks, self.spins.get(self.waiter.get()));
        if are_there {
            let now = Instant::now();
            self.spins.adapt(self.waiter.get(), now - from);
            wait_ctx.log().waited(self.region.peers[awaited].rank, from, now);
        }
        are_there
    }

    /// Looks whether the ranks are there, up to `spins` times, and not longer than it takes to pass notices on.
    pub(super) fn spin_in_tree(&self, phase: Phase, round: u32, ranks: usize, spins: u32) -> bool {
        let interval = self.spins.yield_interval();
        for spin in 1..=spins.min(LATE) {
            if spin & (interval - 1) != 0 {
                if self.gather(phase, round, ranks).is_none() {
                    return true;
                }
                hint::spin_loop();
            } else {
                if self.all_reached_in_tree(phase, round, ranks) {
                    return true;
                }
                thread::yield_now();
            }
        }
        self.all_reached_in_tree(phase, round, ranks)
    }

    /// Passes on what this rank's sources and its parent have posted. Returns the rank whose flag is missing until all ranks
    /// have.
    fn gather(&self, phase: Phase, round: u32, ranks: usize) -> Option<usize> {
        let (subtree, all) = (self.passed_on(Scope::Subtree), self.passed_on(Scope::All));
        if all.flag(phase).reached(round) {
            return None;
        }
        if let Some((rank, _)) = self.sources(ranks).find(|(_, flags)| !flags.flag(phase).reached(round)) {
            return Some(rank);
        }
        let sources = self.sources(ranks).map(|(_, flags)| flags);
        let Some(parent) = self.tree.parent else {
            self.announce(sources, all, phase, round);
            return None;
        };
        if self.tree.sources.len() > 1 && !subtree.flag(phase).reached(round) {
            self.announce(sources, subtree, phase, round);
        }
        let released = self.flags(parent, Scope::All);
        if !released.flag(phase).reached(round) {
            return Some(parent);
        }
        self.announce(iter::once(released), all, phase, round);
        None
    }

    /// Whether each of the ranks has raised its own flag. Then takes what they have posted from there.
    pub(super) fn adopt(&self, phase: Phase, round: u32, ranks: usize) -> bool {
        let are_there = (0..ranks).all(|rank| self.flag(rank, phase).reached(round));
        for to in [Scope::Subtree, Scope::All].map(|scope| self.passed_on(scope)) {
            if are_there && !to.flag(phase).reached(round) {
                self.announce((0..ranks).map(|rank| self.flags(rank, Scope::Own)), to, phase, round);
            }
        }
        are_there
    }

    /// Whether other ranks may wait for what this rank passes on.
    pub fn passes_on(&self) -> bool {
        self.tree.is_tree && self.tree.sources.len() > 1
    }

    /// Raises this rank's flag `to` for other ranks, with what these have in common.
    fn announce<'a>(&self, from: impl Notices<'a> + Clone, to: &RankFlags, phase: Phase, round: u32) {
        let turn = self.turn(round);
        match phase {
            Phase::Packed => {
                to.signature(turn).store(from.clone().common_signature(turn), Ordering::Relaxed);
                to.note(turn).store(from.clone().merged_note(turn).0, Ordering::Relaxed);
                if self.window() as usize > HOST_WINDOW {
                    to.set_lookahead(turn, from.common_lookahead(turn));
                }
            }
            Phase::Reduced => to.reduced.payload[turn].store(from.least_agreed(turn), Ordering::Relaxed),
            Phase::Opened | Phase::Unpacked => {}
        }
        to.flag(phase).raise(round);
    }

    /// All ranks have ended this round: raises the flags by which this rank would have passed it on in rounds whose
    /// flags nobody has waited for.
    pub(super) fn keep_up(&self, ended: u32) {
        for to in [Scope::Subtree, Scope::All].map(|scope| self.passed_on(scope)) {
            for flag in [Phase::Reduced, Phase::Unpacked].map(|phase| to.flag(phase)) {
                if !flag.reached(ended) {
                    flag.raise(ended);
                }
            }
        }
    }

    /// The flags that this rank raises for others.
    fn passed_on(&self, scope: Scope) -> &RankFlags {
        self.flags(self.region.me, scope)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::deadline::Deadline;
    use crate::error::Error;
    use crate::transport::counter::START;
    use crate::transport::flag_tree::fan_out;
    use crate::transport::in_process::{self, Access};
    use crate::transport::wait_context::with_limits;

    /// The channels of `ranks` ranks, whose notices take a tree from 16 ranks on.
    fn channels(ranks: usize) -> Vec<ShmChannel> {
        let regions: Vec<_> = in_process::world_in_tree(&[ranks], 1, 4096, Access::Slots, |ranks| fan_out(ranks, 15))
            .unwrap()
            .into_iter()
            .map(|resources| resources.region)
            .collect();
        regions.iter().for_each(|region| region.open().unwrap());
        regions.iter().map(|region| region.channel(0)).collect()
    }

    #[test]
    fn a_round_touches_as_many_cache_lines_as_there_are_ranks() {
        for (ranks, lines) in [(2, 2), (8, 56), (15, 210), (16, 30), (64, 126), (128, 254)] {
            let channels = channels(ranks);
            let round = START.wrapping_add(1);
            for phase in [Phase::Packed, Phase::Reduced, Phase::Unpacked] {
                channels.iter().for_each(|channel| channel.read.borrow_mut().clear());
                channels.iter().for_each(|channel| channel.raise(phase, round));
                // Rank 0 is the last to wait: those after it hear of it later.
                let mut waiting: Vec<&ShmChannel> = channels.iter().collect();
                for _ in 0..10 {
                    waiting.retain(|channel| match channel.tree.is_tree {
                        true => channel.gather(phase, round, ranks).is_some(),
                        false => !channel.all_reached(phase, round, ranks),
                    });
                }
                assert!(waiting.is_empty(), "{} of {ranks} ranks do not hear of {phase:?}", waiting.len());
                let read: usize = channels.iter().map(|channel| channel.read.borrow().len()).sum();
                assert_eq!(read, lines, "{ranks} ranks, {phase:?}");
            }
        }
    }

    #[test]
    fn a_rank_goes_on_though_no_other_passes_notices_on() {
        let channels = channels(20);
        let round = START.wrapping_add(1);
        for (rank, channel) in channels.iter().enumerate() {
            channel.post_signature(round, 7, Default::default());
            assert!(!channels[17].all_reached(Phase::Packed, round, 20), "before rank {rank}");
            channel.raise(Phase::Packed, round);
            channel.raise(Phase::Unpacked, round);
        }
        assert!(!channels[17].all_reached(Phase::Packed, round, 20), "its parent is silent");
        assert!(channels[17].all_reached(Phase::Unpacked, round, 20), "its slot is free all the same");
        let slept = || Some(Error::Internal("it has slept".into()));
        let wait = |wait_ctx: &WaitContext<'_>| channels[17].wait(Phase::Packed, round, 20, wait_ctx);
        assert_eq!(with_limits("", Deadline::default(), None, &slept, wait), Ok(()));
        assert!(channels[17].same_signatures(round) && channels[17].all_reached(Phase::Packed, round, 20));
        // What it has adopted, a parent passes on.
        assert!(channels[8].adopt(Phase::Packed, round, 20) && channels[9].all_reached(Phase::Packed, round, 20));
        assert!(channels[9].same_signatures(round));
        // And in the other direction.
        channels[16].all_reached(Phase::Packed, round, 20);
        assert!(
            channels[0].all_reached(Phase::Packed, round, 20) && channels[17].all_reached(Phase::Packed, round, 20)
        );
    }
}
