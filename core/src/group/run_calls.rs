//! What the leader of a group does with the next call: its rounds, its chunks, and what the ranks disagree about.
//!
//! Thread rule: the leader ([`super::lead`]).

use std::mem;
use std::sync::Arc;

use super::concurrent_calls::can_be_concurrent;
use super::device::DeviceExecutor;
use super::held::HeldCall;
use super::other_groups::OtherGroups;
use super::queue::{Ended, Queue};
use super::small_calls::CachedCalls;
use super::thread::GroupThread;
use super::unfinished::UnfinishedCalls;
use super::work::{OnComplete, Role, Work};
use super::worker::{Worker, send_parts};
use crate::collective::Call;
use crate::collective::device::wait_event;
use crate::error::{Error, Result};
use crate::transport::spin::Waiter;

/// What the leader has.
pub(super) struct LeadState {
    pub worker: Worker,
    /// The threads of the other channels.
    pub helpers: Vec<GroupThread<Arc<Work>>>,
    pub queue: Queue,
    /// Precedes the calls of the queue.
    pub held: Option<HeldCall>,
    pub unfinished: UnfinishedCalls,
    pub cached_calls: CachedCalls,
    /// For calls on device memory; created by the first.
    pub device: Option<DeviceExecutor>,
    pub closed: bool,
}

impl LeadState {
    /// With a worker for channel 0, and what `queue` takes its calls from.
    pub fn new(worker: Worker, helpers: Vec<GroupThread<Arc<Work>>>, queue: Queue) -> LeadState {
        LeadState {
            worker,
            helpers,
            queue,
            held: None,
            unfinished: UnfinishedCalls::default(),
            cached_calls: CachedCalls::default(),
            device: None,
            closed: false,
        }
    }

    /// Handles the next call; returns it when this thread's part of it has ended, unless it is finished. A caller
    /// leaves what the ranks disagree about to the group's thread: deadlines of single calls hold there.
    pub fn run_next(&mut self, leader: Waiter) -> Option<Ended> {
        self.worker.channel.set_waiter(leader);
        self.queue.drain();
        let held = self.held.as_ref().map(|held| held.submission.number);
        if let Some(completed) = held.and_then(|number| self.complete_held(number)) {
            return match completed {
                Ok(ended) => Some(ended),
                Err(work) => {
                    self.queue.calls.push_front(work);
                    self.differ(leader)
                }
            };
        }
        if leader == Waiter::Thread {
            if self.queue.differs {
                return self.reconcile();
            }
            // There may be a call meanwhile.
            let joins_stalled = mem::take(&mut self.queue.joins_stalled);
            if let Some(oldest) = self.queue.awaits() {
                let oldest = Arc::clone(oldest);
                return self.await_counterparts(&oldest);
            }
            if joins_stalled && self.queue.calls.is_empty() {
                return self.join_stalled();
            }
        } else if !self.queue.has_agreed() {
            return None;
        }
        let work = Arc::clone(self.queue.calls.front()?);
        let work = match self.wait_for_turn(&work) {
            Ok(work) => work,
            Err(error) => {
                self.queue.pop();
                return Some(Ended::Call(work, Err(error)));
            }
        };
        self.queue.calls[0] = Arc::clone(&work);
        if leader == Waiter::Thread && self.worker.shared.several_hosts && can_be_concurrent(&work) {
            return match self.worker.run_concurrent(&mut self.queue, &mut self.unfinished, &self.helpers) {
                Ok(Some(last)) => Some(Ended::Call(last, Ok(()))),
                Err(_) => None,
                Ok(None) => self.reconcile(),
            };
        }
        let was_idle = mem::take(&mut self.queue.idle);
        match self.run_first_chunk(&work, was_idle) {
            Ok(true) => {
                self.cache_call(&work);
                let ended = self.run_matched(&work);
                self.queue.pop();
                Some(ended)
            }
            Ok(false) => self.differ(leader),
            Err(error) => {
                self.queue.pop();
                Some(Ended::Call(work, Err(error)))
            }
        }
    }

