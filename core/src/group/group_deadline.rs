//! The deadline of the calls of a group that have none of their own.
//!
//! Thread rule: any thread.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use super::work::Timeout;
use crate::deadline::{Deadline, SetBy};

/// See the module's documentation.
pub(super) struct GroupDeadline {
    /// 0 for none.
    nanos: AtomicU64,
    /// Whether it is that of the environment.
    is_default: AtomicBool,
}

impl GroupDeadline {
    pub fn new(deadline: Deadline) -> GroupDeadline {
        let new = GroupDeadline { nanos: AtomicU64::new(0), is_default: AtomicBool::new(true) };
        new.set(deadline);
        new
    }

    pub fn set(&self, deadline: Deadline) {
        let nanos = deadline.after.map_or(0, |timeout| u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX));
        self.nanos.store(nanos, Ordering::Relaxed);
        self.is_default.store(deadline.set_by == SetBy::Environment, Ordering::Relaxed);
    }

    /// The deadline of a call.
    pub fn of(&self, timeout: Timeout) -> Deadline {
        match timeout {
            Timeout::GroupDefault => {
                let after = Some(self.nanos.load(Ordering::Relaxed)).filter(|&nanos| nanos > 0);
                let is_default = self.is_default.load(Ordering::Relaxed);
                let set_by = if is_default { SetBy::Environment } else { SetBy::Group };
                Deadline { after: after.map(Duration::from_nanos), set_by }
            }
            Timeout::Override(after) => Deadline { after, set_by: SetBy::Call },
        }
    }
}
