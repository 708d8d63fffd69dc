//! The options of a call that a schedule may delay.

use std::sync::Arc;

use super::schedule_state::ResultBuffer;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::group::{CallOptions, Timeout};

/// Called once with the outcome of a call: the buffer that holds the result, or `None` when the result is in the call's own
/// tensors. Threads as for [`crate::group::OnComplete`].
pub type OnResult = Box<dyn FnOnce(Result<Option<Arc<dyn ResultBuffer>>>) + Send>;

/// The options of a call on a [`super::Team`].
pub struct StepOptions {
    /// Those that every group has.
    pub call: CallOptions,
    /// Receives the outcome.
    pub done: OnResult,
    /// Owns the memory of the call's tensors. Without it the call cannot return before its allreduce has ended.
    pub results: Option<Arc<dyn ResultBuffer>>,
    /// Tells apart, on this rank only, equal lists of tensors of one name, for example of two optimizers.
    pub owner: u64,
    /// The call belongs to the step of the call before, which the schedule has counted.
    pub continues_step: bool,
    /// The caller adds its own mean and the carried one itself; see [`ResultBuffer::set_weights`]. Needs `results`.
    pub return_weights: bool,
    /// The caller waits until the call is done: the time counts as exposed.
    pub count_wait: bool,
}

impl StepOptions {
    /// The defaults: no name, no buffer, and the caller's wait is counted.
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

    /// Sets the deadline.
    pub fn with_timeout(mut self, timeout: Timeout) -> StepOptions {
        self.call.timeout = timeout;
        self
    }

    /// Sets the device of the tensors.
    pub fn with_device(mut self, device: Option<Device>) -> StepOptions {
        self.call.device = device;
        self
    }

    /// Refuses the call before it reaches a team.
    pub fn fail(self, error: Error) {
        (self.done)(Err(error));
    }
}
