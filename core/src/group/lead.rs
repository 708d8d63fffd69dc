//! Who runs the calls of a group.
//!
//! Leading is a role: the right to the [`LeadState`], which has the queue. The thread that has it is the leader. A thread
//! that waits for a call takes the role if it is free, and runs the calls up to its own: that saves two thread
//! switches, and other ranks do not notice. Else the group's thread leads. What comes after the own call of a caller,
//! and what the ranks disagree about, is for the group's thread.
//!
//! Nothing is lost between the two: a caller that cannot lead, or leaves something, wakes the thread; the thread waits
//! for the role, and then looks again. Thread rule: any thread may use a [`Lead`].

use std::mem;
use std::sync::{Arc, Mutex, MutexGuard, TryLockError, Weak};
use std::time::Instant;

use super::held::HeldCall;
use super::queue::{Ended, Queue, QueueItem};
use super::record::Record;
use super::run_calls::LeadState;
use super::small_calls::{CallWords, SmallCallInput, StartedCall};
use super::state::GroupState;
use super::thread::{GroupThread, ThreadSettings};
use super::work::Work;
use super::worker::Worker;
use crate::collective::PostedCall;
use crate::error::{Result, guard};
use crate::lock::lock;
use crate::transport::spin::Waiter;

/// See the module's documentation.
pub(super) struct Lead {
    shared: Arc<GroupState>,
    thread: GroupThread<QueueItem>,
    state: Mutex<LeadState>,
}

/// The role, held by a caller.
pub(super) struct Leading<'a> {
    lead: &'a Lead,
    state: MutexGuard<'a, LeadState>,
}

/// A small call that was started: it has completed, or this rank has posted the input of the cached call of this
/// number.
pub(super) type StartedSmall = Option<(usize, PostedCall)>;

impl Lead {
    /// With a worker for channel 0 and the helper threads. The group's thread starts with its first item.
    pub fn new(
        shared: &Arc<GroupState>,
        settings: ThreadSettings,
        worker: Worker,
        helpers: Vec<GroupThread<Arc<Work>>>,
    ) -> Arc<Lead> {
        Arc::new_cyclic(|lead: &Weak<Lead>| {
            let lead = Weak::clone(lead);
            let thread = GroupThread::new(settings, move |_| lead.upgrade().into_iter().for_each(|lead| lead.run()));
            // Set once: the state is new.
            let _set = shared.lead_thread.set(thread.clone());
            let state = Mutex::new(LeadState::new(worker, helpers, Queue::new(thread.clone())));
            Lead { shared: Arc::clone(shared), thread, state }
        })
    }

    /// The body of the thread: runs calls as long as there are any.
    fn run(&self) {
        let mut was_idle = !self.thread.has_items();
        while self.thread.wait() {
            let mut is_settled = false;
            while !mem::replace(&mut is_settled, true) {
                let mut state = self.lock();
                state.queue.idle = mem::take(&mut was_idle);
                let ended = self.run_next(&mut state, Waiter::Thread);
                is_settled = state.queue.is_settled();
                drop(state);
                ended.into_iter().for_each(Ended::finish);
            }
            was_idle = !self.thread.has_items();
        }
    }

    /// As [`LeadState::run_next`]. A defect must not leave callers without an outcome.
    fn run_next(&self, state: &mut LeadState, leader: Waiter) -> Option<Ended> {
        guard(|| Ok(state.run_next(leader))).unwrap_or_else(|error| {
            self.shared.fail(&error);
            state.queue.pop().map(|work| Ended::Call(work, Err(error)))
        })
    }

    /// The role, for a caller, if it is free.
    fn try_lead(&self) -> Option<Leading<'_>> {
        let state = match self.state.try_lock() {
            Ok(state) => state,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        (!state.closed).then_some(Leading { lead: self, state })
    }