    /// The ranks' calls differ, of which that of this rank is the first in the queue.
    fn differ(&mut self, leader: Waiter) -> Option<Ended> {
        self.queue.differs = true;
        if leader == Waiter::Thread { self.reconcile() } else { None }
    }

    /// Completes the held call of this `number` without a record, if the other ranks post the same call within a short
    /// spin. Returns what it then calls.
    pub fn finish_held(&mut self, number: u64) -> Option<OnComplete> {
        let LeadState { worker, cached_calls, held, .. } = self;
        let Worker { shared, channel, .. } = worker;
        let call = held.as_mut().filter(|held| held.submission.number == number && held.origin.waiting().is_none())?;
        if shared.has_failed() {
            return None;
        }
        let stats = cached_calls.finish(channel, call.index, &mut call.posted)?;
        shared.recorder.count_small(number, stats, shared.next_match_index(number), call.since);
        held.take().map(|held| held.done)
    }

    /// Completes the held call on this thread.
    ///
    /// # Errors
    /// The call, if the ranks' calls differ.
    fn complete_held(&mut self, number: u64) -> Option<std::result::Result<Ended, Arc<Work>>> {
        if let Some(done) = self.finish_held(number) {
            return Some(Ok(Ended::Small(done)));
        }
        let HeldCall { index, posted, submission, origin, timeout, done, .. } = self.held.take()?;
        let LeadState { worker, cached_calls, .. } = self;
        let shared = &worker.shared;
        let call = cached_calls.call(index).clone();
        let work = Arc::new(shared.work(call, Role::Own, Some(submission), origin, timeout, done));
        work.record.start(true);
        let agreed =
            worker.run_checked(&work, |channel, _, wait_ctx| cached_calls.wait(channel, index, posted, wait_ctx));
        Some(match agreed {
            Ok(true) => Ok(self.run_matched(&work)),
            Ok(false) => Err(work),
            Err(error) => Ok(Ended::Call(work, Err(error))),
        })
    }

    /// Waits until the calls before `work` allow it to start; returns it, or what replaces it.
    fn wait_for_turn(&mut self, work: &Arc<Work>) -> Result<Arc<Work>> {
        // The other ranks make the call.
        let keeps_order = self.device.as_ref().is_some_and(|device| device.keeps_order(&work.call));
        self.unfinished.wait_for_turn(work, keeps_order).inspect_err(|error| self.worker.shared.fail(error))
    }

    /// Reconciles the calls of the queue with those of the other ranks.
    fn reconcile(&mut self) -> Option<Ended> {
        let other_groups = OtherGroups::new(&self.worker.shared);
        self.worker.reconcile(&mut self.queue, &mut self.unfinished, other_groups)
    }

    /// Takes part in a round without a call: those of the queue, of which `oldest` is the oldest, lack their
    /// counterparts. Reconciles when all ranks have come.
    fn await_counterparts(&mut self, oldest: &Arc<Work>) -> Option<Ended> {
        match self.worker.await_counterparts(&mut self.queue, oldest) {
            Ok(()) => self.reconcile(),
            Err(error) => self.queue.pop().map(|work| Ended::Call(work, Err(error))),
        }
    }

    /// Takes part without a call in the round in which other ranks are stalled, and in the reconciliation that follows.
    fn join_stalled(&mut self) -> Option<Ended> {
        let shared = Arc::clone(&self.worker.shared);
        shared.stalled_round()?;
        // Before the other ranks see this one, so that later changes in other groups are noticed.
        let _joining = shared.joining_stalled.begin();
        let other_groups = OtherGroups::new(&shared);
        let call = Call::absent(shared.config.clone());
        let absent = call.map(|call| Arc::new(Work::absent(call, Arc::clone(&shared.recorder))));
        match absent.and_then(|absent| self.run_first_chunk(&absent, true)) {
            Ok(false) => self.worker.reconcile(&mut self.queue, &mut self.unfinished, other_groups),
            // The other ranks had no call either, or the group has failed or is closing.
            Ok(true) | Err(_) => None,
        }
    }

