//! Calls between hosts that are under way together: a call begins once all ranks are known to have it, while those before
//! it are under way. With each chunk the ranks also compare the calls behind its call ([`crate::collective::Lookahead`]).
//! Short ones of those that they have so compared are fused: they travel together.
//!
//! Thread rule: the leader.

use std::collections::VecDeque;
use std::mem;
use std::sync::Arc;

use smallvec::{SmallVec, smallvec};

use super::call_limits::CallLimits;
use super::memory_use::MemoryUse;
use super::queue::Queue;
use super::state::GroupState;
use super::thread::GroupThread;
use super::unfinished::UnfinishedCalls;
use super::work::{Role, Work};
use super::worker::{Worker, send_parts};
use crate::collective::{ActiveCall, Call, ChunkPlan, ChunkSource, Lookahead, NextChunk};
use crate::error::{Error, Result};

/// A call, or several that are fused.
struct FusedCalls {
    works: SmallVec<[Arc<Work>; 1]>,
    /// Their bytes; `None` if the first one runs alone.
    bytes: Option<usize>,
    /// All of them, if they are several.
    call: Option<Call>,
    /// Of the first: while any call waits, the deadlines of all are checked.
    limits: CallLimits,
    /// Whether all ranks are known to have it.
    matched: bool,
    /// Whether its chunks are in place, once the ranks of the host know that.
    in_place: Option<bool>,
    /// The number of its chunks on this channel that have begun.
    begun: usize,
    /// The number of those that have ended.
    ended: usize,
}

impl FusedCalls {
    fn new(work: Arc<Work>, matched: bool, shared: &Arc<GroupState>) -> FusedCalls {
        let (bytes, works) = (work.call.fused_bytes(), smallvec![Arc::clone(&work)]);
        let limits = CallLimits { work, shared: Arc::clone(shared) };
        FusedCalls { works, bytes, call: None, limits, matched, in_place: None, begun: 0, ended: 0 }
    }

    /// Adds a call if it can be fused with them.
    fn add(&mut self, work: &Arc<Work>) -> bool {
        let first = &self.works[0].call;
        let total = self.bytes.zip(work.call.fused_bytes()).map(|(bytes, more)| bytes + more);
        let fits = total.is_some_and(|total| total <= first.max_fused_bytes()) && work.call.op == first.op;
        if fits {
            self.bytes = total;
            self.works.push(Arc::clone(work));
        }
        fits
    }

    /// Fuses them: there are no more.
    fn complete(&mut self) {
        if let [first, behind @ ..] = &self.works[..]
            && !behind.is_empty()
        {
            self.call = Some(first.call.fused(behind.iter().map(|work| &work.call)));
        }
    }

    fn call(&self) -> &Call {
        self.call.as_ref().unwrap_or(&self.works[0].call)
    }

    fn plan(&self) -> ChunkPlan {
        ChunkPlan::between_hosts(self.call(), self.in_place.unwrap_or(false))
    }

    /// The number of its chunks on this channel.
    fn chunks(&self) -> usize {
        self.plan().chunks(self.call()).div_ceil(self.call().channels())
    }

    /// Whether chunks after the first may begin.
    fn is_settled(&self) -> bool {
        self.matched && self.in_place.is_some()
    }

    /// The next chunk, if it may begin.
    fn next_chunk(&self) -> Option<usize> {
        (self.begun == 0 || self.is_settled()).then(|| self.begun * self.call().channels())
    }
}

/// The calls at the front of a queue.
pub(super) struct ConcurrentCalls<'a> {
    queue: &'a mut Queue,
    unfinished: &'a mut UnfinishedCalls,
    helpers: &'a [GroupThread<Arc<Work>>],
    shared: &'a Arc<GroupState>,
    /// The calls from number `ended` on that may begin: the first one, and those that all ranks are known to have. All
    /// ranks fuse the same ones.
    calls: VecDeque<FusedCalls>,
    /// The number of fused calls that have ended on this channel, and the number of the oldest other one.
    ended: usize,
    /// The number of fused calls whose chunks on this channel have all begun.
    begun: usize,
    /// The number of calls at the front of the queue that can follow those before them.
    following: usize,
    /// What the calls and those that can follow use, and some that have ended if it `is_stale`.
    memory: MemoryUse,
    is_stale: bool,
    /// The last call, once all have ended.
    last: Option<Arc<Work>>,
}

