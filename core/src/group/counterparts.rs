//! The wait for the counterparts of calls that match by name. This rank takes part in the next round without a call: it
//! has posted none of its own, so a call can end at its deadline although other ranks may still come for the round.
//!
//! Thread rule: the leader.

use std::cell::RefCell;
use std::sync::Arc;

use super::queue::Queue;
use super::state::GroupState;
use super::work::Work;
use super::worker::Worker;
use crate::collective::Call;
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::log::log_line;
use crate::transport::WaitContext;
use crate::transport::wait_context::WaitCallbacks;

/// The limits of the wait.
struct Limits<'a> {
    queue: RefCell<&'a mut Queue>,
    shared: &'a GroupState,
    /// The call that has waited longest at the start.
    oldest: &'a Arc<Work>,
}

impl WaitCallbacks for Limits<'_> {
    fn describe(&self) -> String {
        self.oldest.call.summary()
    }

    fn abort_reason(&self) -> Option<Error> {
        let mut queue = self.queue.borrow_mut();
        queue.drain();
        queue.end_overdue();
        if !queue.is_empty() {
            return self.shared.abort_reason(self.oldest);
        }
        self.shared.failure().or_else(|| queue.closed.then(|| self.shared.ended()))
    }

    fn on_stall(&self, text: &str) {
        log_line(text);
        (self.shared.on_failure)(text);
    }
}

impl Worker {
    /// Waits until all ranks take part in the next round, in which their calls differ. Ends calls of `queue`, of which
    /// `oldest` is the oldest, at their deadlines.
    ///
    /// # Errors
    /// Those of `run_checked`; [`Error::State`] if no call is left and the group is closing.
    pub fn await_counterparts(&mut self, queue: &mut Queue, oldest: &Arc<Work>) -> Result<()> {
        let shared = Arc::clone(&self.shared);
        let call = Call::waiting(shared.config.clone())?;
        let limits = Limits { queue: RefCell::new(queue), shared: &shared, oldest };
        let Work { record, warned, .. } = &**oldest;
        // The deadlines are those of the calls.
        let deadline = Deadline::default();
        let wait_ctx =
            WaitContext::new(record.submitted, deadline, shared.settings.stall_warn, warned, &record.timings, &limits);
        self.run_guarded(|channel| {
            channel.open(&wait_ctx)?;
            if channel.start_call(&call, &wait_ctx)? {
                return Err(Error::Internal("a rank has matched no call".into()));
            }
            Ok(())
        })
    }
}
