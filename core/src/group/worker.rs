//! A thread of a group, and its part of a call.

use std::sync::Arc;

use super::call_limits::CallLimits;
use super::state::GroupState;
use super::thread::GroupThread;
use super::work::Work;
use crate::collective::Channel;
use crate::collective::device::StagingPipeline;
use crate::error::{Result, guard};
use crate::transport::WaitContext;

/// Sends the helpers their parts of a call of `chunks` chunks, which all ranks are known to have; returns whether there are
/// any. Helper h takes the chunks h, h + channels, ...
pub(super) fn send_parts(
    work: &Arc<Work>,
    chunks: usize,
    helpers: &[GroupThread<Arc<Work>>],
    shared: &GroupState,
) -> bool {
    let helpers = &helpers[..(work.call.channels() - 1).min(chunks - 1)];
    work.add_parts(helpers.len());
    for helper in helpers {
        if let Err((work, reason)) = helper.send(Arc::clone(work)) {
            let error = reason.unwrap_or_else(|| shared.ended());
            // The other ranks wait for this part.
            shared.fail(&error);
            work.finish(Err(error));
        }
    }
    !helpers.is_empty()
}

/// A thread of a group with its channel.
pub(super) struct Worker {
    pub shared: Arc<GroupState>,
    pub index: usize,
    pub rank: usize,
    pub channel: Channel,
    /// For calls on device memory that go through the host; created by the first.
    pub staging: Option<StagingPipeline>,
}

impl Worker {
    /// Runs this thread's chunks of the calls that `thread` is sent.
    pub fn run_helper(&mut self, thread: &GroupThread<Arc<Work>>) {
        while thread.wait() {
            if let Some(work) = thread.take() {
                let result = self.run_own_chunks(&work);
                work.finish(result);
            }
        }
    }

    /// Runs this thread's chunks, except the first chunk of the call.
    pub fn run_own_chunks(&mut self, work: &Arc<Work>) -> Result<()> {
        if work.call.producer().is_some() {
            return self.run_staged_chunks(work);
        }
        let (index, channels) = (self.index, work.call.channels());
        self.run_checked(work, |channel, work, wait_ctx| {
            let plan = work.plan();
            let chunks = (index..plan.chunks(&work.call)).step_by(channels).filter(|&chunk| chunk > 0);
            channel.run_chunks(&work.call, chunks, plan, wait_ctx)
        })
    }

    /// Runs `body` unless the group has failed. Ends the group if an error leaves the ranks out of sync.
    pub fn run_checked<T>(
        &mut self,
        work: &Arc<Work>,
        body: impl FnOnce(&mut Channel, &Work, &WaitContext<'_>) -> Result<T>,
    ) -> Result<T> {
        let limits = CallLimits { work: Arc::clone(work), shared: Arc::clone(&self.shared) };
        let wait_ctx = limits.wait_context();
        let result = self.run_guarded(|channel| {
            channel.open(&wait_ctx)?;
            body(channel, work, &wait_ctx)
        });
        if result.is_err() && self.shared.has_failed() {
            // The caller may free the tensors as soon as it sees the error.
            self.channel.hold_tensors(&work.call);
        }
        result
    }

    /// Runs `body` unless the group has failed. Ends the group if an error leaves the ranks out of sync.
    pub fn run_guarded<T>(&mut self, body: impl FnOnce(&mut Channel) -> Result<T>) -> Result<T> {
        let shared = &self.shared;
        if let Some(error) = shared.failure() {
            return Err(error);
        }
        let channel = &mut self.channel;
        let result = guard(|| body(channel));
        if let Err(error) = &result
            && !error.is_recoverable()
        {
            shared.fail(error);
        }
        result
    }
}
