//! Calls of one chunk between hosts that are under way together: a call begins once all ranks are known to have it, while
//! those before it are under way. Each call also compares the calls behind it ([`crate::collective::Lookahead`]).
//!
//! Thread rule: the leader.

use std::collections::VecDeque;
use std::sync::Arc;

use super::call_limits::CallLimits;
use super::queue::Queue;
use super::state::GroupState;
use super::unfinished::UnfinishedCalls;
use super::work::{Role, Work};
use super::worker::Worker;
use crate::collective::{ActiveCall, ChunkSource, Lookahead, NextChunk};
use crate::error::{Error, Result};

/// The calls at the front of a queue.
pub(super) struct ConcurrentCalls<'a> {
    queue: &'a mut Queue,
    unfinished: &'a mut UnfinishedCalls,
    shared: &'a Arc<GroupState>,
    /// The calls from number `ended` on that may begin: the first one, and those that all ranks are known to have.
    calls: VecDeque<CallLimits>,
    /// The number of calls that have ended, and the number of the oldest other one.
    ended: usize,
    /// The number of calls that have begun.
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

    /// Looks for further calls that can follow. A call whose memory conflicts with that of a call before it must wait
    /// until that one has ended.
    fn find_following(&mut self) {
        self.queue.drain();
        while self.following < Lookahead::MAX.min(self.queue.ready())
            && let Some(next) = self.queue.calls.get(self.following).filter(|work| can_be_concurrent(work))
        {
            let queued = self.queue.calls.iter().take(self.following);
            let mut before = self.calls.iter().map(|call| &call.work).chain(queued);
            if before.any(|work| work.call.conflicts_with(&next.call)) || self.unfinished.conflict_with(&next.call) {
                return;
            }
            self.following += 1;
        }
    }

    /// The number of calls that may have begun.
    fn known(&self) -> usize {
        self.ended + self.calls.len()
    }

    /// Moves the next `count` calls from the queue to the calls.
    fn take(&mut self, count: usize) {
        let works = (0..count).filter_map(|_| self.queue.pop());
        self.calls.extend(works.map(|work| CallLimits { work, shared: Arc::clone(self.shared) }));
        self.following -= count;
    }

    /// A call counts as started once those before it have ended: until then it is behind them, for its deadline, and in
    /// the statistics.
    fn start_oldest(&self) {
        if self.ended < self.begun {
            self.calls[0].work.record.start(false);
        }
    }

    /// After a difference between the ranks' calls: puts the first call back into the queue.
    ///
    /// # Errors
    /// [`Error::Internal`] if it is another one.
    pub fn give_back(&mut self) -> Result<()> {
        if self.known() > 1 {
            return Err(Error::Internal("ranks out of sync in calls that they had compared".into()));
        }
        self.calls.drain(..).for_each(|first| self.queue.calls.push_front(first.work));
        Ok(())
    }

    /// After a failure: ends all calls.
    pub fn fail(&mut self, error: &Error) {
        self.calls.drain(..).for_each(|call| call.work.finish(Err(error.clone())));
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
        let known = self.calls.iter().skip(self.begun - self.ended).map(|call| &call.work);
        let following = self.queue.calls.iter().take(self.following);
        Lookahead::new(known.chain(following).map(|work| work.call.signature))
    }

    fn call(&self, number: usize) -> ActiveCall<'_> {
        let limits = &self.calls[number - self.ended];
        ActiveCall::new(&limits.work.call, limits.wait_context())
    }

    fn ended(&mut self, number: usize, ahead: usize) {
        self.take((number + 1 + ahead).saturating_sub(self.known()));
        self.ended += 1;
        let Some(CallLimits { work, .. }) = self.calls.pop_front() else { return };
        work.record.matched(self.shared.next_match_index());
        if self.calls.is_empty() {
            self.last = Some(work);
        } else {
            work.finish(Ok(()));
            self.start_oldest();
        }
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
