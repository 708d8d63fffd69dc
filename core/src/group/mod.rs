//! A team: its queue, its threads, and the life of a call.
//!
//! `submit` checks, lays out and enqueues a call, and returns. The lead thread takes calls in order; with a call's first
//! chunk it finds out whether all ranks called the same, and only then hands the other chunks to the helpers, so the helpers
//! meet the calls in one order on all ranks. Ranks that met with different calls line them up
//! ([`crate::collective::lineup`]). The thread that ends a call's last part completes it.
//! A failure that leaves the ranks out of step (a deadline, a lost peer) ends the team: every call, waiting or new, gets
//! that first error.
//! Thread rule: a [`Group`] may be shared and used by any thread.

mod callers;
mod device;
mod lifecycle;
mod other_groups;
mod process_groups;
mod reconcile;
mod record;
mod small_calls;
mod stats;
mod work;
mod worker;

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde_json::Value;

pub use process_groups::{BlockedCaller, ProcessGroups};
pub use record::Totals;
pub use work::{CallOptions, OnComplete, Timeout, wait_for_result};

use crate::buffer::{Tensor, View};
use crate::collective::device::DeviceSettings;
use crate::collective::{AlgorithmSetting, Call, CallConfig, Op, PostedCall};
use crate::error::{Error, Result};
use crate::signals;
use crate::timeline;
use crate::topology::Topology;
use crate::transport::ShmRegion;
use callers::CallerThreads;
use work::Work;
use worker::{Executor, ExecutorGuard, QueueItem};

/// The settings of a team.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupConfig {
    /// Its number; -1 is the control team.
    pub id: i32,
    /// Whether floating point is added up in float64.
    pub acc_f64: bool,
    /// How it averages between hosts.
    pub algorithm: AlgorithmSetting,
    /// The longest that a call may take.
    pub timeout: Option<Duration>,
    /// After how long a wait names who is late.
    pub stall_warn: Option<Duration>,
    /// How long ranks that hold different calls wait for a counterpart to be submitted; a thirtieth of it where every
    /// caller waits for its call already.
    pub match_timeout: Duration,
    /// How calls on device memory are carried.
    pub device: DeviceSettings,
}

/// Told, in words, of what a team's user should look into: a stall, and the failure that ended it.
pub type OnFailure = Arc<dyn Fn(&str) + Send + Sync>;

/// A team of threads that carries out calls; see the module's text.
pub struct Group {
    shared: Arc<GroupState>,
    topology: Arc<Topology>,
    config: CallConfig,
    executor: Arc<Executor>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

/// A submitted call: in the queue, or with the executor that its caller holds. Ends with [`Group::run`].
#[must_use]
pub(crate) struct Placed<'a>(Option<(ExecutorGuard<'a>, Arc<Work>)>);

/// What the team's threads share.
struct GroupState {
    settings: GroupConfig,
    region: Arc<ShmRegion>,
    /// Then threads wait for other hosts too, where the region does not look.
    several_hosts: bool,
    rank: usize,
    /// The names of all ranks.
    names: Arc<[String]>,
    failure: OnceLock<Error>,
    on_failure: OnFailure,
    recorder: Arc<record::Recorder>,
    callers: CallerThreads,
    process_groups: Arc<ProcessGroups>,
    /// What the thread that leads is given; none when the team is about to end.
    queue: Mutex<Option<Sender<QueueItem>>>,
    /// Calls have waited so long when they look whether the ranks wait for each other.
    stall_check_after: Duration,
    /// Whether the lead is reconciling calls with the other ranks.
    is_reconciling: AtomicBool,
    /// Whether the lead takes part in a step without a call, and in what follows.
    joins_stalled: AtomicBool,
    /// The last step for which the lead was told to take part without a call.
    joined_seq: AtomicU64,
    /// The number of calls that all ranks have matched.
    matched: AtomicU64,
    /// The deadline of calls in nanoseconds; 0 for none.
    timeout: AtomicU64,
    /// What is known of the way that calls on device memory take, after the first.
    gpu_info: OnceLock<Value>,
    /// The bytes of device memory that the team has taken.
    device_bytes: AtomicUsize,
    /// How many calls on device memory went in chunks, because a rank could not open the memory of another.
    calls_in_chunks: AtomicUsize,
}

impl GroupState {
    /// The first failure that ended the team, here or on another rank of the host.
    fn failure(&self) -> Option<Error> {
        if let Some(error) = self.failure.get() {
            return Some(error.clone());
        }
        let error = self.region.failure()?;
        self.fail(&error);
        Some(error)
    }

    /// The failure that ended the team, here or on another rank of the host, without the alarm that [`Shared::failure`]
    /// raises for one of which this rank had not heard: a dump, which an alarm writes, asks for it.
    fn known_failure(&self) -> Option<Error> {
        self.failure.get().cloned().or_else(|| self.region.failure())
    }

