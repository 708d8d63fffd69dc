//! The calls of a group that wait to run.
//!
//! Thread rule: a [`Queue`] belongs to the leader.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::thread::GroupThread;
use super::work::{OnComplete, Work};
use crate::collective::list_of_ranks;
use crate::collective::matching::Lacking;
use crate::error::{Error, Result};

/// What the group's thread is sent. Whoever leads takes it.
pub(super) enum QueueItem {
    /// A call.
    Call(Arc<Work>),
    /// Nothing: there is something to do for the thread.
    Wake,
    /// Other ranks are stalled in a round for which this rank has no call.
    JoinStalled,
}

/// A call whose part on this thread has ended, and is not finished.
#[must_use]
pub(super) enum Ended {
    Call(Arc<Work>, Result<()>),
    /// A small one that had no record, with success.
    Small(OnComplete),
}

impl Ended {
    /// Completes the call. Without the role: others can then lead.
    pub fn finish(self) {
        match self {
            Ended::Call(work, result) => work.finish(result),
            Ended::Small(done) => done(Ok(())),
        }
    }
}

/// Calls that were taken from the thread's items and have not ended.
pub(super) struct Queue {
    thread: GroupThread<QueueItem>,
    pub calls: VecDeque<Arc<Work>>,
    /// The number of calls at the front that all ranks have, as they have decided.
    decided: usize,
    /// Calls that match by name and lacked a counterpart when the ranks decided, in the order of their submission; and
    /// those that always need a decision.
    unmatched: Vec<Arc<Work>>,
    /// When the last item came.
    pub arrived: Instant,
    /// Whether nobody led before the first call came.
    pub idle: bool,
    /// Whether other ranks are stalled in a round.
    pub joins_stalled: bool,
    /// Whether the ranks have found in a round that their calls differ, and have not decided.
    pub differs: bool,
    pub closed: bool,
}

impl Queue {
    /// An empty queue of what `thread` is sent.
    pub fn new(thread: GroupThread<QueueItem>) -> Queue {
        Queue {
            thread,
            calls: VecDeque::new(),
            decided: 0,
            unmatched: Vec::new(),
            arrived: Instant::now(),
            idle: false,
            joins_stalled: false,
            differs: false,
            closed: false,
        }
    }

    /// Takes all that the thread was sent.
    pub fn drain(&mut self) {
        // Before the last items are taken, so that none comes after it.
        self.closed = self.thread.is_closed();
        while self.thread.has_items()
            && let Some(item) = self.thread.take()
        {
            match item {
                QueueItem::Call(work) => self.push(work),
                QueueItem::Wake => {}
                QueueItem::JoinStalled => self.joins_stalled = true,
            }
            self.arrived = Instant::now();
        }
    }

    /// Waits up to `timeout` for an item; returns whether one came.
    pub fn wait_for_more(&mut self, timeout: Duration) -> bool {
        self.thread.wait_timeout(timeout)
    }

    /// Adds a call at the end.
    pub fn push(&mut self, work: Arc<Work>) {
        if work.ends_alone() { self.unmatched.push(work) } else { self.calls.push_back(work) }
    }

    /// Whether there is nothing to do, as far as items were taken.
    pub fn is_settled(&self) -> bool {
        self.is_empty() && !self.joins_stalled && !self.differs
    }

    /// Whether it has no call.
    pub fn is_empty(&self) -> bool {
        self.calls.is_empty() && self.unmatched.is_empty()
    }

    /// Whether it has more than one call.
    pub fn has_several(&self) -> bool {
        self.calls.len() + self.unmatched.len() > 1
    }

    /// The oldest call that lacks its counterpart, if the ranks must decide before any call runs: one that does may have
    /// to follow it, and it is never the one that a rank starts with. So a rank can give it up.
    pub fn awaits(&self) -> Option<&Arc<Work>> {
        self.unmatched.first().filter(|_| self.decided == 0)
    }

