//! A small call that was started and is completed by whoever waits for it.
//!
//! This rank has posted its input, so the other ranks do not wait for it. That saves two thread switches. The lead thread
//! completes it if somebody tests the handle, waits with a limit or drops it, before the next call, and when the group
//! looks for ranks that lack a call.
//! Thread rule: any thread may use a [`HeldCall`].

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::executor::Executor;
use super::state::GroupState;
use super::work::{QueueItem, Work};
use crate::fork;

/// See the module's documentation.
pub(super) struct HeldCall {
    shared: Arc<GroupState>,
    executor: Arc<Executor>,
    work: Arc<Work>,
    /// Whether somebody has taken it on.
    taken: AtomicBool,
}

impl HeldCall {
    /// `work`, which the executor holds.
    pub fn new(shared: &Arc<GroupState>, executor: &Arc<Executor>, work: Arc<Work>) -> HeldCall {
        HeldCall { shared: Arc::clone(shared), executor: Arc::clone(executor), work, taken: AtomicBool::new(false) }
    }

    /// Completes the call on this thread, if nobody else does.
    pub fn complete(&self) {
        if !self.taken.swap(true, Ordering::AcqRel) && self.executor.run_posted(&self.work) {
            wake_lead(&self.shared);
        }
    }

    /// Leaves it to the lead thread.
    pub fn hand_over(&self) {
        if !self.taken.swap(true, Ordering::AcqRel) && self.executor.may_hold_posted(Some(&self.work)) {
            wake_lead(&self.shared);
        }
    }
}

impl Drop for HeldCall {
    fn drop(&mut self) {
        // The threads of a child are those of its parent.
        if !fork::is_child() {
            self.hand_over();
        }
    }
}

/// Lets the lead thread go on with the call that the executor holds.
pub(super) fn wake_lead(shared: &GroupState) {
    // Without a queue the group is closing, and checks the executor once more.
    let _none = shared.send(QueueItem::Held);
}