    /// Ends the team for `error`, on this rank and the others of the host.
    fn fail(&self, error: &Error) {
        if self.end(error) {
            (self.on_failure)(&error.to_string());
        }
    }

    /// The same without the alarm; false when the team had failed before.
    fn end(&self, error: &Error) -> bool {
        // Other ranks may still be at work on memory that they see. Its owner may free it as soon as it hears of the failure.
        if let Some(memory) = self.region.shared() {
            memory.quarantine();
        }
        let first = self.failure.set(error.clone()).is_ok();
        if first {
            self.region.set_failure(error);
        }
        first
    }

    /// Why a wait for `head` should end before its own time: the team has failed, or a call behind it is out of time. Looks
    /// also whether the ranks wait for each other in different teams.
    fn abort_reason(&self, head: &Work) -> Option<Error> {
        if signals::interrupted() {
            return Some(Error::PeerLost(format!(
                "{} was interrupted by a signal on {}",
                head.call.full_name(),
                self.rank_name()
            )));
        }
        if head.is_absent() {
            if self.closing() && !self.reconciles() {
                return Some(Error::State("the team has ended".into()));
            }
        } else if head.record.submitted.elapsed() > self.stall_check_after {
            self.region.stall(self.region.step());
            self.process_groups.check_deadlock(self);
        }
        let other_groups = || if self.several_hosts { self.lost_rank() } else { None };
        self.failure().or_else(other_groups).or_else(|| {
            let behind = self.recorder.overdue()?;
            Some(Error::Timeout(format!(
                "{} was not complete after {:.1} s (DL_COMM_TIMEOUT_S); it is behind {}, which waits for other ranks",
                behind.summary.name_line,
                behind.submitted.elapsed().as_secs_f64(),
                head.call.full_name()
            )))
        })
    }

    /// The name of this rank.
    fn rank_name(&self) -> &str {
        &self.names[self.rank]
    }

    /// A rank that this one would wait for in vain while it waits for another host, which may be one of that host.
    fn lost_rank(&self) -> Option<Error> {
        let left = || {
            let rank = self.region.departed()?;
            let name = self.names.get(rank).cloned().unwrap_or_else(|| format!("rank {rank}"));
            Some(Error::PeerLost(format!("{name} has called finalize")))
        };
        self.region.lost_rank().or_else(left)
    }

    /// Sends the thread that leads a note; returns it when the team is about to end.
    fn send(&self, note: QueueItem) -> Option<QueueItem> {
        match &*self.queue.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(queue) => queue.send(note).err().map(|refused| refused.0),
            None => Some(note),
        }
    }

    fn closing(&self) -> bool {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner).is_none()
    }

    fn reconciles(&self) -> bool {
        self.is_reconciling.load(Ordering::Acquire)
    }

    fn attends(&self) -> bool {
        self.joins_stalled.load(Ordering::Acquire)
    }

    /// The step of channel 0 in which another rank waits long, and this one has not come to.
    fn stalled_seq(&self) -> Option<u32> {
        self.region.stalled().filter(|&step| step == self.region.step().wrapping_add(1))
    }

    /// Lets the lead take part in a step in which other ranks wait long, once.
    fn join_stalled(&self) {
        let Some(step) = self.stalled_seq().map(|step| u64::from(step) + 1) else { return };
        if self.joined_seq.swap(step, Ordering::AcqRel) != step {
            // A team that is about to end attends nothing any more.
            let _refused = self.send(QueueItem::JoinStalled);
        }
    }

    /// Counts a call that the ranks have matched; returns its place, from 1. For who has the executor.
    fn next_match_index(&self) -> u64 {
        let place = self.matched() + 1;
        self.matched.store(place, Ordering::Relaxed);
        place
    }

    fn matched(&self) -> u64 {
        self.matched.load(Ordering::Relaxed)
    }

    fn timeout(&self) -> Option<Duration> {
        Some(self.timeout.load(Ordering::Relaxed)).filter(|&nanos| nanos > 0).map(Duration::from_nanos)
    }

    fn set_timeout(&self, timeout: Option<Duration>) {
        let nanos = timeout.map_or(0, |timeout| u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX));
        self.timeout.store(nanos, Ordering::Relaxed);
    }
}

impl Group {
    /// The number of this rank.
    pub fn rank(&self) -> usize {
        self.shared.rank
    }

    /// What its calls have in common.
    pub fn call_config(&self) -> CallConfig {
        self.config
    }

    /// Enqueues `op` on `replicas` (lists of the same tensors) and returns. `done` is called once, at once if the call is
    /// refused.
    ///
    /// # Safety
    /// The memory of the tensors stays valid until `done` is called; nobody else writes to `src` or uses `dst` meanwhile.
    pub unsafe fn submit(&self, op: Op, replicas: Vec<Vec<Tensor>>, options: &CallOptions, done: OnComplete) {
        match self.new_call(op, replicas, options) {
            Ok(call) => self.run(self.new_work(call, options, done)),
            Err(error) => done(Err(error)),
        }
    }