    /// Whether this rank knows of nothing that the ranks disagree about.
    pub fn has_agreed(&self) -> bool {
        !self.differs && !self.joins_stalled && self.awaits().is_none()
    }

    /// The number of calls at the front that may start one after the other, for all that this rank knows.
    pub fn ready(&self) -> usize {
        if self.unmatched.is_empty() { self.calls.len() } else { self.decided }
    }

    /// Removes the first call.
    pub fn pop(&mut self) -> Option<Arc<Work>> {
        let first = self.calls.pop_front().or_else(|| self.unmatched.pop());
        self.decided = self.decided.saturating_sub(1);
        first
    }

    /// Puts a call that all ranks have to the front.
    pub fn push_decided(&mut self, work: Arc<Work>) {
        self.calls.push_front(work);
        self.decided += 1;
    }

    /// Before the ranks decide: all calls, in the order of their submission.
    pub fn gather(&mut self) {
        self.decided = 0;
        if !self.unmatched.is_empty() {
            self.calls.extend(self.unmatched.drain(..));
            self.calls.make_contiguous().sort_by_key(|work| work.record.number);
        }
    }

    /// Notes which ranks lack which calls.
    pub fn note_lacking(&self, lacking: &Lacking) {
        let by_key: HashMap<u64, &Vec<usize>> = lacking.iter().map(|(key, ranks)| (*key, ranks)).collect();
        for work in self.calls.iter().filter(|work| !by_key.is_empty() && work.call.is_by_name()) {
            by_key.get(&work.call.key()).into_iter().for_each(|ranks| work.set_lacking(ranks));
        }
    }

    /// Moves the calls with the signatures `order` to the front, in that order: all ranks have them.
    pub fn decide(&mut self, order: &[u64]) {
        let mut chosen: HashMap<u64, (usize, VecDeque<Arc<Work>>)> = HashMap::new();
        order.iter().for_each(|&signature| chosen.entry(signature).or_default().0 += 1);
        let mut others = VecDeque::with_capacity(self.calls.len());
        for work in self.calls.drain(..) {
            match chosen.get_mut(&work.call.signature) {
                Some((number, works)) if works.len() < *number => works.push_back(work),
                _ => others.push_back(work),
            }
        }
        self.calls.extend(order.iter().filter_map(|signature| chosen.get_mut(signature)?.1.pop_front()));
        self.calls.iter().for_each(|work| work.record.set_unmatched(false));
        self.decided = self.calls.len();
        others.iter().for_each(|work| work.reset_unmatched());
        self.calls.append(&mut others);
    }

    /// After the ranks have decided: sets the calls by name that cannot run aside.
    pub fn set_aside(&mut self) {
        let others = self.calls.split_off(self.decided.min(self.calls.len()));
        let (by_name, others): (Vec<_>, Vec<_>) = others.into_iter().partition(|work| work.call.is_by_name());
        self.unmatched.extend(by_name);
        self.calls.extend(others);
    }

    /// Ends the calls by name whose deadline has passed. Only while no other rank can count on them: in a round without a
    /// call of this rank, and before the ranks decide.
    pub fn end_overdue(&mut self) {
        let stays = |work: &Arc<Work>| {
            let waited = work.record.submitted.elapsed();
            let stays = !work.call.is_by_name() || !work.deadline.is_over(waited);
            if !stays {
                let (call, seconds, set_by) = (work.call.summary(), waited.as_secs_f64(), work.deadline.set_by);
                let ranks = match &work.lacking()[..] {
                    [] => "some rank".to_owned(),
                    ranks => list_of_ranks(ranks),
                };
                let text = format!("  {call}: {ranks} had not made this call after {seconds:.1} s ({set_by})");
                work.finish(Err(Error::Mismatch(text)));
            }
            stays
        };
        self.calls.retain(stays);
        self.unmatched.retain(stays);
    }
}
