//! Small calls on one host in one round: every rank posts its input and takes or computes the whole result, in a
//! shard's order of addition. That saves two rounds of flags. No rank raises `Unpacked`; the next round does if it is
//! needed.
//!
//! What a small call copies and reduces is found by the first one of its kind ([`SmallPlan`]). Calls like it on other
//! memory can then be posted without blocking. Thread rule: that of [`Channel`].

use super::call::Call;
use super::channel::Channel;
use super::path_choice::CallPath;
use super::plan::ChunkPlan;
use super::small_plan::SmallPlan;
use crate::error::Result;
use crate::timings::{Activity, PhaseTimer};
use crate::transport::rounds::{AllPacked, Open, Packed};
use crate::transport::{SlotContent, WaitContext};

/// A small call in progress: this rank has posted its input.
#[derive(Debug, Clone, Copy)]
pub struct PostedCall {
    packed: Packed,
    /// Once all ranks have posted.
    all_packed: Option<AllPacked>,
}

impl Channel {
    /// The plan of `call`, a small one: that which it has just run by, if it has run in one round.
    ///
    /// # Errors
    /// [`Error::Internal`] without a kernel, which validated calls have.
    pub fn take_small_plan(&mut self, call: &Call) -> Result<SmallPlan> {
        self.small_plan.take().map_or_else(|| SmallPlan::new(call, &self.topology), Ok)
    }

    /// Runs a small call in one round; false, with nothing written, if the ranks' calls differ.
    pub(super) fn run_small(&mut self, call: &Call, wait_ctx: &WaitContext<'_>) -> Result<bool> {
        let mut plan = SmallPlan::new(call, &self.topology)?;
        let open = self.rounds.begin_small(wait_ctx)?;
        let mut timer = PhaseTimer::start(wait_ctx.log(), call.layout.chunk_len(0));
        let posted = self.post(call, &plan, open, u32::MAX);
        timer.end(Activity::Copy);
        let agreed = self.finish_posted(call, &mut plan, posted, wait_ctx)?;
        self.small_plan = agreed.then_some(plan);
        Ok(agreed)
    }

    /// Starts a small call ([`Call::is_small`]) without blocking; spins at most `spins` times for the other ranks.
    /// `None`, without effect, if some rank has not finished the previous call, or if the call takes its second path.
    pub fn try_post(&mut self, call: &Call, plan: &SmallPlan, spins: u32) -> Option<PostedCall> {
        self.rounds.refresh();
        let kind = self.kind(call, call.layout.total());
        if kind.is_some_and(|kind| self.path(call, kind) == CallPath::Second) {
            return None;
        }
        let open = self.rounds.try_begin_small()?;
        self.start_timer(call, call.layout.total(), kind);
        Some(self.post(call, plan, open, spins))
    }

    /// Posts this rank's input to the other ranks.
    #[inline]
    fn post(&mut self, call: &Call, plan: &SmallPlan, open: Open, spins: u32) -> PostedCall {
        // SAFETY: the round is open, so this rank owns its slot; the plan is that of a call like this one.
        unsafe { plan.pack(call, self.rounds.slots(open, 0)) };
        self.post_path_note(open);
        let (packed, all_packed) = open.pack_small(&self.rounds, call.signature, spins);
        PostedCall { packed, all_packed }
    }

    /// Spins for the other ranks; returns whether all have posted.
    pub fn spin_posted(&self, posted: &mut PostedCall) -> bool {
        posted.all_packed = posted.all_packed.or_else(|| posted.packed.spin(&self.rounds));
        posted.all_packed.is_some()
    }

    /// Completes a posted call once all ranks have posted; false, with nothing written, if the calls differ.
    ///
    /// # Errors
    /// As for [`Channel::run_first_chunk`].
    pub fn finish_posted(
        &mut self,
        call: &Call,
        plan: &mut SmallPlan,
        posted: PostedCall,
        wait_ctx: &WaitContext<'_>,
    ) -> Result<bool> {
        // That of an earlier call remains if this one was posted without blocking.
        self.plan = ChunkPlan { total: call.layout.total(), ..ChunkPlan::default() };
        wait_ctx.log().round();
        wait_ctx.log().flag();
        let all_packed = match posted.all_packed {
            Some(all_packed) => all_packed,
            None => posted.packed.wait(&self.rounds, wait_ctx)?,
        };
        let mut timer = PhaseTimer::start(wait_ctx.log(), call.layout.chunk_len(0));
        let agreed = self.finish(call, plan, all_packed);
        timer.end(Activity::Reduce);
        Ok(agreed)
    }

    /// As [`Channel::finish_posted`], but also false, without waiting, if some rank has not posted.
    pub fn try_finish_posted(&mut self, call: &Call, plan: &mut SmallPlan, posted: &PostedCall) -> bool {
        posted.all_packed.is_some_and(|all_packed| self.finish(call, plan, all_packed))
    }

    /// Ends the round of a small call; false, with nothing written, if the ranks' calls differ.
    #[inline]
    fn finish(&mut self, call: &Call, plan: &mut SmallPlan, all_packed: AllPacked) -> bool {
        all_packed.end_small(&mut self.rounds);
        if !all_packed.same_signatures(&self.rounds) {
            self.timer = None;
            return false;
        }
        debug_assert!(all_packed.contents(&self.rounds).are_all(SlotContent::Data), "the ranks disagree on the path");
        self.agree_on_path(all_packed);
        // SAFETY: all ranks have packed; the plan is that of a call like this one, which owns its tensors.
        unsafe { plan.take(call, self.rounds.slots(all_packed, 0)) };
        self.end_timer();
        true
    }
}