    /// Runs an allreduce on this thread if it is small, calls like it came before, and nothing is queued. `None`: nothing
    /// has happened. Otherwise the outcome, and how long the caller has waited if the statistics of small calls do not
    /// count that.
    ///
    /// # Safety
    /// The memory of `views` is valid, and nobody else uses it meanwhile.
    pub unsafe fn try_small_allreduce(
        &self,
        name: &str,
        views: &[View<'_>],
        timeout: Timeout,
    ) -> Option<(Result<()>, Option<Duration>)> {
        if timeline::is_on() || self.shared.failure.get().is_some() {
            return None;
        }
        self.shared.callers.note(true);
        let mut guard = self.executor.try_acquire()?;
        let since = small_calls::is_sampled(self.shared.matched()).then(Instant::now);
        let (call, posted) = match guard.begin_small(Op::Allreduce, name, views, since)? {
            Ok(None) => return Some((Ok(()), None)),
            Ok(Some(rest)) => rest,
            Err(error) => return Some((Err(error), None)),
        };
        let since = since.unwrap_or_else(Instant::now);
        let result = wait_for_result(
            || self.shared.process_groups.interrupt(),
            |done| {
                let work = self.work(*call, true, timeout, done);
                self.carry(guard, &work, Some(posted));
            },
        );
        Some((result, Some(since.elapsed())))
    }

    /// Seconds that callers have waited in small allreduces that ended at once.
    pub fn small_call_wait(&self) -> f64 {
        self.shared.recorder.small_call_wait()
    }

    /// Checks a call and lays it out; nothing is submitted yet.
    pub(crate) fn new_call(&self, op: Op, replicas: Vec<Vec<Tensor>>, options: &CallOptions) -> Result<Call> {
        if let Some(error) = self.shared.failure() {
            return Err(error);
        }
        if signals::checking() {
            let text = "a handler of a signal called dl_comm while its thread waits in a call; let the call end first";
            return Err(Error::State(text.into()));
        }
        let CallOptions { name, instance_id, tensor_names, device, .. } = options;
        let call = Call::new(op, replicas, name, instance_id, tensor_names.clone(), self.config)?;
        match device {
            None => Ok(call),
            Some(device) => self.on_device(call, *device),
        }
    }

    /// Puts a call in its place among the team's calls: into the queue, or, where its caller waits and may carry it out,
    /// into the executor, for [`Group::run`].
    pub(crate) fn new_work(&self, call: Call, options: &CallOptions, done: OnComplete) -> Placed<'_> {
        let work = self.work(call, options.caller_blocks, options.timeout, done);
        if options.caller_blocks
            && let Some(guard) = self.executor.try_acquire()
        {
            return Placed(Some((guard, work)));
        }
        self.executor.enqueue();
        if let Some(QueueItem::Call(work)) = self.shared.send(QueueItem::Call(work)) {
            work.finish(Err(Error::State("the team has ended".into())));
        }
        Placed(None)
    }

    /// A call that is submitted now.
    fn work(&self, call: Call, blocks: bool, timeout: Timeout, done: OnComplete) -> Arc<Work> {
        let timeout = match timeout {
            Timeout::GroupDefault => self.shared.timeout(),
            Timeout::Override(timeout) => timeout,
        };
        let thread = self.shared.callers.note(blocks);
        let record = self.shared.recorder.open(&call, timeout, thread);
        Arc::new(Work::new(call, done, timeout, record, Arc::clone(&self.shared.recorder)))
    }

    /// Carries out a call that is in its place, if that is not for the team's threads.
    pub(crate) fn run(&self, placed: Placed<'_>) {
        if let Some((guard, work)) = placed.0 {
            self.carry(guard, &work, None);
        }
    }

    fn carry(&self, guard: ExecutorGuard<'_>, work: &Arc<Work>, posted: Option<PostedCall>) {
        if !guard.run(work, posted) {
            // Without a queue the team is about to end, and looks at the executor once more.
            let _none = self.shared.send(QueueItem::HandedBack);
        }
    }

    /// Sets the deadline of coming calls; `None` for none. The ranks need not agree on it.
    pub fn set_timeout(&self, timeout: Option<Duration>) {
        self.shared.set_timeout(timeout);
    }

    /// Ends the team with `error`, here and on the other ranks of the host, whom it alarms. Here it is known.
    pub fn fail(&self, error: &Error) {
        self.shared.end(error);
    }

    /// The error that ended the team, if one did.
    pub fn failure(&self) -> Option<Error> {
        self.shared.failure()
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        self.stop();
    }
}
