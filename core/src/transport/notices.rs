//! Waits in a channel whose notices take a tree ([`super::flag_tree`]).
//!
//! A rank gathers what its children and itself have posted, shows it to its parent, waits for what the parent releases,
//! and releases that to its children. It does so when it waits for all ranks, or looks for them. So notices go on as
//! quickly as ranks wait, and no rank works for another. Every flag has one writer, and says that all ranks that it is for
//! have reached a round, or a later one.
//!
//! A rank may never pass on what it knows: it ends, or with another call it waits for something else. So who has slept
//! for a while looks at the flags that each rank raises for itself, and if all are there, goes on as if it had heard so
//! ([`ShmChannel::adopt`]). Whether a slot is free is looked up there early: a rank whose call is another one does not ask.
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
use crate::error::Result;

/// After so many checks a wait is one for the rank that is late, not for one that passes notices on.
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

/// A flag that has not been raised, and the rank that raises it.
type Missing<'a> = (usize, &'a Flag);

impl ShmChannel {
    /// Whether the first `ranks` local ranks have reached round `round` in `phase`.
    pub(super) fn all_reached_in_tree(&self, phase: Phase, round: u32, ranks: usize) -> bool {
        self.missing(phase, round, ranks).is_none()
    }

    /// As [`ShmChannel::wait`].
    pub(super) fn wait_in_tree(
        &self,
        phase: Phase,
        round: u32,
        ranks: usize,
        wait_ctx: &WaitContext<'_>,
    ) -> Result<()> {
        let Some((mut awaited, _)) = self.gather(phase, round, ranks) else { return Ok(()) };
        let from = Instant::now();
        let spins = self.spins.get(self.waiter.get());
        let mut missing = self.spin_in_tree(phase, round, ranks, spins.min(LATE));
        if missing.is_some() {
            let late = (0..ranks).find(|&rank| !self.flag(rank, phase).reached(round));
            awaited = late.unwrap_or(awaited);
            missing = self.spin_in_tree(phase, round, ranks, spins.saturating_sub(LATE));
        }
        let mut result = Ok(());
        while let Some((_, flag)) = missing.filter(|_| result.is_ok()) {
            result = flag.sleep(round, &mut || self.check_wait(phase, round, ranks, wait_ctx));
            missing = self.missing(phase, round, ranks);
        }
        let now = Instant::now();
        self.spins.adapt(self.waiter.get(), now - from);
        wait_ctx.log().waited(self.region.peers[awaited].rank, from, now);
        result
    }

    /// Looks up to `spins + 1` times whether the ranks are there; returns what is missing then.
    pub(super) fn spin_in_tree(&self, phase: Phase, round: u32, ranks: usize, spins: u32) -> Option<Missing<'_>> {
        let interval = self.spins.yield_interval();
        for spin in 1..=spins {
            self.gather(phase, round, ranks)?;
            if spin & (interval - 1) != 0 {
                hint::spin_loop();
            } else {
                self.missing(phase, round, ranks)?;
                thread::yield_now();
            }
        }
        self.missing(phase, round, ranks)
    }

    /// What is missing until the ranks are there. Sleep on no other flag: once this one is raised, there may be something to
    /// pass on.
    fn missing(&self, phase: Phase, round: u32, ranks: usize) -> Option<Missing<'_>> {
        let missing = self.gather(phase, round, ranks)?;
        if phase == Phase::Unpacked { self.adopt(phase, round, ranks) } else { Some(missing) }
    }

    /// Passes on what this rank's sources and its parent have posted; returns what is missing until all ranks have.
    fn gather(&self, phase: Phase, round: u32, ranks: usize) -> Option<Missing<'_>> {
        let (subtree, all) = (self.passed_on(Scope::Subtree), self.passed_on(Scope::All));
        if all.flag(phase).reached(round) {
            return None;
        }
        let is_missing = |(_, flags): &(usize, &RankFlags)| !flags.flag(phase).reached(round);
        if let Some((rank, flags)) = self.sources(ranks).find(is_missing) {
            return Some((rank, flags.flag(phase)));
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
        if is_missing(&(parent, released)) {
            return Some((parent, released.flag(phase)));
        }
        self.announce(iter::once(released), all, phase, round);
        None
    }

    /// If each of the ranks has raised its own flag: takes what they have posted from there; otherwise returns what is
    /// missing.
    pub(super) fn adopt(&self, phase: Phase, round: u32, ranks: usize) -> Option<Missing<'_>> {
        let own = |rank: usize| (rank, self.flag(rank, phase));
        let missing = (0..ranks).map(own).find(|(_, flag)| !flag.reached(round));
        for to in [Scope::Subtree, Scope::All].map(|scope| self.passed_on(scope)) {
            if missing.is_none() && !to.flag(phase).reached(round) {
                self.announce((0..ranks).map(|rank| self.flags(rank, Scope::Own)), to, phase, round);
            }
        }
        missing
    }

    /// Raises this rank's flag `to` for other ranks, with what these have in common.
    fn announce<'a>(&self, from: impl Notices<'a> + Clone, to: &RankFlags, phase: Phase, round: u32) {
        let turn = self.turn(round);
        match phase {
            Phase::Packed => {
                to.signature(turn).store(from.clone().common_signature(turn), Ordering::Relaxed);
                to.note(turn).store(from.clone().merged_note(turn).0, Ordering::Relaxed);
                if self.window() as usize > HOST_WINDOW {
                    let words = from.common_lookahead(turn);
                    to.lookaheads.0[turn]
                        .iter()
                        .zip(words)
                        .for_each(|(place, word)| place.store(word, Ordering::Relaxed));
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
    use crate::transport::counter::START;
    use crate::transport::flag_tree::fan_out;
    use crate::transport::in_process::{self, Access};

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
        assert!(channels[17].adopt(Phase::Packed, round, 20).is_none() && channels[17].same_signatures(round));
        assert!(channels[17].all_reached(Phase::Packed, round, 20));
        // What it has adopted, a parent passes on.
        assert!(
            channels[8].adopt(Phase::Packed, round, 20).is_none() && channels[9].all_reached(Phase::Packed, round, 20)
        );
        assert!(channels[9].same_signatures(round));
        // And in the other direction.
        channels[16].all_reached(Phase::Packed, round, 20);
        assert!(
            channels[0].all_reached(Phase::Packed, round, 20) && channels[17].all_reached(Phase::Packed, round, 20)
        );
    }
}
