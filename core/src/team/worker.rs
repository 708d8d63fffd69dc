//! The threads of a team: the lead, which takes the calls in order, and the helpers, which take their share of long ones.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender};

use super::Shared;
use super::call::Call;
use crate::collective::Channel;
use crate::error::{Error, Result, guard};
use crate::transport::Patience;

/// One thread of a team and its channel.
pub(super) struct Worker {
    pub shared: Arc<Shared>,
    pub index: usize,
    pub channels: usize,
    pub channel: Channel,
}

impl Worker {
    /// Carries out the calls of `queue` until it closes.
    pub fn lead(mut self, queue: &Receiver<Arc<Call>>, helpers: &[Sender<Arc<Call>>]) {
        while let Ok(call) = queue.recv() {
            let matched = self.attempt(&call, |channel, call, patience| channel.first(&call.job, patience));
            let result = matched.and_then(|()| {
                // Helper h takes the chunks h, h + channels, ...
                let helped = helpers.len().min(call.job.plan.chunks() - 1);
                call.split(helped);
                for helper in &helpers[..helped] {
                    if helper.send(Arc::clone(&call)).is_err() {
                        call.finish(Err(Error::Internal("a thread of the team has ended".into())));
                    }
                }
                self.share(&call)
            });
            call.finish(result);
        }
    }

    /// Carries out this thread's share of the calls of `queue` until it closes.
    pub fn help(mut self, queue: &Receiver<Arc<Call>>) {
        while let Ok(call) = queue.recv() {
            let result = self.share(&call);
            call.finish(result);
        }
    }

    /// The chunks of this thread but the first of all.
    fn share(&mut self, call: &Arc<Call>) -> Result<()> {
        let (index, channels) = (self.index, self.channels);
        self.attempt(call, |channel, call, patience| {
            let chunks = (index..call.job.plan.chunks()).step_by(channels).filter(|&chunk| chunk > 0);
            channel.rest(&call.job, chunks, patience)
        })
    }

    /// Runs `work` unless the team has failed; ends the team when its failure leaves the ranks out of step.
    fn attempt(
        &mut self,
        call: &Arc<Call>,
        work: impl FnOnce(&mut Channel, &Call, &Patience<'_>) -> Result<()>,
    ) -> Result<()> {
        if let Some(error) = self.shared.failure() {
            return Err(error);
        }
        let settings = &self.shared.settings;
        let describe = || call.job.title();
        let interrupted = || self.shared.failure();
        let patience =
            Patience::new(call.started, call.timeout, settings.stall_warn, &call.warned, &describe, &interrupted);
        let channel = &mut self.channel;
        let result = guard(|| work(channel, call, &patience));
        if let Err(error) = &result
            && !error.is_recoverable()
        {
            self.shared.fail(error);
        }
        result
    }
}
