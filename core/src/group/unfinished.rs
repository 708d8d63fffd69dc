//! Calls of a group that have started and not ended, while later calls may start: other threads run their chunks, or a
//! GPU runs them. A call that conflicts with one of them waits for it, so that calls take effect in their order.
//!
//! Thread rule: belongs to the leader.

use std::sync::Arc;
use std::time::Instant;

use super::memory_use::MemoryUse;
use super::work::Work;
use crate::collective::Call;
use crate::error::Result;

/// The unfinished calls before the next one.
#[derive(Default)]
pub(super) struct UnfinishedCalls(Vec<Unfinished>);

struct Unfinished {
    memory: MemoryUse,
    on_device: bool,
    /// Whether the GPU runs it before later calls that this is true for, though it may not have got it yet.
    keeps_order: bool,
    /// Ends with the call.
    work: Arc<Work>,
    /// When it was seen to have ended.
    ended: Option<Instant>,
}

impl UnfinishedCalls {
    /// Adds a call that uses the memory of `described` and ends with `work`. `keeps_order`: the GPU runs it before later
    /// calls that this is true for.
    pub fn add(&mut self, described: &Call, work: &Arc<Work>, keeps_order: bool) {
        let (memory, on_device) = (MemoryUse::of(described), described.producer().is_some());
        self.0.push(Unfinished { memory, on_device, keeps_order, work: Arc::clone(work), ended: None });
    }

    /// Whether a call on host memory may start, whatever memory it uses.
    #[inline]
    pub fn allow_any(&mut self) -> bool {
        self.0.is_empty() || {
            self.forget_ended(None);
            self.0.iter().all(|before| before.on_device)
        }
    }

    /// Whether `call`, on host memory, must wait.
    pub fn conflict_with(&mut self, call: &Call) -> bool {
        self.forget_ended(None);
        self.0.iter().any(|before| before.memory.conflicts_with(call))
    }

    /// Waits until `work` may start, and returns it, or what replaces it. `keeps_order` as in [`UnfinishedCalls::add`]: then
    /// it waits for none of these calls, which may in turn wait for other groups. Waits only for threads of this rank, which
    /// wait for no later call of the group.
    ///
    /// # Errors
    /// [`crate::error::Error::System`] of a GPU's driver.
    pub fn wait_for_turn(&mut self, work: &Arc<Work>, keeps_order: bool) -> Result<Arc<Work>> {
        if self.0.is_empty() {
            return Ok(Arc::clone(work));
        }
        self.forget_ended(Some(work.record.submitted));
        let mut follows_on_device = false;
        let precedes =
            |before: &&Unfinished| !(keeps_order && before.keeps_order) && before.memory.conflicts_with(&work.call);
        for before in self.0.iter().filter(precedes) {
            before.work.wait_until_ended();
            follows_on_device |= before.on_device;
        }
        // The call waits for the point on its stream at which it was submitted. That may be before the results of these.
        if follows_on_device { work.again_on_stream().map(Arc::new) } else { Ok(Arc::clone(work)) }
    }

    /// Forgets calls that have ended. Those on a GPU put the end of their results onto the caller's stream when they
    /// end: calls that were `submitted` later follow them by that.
    fn forget_ended(&mut self, submitted: Option<Instant>) {
        self.0.retain_mut(|before| {
            if before.ended.is_none() && before.work.has_ended() {
                before.ended = Some(Instant::now());
            }
            match (before.ended, submitted) {
                (None, _) => true,
                (Some(_), _) if !before.on_device => false,
                (Some(_), None) => true,
                (Some(ended), Some(submitted)) => ended >= submitted,
            }
        });
    }
}
