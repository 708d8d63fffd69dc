//! The threads of a group: the lead runs the calls in order, and helpers run their chunks of large calls.
//!
//! Leading is a role: the right to the [`Executor`]. A blocking caller takes it if it is free and no call is queued,
//! and runs its own call, which saves two thread switches. Other ranks do not notice.

use std::mem;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};
use std::time::Instant;

use super::concurrent_calls::can_be_concurrent;
use super::device::DeviceExecutor;
use super::other_groups::OtherGroups;
use super::queue::{Finish, Queue};
use super::small_calls::{CachedCalls, CallWords, SmallCall, SmallCallInput};
use super::thread::{GroupThread, Inbox};
use super::unfinished::UnfinishedCalls;
use super::work::{QueueItem, Role, Work};
use super::worker::Worker;
use crate::collective::device::wait_event;
use crate::collective::{Call, PostedCall};
use crate::error::{Error, Result, guard};
use crate::lock::lock;
use crate::transport::spin::Waiter;

/// Runs the group's calls in order.
pub(super) struct Executor {
    state: Mutex<ExecutorState>,
    /// Calls that were enqueued and have not ended.
    queued: AtomicUsize,
}

/// The state of the lead thread.
struct ExecutorState {
    worker: Worker,
    /// The threads of the other channels.
    helpers: Vec<GroupThread<Arc<Work>>>,
    /// A call that precedes all others.
    held: Option<Held>,
    unfinished: UnfinishedCalls,
    cached_calls: CachedCalls,
    /// For calls on device memory; created by the first.
    device: Option<DeviceExecutor>,
    closed: bool,
}

/// A call that the executor holds.
enum Held {
    /// Its caller could not run it, because the ranks' calls differ.
    HandedBack(Arc<Work>),
    /// A small one that was started: this rank has posted its input. Who waits for it first completes it, else the lead
    /// thread before its next call.
    Posted(Arc<Work>, PostedCall),
}

/// The executor, held by a caller.
pub(super) struct ExecutorGuard<'a> {
    executor: &'a Executor,
    state: MutexGuard<'a, ExecutorState>,
}

/// A small call that waits for other ranks, and its posted input.
pub(super) type SmallCallRemainder = (Box<Call>, PostedCall);

impl Executor {
    /// An executor with channel 0 and the helper threads.
    pub fn new(worker: Worker, helpers: Vec<GroupThread<Arc<Work>>>) -> Executor {
        let state = ExecutorState {
            worker,
            helpers,
            held: None,
            unfinished: UnfinishedCalls::default(),
            cached_calls: CachedCalls::default(),
            device: None,
            closed: false,
        };
        Executor { state: Mutex::new(state), queued: AtomicUsize::new(0) }
    }