/// Whether a call can be one of them.
pub(super) fn can_be_concurrent(work: &Work) -> bool {
    matches!(work.role, Role::Own) && work.call.can_be_concurrent()
}

impl<'a> ConcurrentCalls<'a> {
    /// The calls from the first one in the queue on, which can be one of them and conflicts with no `unfinished` call.
    pub fn new(
        queue: &'a mut Queue,
        unfinished: &'a mut UnfinishedCalls,
        helpers: &'a [GroupThread<Arc<Work>>],
        shared: &'a Arc<GroupState>,
    ) -> ConcurrentCalls<'a> {
        let first = queue.pop().map(|work| FusedCalls::new(work, false, shared));
        ConcurrentCalls {
            queue,
            unfinished,
            helpers,
            shared,
            calls: first.into_iter().collect(),
            ended: 0,
            begun: 0,
            following: 0,
            memory: MemoryUse::default(),
            is_stale: true,
            last: None,
        }
    }

    /// The calls that may begin or have begun, from the fused call with this index in `calls` on.
    fn works(&self, from: usize) -> impl Iterator<Item = &Arc<Work>> {
        self.calls.iter().skip(from).flat_map(|fused| &fused.works)
    }

    /// Looks for further calls that can follow. A call whose memory conflicts with that of a call before it must wait
    /// until that one has ended.
    fn find_following(&mut self) {
        self.queue.drain();
        while self.following < Lookahead::MAX.min(self.queue.ready())
            && let Some(next) = self.queue.calls.get(self.following).filter(|work| can_be_concurrent(work)).cloned()
        {
            if self.is_stale && (self.following == 0 || self.memory.conflicts_with(&next.call)) {
                let mut memory = MemoryUse::default();
                let before = self.works(0).chain(self.queue.calls.iter().take(self.following));
                before.for_each(|work| memory.add(&work.call));
                (self.memory, self.is_stale) = (memory, false);
            }
            if self.memory.conflicts_with(&next.call) || self.unfinished.conflict_with(&next.call) {
                return;
            }
            self.memory.add(&next.call);
            self.following += 1;
        }
    }

    /// Moves the next `count` calls from the queue to the calls: all ranks are known to have them. All take the same ones
    /// at once, so they fuse the same ones.
    fn take(&mut self, count: usize) {
        let mut taken: Vec<FusedCalls> = Vec::new();
        for work in (0..count).filter_map(|_| self.queue.pop()) {
            if !taken.last_mut().is_some_and(|fused| fused.add(&work)) {
                taken.push(FusedCalls::new(work, true, self.shared));
            }
        }
        taken.iter_mut().for_each(FusedCalls::complete);
        self.calls.extend(taken);
        self.following -= count;
    }

    /// A call counts as started once those before it have ended: until then it is behind them, for its deadline, and in
    /// the statistics.
    fn start_oldest(&self) {
        if let Some(oldest) = self.calls.front().filter(|oldest| oldest.begun > 0) {
            oldest.works.iter().for_each(|work| work.record.start(false));
        }
    }

    /// Sends the helpers their parts of the call with this index in `calls`, if chunks after the first may begin.
    fn send_parts(&mut self, index: usize) {
        let fused = &self.calls[index];
        if let [work] = &fused.works[..]
            && fused.is_settled()
        {
            let plan = fused.plan();
            work.set_plan(plan);
            if send_parts(work, plan.chunks(&work.call), self.helpers, self.shared) {
                self.unfinished.add(&work.call, work, false);
            }
        }
    }

    /// After a difference between the ranks' calls: puts the first call back into the queue.
    ///
    /// # Errors
    /// [`Error::Internal`] if it is another one.
    pub fn give_back(&mut self) -> Result<()> {
        if self.works(0).count() + self.ended > 1 {
            return Err(Error::Internal("ranks out of sync in calls that they had compared".into()));
        }
        self.calls.drain(..).flat_map(|first| first.works).for_each(|work| self.queue.calls.push_front(work));
        Ok(())
    }

    /// After a failure: ends all calls.
    pub fn fail(&mut self, error: &Error) {
        self.calls.drain(..).flat_map(|fused| fused.works).for_each(|work| work.finish(Err(error.clone())));
    }
}

