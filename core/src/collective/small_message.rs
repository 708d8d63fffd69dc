//! Short calls on one host, which take one exchange: every rank shows what it brings, and makes the whole result for itself.
//!
//! Thread rule: that of [`Channel`].

use super::call::Call;
use super::channel::Channel;
use super::phases::ShardView;
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
    /// additions as a shard. That costs less than two more turns of flags. Nobody raises `Unpacked`; `begin` does when that
    /// is missed.
    pub(super) fn exchange(&mut self, call: &Call, wait_ctx: &WaitContext<'_>) -> Result<bool> {
        let number = self.next_seq(wait_ctx)?;
        let len = call.layout.chunk_len(0);
        let mut timer = PhaseTimer::start(wait_ctx.log(), len);
        self.copy_in(call, 0, 0..len, number);
        timer.end(Activity::Copy);
        let posted = self.post(call, number);
        self.finish_posted(call, posted, wait_ctx)
    }

    /// Begins a short call ([`Call::is_short`]) without waiting for longer than a look; `None`, and nothing is done, when
    /// ranks have not yet ended what came before.
    pub fn try_post(&mut self, call: &Call) -> Option<PostedCall> {
        self.refresh();
        let number = self.seq.wrapping_add(1);
        self.is_free(number).then(|| {
            self.seq = number;
            self.copy_in(call, 0, 0..call.layout.chunk_len(0), number);
            self.post(call, number)
        })
    }

    /// Shows the others what this rank has put into its slot.
    fn post(&mut self, call: &Call, number: u32) -> PostedCall {
        self.shm.post_signature(number, call.signature, false);
        PostedCall { number, all: self.shm.post_and_spin(Phase::Packed, number) }
    }

    /// Ends a short call that was shown, once all ranks have; false, and nothing written, when they called other things.
    ///
    /// # Errors
    /// As for [`Channel::first`].
    pub fn finish_posted(&mut self, call: &Call, posted: PostedCall, wait_ctx: &WaitContext<'_>) -> Result<bool> {
        wait_ctx.log().step();
        wait_ctx.log().flag();
        if !posted.all {
            self.shm.wait(Phase::Packed, posted.number, self.topology.local_size(), wait_ctx)?;
        }
        let mut timer = PhaseTimer::start(wait_ctx.log(), call.layout.chunk_len(0));
        let agreed = self.take(call, posted.number);
        timer.end(Activity::Reduce);
        Ok(agreed)
    }

    /// The same where all have shown theirs already; false also where they have not.
    pub fn try_finish_posted(&mut self, call: &Call, posted: &PostedCall) -> bool {
        posted.all && self.take(call, posted.number)
    }

    fn take(&mut self, call: &Call, number: u32) -> bool {
        // Nobody shows a call before it has ended what came before.
        self.freed_seq = number.wrapping_sub(1);
        self.unpacked_seq = number;
        let agreed = self.shm.same_signatures(number);
        if agreed {
            let slots = self.shm.slots(number);
            slots.iter().for_each(|&slot| sync::check_read(slot, call.layout.chunk_len(0)));
            let shard = ShardView { topology: &self.topology, chunk: 0, slots };
            // SAFETY: all have packed, and nobody writes to a slot before all have come to the step after this one.
            unsafe { call.op.collective().reduce_to_tensor(call, &shard) };
        }
        agreed
    }
}