    /// The executor for a blocking caller, if it is free and nothing is queued.
    pub fn try_acquire(&self) -> Option<ExecutorGuard<'_>> {
        if self.queued.load(Ordering::Acquire) > 0 {
            return None;
        }
        // Another thread may have left a call there since.
        let state = self.try_lock().filter(|state| !state.closed && state.held.is_none())?;
        state.worker.channel.set_waiter(Waiter::Caller);
        Some(ExecutorGuard { executor: self, state })
    }

    fn try_lock(&self) -> Option<MutexGuard<'_, ExecutorState>> {
        match self.state.try_lock() {
            Ok(state) => Some(state),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Completes `work` on this thread if the executor holds it, posted. Returns whether the lead thread must go on with
    /// it.
    pub fn run_posted(&self, work: &Arc<Work>) -> bool {
        // Another thread may have the executor for a moment only, to find that it holds a call.
        let Some(mut state) = self.try_lock() else { return true };
        let Some(posted) = state.take_posted(work) else { return false };
        self.queued.fetch_sub(1, Ordering::Release);
        state.worker.channel.set_waiter(Waiter::Caller);
        !ExecutorGuard { executor: self, state }.run(work, Some(posted))
    }

    /// Whether the executor may hold a call that it has posted; `work`, if given. Does not wait: a thread that has the
    /// executor may wait for other ranks, and they for what this thread does next.
    pub fn may_hold_posted(&self, work: Option<&Arc<Work>>) -> bool {
        let Some(state) = self.try_lock() else { return true };
        matches!(&state.held, Some(Held::Posted(held, _)) if work.is_none_or(|work| Arc::ptr_eq(held, work)))
    }

    /// Counts a call that is about to be queued.
    pub fn enqueue(&self) {
        self.queued.fetch_add(1, Ordering::Release);
    }

    /// Runs the calls from `inbox` until none comes.
    pub fn run_loop(&self, inbox: &Inbox<QueueItem>) {
        let mut queue = Queue::new(inbox);
        while queue.wait() {
            let run_next = || Ok(self.lock().run_next(&mut queue, &|work, result| self.finish(work, result)));
            let ended = guard(run_next).unwrap_or_else(|error| {
                // A defect must not leave callers without an outcome.
                self.lock().worker.shared.fail(&error);
                queue.pop().map(|work| (work, Err(error)))
            });
            // The next caller can then find the executor free.
            if let Some((work, result)) = ended {
                self.finish(&work, result);
            }
        }
    }

    /// Finishes this thread's part of a call.
    fn finish(&self, work: &Work, result: Result<()>) {
        if work.is_queued() {
            self.queued.fetch_sub(1, Ordering::Release);
        }
        work.finish(result);
    }

    /// Starts the helper threads.
    ///
    /// # Errors
    /// [`Error::System`] if the system refuses a thread.
    pub fn start_helpers(&self) -> Result<()> {
        self.lock().helpers.iter().try_for_each(GroupThread::start)
    }

    /// Ends the helper threads, and lets no caller run calls any more. After the lead thread has ended.
    pub fn close(&self) {
        let mut state = self.lock();
        state.closed = true;
        let helpers = mem::take(&mut state.helpers);
        let (held, ended) = (state.held.take(), state.worker.shared.ended());
        let (launches, number) =
            (state.device.as_ref().map(|device| Arc::clone(device.launches())), state.worker.shared.number);
        drop(state);
        helpers.iter().for_each(GroupThread::close);
        if let Some(Held::HandedBack(work) | Held::Posted(work, _)) = held {
            work.finish(Err(ended));
        }
        // Calls that other threads start.
        launches.iter().for_each(|launches| launches.wait(number));
    }

    /// Closes channel 0's links to other hosts and releases GPU resources; helpers release theirs at exit.
    pub fn release_resources(&self) {
        let mut state = self.lock();
        state.worker.channel.close_links();
        state.worker.staging = None;
        state.device = None;
    }

    fn lock(&self) -> MutexGuard<'_, ExecutorState> {
        lock(&self.state)
    }
}

impl ExecutorGuard<'_> {
    /// Starts a small call, as [`CachedCalls::start`]; `since` is its submission, if it is timed. `Ok(None)`: it has
    /// completed. `Ok(Some(_))`: it waits for other ranks. `None`: the fast path does not apply. An error has ended the
    /// group.
    pub fn start_small<'v>(
        &mut self,
        words: Option<CallWords<'_>>,
        input: impl FnOnce() -> Option<SmallCallInput<'v>>,
        since: Option<Instant>,
        spins: u32,
    ) -> Option<Result<Option<SmallCallRemainder>>> {
        let ExecutorState { worker, cached_calls, unfinished, .. } = &mut *self.state;
        if !unfinished.allow_any() {
            return None;
        }
        let Worker { shared, channel, .. } = worker;
        let started = guard(|| {
            Ok(cached_calls.start(channel, words, input, spins).map(|started| match started {
                SmallCall::Done(stats) => {
                    shared.recorder.count_small(stats, shared.next_match_index(), since);
                    None
                }
                SmallCall::Pending(call, posted) => Some((call, posted)),
            }))
        });
        if let Err(error) = &started {
            shared.fail(error);
        }
        started.transpose()
    }

    /// Leaves a call that was posted in the executor.
    pub fn hold(mut self, work: &Arc<Work>, posted: PostedCall) {
        // It needs this rank no more, however long nobody waits for it.
        work.record.start(true);
        self.state.held = Some(Held::Posted(Arc::clone(work), posted));
        self.executor.enqueue();
    }

    /// Runs `work` on this thread, starting after `posted`, if given. Returns false if it left the call in the
    /// executor, for the lead thread.
    pub fn run(mut self, work: &Arc<Work>, posted: Option<PostedCall>) -> bool {
        let work = &match self.state.wait_for_turn(work) {
            Ok(work) => work,
            Err(error) => {
                drop(self);
                work.finish(Err(error));
                return true;
            }
        };
        let state = &mut *self.state;
        let first = match posted {
            None => state.run_first_chunk(work, true),
            Some(posted) => state.finish_posted(work, posted),
        };
        let rest = || {
            state.cache_call(work);
            Ok(state.run_matched(work))
        };
        let (work, result) = match first {
            // A defect must not leave the other ranks without this one.
            Ok(true) => guard(rest).unwrap_or_else(|error| {
                self.state.worker.shared.fail(&error);
                (Arc::clone(work), Err(error))
            }),
            Ok(false) => {
                self.state.held = Some(Held::HandedBack(Arc::clone(work)));
                self.executor.enqueue();
                return false;
            }
            Err(error) => (Arc::clone(work), Err(error)),
        };
        drop(self);
        work.finish(result);
        true
    }
}

