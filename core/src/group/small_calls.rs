//! Calls that are over before anything else could be started for them: a short list, averaged on one host by a caller that
//! waits, when the other ranks come at about the same time.
//!
//! The first such call goes the long way and leaves its job in the executor; a later one that is like it puts its memory into
//! that job and shows it to the other ranks. If all of them have shown theirs within a short look, that was all: no
//! allocation, no system call, no change of threads. If not, the call goes on as any other, from that step.
//! Thread rule: a [`CachedCall`] is in the executor; a [`SmallCallStats`] is written by who has the executor and read by anybody.

use std::sync::Arc;

use super::call_summary::{SAMPLE_EVERY, SmallCallStats};
use crate::buffer::View;
use crate::collective::{Call, Channel, Op, PostedCall};

/// As many kinds of short calls are kept.
const MAX_CACHED: usize = 8;

/// Whether the call after the `matched`-th is one of those that are timed: whichever, so that no rhythm of calls is missed.
pub(super) fn is_sampled(matched: u64) -> bool {
    matched.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32 & (SAMPLE_EVERY - 1) == 0
}

/// The job of a short call, for those that are like it.
struct CachedCall {
    call: Call,
    kind: Arc<SmallCallStats>,
}

/// The templates of a executor.
#[derive(Default)]
pub(super) struct CachedCalls {
    calls: Vec<CachedCall>,
    /// Whose place the next one takes.
    oldest: usize,
}

/// How a short call began.
pub(super) enum SmallCall<'a> {
    /// It is over, one of these.
    Done(&'a SmallCallStats),
    /// It goes on as any other call, after what was shown.
    Pending(Box<Call>, PostedCall),
}

impl CachedCalls {
    /// Keeps `call`, which was carried out, as a template for others like it.
    pub fn keep(&mut self, call: &Call, kind: impl FnOnce() -> Arc<SmallCallStats>) {
        if self.calls.iter().any(|template| template.call.signature == call.signature) {
            return;
        }
        let template = CachedCall { call: call.clone(), kind: kind() };
        if self.calls.len() < MAX_CACHED {
            self.calls.push(template);
        } else {
            self.calls[self.oldest] = template;
            self.oldest = (self.oldest + 1) % MAX_CACHED;
        }
    }

    /// Begins a call, if there is a template for it and nothing is to be waited for before.
    pub fn begin(&mut self, channel: &mut Channel, op: Op, name: &str, views: &[View<'_>]) -> Option<SmallCall<'_>> {
        let template = self.calls.iter_mut().find_map(|template| {
            let fits = template.call.rebind_buffers(op, name, views);
            fits.then_some(template)
        })?;
        let posted = channel.try_post(&template.call)?;
        Some(match channel.try_finish_posted(&template.call, &posted) {
            true => SmallCall::Done(&template.kind),
            false => SmallCall::Pending(Box::new(template.call.clone()), posted),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_call_of_eight_is_timed_in_any_rhythm() {
        for rhythm in 1..20 {
            let timed = (0..8000).filter(|work| is_sampled(work * rhythm)).count();
            assert!((600..1400).contains(&timed), "{timed} of 8000 in steps of {rhythm}");
        }
    }
}
