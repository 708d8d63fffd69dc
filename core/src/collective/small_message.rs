//! Short calls on one host, which take one exchange: every rank shows what it brings, and makes the whole result for itself.
//!
//! Thread rule: that of [`Channel`].

use super::{Call, Channel, ShardView};
use crate::error::Result;
use crate::timings::{Activity, PhaseTimer};
use crate::transport::{Phase, WaitContext, sync};

/// A short call under way: this rank has shown what it brings.
#[derive(Debug, Clone, Copy)]
pub struct PostedCall {
    number: u32,
    /// Whether all ranks have.
    all: bool,
}

impl Channel {
    /// A short call in one exchange: every rank shows what it brings, and makes the whole result for itself, by the same
    /// additions as a lane. That costs less than two more turns of flags. Nobody raises `Unpacked`; `begin` does when that
    /// is missed.
    pub(super) fn exchange(&mut self, job: &Call, patience: &WaitContext<'_>) -> Result<bool> {
        let number = self.next_seq(patience)?;
        let len = job.layout.chunk_len(0);
        let mut lap = PhaseTimer::start(patience.log(), len);
        self.copy_in(job, 0, 0..len, number);
        lap.end(Activity::Copy);
        let shown = self.post(job, number);
        self.finish_posted(job, shown, patience)
    }

    /// Begins a short call ([`Call::is_short`]) without waiting for longer than a look; `None`, and nothing is done, when
    /// ranks have not yet ended what came before.
    pub fn try_post(&mut self, job: &Call) -> Option<PostedCall> {
        self.refresh();
        let number = self.seq.wrapping_add(1);
        self.is_free(number).then(|| {
            self.seq = number;
            self.copy_in(job, 0, 0..job.layout.chunk_len(0), number);
            self.post(job, number)
        })
    }

    /// Shows the others what this rank has put into its slot.
    fn post(&mut self, job: &Call, number: u32) -> PostedCall {
        self.shm.post_signature(number, job.signature, false);
        PostedCall { number, all: self.shm.post_and_spin(Phase::Packed, number) }
    }

    /// Ends a short call that was shown, once all ranks have; false, and nothing written, when they called other things.
    ///
    /// # Errors
    /// As for [`Channel::first`].
    pub fn finish_posted(&mut self, job: &Call, shown: PostedCall, patience: &WaitContext<'_>) -> Result<bool> {
        patience.log().step();
        patience.log().flag();
        if !shown.all {
            self.shm.wait(Phase::Packed, shown.number, self.topology.local_size(), patience)?;
        }
        let mut lap = PhaseTimer::start(patience.log(), job.layout.chunk_len(0));
        let agreed = self.take(job, shown.number);
        lap.end(Activity::Reduce);
        Ok(agreed)
    }

    /// The same where all have shown theirs already; false also where they have not.
    pub fn try_finish_posted(&mut self, job: &Call, shown: &PostedCall) -> bool {
        shown.all && self.take(job, shown.number)
    }

    fn take(&mut self, job: &Call, number: u32) -> bool {
        // Nobody shows a call before it has ended what came before.
        self.freed_seq = number.wrapping_sub(1);
        self.unpacked_seq = number;
        let agreed = self.shm.same_signatures(number);
        if agreed {
            let slots = self.shm.slots(number);
            slots.iter().for_each(|&slot| sync::check_read(slot, job.layout.chunk_len(0)));
            let lane = ShardView { topology: &self.topology, chunk: 0, slots };
            // SAFETY: all have packed, and nobody writes to a slot before all have come to the step after this one.
            unsafe { job.op.collective().reduce_to_tensor(job, &lane) };
        }
        agreed
    }
}
