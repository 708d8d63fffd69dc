//! A team: its queue, its threads, and the life of a call.
//!
//! `submit` checks, lays out and enqueues a call, and returns. The lead thread takes calls in order; with a call's first
//! chunk it finds out whether all ranks called the same, and only then hands the other chunks to the helpers, so the helpers
//! meet the calls in one order on all ranks. Ranks that met with different calls line them up
//! ([`crate::collective::lineup`]). The thread that ends a call's last part completes it.
//! A failure that leaves the ranks out of step (a deadline, a lost peer) ends the team: every call, waiting or new, gets
//! that first error.
//! Thread rule: a [`Team`] may be shared and used by any thread.

mod callers;
mod device;
mod lifecycle;
mod other_teams;
mod process_teams;
mod reconcile;
mod record;
mod result_assembly;
mod schedule_state;
mod small_calls;
mod staging;
mod stats;
mod wait_time;
mod work;
mod worker;

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde_json::Value;
use xxhash_rust::xxh3::xxh3_64_with_seed;

pub use process_teams::{BlockedCaller, ProcessTeams};
pub use record::Totals;
pub use schedule_state::ResultBuffer;
pub use staging::{StagingBuffer, StagingPool};
pub use work::{CallOptions, OnComplete, Timeout, wait_for_result};

use crate::buffer::{Tensor, View};
use crate::collective::device::DeviceSettings;
use crate::collective::{AlgorithmSetting, Call, CallConfig, Op, PostedCall};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::schedule::{Schedule, Verbosity};
use crate::signals;
use crate::timeline;
use crate::topology::Topology;
use crate::transport::ShmRegion;
use callers::CallerThreads;
use result_assembly::ResultAssembly;
use schedule_state::{InFlightMean, ScheduleState};
use wait_time::WaitTime;
use work::{OnAllParts, Work};
use worker::{Executor, ExecutorGuard, QueueItem};

/// The settings of a team.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Settings {
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
pub struct Team {
    shared: Arc<TeamState>,
    topology: Arc<Topology>,
    config: CallConfig,
    executor: Arc<Executor>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    schedule: Arc<Mutex<ScheduleState>>,
    /// Whether all calls block and get their own mean, which no schedule needs to know.
    unscheduled: AtomicBool,
    wait_time: Arc<WaitTime>,
    pool: Arc<StagingPool>,
}

