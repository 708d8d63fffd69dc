//! The threads of a team: the lead, which takes the calls in order, and the helpers, which take their share of long ones.
//!
//! To lead is a role, on a [`Executor`]: a caller that waits for its call anyway takes it while nobody else has it and no call is
//! queued, and carries the call out itself, which spares it two changes of threads. The other ranks cannot tell.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread;
use std::time::{Duration, Instant};

use super::device::DeviceExecutor;
use super::other_groups::OtherGroups;
use super::small_calls::{CachedCalls, SmallCall};
use super::work::{QueueItem, Work};
use super::worker::Worker;
use crate::buffer::View;
use crate::collective::{Call, Op, PostedCall};
use crate::error::{Error, Result, guard};

/// What the team's calls go through, one after the other.
pub(super) struct Executor {
    state: Mutex<ExecutorState>,
    /// Calls that were enqueued and have not ended.
    queued: AtomicUsize,
}

/// What who leads has.
struct ExecutorState {
    worker: Worker,
    helpers: Vec<Sender<Arc<Work>>>,
    /// A call that its caller could not carry out, because the ranks called different things. It comes before all others.
    handed_back: Option<Arc<Work>>,
    templates: CachedCalls,
    /// For calls on device memory, once there was one.
    device: Option<DeviceExecutor>,
    closed: bool,
}

/// The executor in the hands of a caller.
pub(super) struct ExecutorGuard<'a> {
    executor: &'a Executor,
    state: MutexGuard<'a, ExecutorState>,
}

/// A short call that other ranks are to be waited for, and what was shown of it.
pub(super) type SmallCallRemainder = (Box<Call>, PostedCall);

/// The calls that the lead has been given and not carried out.
pub(super) struct Queue<'a> {
    receiver: &'a Receiver<QueueItem>,
    pub calls: VecDeque<Arc<Work>>,
    /// When the last one came.
    pub arrived: Instant,
    /// Whether the lead had nothing to do when the first came.
    idle: bool,
    /// Other ranks wait long in a step.
    joins_stalled: bool,
    pub closed: bool,
}

impl Queue<'_> {
    /// Waits for a note when there is no call; false when there is none and none can come.
    fn wait(&mut self) -> bool {
        self.idle = false;
        if self.calls.is_empty() {
            let note = self.receiver.try_recv().or_else(|_| {
                self.idle = true;
                self.receiver.recv()
            });
            match note {
                Ok(note) => self.push(note),
                Err(_) => return false,
            }
        }
        true
    }

    /// Takes what has been submitted.
    pub fn drain(&mut self) {
        loop {
            match self.receiver.try_recv() {
                Ok(note) => self.push(note),
                Err(TryRecvError::Empty) => return,
                Err(TryRecvError::Disconnected) => {
                    self.closed = true;
                    return;
                }
            }
        }
    }

    /// Waits up to `nap` for a further call; whether one came.
    pub fn wait_for_more(&mut self, nap: Duration) -> bool {
        match self.receiver.recv_timeout(nap) {
            Ok(note) => self.push(note),
            Err(RecvTimeoutError::Timeout) => return false,
            Err(RecvTimeoutError::Disconnected) => {
                self.closed = true;
                thread::sleep(nap);
                return false;
            }
        }
        true
    }

    fn push(&mut self, note: QueueItem) {
        match note {
            QueueItem::Call(work) => self.calls.push_back(work),
            QueueItem::HandedBack => {}
            QueueItem::JoinStalled => self.joins_stalled = true,
        }
        self.arrived = Instant::now();
    }

    /// Puts the calls with the signatures `order` first, in that order.
    pub fn reorder(&mut self, order: &[u64]) {
        let mut first = VecDeque::with_capacity(self.calls.len());
        for &signature in order {
            let place = self.calls.iter().position(|work| work.call.signature == signature);
            first.extend(place.and_then(|place| self.calls.remove(place)));
        }
        self.calls.iter().for_each(|work| work.reset_unmatched());
        first.append(&mut self.calls);
        self.calls = first;
    }
}