impl ChunkSource for ConcurrentCalls<'_> {
    fn next(&self) -> Option<NextChunk> {
        let fused = self.calls.get(self.begun - self.ended)?;
        let (chunk, is_first) = (fused.next_chunk()?, fused.begun == 0);
        Some(NextChunk { call: self.begun, chunk, is_first, compares: is_first && !fused.matched })
    }

    fn begin(&mut self) -> Lookahead {
        let index = self.begun - self.ended;
        let fused = &mut self.calls[index];
        fused.begun += 1;
        self.begun += usize::from(fused.begun == fused.chunks());
        self.start_oldest();
        self.find_following();
        let following = self.queue.calls.iter().take(self.following);
        Lookahead::new(self.works(index + 1).chain(following).map(|work| work.call.signature))
    }

    fn set_in_place(&mut self, number: usize, in_place: bool) {
        let index = number - self.ended;
        self.calls[index].in_place = Some(in_place);
        self.send_parts(index);
    }

    fn call(&self, number: usize) -> ActiveCall<'_> {
        let fused = &self.calls[number - self.ended];
        ActiveCall::new(fused.call(), fused.plan(), fused.limits.wait_context())
    }

    fn ended(&mut self, _number: usize, ahead: usize) {
        self.take(ahead.saturating_sub(self.works(1).count()));
        let first = &mut self.calls[0];
        first.ended += 1;
        if first.ended == 1 {
            let records = first.works.iter().map(|work| &work.record);
            records.for_each(|record| record.matched(self.shared.next_match_index(record.number)));
        }
        let is_complete = first.ended == first.chunks();
        if !mem::replace(&mut first.matched, true) {
            self.send_parts(0);
        }
        if is_complete {
            (self.ended, self.is_stale) = (self.ended + 1, true);
            let Some(FusedCalls { mut works, .. }) = self.calls.pop_front() else { return };
            self.last = self.calls.is_empty().then(|| works.pop()).flatten();
            works.into_iter().for_each(|work| work.finish(Ok(())));
            self.start_oldest();
        }
    }
}

impl Worker {
    /// Runs the calls at the front of `queue`, of which the first is [`can_be_concurrent`] and conflicts with no
    /// `unfinished` call. Returns the last one, of which the part of this thread has ended and is not finished. `None`, with
    /// the first call at the front, if the ranks' calls differ.
    ///
    /// # Errors
    /// Those of `run_checked`; then the parts of this thread of all calls that were taken from the queue are finished.
    pub fn run_concurrent(
        &mut self,
        queue: &mut Queue,
        unfinished: &mut UnfinishedCalls,
        helpers: &[GroupThread<Arc<Work>>],
    ) -> Result<Option<Arc<Work>>> {
        let shared = Arc::clone(&self.shared);
        let mut calls = ConcurrentCalls::new(queue, unfinished, helpers, &shared);
        let result = self.run_guarded(|channel| {
            channel.open(&calls.call(0).wait_ctx)?;
            let same = channel.run_concurrent(&mut calls)?;
            if !same {
                calls.give_back()?;
            }
            Ok(calls.last.take())
        });
        result.inspect_err(|error| {
            // The callers may free the tensors as soon as they see the error.
            calls.works(0).for_each(|work| self.channel.hold_tensors(&work.call));
            calls.fail(error);
        })
    }
}
