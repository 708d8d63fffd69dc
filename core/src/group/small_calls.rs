//! Fast path for small blocking calls on one host: completes inline when all ranks arrive together.
//!
//! The first call of its kind takes the normal path and is cached. A later call like it rebinds the
//! cached call to its memory and posts its input. If all ranks have posted within a short spin, it completes without
//! allocation, system call or thread switch. Otherwise it continues as a normal call from that round ([`super::held`]).
//! Thread rule: the cached calls belong to the leader, which writes [`SmallCallStats`]; any thread reads them.

use std::sync::Arc;

use smallvec::SmallVec;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::call_summary::{SAMPLE_EVERY, SmallCallStats};
use crate::buffer::View;
use crate::collective::{Call, Channel, Op, PostedCall, SmallPlan};
use crate::error::Result;
use crate::hashed_map::HashedMap;
use crate::transport::WaitContext;

/// Maximum number of cached calls.
const MAX_CACHED: usize = 256;

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

impl CallWords<'_> {
    /// Its key in the table; `None` if it has nothing to read.
    fn key(&self) -> Option<u64> {
        // A barrier takes 0.12 us by its input, and 0.19 by its words, for an unknown reason.
        let mut key = Key(self.tensors.len() as u64);
        let words = self.head.iter().chain(self.tensors.iter().flat_map(|tensor| &tensor.words));
        words.for_each(|&word| key.add(word));
        (!self.tensors.is_empty()).then(|| key.finish())
    }
}

impl SmallCallInput<'_> {
    /// Its key in the table.
    fn key(&self) -> u64 {
        let mut key = Key(xxh3_64_with_seed(self.name.as_bytes(), u64::from(self.by_name)));
        key.add(std::ptr::from_ref(self.op.collective).addr() as u64 ^ u64::from(self.op.reduce.code()));
        key.add(self.op.root as u64);
        for view in self.views {
            key.add(view.buffer.len() as u64);
            key.add(view.buffer.dtype() as u64);
            view.shape.iter().for_each(|&size| key.add(size as u64));
        }
        key.finish()
    }
}

/// The key of some words. It multiplies and rotates: a few cycles a word; what a key finds is compared in full.
struct Key(u64);

impl Key {
    fn add(&mut self, word: u64) {
        self.0 = (self.0.rotate_left(5) ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }

    fn finish(self) -> u64 {
        self.0 ^ self.0 >> 32
    }
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
        let found = !words.tensors.is_empty() && self.tensors.len() == words.tensors.len() && self.head == words.head;
        found && self.tensors.iter().zip(words.tensors).all(|(known, tensor)| *known == tensor.words)
    }

    fn set(&mut self, words: CallWords<'_>) {
        self.head = words.head;
        self.tensors = words.tensors.iter().map(|tensor| tensor.words).collect();
    }
}

/// A small call, for reuse by calls like it.
struct CachedCall {
    call: Call,
    words: LastWords,
    plan: SmallPlan,
    stats: Arc<SmallCallStats>,
    /// The entry of the call that followed it, which is tried first.
    next: usize,
    /// Whether it was used since it was last considered for replacement.
    used: bool,
}

/// The cached calls of a group.
#[derive(Default)]
pub(super) struct CachedCalls {
    calls: Vec<CachedCall>,
    /// Keys of words and of inputs. An entry may have been replaced since: what it finds is compared.
    by_key: HashedMap<usize>,
    /// The entry that was used last.
    last: usize,
    /// The next entry to consider for replacement.
    oldest: usize,
}

/// The outcome of the fast path.
pub(super) enum StartedCall<'a> {
    /// Completed.
    Done(&'a SmallCallStats),
    /// This rank has posted the input of the cached call of this number. No call is cached before it has ended.
    Pending(usize, PostedCall),
}