impl Executor {
    /// A executor with channel 0 and the threads that help.
    pub fn new(worker: Worker, helpers: Vec<Sender<Arc<Work>>>) -> Executor {
        let state = ExecutorState {
            worker,
            helpers,
            handed_back: None,
            templates: CachedCalls::default(),
            device: None,
            closed: false,
        };
        Executor { state: Mutex::new(state), queued: AtomicUsize::new(0) }
    }

    /// The executor for a caller that waits, if nobody has it and nothing is queued.
    pub fn try_acquire(&self) -> Option<ExecutorGuard<'_>> {
        if self.queued.load(Ordering::Acquire) > 0 {
            return None;
        }
        let state = match self.state.try_lock() {
            Ok(state) => state,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        (!state.closed).then_some(ExecutorGuard { executor: self, state })
    }

    /// Counts a call that is about to be queued.
    pub fn enqueue(&self) {
        self.queued.fetch_add(1, Ordering::Release);
    }

    /// Carries out the calls that `receiver` gets until it closes; then nobody takes the executor any more.
    pub fn run_loop(&self, receiver: &Receiver<QueueItem>) {
        let (calls, arrived) = (VecDeque::new(), Instant::now());
        let mut queue = Queue { receiver, calls, arrived, idle: true, joins_stalled: false, closed: false };
        while queue.wait() {
            let ended = self.lock().run_next(&mut queue);
            // The next caller finds the executor free.
            if let Some((work, result)) = ended {
                self.queued.fetch_sub(1, Ordering::Release);
                work.finish(result);
            }
        }
        let mut state = self.lock();
        state.closed = true;
        state.helpers.clear(); // which ends their threads
        let left = state.handed_back.take();
        drop(state);
        if let Some(work) = left {
            work.finish(Err(Error::State("the team has ended".into())));
        }
    }

    /// Lets go of channel 0's way to other hosts, and of GPUs; the helpers' have gone with their threads.
    pub fn release_resources(&self, failed: bool) {
        let mut state = self.lock();
        state.worker.channel.close_links(failed);
        state.worker.staging = None;
        state.device = None;
    }

