//! Options of calls that follow a schedule.

use std::sync::Arc;

use super::schedule_state::ResultBuffer;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::group::{CallOptions, Timeout};

/// Called once with the outcome of a call: the buffer with the result, or `None` if the result is in the call's own
/// tensors. Thread rule as for [`crate::group::OnComplete`].
pub type OnResult = Box<dyn FnOnce(Result<Option<Arc<dyn ResultBuffer>>>) + Send>;

/// The options of a call on a [`super::Team`].
pub struct StepOptions {
    /// Options of every group.
    pub call: CallOptions,
    /// Receives the outcome.
    pub done: OnResult,
    /// Owns the memory of the call's tensors. Without it the call cannot return before its allreduce has completed.
    pub results: Option<Arc<dyn ResultBuffer>>,
    /// Distinguishes, on this rank only, equal lists of tensors with one name, for example of two optimizers.
    pub owner: u64,
    /// The call belongs to the training step of the previous call, so the schedule does not count it.
    pub continues_step: bool,
    /// The caller itself adds the new and the carried mean; see [`ResultBuffer::set_weights`]. Requires `results`.
    pub return_weights: bool,
    /// The caller blocks until completion: the time counts as exposed.
    pub count_wait: bool,
}

impl StepOptions {
    /// Defaults: no name, no buffer, and the caller's wait counts.
    pub fn new(done: OnResult) -> StepOptions {
        StepOptions {
            call: CallOptions::default(),
            done,
            results: None,
            owner: 0,
            continues_step: false,
            return_weights: false,
            count_wait: true,
        }
    }

    /// Sets the timeout.
    pub fn with_timeout(mut self, timeout: Timeout) -> StepOptions {
        self.call.timeout = timeout;
        self
    }

    /// Sets the device of the tensors.
    pub fn with_device(mut self, device: Option<Device>) -> StepOptions {
        self.call.device = device;
        self
    }

    /// Completes the call with an error, without a team.
    pub fn fail(self, error: Error) {
        (self.done)(Err(error));
    }
}