impl CachedCalls {
    /// Caches `call`, which has completed.
    pub fn keep(&mut self, channel: &mut Channel, call: &Call, stats: impl FnOnce() -> Arc<SmallCallStats>) {
        if self.calls.iter().any(|cached| cached.call.signature == call.signature) {
            return;
        }
        // Without one it has not completed.
        let Ok(plan) = channel.take_small_plan(call) else { return };
        let (words, next) = (LastWords::default(), self.last);
        let cached = CachedCall { call: call.clone(), words, plan, stats: stats(), next, used: true };
        if self.calls.len() < MAX_CACHED {
            return self.calls.push(cached);
        }
        // Second chance: the first that was not used since the last look.
        while std::mem::take(&mut self.calls[self.oldest].used) {
            self.oldest = (self.oldest + 1) % MAX_CACHED;
        }
        let replaced = self.oldest;
        self.by_key.retain(|_, index| *index != replaced);
        self.calls[replaced] = cached;
        self.oldest = (replaced + 1) % MAX_CACHED;
    }

    /// Starts a call if a cached one matches and no rank is behind. `input` reads it, unless its words are known. It
    /// spins at most `spins` times for the other ranks.
    pub fn start<'v>(
        &mut self,
        channel: &mut Channel,
        words: Option<CallWords<'_>>,
        input: impl FnOnce() -> Option<SmallCallInput<'v>>,
        spins: u32,
    ) -> Option<StartedCall<'_>> {
        let expected = self.calls.get(self.last)?.next;
        let index = match words.and_then(|words| self.find_words(expected, words)) {
            Some((index, words)) => {
                let memory = words.tensors.iter().map(|tensor| (tensor.src, tensor.dst));
                self.calls[index].call.rebind_memory(memory).then_some(index)?
            }
            None => self.find(expected, words, &input()?)?,
        };
        self.calls[self.last].next = index;
        self.last = index;
        let CachedCall { call, plan, stats, used, .. } = &mut self.calls[index];
        *used = true;
        let posted = channel.try_post(call, plan, spins)?;
        Some(match channel.try_finish_posted(call, plan, &posted) {
            true => StartedCall::Done(stats),
            false => StartedCall::Pending(index, posted),
        })
    }

    /// Completes the cached call `index`, which this rank has posted, if all ranks post the same call within a short
    /// spin.
    pub fn finish(&mut self, channel: &mut Channel, index: usize, posted: &mut PostedCall) -> Option<&SmallCallStats> {
        let CachedCall { call, plan, stats, .. } = &mut self.calls[index];
        let has_ended = channel.spin_posted(posted) && channel.try_finish_posted(call, plan, posted);
        has_ended.then_some(stats)
    }

    /// As [`CachedCalls::finish`], but waits for the other ranks, and the calls may differ.
    pub fn wait(
        &mut self,
        channel: &mut Channel,
        index: usize,
        posted: PostedCall,
        wait_ctx: &WaitContext<'_>,
    ) -> Result<bool> {
        let CachedCall { call, plan, .. } = &mut self.calls[index];
        channel.finish_posted(call, plan, posted, wait_ctx)
    }

    /// The cached call `index`.
    pub fn call(&self, index: usize) -> &Call {
        &self.calls[index].call
    }

    /// The index of the cached call with these words.
    #[inline]
    fn find_words<'w>(&self, expected: usize, words: CallWords<'w>) -> Option<(usize, CallWords<'w>)> {
        let are = |&index: &usize| self.calls[index].words.are(words);
        let other = || self.by_key.get(&words.key()?).copied().filter(are);
        Some(expected).filter(are).or_else(other).map(|index| (index, words))
    }

    /// The index of the cached call for this input, which gets its memory and its words.
    fn find(&mut self, expected: usize, words: Option<CallWords<'_>>, input: &SmallCallInput<'_>) -> Option<usize> {
        let &SmallCallInput { op, name, by_name, views } = input;
        let number = self.calls.len();
        let mut rebinds = |index: &usize| self.calls[*index].call.rebind_buffers(op, name, by_name, views);
        let index = if rebinds(&expected) {
            expected
        } else {
            let key = input.key();
            let known = self.by_key.get(&key).copied();
            let index = known.filter(&mut rebinds).or_else(|| (0..number).find(rebinds))?;
            self.note(key, index);
            index
        };
        if let Some((words, key)) = words.and_then(|words| Some((words, words.key()?))) {
            self.calls[index].words.set(words);
            self.note(key, index);
        }
        Some(index)
    }

    /// Enters a key, of which a call may have many: it has many words if its caller writes one call in many ways.
    fn note(&mut self, key: u64, index: usize) {
        if self.by_key.len() >= 4 * MAX_CACHED {
            self.by_key.clear();
        }
        self.by_key.insert(key, index);
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