    fn lock(&self) -> MutexGuard<'_, ExecutorState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ExecutorGuard<'_> {
    /// Begins a short call, submitted at `since` if it is timed: `Ok(None)` when that was all, what is left of it when other ranks are to
    /// be waited for. `None` when it has to go another way; an error has ended the team.
    pub fn begin_small(
        &mut self,
        op: Op,
        name: &str,
        views: &[View<'_>],
        since: Option<Instant>,
    ) -> Option<Result<Option<SmallCallRemainder>>> {
        let ExecutorState { worker, templates, .. } = &mut *self.state;
        let Worker { shared, channel, .. } = worker;
        let begun = guard(|| {
            Ok(templates.begin(channel, op, name, views).map(|begun| match begun {
                SmallCall::Done(kind) => {
                    shared.recorder.count_small(kind, shared.next_match_index(), since);
                    None
                }
                SmallCall::Pending(call, posted) => Some((call, posted)),
            }))
        });
        if let Err(error) = &begun {
            shared.fail(error);
        }
        begun.transpose()
    }

    /// Carries `work` out on this thread, what was `posted` of it already included. False when the thread that leads must see
    /// to it: the call was left in the executor.
    pub fn run(mut self, work: &Arc<Work>, posted: Option<PostedCall>) -> bool {
        let first = match posted {
            None => self.state.run_first_chunk(work, true),
            Some(posted) => {
                work.record.start(true);
                self.state
                    .worker
                    .run_checked(work, |channel, work, wait_ctx| channel.finish_posted(&work.call, posted, wait_ctx))
            }
        };
        let result = match first {
            Ok(true) => {
                self.state.cache_call(work);
                self.state.run_matched(work)
            }
            Ok(false) => {
                self.state.handed_back = Some(Arc::clone(work));
                self.executor.enqueue();
                return false;
            }
            Err(error) => Err(error),
        };
        drop(self);
        work.finish(result);
        true
    }
}

impl ExecutorState {
    /// Deals with the first call of `queue`; returns it when this thread's part of it has ended.
    fn run_next(&mut self, queue: &mut Queue<'_>) -> Option<(Arc<Work>, Result<()>)> {
        if let Some(work) = self.handed_back.take() {
            queue.calls.push_front(work);
            return self.worker.reconcile(queue, None, OtherGroups::new(&self.worker.shared));
        }
        // A note may tell of what was seen to before it was read.
        let attends = std::mem::take(&mut queue.joins_stalled);
        let Some(work) = queue.calls.front().cloned() else {
            return if attends { self.join_stalled(queue) } else { None };
        };
        match self.run_first_chunk(&work, queue.idle) {
            Ok(true) => {
                queue.calls.pop_front();
                let result = self.run_matched(&work);
                Some((work, result))
            }
            Ok(false) => self.worker.reconcile(queue, None, OtherGroups::new(&self.worker.shared)),
            Err(error) => {
                queue.calls.pop_front();
                Some((work, Err(error)))
            }
        }
    }

    /// Takes part without a call in the step in which other ranks wait long, and in the reconciliation that follows.
    fn join_stalled(&mut self, queue: &mut Queue<'_>) -> Option<(Arc<Work>, Result<()>)> {
        let shared = Arc::clone(&self.worker.shared);
        shared.stalled_seq()?;
        // Before the others can see this rank: what follows on other teams is noticed.
        shared.joins_stalled.store(true, Ordering::Release);
        let other_groups = OtherGroups::new(&shared);
        let call = Call::absent(self.worker.config);
        let absent = call.map(|call| Arc::new(Work::absent(call, Arc::clone(&shared.recorder))));
        let ended = match absent.and_then(|absent| Ok((self.run_first_chunk(&absent, true)?, absent))) {
            Ok((false, absent)) => self.worker.reconcile(queue, Some(&absent), other_groups),
            // The others had no call either; or the team has failed, or ends.
            Ok((true, _)) | Err(_) => None,
        };
        shared.joins_stalled.store(false, Ordering::Release);
        ended
    }

    /// The first chunk of `work`; false when the ranks called different things.
    fn run_first_chunk(&mut self, work: &Arc<Work>, at_once: bool) -> Result<bool> {
        work.record.start(at_once);
        self.worker.run_checked(work, |channel, work, wait_ctx| match work.call.producer() {
            None => channel.run_first_chunk(&work.call, wait_ctx),
            // Nothing of the data moves before all ranks are known to have called the same.
            Some(_) => channel.run_first_chunk(&work.call.without_data(), wait_ctx),
        })
    }

    /// Keeps the job of `work` for short calls like it, if it is one.
    fn cache_call(&mut self, work: &Work) {
        let ExecutorState { worker, templates, .. } = self;
        if work.call.is_repeatable() && work.call.is_small() {
            templates.keep(&work.call, || worker.shared.recorder.small_call_stats(&work.record));
        }
    }

    /// Carries out what is left of a call that the ranks have matched.
    fn run_matched(&mut self, work: &Arc<Work>) -> Result<()> {
        let ExecutorState { worker, helpers, device, .. } = self;
        work.record.matched(worker.shared.next_match_index());
        if work.call.producer().is_some() {
            if DeviceExecutor::run(device, worker, work)? {
                return Ok(());
            }
        } else if work.call.layout.chunks() == 1 {
            return Ok(());
        }
        work.zero_copy.store(worker.channel.is_zero_copy(), Ordering::Relaxed);
        // Helper h takes the chunks h, h + channels, ...
        let helped = (work.call.channels() - 1).min(work.call.layout.chunks() - 1);
        work.add_parts(helped);
        for helper in &helpers[..helped] {
            if helper.send(Arc::clone(work)).is_err() {
                work.finish(Err(Error::Internal("a thread of the team has ended".into())));
            }
        }
        worker.run_own_chunks(work)
    }
}
