//! Fast path for small blocking calls on one host: completes inline when all ranks arrive together.
//!
//! The first call of its kind takes the normal path and is cached in the executor. A later call like it rebinds the
//! cached call to its memory and posts its input. If all ranks have posted within a short spin, it completes without
//! allocation, system call or thread switch. Otherwise it continues as a normal call from that round.
//! Thread rule: a [`CachedCall`] belongs to the executor. The thread that holds the executor writes [`SmallCallStats`];
//! any thread reads them.

use std::sync::Arc;

use smallvec::SmallVec;

use super::call_summary::{SAMPLE_EVERY, SmallCallStats};
use crate::buffer::View;
use crate::collective::{Call, Channel, Op, PostedCall, SmallPlan};

/// Maximum number of cached calls.
const MAX_CACHED: usize = 8;

/// Whether to time the call after the `matched`-th: pseudo-random, so no periodic pattern is missed.
pub(super) fn is_sampled(matched: u64) -> bool {
    matched.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32 & (SAMPLE_EVERY - 1) == 0
}

/// A call on host memory as its caller has written it, without anything that may change behind its address. Calls whose
/// words are the same differ in the addresses of their tensors only, so the others need not be read.
#[derive(Debug, Clone, Copy)]
pub struct CallWords<'a> {
    /// The collective, the operator, its factors and the root.
    pub head: [u64; 4],
    /// The tensors.
    pub tensors: &'a [TensorWords],
}

/// A tensor of [`CallWords`].
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct TensorWords {
    /// The source.
    pub src: *const u8,
    /// The destination.
    pub dst: *mut u8,
    /// The type and shape.
    pub words: [u64; 3],
}

/// What a small call is, read from its caller's structures.
pub struct SmallCallInput<'a> {
    /// The collective.
    pub op: Op,
    /// The name.
    pub name: &'a str,
    /// Whether it matches by its name.
    pub by_name: bool,
    /// The tensors.
    pub views: &'a [View<'a>],
}

/// The words of the call that a cached call was last used for; no tensors if they are not known.
#[derive(Default)]
struct LastWords {
    head: [u64; 4],
    tensors: SmallVec<[[u64; 3]; 2]>,
}

impl LastWords {
    #[inline]
    fn are(&self, words: CallWords<'_>) -> bool {
        // A barrier has nothing to read; it takes 0.12 us this way, and 0.19 by its words, for an unknown reason.
        let found = !words.tensors.is_empty() && self.tensors.len() == words.tensors.len() && self.head == words.head;
        found && self.tensors.iter().zip(words.tensors).all(|(known, tensor)| *known == tensor.words)
    }

    fn set(&mut self, words: Option<CallWords<'_>>) {
        self.tensors.clear();
        if let Some(words) = words {
            self.head = words.head;
            self.tensors.extend(words.tensors.iter().map(|tensor| tensor.words));
        }
    }
}

/// A small call, for reuse by calls like it.
struct CachedCall {
    call: Call,
    words: LastWords,
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
        let cached = CachedCall { call: call.clone(), words: LastWords::default(), plan, stats: stats() };
        if self.calls.len() < MAX_CACHED {
            self.calls.push(cached);
        } else {
            self.calls[self.oldest] = cached;
            self.oldest = (self.oldest + 1) % MAX_CACHED;
        }
    }

    /// Starts a call if a cached one matches and no rank is behind. `input` reads it, unless its words are known.
    pub fn start<'v>(
        &mut self,
        channel: &mut Channel,
        words: Option<CallWords<'_>>,
        input: impl FnOnce() -> Option<SmallCallInput<'v>>,
    ) -> Option<SmallCall<'_>> {
        let known = words.and_then(|words| {
            let index = self.calls.iter().position(|cached| cached.words.are(words))?;
            let memory = words.tensors.iter().map(|tensor| (tensor.src, tensor.dst));
            Some(self.calls[index].call.rebind_memory(memory).then_some(index))
        });
        let index = match known {
            Some(index) => index?,
            None => self.find(words, &input()?)?,
        };
        let CachedCall { call, plan, stats, .. } = &mut self.calls[index];
        let posted = channel.try_post(call, plan)?;
        Some(match channel.try_finish_posted(call, plan, &posted) {
            true => SmallCall::Done(stats),
            false => SmallCall::Pending(Box::new(call.clone()), posted),
        })
    }

    /// The index of the cached call for this input, which gets its memory and its words.
    fn find(&mut self, words: Option<CallWords<'_>>, input: &SmallCallInput<'_>) -> Option<usize> {
        let &SmallCallInput { op, name, by_name, views } = input;
        let index = self.calls.iter_mut().position(|cached| cached.call.rebind_buffers(op, name, by_name, views))?;
        self.calls[index].words.set(words);
        Some(index)
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