impl ExecutorState {
    /// Handles the first call of `queue`; returns it when this thread's part of it has ended, unless it was finished by
    /// `finish`.
    fn run_next(&mut self, queue: &mut Queue<'_>, finish: Finish<'_>) -> Option<(Arc<Work>, Result<()>)> {
        self.worker.channel.set_waiter(Waiter::Thread);
        match self.held.take() {
            None => {}
            Some(Held::HandedBack(work)) => {
                queue.calls.push_front(work);
                return self.reconcile(queue, finish);
            }
            Some(Held::Posted(work, posted)) => {
                return match self.finish_posted(&work, posted) {
                    Ok(true) => Some(self.run_matched(&work)),
                    Ok(false) => {
                        queue.calls.push_front(work);
                        self.reconcile(queue, finish)
                    }
                    Err(error) => Some((work, Err(error))),
                };
            }
        }
        // The queue item may already have been handled.
        let joins_stalled = mem::take(&mut queue.joins_stalled);
        if let Some(oldest) = queue.awaits() {
            let oldest = Arc::clone(oldest);
            return self.await_counterparts(queue, &oldest, finish);
        }
        let Some(work) = queue.calls.front().cloned() else {
            return if joins_stalled { self.join_stalled(queue, finish) } else { None };
        };
        let work = match self.wait_for_turn(&work) {
            Ok(work) => work,
            Err(error) => {
                queue.pop();
                return Some((work, Err(error)));
            }
        };
        queue.calls[0] = Arc::clone(&work);
        if self.worker.shared.several_hosts && can_be_concurrent(&work) {
            return match self.worker.run_concurrent(queue, &mut self.unfinished, finish) {
                Ok(Some(last)) => Some((last, Ok(()))),
                Err(_) => None,
                Ok(None) => self.reconcile(queue, finish),
            };
        }
        match self.run_first_chunk(&work, queue.idle) {
            Ok(true) => {
                self.cache_call(&work);
                let ended = self.run_matched(&work);
                queue.pop();
                Some(ended)
            }
            Ok(false) => self.reconcile(queue, finish),
            Err(error) => {
                queue.pop();
                Some((work, Err(error)))
            }
        }
    }

    /// The posted input of `work`, if the executor holds it.
    fn take_posted(&mut self, work: &Arc<Work>) -> Option<PostedCall> {
        match self.held.take() {
            Some(Held::Posted(held, posted)) if Arc::ptr_eq(&held, work) => Some(posted),
            other => {
                self.held = other;
                None
            }
        }
    }

    /// Completes a small call that this rank has posted; false if the ranks' calls differ.
    fn finish_posted(&mut self, work: &Arc<Work>, posted: PostedCall) -> Result<bool> {
        work.record.start(true);
        self.worker.run_checked(work, |channel, work, wait_ctx| channel.finish_posted(&work.call, posted, wait_ctx))
    }

    /// Waits until the calls before `work` allow it to start; returns it, or what replaces it.
    fn wait_for_turn(&mut self, work: &Arc<Work>) -> Result<Arc<Work>> {
        // The other ranks make the call.
        let keeps_order = self.device.as_ref().is_some_and(|device| device.keeps_order(&work.call));
        self.unfinished.wait_for_turn(work, keeps_order).inspect_err(|error| self.worker.shared.fail(error))
    }

