//! Small calls on one host in one round: every rank posts its input and takes or computes the whole result.
//!
//! Thread rule: that of [`Channel`].

use super::call::Call;
use super::channel::Channel;
use super::path_choice::CallPath;
use super::plan::Plan;
use super::small_plan::SmallPlan;
use crate::error::Result;
use crate::timings::{Activity, PhaseTimer};
use crate::transport::{Phase, SlotContent, WaitContext};

/// A small call in progress: this rank has posted its input.
#[derive(Debug, Clone, Copy)]
pub struct PostedCall {
    seq: u32,
    /// Whether all ranks have posted.
    all_posted: bool,
}

impl Channel {
    /// Runs a small call in one round: every rank posts its input and computes the whole result, in a shard's order of
    /// addition. That saves two rounds of flags. No rank raises `Unpacked`; `begin_round` does if it is needed.
    pub(super) fn exchange(&mut self, call: &Call, wait_ctx: &WaitContext<'_>) -> Result<bool> {
        let seq = self.begin_small_round(wait_ctx)?;
        let len = call.layout.chunk_len(0);
        let mut timer = PhaseTimer::start(wait_ctx.log(), len);
        self.copy_in(call, 0, 0..0, seq);
        timer.end(Activity::Copy);
        let posted = self.post(call, seq, u32::MAX);
        self.finish_posted(call, posted, wait_ctx)
    }

    /// Starts a small call ([`Call::is_small`]) without blocking; spins at most `spins` times for the other ranks.
    /// `None`, without effect, if some rank has not finished the previous call, or if the call takes its second path.
    pub fn try_post(&mut self, call: &Call, plan: &SmallPlan, spins: u32) -> Option<PostedCall> {
        self.refresh();
        let kind = self.kind(call, call.layout.total());
        if kind.is_some_and(|kind| self.path(call, kind) == CallPath::Second) {
            return None;
        }
        let seq = self.try_begin_small_round()?;
        self.start_timer(call, call.layout.total(), kind);
        // SAFETY: this rank owns its slot of the round; the plan is that of a call like this one.
        unsafe { plan.pack(call, self.shm.small_slots(seq)) };
        Some(self.post(call, seq, spins))
    }

    /// Posts this rank's slot to the other ranks.
    #[inline]
    fn post(&mut self, call: &Call, seq: u32, spins: u32) -> PostedCall {
        self.post_path_note(seq);
        self.shm.post_signature(seq, call.signature, SlotContent::Data);
        PostedCall { seq, all_posted: self.shm.post_and_spin(seq, spins) }
    }

    /// Spins for the other ranks; returns whether all have posted.
    pub fn spin_posted(&self, posted: &mut PostedCall) -> bool {
        posted.all_posted = posted.all_posted || self.shm.spin_small(posted.seq, u32::MAX);
        posted.all_posted
    }

    /// Completes a posted call once all ranks have posted; false, with nothing written, if the calls differ.
    ///
    /// # Errors
    /// As for [`Channel::run_first_chunk`].
    pub fn finish_posted(&mut self, call: &Call, posted: PostedCall, wait_ctx: &WaitContext<'_>) -> Result<bool> {
        // That of an earlier call remains if this one was posted without blocking.
        self.plan = Plan { total: call.layout.total(), ..Plan::default() };
        wait_ctx.log().step();
        wait_ctx.log().flag();
        if !posted.all_posted {
            self.shm.wait(Phase::Packed, posted.seq, self.topology.local_size(), wait_ctx)?;
        }
        let mut timer = PhaseTimer::start(wait_ctx.log(), call.layout.chunk_len(0));
        let agreed = self.end_small_round(posted.seq);
        if agreed {
            self.take(call, 0, posted.seq);
            self.end_timer();
        }
        timer.end(Activity::Reduce);
        Ok(agreed)
    }

    /// As `finish_posted`, but also false, without waiting, if some rank has not posted.
    pub fn try_finish_posted(&mut self, call: &Call, plan: &mut SmallPlan, posted: &PostedCall) -> bool {
        let agreed = posted.all_posted && self.end_small_round(posted.seq);
        if agreed {
            // SAFETY: all ranks have packed; the plan is that of a call like this one, which owns its tensors.
            unsafe { plan.take(call, self.shm.small_slots(posted.seq)) };
            self.end_timer();
        }
        agreed
    }

    /// Ends round `seq` of a small call, which all ranks have posted; returns whether their calls are the same.
    #[inline]
    fn end_small_round(&mut self, seq: u32) -> bool {
        // A rank posts a call only after it has finished the previous one.
        self.freed_seq = seq.wrapping_sub(1);
        self.unpacked_seq = seq;
        let agreed = self.shm.same_signatures(seq);
        if agreed {
            debug_assert_eq!(self.shm.zero_copy_ranks(seq), 0, "the ranks disagree on the path");
            self.agree_on_path(seq);
        } else {
            self.timer = None;
        }
        agreed
    }
}