    /// The role, for a caller whose call would be the next one, if it is free.
    #[inline]
    pub fn try_lead_idle(&self) -> Option<Leading<'_>> {
        if self.thread.has_items() {
            return None;
        }
        // Another thread may have left a call there since.
        let leading = self.try_lead().filter(|leading| leading.is_idle())?;
        leading.state.worker.channel.set_waiter(Waiter::Caller);
        Some(leading)
    }

    /// The role, for the caller of `work`, which is then in the queue.
    pub fn try_lead_with(&self, work: &Arc<Work>) -> Option<Leading<'_>> {
        let mut leading = self.try_lead()?;
        let state = &mut *leading.state;
        state.queue.drain();
        let is_first = state.held.is_none() && state.queue.is_settled();
        if !is_first && (self.shared.several_hosts || !state.queue.has_agreed()) {
            // The thread takes what was drained.
            drop(leading);
            return None;
        }
        state.queue.idle = is_first;
        state.queue.push(Arc::clone(work));
        Some(leading)
    }

    /// Runs calls on this thread until one `has_ended` that was submitted, as long as this thread can lead.
    pub fn run_until(&self, has_ended: impl Fn() -> bool) {
        if !has_ended() {
            self.run_from(self.try_lead(), has_ended);
        }
    }

    fn run_from<'a>(&'a self, mut leading: Option<Leading<'a>>, has_ended: impl Fn() -> bool) {
        loop {
            let Some(Leading { mut state, .. }) = leading else {
                // Whoever leads may be about to end that, and this call may not be what ends it.
                return self.wake();
            };
            // Calls between hosts that follow each other are under way together: by the thread.
            let ended = match self.shared.several_hosts && state.queue.has_several() {
                true => None,
                false => self.run_next(&mut state, Waiter::Caller),
            };
            let is_settled = state.queue.is_settled();
            drop(state);
            let has_run = ended.is_some();
            ended.into_iter().for_each(Ended::finish);
            if !has_run || has_ended() {
                if !is_settled {
                    self.wake();
                }
                return;
            }
            leading = self.try_lead();
        }
    }

    /// Completes the call `number` that it holds, if the other ranks post the same call within a short spin; returns
    /// whether it has.
    pub fn complete_held(&self, number: u64) -> bool {
        let Some(Leading { mut state, .. }) = self.try_lead() else { return false };
        state.worker.channel.set_waiter(Waiter::Caller);
        let finished = guard(|| Ok(state.finish_held(number)));
        drop(state);
        let done = finished.unwrap_or_else(|error| {
            self.shared.fail(&error);
            None
        });
        done.map(|done| done(Ok(()))).is_some()
    }

    /// Whether it may hold a call; that of this `number`, if given. Does not wait: the leader may wait for other ranks,
    /// and they for what this thread does next.
    pub fn may_hold(&self, number: Option<u64>) -> bool {
        let Some(Leading { state, .. }) = self.try_lead() else { return true };
        state.held.as_ref().is_some_and(|held| number.is_none_or(|number| held.submission.number == number))
    }

    /// The record of the call that it holds, for a dump; `None` while somebody leads.
    pub fn held_record(&self) -> Option<Record> {
        let Leading { state, .. } = self.try_lead()?;
        state.held.as_ref().map(|held| held.submission.record(state.cached_calls.call(held.index)))
    }

    /// Lets the group's thread look for something to do.
    pub fn wake(&self) {
        // A group that is closing looks once more.
        let _none = self.shared.send(QueueItem::Wake);
    }

    /// Starts the threads.
    ///
    /// # Errors
    /// [`crate::error::Error::System`] if the system refuses a thread.
    pub fn start_threads(&self) -> Result<()> {
        self.lock().helpers.iter().try_for_each(GroupThread::start)?;
        self.thread.start()
    }

    /// Ends the calls and the threads, and lets no caller lead any more.
    pub fn close(&self) {
        if self.may_hold(None) {
            self.wake();
        }
        self.thread.close();
        let mut state = self.lock();
        state.closed = true;
        state.queue.drain();
        let held = state.held.take();
        let left: Vec<_> = std::iter::from_fn(|| state.queue.pop()).collect();
        let helpers = mem::take(&mut state.helpers);
        let launches = state.device.as_ref().map(|device| Arc::clone(device.launches()));
        drop(state);
        helpers.iter().for_each(GroupThread::close);
        held.into_iter().for_each(|held| (held.done)(Err(self.shared.ended())));
        left.iter().for_each(|work| work.finish(Err(self.shared.ended())));
        // Calls that other threads start.
        launches.iter().for_each(|launches| launches.wait(self.shared.number));
    }

    /// Closes channel 0's links to other hosts and releases GPU resources; helpers release theirs at exit.
    pub fn release_resources(&self) {
        let mut state = self.lock();
        state.worker.channel.close_links();
        state.worker.staging = None;
        state.device = None;
    }

    fn lock(&self) -> MutexGuard<'_, LeadState> {
        lock(&self.state)
    }
}

impl<'a> Leading<'a> {
    /// Whether there is nothing to do.
    fn is_idle(&self) -> bool {
        self.state.held.is_none() && self.state.queue.is_settled() && !self.lead.thread.has_items()
    }

    /// Starts a small call, as [`super::small_calls::CachedCalls::start`]; `since` is its submission, if it is timed.
    /// `None`: the fast path does not apply. An error has ended the group.
    pub fn start_small<'v>(
        &mut self,
        words: Option<CallWords<'_>>,
        input: impl FnOnce() -> Option<SmallCallInput<'v>>,
        since: Option<Instant>,
        spins: u32,
    ) -> Option<Result<StartedSmall>> {
        let LeadState { worker, cached_calls, unfinished, .. } = &mut *self.state;
        if !unfinished.allow_any() {
            return None;
        }
        let Worker { shared, channel, .. } = worker;
        let started = guard(|| {
            Ok(cached_calls.start(channel, words, input, spins).map(|started| match started {
                StartedCall::Done(stats) => {
                    let number = shared.recorder.number();
                    shared.recorder.count_small(number, stats, shared.next_match_index(number), since);
                    None
                }
                StartedCall::Pending(index, posted) => Some((index, posted)),
            }))
        });
        if let Err(error) = &started {
            shared.fail(error);
        }
        started.transpose()
    }

    /// Leaves a call that this rank has posted to who waits for it.
    pub fn hold(mut self, held: HeldCall) {
        self.state.held = Some(held);
    }

    /// Runs a call that this rank has posted.
    pub fn run_held(mut self, held: HeldCall) {
        self.state.held = Some(held);
        let lead = self.lead;
        // It is the next one.
        lead.run_from(Some(self), || true);
    }

    /// Runs calls until `work` has ended, which was submitted, as long as this thread can lead.
    pub fn run_until_ended(self, work: &Work) {
        let lead = self.lead;
        lead.run_from(Some(self), || work.record.ended().is_some());
    }
}