/// What the team's threads share.
struct TeamState {
    settings: Settings,
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
    process_teams: Arc<ProcessTeams>,
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

impl TeamState {
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
            self.process_teams.check_deadlock(self);
        }
        let other_teams = || if self.several_hosts { self.lost_rank() } else { None };
        self.failure().or_else(other_teams).or_else(|| {
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

impl Team {
    /// How it carries its calls.
    pub fn call_config(&self) -> CallConfig {
        self.config
    }

    /// Enqueues `op` on `towers` and returns; the schedule does not count it. `request.done` is called exactly once: with the
    /// outcome, or at once when the call is refused.
    ///
    /// # Safety
    /// The memory of the tensors stays valid until `done` is called; nobody else writes to `src` or uses `dst` meanwhile.
    pub unsafe fn submit(&self, op: Op, towers: Vec<Vec<Tensor>>, request: CallOptions) {
        let CallOptions {
            done,
            name,
            instance_id: instance,
            tensor_names: labels,
            caller_blocks: blocks,
            timeout,
            device,
            ..
        } = request;
        match self.new_call(op, towers, &name, &instance, labels, device) {
            Ok(call) => self.run(self.new_work(call, blocks, timeout, Box::new(|result| done(result.map(|()| None))))),
            Err(error) => done(Err(error)),
        }
    }

    /// Averages `towers` on the team's schedule, and returns; see [`crate::schedule`] for what the caller gets.
    /// `request.done` is called exactly once.
    ///
    /// # Safety
    /// As for [`Team::submit`]; with a result buffer (`request.keeping`) the memory stays valid as long as the result buffer does, also
    /// after `done` was called.
    pub unsafe fn gradients(&self, towers: Vec<Vec<Tensor>>, request: CallOptions) {
        let waiting_since = request.count_wait.then(Instant::now);
        let CallOptions {
            done,
            name,
            instance_id: instance,
            tensor_names: labels,
            results,
            owner,
            continues_step: part,
            return_weights,
            caller_blocks: blocks,
            timeout,
            device,
            ..
        } = request;
        let call = self.new_call(Op::Allreduce, towers, &name, &instance, labels, device);
        let mut call = match call.and_then(|call| self.check_schedule(call, owner, return_weights && results.is_some()))
        {
            Ok(call) => call,
            Err(error) => return done(Err(error)),
        };
        let list = xxh3_64_with_seed(&owner.to_le_bytes(), call.list_hash);
        let mut schedule = self.schedule();
        let plan = schedule.plan_call(list, owner, part, results.as_deref());
        call.schedule(plan.weights.left, plan.position.clone());
        if timeline::is_on() && !part {
            let now = Instant::now();
            let args = [("team", self.config.team.into()), ("call", plan.index.into())];
            timeline::span("step", "gradients", now, now, &args);
        }
        // A call that gets nothing and leaves nothing has its mean where it belongs: nobody else looks at it.
        let alone = plan.before.is_none() && plan.weights.left == 0.0;
        let own = InFlightMean::new(results, if alone { Vec::new() } else { call.outputs() });
        let in_flight = Arc::clone(&own);
        let placed = self.new_work(call, blocks, timeout, Box::new(move |result| in_flight.end(&result)));
        schedule.carry(list, Arc::clone(&own), plan.weights.left);
        drop(schedule);
        self.run(placed);
        let (schedule, wait_time) = (Arc::clone(&self.schedule), Arc::clone(&self.wait_time));
        ResultAssembly { schedule, wait_time, list, plan, own, done, return_weights, waiting_since }.start();
    }

    /// Carries out an average on this thread, if that is a short call that nothing stands in the way of and others like it
    /// came before; else `None`, and nothing has happened.
    ///
    /// # Safety
    /// The memory of `views` is valid, and nobody else uses it meanwhile.
    pub unsafe fn try_small_allreduce(&self, name: &str, views: &[View<'_>], timeout: Timeout) -> Option<Result<()>> {
        if !self.unscheduled.load(Ordering::Relaxed) || timeline::is_on() || self.shared.failure.get().is_some() {
            return None;
        }
        self.shared.callers.note(true);
        let mut guard = self.executor.try_acquire()?;
        let since = small_calls::is_sampled(self.shared.matched()).then(Instant::now);
        let (call, posted) = match guard.begin_small(Op::Allreduce, name, views, since)? {
            Ok(None) => return Some(Ok(())),
            Ok(Some(rest)) => rest,
            Err(error) => return Some(Err(error)),
        };
        let since = since.unwrap_or_else(Instant::now);
        let result = wait_for_result(
            || self.shared.process_teams.interrupt(),
            |ended| {
                let work = self.call(*call, true, timeout, ended);
                self.carry(guard, &work, Some(posted));
            },
        );
        if self.times_callers() {
            self.wait_time.add(since.elapsed().as_secs_f64());
        }
        Some(result)
    }

    /// Whether the time that callers wait is told: of training, not of broadcasts and metrics.
    fn times_callers(&self) -> bool {
        self.config.team >= 0
    }

    fn new_call(
        &self,
        op: Op,
        towers: Vec<Vec<Tensor>>,
        name: &str,
        instance: &str,
        labels: String,
        device: Option<Device>,
    ) -> Result<Call> {
        if let Some(error) = self.shared.failure() {
            return Err(error);
        }
        if signals::checking() {
            let words = "a handler of a signal called dl_comm while its thread waits in a call; let the call end first";
            return Err(Error::State(words.into()));
        }
        let call = Call::new(op, towers, name, instance, labels, self.config)?;
        match device {
            None => Ok(call),
            Some(device) => self.on_device(call, device),
        }
    }

    /// Puts a call in its place among the team's calls: into the queue, or, where its caller waits and may carry it out,
    /// into the executor, for [`Team::run`].
    fn new_work(
        &self,
        call: Call,
        blocks: bool,
        timeout: Timeout,
        ended: OnAllParts,
    ) -> Option<(ExecutorGuard<'_>, Arc<Work>)> {
        let work = self.call(call, blocks, timeout, ended);
        if blocks && let Some(guard) = self.executor.try_acquire() {
            return Some((guard, work));
        }
        self.executor.enqueue();
        if let Some(QueueItem::Call(work)) = self.shared.send(QueueItem::Call(work)) {
            work.finish(Err(Error::State("the team has ended".into())));
        }
        None
    }

    /// A call that is submitted now.
    fn call(&self, call: Call, blocks: bool, timeout: Timeout, ended: OnAllParts) -> Arc<Work> {
        let timeout = match timeout {
            Timeout::GroupDefault => self.shared.timeout(),
            Timeout::Override(timeout) => timeout,
        };
        let thread = self.shared.callers.note(blocks);
        let record = self.shared.recorder.open(&call, timeout, thread);
        Arc::new(Work::new(call, ended, timeout, record, Arc::clone(&self.shared.recorder)))
    }

    /// Carries out a call that is in its place, if that is not for the team's threads.
    fn run(&self, placed: Option<(ExecutorGuard<'_>, Arc<Work>)>) {
        if let Some((guard, work)) = placed {
            self.carry(guard, &work, None);
        }
    }

    fn carry(&self, guard: ExecutorGuard<'_>, work: &Arc<Work>, posted: Option<PostedCall>) {
        if !guard.run(work, posted) {
            // Without a queue the team is about to end, and looks at the executor once more.
            let _none = self.shared.send(QueueItem::HandedBack);
        }
    }

    fn schedule(&self) -> MutexGuard<'_, ScheduleState> {
        self.schedule.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts `schedule` with the next call of [`Team::gradients`].
    pub fn configure(&self, schedule: Schedule) {
        let mut state = self.schedule();
        state.configure(schedule);
        let plain = schedule == Schedule::BLOCKING && state.undelivered_means() == 0;
        self.unscheduled.store(plain, Ordering::Relaxed);
    }

    /// Whether coming calls of `owner` ([`Team::gradients`]) may return before their average has ended, if they bring a
    /// result buffer, or another one's mean.
    pub fn may_return_early(&self, owner: u64) -> bool {
        self.schedule().may_return_early(owner)
    }

    /// Forgets the lists of `owner`, and the means that its last calls have left to calls that will not come.
    pub fn release(&self, owner: u64) {
        self.schedule().release(owner);
    }

    /// Forgets the means that the last calls of `owner` have left.
    pub fn discard_carried(&self, owner: u64) {
        self.schedule().discard_carried(owner);
    }

    /// Memory for bindings whose callers keep theirs.
    pub fn pool(&self) -> &Arc<StagingPool> {
        &self.pool
    }

    /// Counts `seconds` that a caller has waited, for calls that are not timed.
    pub fn add_waited(&self, seconds: f64) {
        self.wait_time.add(seconds);
    }

    /// Who prints, and for how long callers have waited.
    pub fn waited(&self) -> (Verbosity, f64) {
        let shortly = if self.times_callers() { self.shared.recorder.small_call_wait() } else { 0.0 };
        (self.schedule().verbosity(), self.wait_time.total() + shortly)
    }

    /// The number of means that were left to calls that have not come.
    pub fn undelivered_means(&self) -> usize {
        self.schedule().undelivered_means()
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

impl Drop for Team {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Prints how long this rank has waited on all `teams`, if one of them wants it.
pub fn report_waited<'a>(teams: impl Iterator<Item = &'a Arc<Team>>, rank: usize) {
    let waited: Vec<(Verbosity, f64)> = teams.map(|team| team.waited()).collect();
    if waited.iter().any(|(verbosity, _)| verbosity.prints_on(rank)) {
        wait_time::report_all(rank, waited.iter().map(|(_, seconds)| seconds).sum());
    }
}
