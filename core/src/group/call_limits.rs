//! The limits of the waits of a call.
//!
//! Thread rule: any thread.

use std::sync::Arc;

use super::state::GroupState;
use super::work::Work;
use crate::error::Error;
use crate::log::log_line;
use crate::transport::WaitContext;
use crate::transport::wait_context::WaitCallbacks;

/// The limits of the waits of a call.
pub(super) struct CallLimits {
    pub work: Arc<Work>,
    pub shared: Arc<GroupState>,
}

impl CallLimits {
    /// They hold from its submission on.
    pub fn wait_context(&self) -> WaitContext<'_> {
        let Work { record, deadline, warned, .. } = &*self.work;
        let warn = self.shared.settings.stall_warn;
        WaitContext::new(record.submitted, *deadline, warn, warned, &record.timings, self)
    }
}

impl WaitCallbacks for CallLimits {
    fn describe(&self) -> String {
        self.work.call.summary()
    }

    fn abort_reason(&self) -> Option<Error> {
        self.shared.abort_reason(&self.work)
    }

    fn on_stall(&self, text: &str) {
        log_line(text);
        (self.shared.on_failure)(text);
    }
}
