//! Calls of one chunk between hosts that are under way together: a call begins once all ranks are known to have it, while
//! those before it are under way. Each call also compares the calls behind it ([`crate::collective::Lookahead`]). Short
//! ones of those that the ranks have so compared are fused: they travel together.
//!
//! Thread rule: the leader.

use std::collections::VecDeque;
use std::sync::Arc;

use smallvec::{SmallVec, smallvec};

use super::call_limits::CallLimits;
use super::queue::Queue;
use super::state::GroupState;
use super::unfinished::UnfinishedCalls;
use super::work::{Role, Work};
use super::worker::Worker;
use crate::collective::{ActiveCall, Call, ChunkSource, Lookahead, NextChunk};
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
}

impl FusedCalls {
    fn new(work: Arc<Work>, shared: &Arc<GroupState>) -> FusedCalls {
        let (bytes, works) = (work.call.fused_bytes(), smallvec![Arc::clone(&work)]);
        FusedCalls { works, bytes, call: None, limits: CallLimits { work, shared: Arc::clone(shared) } }
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
}

/// The calls at the front of a queue.
pub(super) struct ConcurrentCalls<'a> {
    queue: &'a mut Queue,
    unfinished: &'a mut UnfinishedCalls,
    shared: &'a Arc<GroupState>,
    /// The calls from number `ended` on that may begin: the first one, and those that all ranks are known to have. All
    /// ranks fuse the same ones.
    calls: VecDeque<FusedCalls>,
    /// The number of fused calls that have ended, and the number of the oldest other one.
    ended: usize,
    /// The number of fused calls that have begun.
    begun: usize,
    /// The number of calls at the front of the queue that can follow those before them.
    following: usize,
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
        shared: &'a Arc<GroupState>,
    ) -> ConcurrentCalls<'a> {
        let (calls, following, last) = (VecDeque::new(), 1, None);
        let mut all = ConcurrentCalls { queue, unfinished, shared, calls, ended: 0, begun: 0, following, last };
        all.take(1);
        all
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
            && let Some(next) = self.queue.calls.get(self.following).filter(|work| can_be_concurrent(work))
        {
            let before = || self.works(0).chain(self.queue.calls.iter().take(self.following));
            let conflicts = before().any(|work| work.call.conflicts_with(&next.call));
            if conflicts || self.unfinished.conflict_with(&next.call) {
                return;
            }
            self.following += 1;
        }
    }

    /// The number of fused calls that may have begun.
    fn known(&self) -> usize {
        self.ended + self.calls.len()
    }

    /// Moves the next `count` calls from the queue to the calls. All ranks take the same ones at once, so they fuse the
    /// same ones.
    fn take(&mut self, count: usize) {
        let mut taken: Vec<FusedCalls> = Vec::new();
        for work in (0..count).filter_map(|_| self.queue.pop()) {
            if !taken.last_mut().is_some_and(|fused| fused.add(&work)) {
                taken.push(FusedCalls::new(work, self.shared));
            }
        }
        taken.iter_mut().for_each(FusedCalls::complete);
        self.calls.extend(taken);
        self.following -= count;
    }

    /// A call counts as started once those before it have ended: until then it is behind them, for its deadline, and in
    /// the statistics.
    fn start_oldest(&self) {
        if self.ended < self.begun {
            self.calls[0].works.iter().for_each(|work| work.record.start(false));
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
        (self.begun < self.known()).then_some(NextChunk { call: self.begun, chunk: 0, compares: true })
    }

    fn begin(&mut self) -> Lookahead {
        self.begun += 1;
        self.start_oldest();
        self.find_following();
        let following = self.queue.calls.iter().take(self.following);
        Lookahead::new(self.works(self.begun - self.ended).chain(following).map(|work| work.call.signature))
    }

    fn call(&self, number: usize) -> ActiveCall<'_> {
        let fused = &self.calls[number - self.ended];
        ActiveCall::new(fused.call(), fused.limits.wait_context())
    }

    fn ended(&mut self, _number: usize, ahead: usize) {
        self.take(ahead.saturating_sub(self.works(1).count()));
        self.ended += 1;
        let Some(FusedCalls { mut works, .. }) = self.calls.pop_front() else { return };
        works.iter().for_each(|work| work.record.matched(self.shared.next_match_index()));
        self.last = self.calls.is_empty().then(|| works.pop()).flatten();
        works.into_iter().for_each(|work| work.finish(Ok(())));
        self.start_oldest();
    }
}

impl Worker {
    /// Runs the calls at the front of `queue`, of which the first is [`can_be_concurrent`] and conflicts with no
    /// `unfinished` call. Returns the last one, which has ended and is not finished. `None`, with the first call at the
    /// front, if the ranks' calls differ.
    ///
    /// # Errors
    /// Those of `run_checked`; then all calls that were taken from the queue are finished.
    pub fn run_concurrent(&mut self, queue: &mut Queue, unfinished: &mut UnfinishedCalls) -> Result<Option<Arc<Work>>> {
        let shared = Arc::clone(&self.shared);
        let mut calls = ConcurrentCalls::new(queue, unfinished, &shared);
        let result = self.run_guarded(|channel| {
            channel.open(&calls.call(0).wait_ctx)?;
            let same = channel.run_concurrent(&mut calls)?;
            if !same {
                calls.give_back()?;
            }
            Ok(calls.last.take())
        });
        result.inspect_err(|error| calls.fail(error))
    }
}