    /// Reconciles the calls of `queue` with those of the other ranks.
    fn reconcile(&mut self, queue: &mut Queue<'_>, finish: Finish<'_>) -> Option<(Arc<Work>, Result<()>)> {
        let other_groups = OtherGroups::new(&self.worker.shared);
        self.worker.reconcile(queue, &mut self.unfinished, finish, other_groups)
    }

    /// Takes part in a round without a call: those of `queue`, of which `oldest` is the oldest, lack their counterparts.
    /// Reconciles when all ranks have come.
    fn await_counterparts(
        &mut self,
        queue: &mut Queue<'_>,
        oldest: &Arc<Work>,
        finish: Finish<'_>,
    ) -> Option<(Arc<Work>, Result<()>)> {
        match self.worker.await_counterparts(queue, oldest, finish) {
            Ok(()) => self.reconcile(queue, finish),
            Err(error) => queue.pop().map(|work| (work, Err(error))),
        }
    }

    /// Takes part without a call in the round in which other ranks are stalled, and in the reconciliation that follows.
    fn join_stalled(&mut self, queue: &mut Queue<'_>, finish: Finish<'_>) -> Option<(Arc<Work>, Result<()>)> {
        let shared = Arc::clone(&self.worker.shared);
        shared.stalled_seq()?;
        // Before the other ranks see this one, so that later changes in other groups are noticed.
        shared.joins_stalled.store(true, Ordering::Release);
        let other_groups = OtherGroups::new(&shared);
        let call = Call::absent(shared.config.clone());
        let absent = call.map(|call| Arc::new(Work::absent(call, Arc::clone(&shared.recorder))));
        let ended = match absent.and_then(|absent| Ok((self.run_first_chunk(&absent, true)?, absent))) {
            Ok((false, _)) => self.worker.reconcile(queue, &mut self.unfinished, finish, other_groups),
            // The other ranks had no call either, or the group has failed or is closing.
            Ok((true, _)) | Err(_) => None,
        };
        shared.joins_stalled.store(false, Ordering::Release);
        ended
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
        let ExecutorState { worker, cached_calls, .. } = self;
        if work.call.is_repeatable() && work.call.is_small() {
            cached_calls.keep(&worker.channel, &work.call, || worker.shared.recorder.small_call_stats(&work.record));
        }
    }

    /// Runs the rest of a call that the ranks have matched. Returns the work to finish, which may replace this one.
    fn run_matched(&mut self, work: &Arc<Work>) -> (Arc<Work>, Result<()>) {
        let ExecutorState { worker, device, .. } = self;
        work.record.matched(worker.shared.next_match_index());
        let place = work.take_place();
        let enqueued = match work.call.producer() {
            None => Ok(false),
            Some(_) => DeviceExecutor::run(device, worker, work, place),
        };
        match enqueued {
            Ok(true) => {
                let keeps_order = device.as_ref().is_some_and(|device| device.keeps_order(&work.call));
                self.unfinished.add(&work.call, work, keeps_order);
                (Arc::clone(work), Ok(()))
            }
            Ok(false) if work.call.producer().is_none() || work.call.op.runs_in_device_chunks() => {
                (Arc::clone(work), self.run_chunks(work))
            }
            Ok(false) => {
                let (copied, result) = self.run_on_host(work);
                self.unfinished.add(&work.call, &copied, false);
                (copied, result)
            }
            Err(error) => (Arc::clone(work), Err(error)),
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
        let ExecutorState { worker, helpers, unfinished, .. } = self;
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
        // Helper h takes the chunks h, h + channels, ...
        let num_helpers = (work.call.channels() - 1).min(chunks - 1);
        work.add_parts(num_helpers);
        if num_helpers > 0 || work.call.producer().is_some() {
            unfinished.add(&work.call, work, false);
        }
        for helper in &helpers[..num_helpers] {
            if let Err((work, reason)) = helper.send(Arc::clone(work)) {
                let error = reason.unwrap_or_else(|| worker.shared.ended());
                // The other ranks wait for this part.
                worker.shared.fail(&error);
                work.finish(Err(error));
            }
        }
        worker.run_own_chunks(work)
    }
}
