//! Fast path for small blocking calls on one host: completes inline when all ranks arrive together.
//!
//! The first call of its kind takes the normal path and is cached in the executor. A later call like it rebinds the
//! cached call to its memory and posts its input. If all ranks have posted within a short spin, it completes without
//! allocation, system call or thread switch. Otherwise it continues as a normal call from that round.
//! Thread rule: a [`CachedCall`] belongs to the executor. The thread that holds the executor writes [`SmallCallStats`];
//! any thread reads them.

use std::sync::Arc;

use super::call_summary::{SAMPLE_EVERY, SmallCallStats};
use crate::buffer::View;
use crate::collective::{Call, Channel, Op, PostedCall, SmallPlan};

/// Maximum number of cached calls.
const MAX_CACHED: usize = 8;

/// Whether to time the call after the `matched`-th: pseudo-random, so no periodic pattern is missed.
pub(super) fn is_sampled(matched: u64) -> bool {
    matched.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32 & (SAMPLE_EVERY - 1) == 0
}

/// A small call, for reuse by calls like it.
struct CachedCall {
    call: Call,
    plan: SmallPlan,
    stats: Arc<SmallCallStats>,
}

/// The cached calls of an executor.
#[derive(Default)]
pub(super) struct CachedCalls {
    calls: Vec<CachedCall>,
    /// The next entry to replace.
    oldest: usize,
}

/// The outcome of the fast path.
pub(super) enum SmallCall<'a> {
    /// Completed.
    Done(&'a SmallCallStats),
    /// Continues as a normal call after the posted input.
    Pending(Box<Call>, PostedCall),
}

impl CachedCalls {
    /// Caches `call`, which has completed.
    pub fn keep(&mut self, channel: &Channel, call: &Call, stats: impl FnOnce() -> Arc<SmallCallStats>) {
        if self.calls.iter().any(|cached| cached.call.signature == call.signature) {
            return;
        }
        let Some(plan) = channel.small_plan(call) else { return };
        let cached = CachedCall { call: call.clone(), plan, stats: stats() };
        if self.calls.len() < MAX_CACHED {
            self.calls.push(cached);
        } else {
            self.calls[self.oldest] = cached;
            self.oldest = (self.oldest + 1) % MAX_CACHED;
        }
    }

    /// Starts a call if a cached one matches and no rank is behind.
    pub fn start(&mut self, channel: &mut Channel, op: Op, name: &str, views: &[View<'_>]) -> Option<SmallCall<'_>> {
        let CachedCall { call, plan, stats } = self.calls.iter_mut().find_map(|cached| {
            let matches = cached.call.rebind_buffers(op, name, views);
            matches.then_some(cached)
        })?;
        let posted = channel.try_post(call, plan)?;
        Some(match channel.try_finish_posted(call, plan, &posted) {
            true => SmallCall::Done(stats),
            false => SmallCall::Pending(Box::new(call.clone()), posted),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_call_in_eight_is_timed_for_any_period() {
        for period in 1..20 {
            let num_timed = (0..8000).filter(|work| is_sampled(work * period)).count();
            assert!((600..1400).contains(&num_timed), "{num_timed} of 8000 in steps of {period}");
        }
    }
}
