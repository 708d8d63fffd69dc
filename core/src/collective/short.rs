//! Short calls on one host, which take one exchange: every rank shows what it brings, and makes the whole result for itself.
//!
//! Thread rule: that of [`Channel`].

use super::{Channel, Job, Lane};
use crate::error::Result;
use crate::trace::{Activity, Lap};
use crate::transport::{Patience, Phase, sync};

/// A short call under way: this rank has shown what it brings.
#[derive(Debug, Clone, Copy)]
pub struct Shown {
    number: u32,
    /// Whether all ranks have.
    all: bool,
}

impl Channel {
    /// A short call in one exchange: every rank shows what it brings, and makes the whole result for itself, by the same
    /// additions as a lane. That costs less than two more turns of flags. Nobody raises `Unpacked`; `begin` does when that
    /// is missed.
    pub(super) fn exchange(&mut self, job: &Job, patience: &Patience<'_>) -> Result<bool> {
        let number = self.advance(patience)?;
        let len = job.plan.chunk_len(0);
        let mut lap = Lap::start(patience.log(), len);
        self.put(job, 0, 0..len, number);
        lap.end(Activity::Copy);
        let shown = self.show(job, number);
        self.taken(job, shown, patience)
    }

    /// Begins a short call ([`Job::is_short`]) without waiting for longer than a look; `None`, and nothing is done, when
    /// ranks have not yet ended what came before.
    pub fn offer(&mut self, job: &Job) -> Option<Shown> {
        self.refresh();
        let number = self.step.wrapping_add(1);
        self.is_free(number).then(|| {
            self.step = number;
            self.put(job, 0, 0..job.plan.chunk_len(0), number);
            self.show(job, number)
        })
    }

    /// Shows the others what this rank has put into its slot.
    fn show(&mut self, job: &Job, number: u32) -> Shown {
        self.node.sign(number, job.signature, false);
        Shown { number, all: self.node.meet(Phase::Packed, number) }
    }

    /// Ends a short call that was shown, once all ranks have; false, and nothing written, when they called other things.
    ///
    /// # Errors
    /// As for [`Channel::first`].
    pub fn taken(&mut self, job: &Job, shown: Shown, patience: &Patience<'_>) -> Result<bool> {
        patience.log().step();
        patience.log().flag();
        if !shown.all {
            self.node.wait(Phase::Packed, shown.number, self.topology.local_size(), patience)?;
        }
        let mut lap = Lap::start(patience.log(), job.plan.chunk_len(0));
        let agreed = self.take(job, shown.number);
        lap.end(Activity::Reduce);
        Ok(agreed)
    }

    /// The same where all have shown theirs already; false also where they have not.
    pub fn take_now(&mut self, job: &Job, shown: &Shown) -> bool {
        shown.all && self.take(job, shown.number)
    }

    fn take(&mut self, job: &Job, number: u32) -> bool {
        // Nobody shows a call before it has ended what came before.
        self.free = number.wrapping_sub(1);
        self.unpacked = number;
        let agreed = self.node.same_signatures(number);
        if agreed {
            let slots = self.node.slots(number);
            slots.iter().for_each(|&slot| sync::reads(slot, job.plan.chunk_len(0)));
            let lane = Lane { topology: &self.topology, chunk: 0, slots };
            // SAFETY: all have packed, and nobody writes to a slot before all have come to the step after this one.
            unsafe { job.op.collective().take(job, &lane) };
        }
        agreed
    }
}