    /// Runs the first chunk of `work`; false if the ranks' calls differ.
    fn run_first_chunk(&mut self, work: &Arc<Work>, was_idle: bool) -> Result<bool> {
        work.record.start(was_idle);
        if let Role::Copied(ready) = &work.role {
            // Before this rank takes part: a failure of its GPU ends the group.
            self.worker.run_checked(work, |_, _, wait_ctx| {
                let _guard = ready.context().push()?;
                wait_event(ready, wait_ctx)
            })?;
        }
        self.worker.run_checked(work, |channel, work, wait_ctx| channel.start_call(&work.call, wait_ctx))
    }

    /// Caches the call of `work` if it is a small one.
    fn cache_call(&mut self, work: &Work) {
        let LeadState { worker, cached_calls, .. } = self;
        if work.call.is_repeatable() && work.call.is_small() {
            cached_calls
                .keep(&mut worker.channel, &work.call, || worker.shared.recorder.small_call_stats(&work.record));
        }
    }

    /// Runs the rest of a call that the ranks have matched. Another work may replace this one.
    pub(super) fn run_matched(&mut self, work: &Arc<Work>) -> Ended {
        let LeadState { worker, device, .. } = self;
        work.record.matched(worker.shared.next_match_index(work.record.number));
        let place = work.take_place();
        let enqueued = match work.call.producer() {
            None => Ok(false),
            Some(_) => DeviceExecutor::run(device, worker, work, place),
        };
        match enqueued {
            Ok(true) => {
                let keeps_order = device.as_ref().is_some_and(|device| device.keeps_order(&work.call));
                self.unfinished.add(&work.call, work, keeps_order);
                Ended::Call(Arc::clone(work), Ok(()))
            }
            Ok(false) if work.call.producer().is_none() || work.call.op.runs_in_device_chunks() => {
                Ended::Call(Arc::clone(work), self.run_chunks(work))
            }
            Ok(false) => {
                let (copied, result) = self.run_on_host(work);
                self.unfinished.add(&work.call, &copied, false);
                Ended::Call(copied, result)
            }
            Err(error) => Ended::Call(Arc::clone(work), Err(error)),
        }
    }

    /// Runs a call on device memory on copies in host memory.
    fn run_on_host(&mut self, work: &Arc<Work>) -> (Arc<Work>, Result<()>) {
        let copied = match self.worker.copy_to_host(work) {
            Ok(copied) => copied,
            Err(error) => return (Arc::clone(work), Err(error)),
        };
        let result = match self.run_first_chunk(&copied, false) {
            Ok(true) => self.run_chunks(&copied),
            // The ranks have just agreed on it.
            Ok(false) => {
                let error = Error::Internal(format!("the ranks are out of sync in {}", copied.call.full_name()));
                self.worker.shared.fail(&error);
                Err(error)
            }
            Err(error) => Err(error),
        };
        (copied, result)
    }

    /// Runs the chunks that are left of a call on host memory, or all of one on device memory.
    fn run_chunks(&mut self, work: &Arc<Work>) -> Result<()> {
        let LeadState { worker, helpers, unfinished, .. } = self;
        let chunks = if work.call.producer().is_none() {
            let plan = worker.channel.plan();
            work.set_plan(plan);
            plan.chunks(&work.call)
        } else {
            work.call.layout.chunks()
        };
        if chunks == 1 && work.call.producer().is_none() {
            return Ok(());
        }
        let helped = send_parts(work, chunks, helpers, &worker.shared);
        if helped || work.call.producer().is_some() {
            unfinished.add(&work.call, work, false);
        }
        worker.run_own_chunks(work)
    }
}
