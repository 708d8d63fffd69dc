//! A team of the plugin: a group whose gradients follow a schedule.
//!
//! Thread rule: a [`Team`] may be used from any thread.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

use serde_json::Value;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::options::StepOptions;
use super::result_assembly::ResultAssembly;
use super::schedule::{Schedule, Verbosity};
use super::schedule_state::{InFlightMean, ScheduleState};
use super::staging::StagingPool;
use super::wait_time::{WaitTime, print_total};
use crate::buffer::{Tensor, View};
use crate::collective::{Call, Op};
use crate::error::{Error, Result};
use crate::group::{Group, SmallCallInput, Timeout};
use crate::lock::lock;
use crate::timeline;

/// A group with a schedule; see the module text.
pub struct Team {
    group: Arc<Group>,
    schedule: Arc<Mutex<ScheduleState>>,
    /// Every call blocks and returns its own mean.
    unscheduled: AtomicBool,
    wait_time: Arc<WaitTime>,
    staging: Arc<StagingPool>,
}

impl Team {
    /// Creates a team of `group` without a schedule: every call blocks.
    pub fn new(group: Arc<Group>) -> Team {
        let wait_time = WaitTime::new(group.call_config().key.number(), group.rank());
        Team {
            schedule: Arc::new(Mutex::new(ScheduleState::new(group.rank()))),
            group,
            unscheduled: AtomicBool::new(true),
            wait_time: Arc::new(wait_time),
            staging: Arc::default(),
        }
    }

    /// The group that runs the calls.
    pub fn group(&self) -> &Arc<Group> {
        &self.group
    }

    /// Submits an allreduce (mean) that the schedule does not count.
    ///
    /// # Safety
    /// As for [`Group::submit`].
    pub unsafe fn average(&self, towers: Vec<Vec<Tensor>>, options: StepOptions) {
        let StepOptions { call, done, .. } = options;
        // SAFETY: guaranteed by the caller.
        unsafe { self.group.submit(Op::MEAN, towers, call, Box::new(|result| done(result.map(|()| None)))) }
    }

    /// Starts the mean of `towers` over the ranks, according to the team's schedule; `schedule.rs` defines the
    /// result. Calls `options.done` once.
    ///
    /// # Safety
    /// As for [`Group::submit`]. With `options.results` the memory stays valid as long as that buffer, even after
    /// `done`.
    pub unsafe fn gradients(&self, towers: Vec<Vec<Tensor>>, options: StepOptions) {
        let waiting_since = options.count_wait.then(Instant::now);
        let StepOptions { call: mut options, done, results, owner, continues_step, return_weights, .. } = options;
        let call = self.group.new_call(Op::MEAN, towers, &mut options);
        let mut call = match call.and_then(|call| self.check_device(call, owner, return_weights && results.is_some())) {
            Ok(call) => call,
            Err(error) => return done(Err(error)),
        };
        let list_hash = xxh3_64_with_seed(&owner.to_le_bytes(), call.list_hash);
        let mut schedule = self.schedule();
        let plan = schedule.plan_call(list_hash, owner, continues_step, results.as_deref());
        call.schedule(plan.weights.left, plan.position.clone());
        if timeline::is_on() && !continues_step {
            let now = Instant::now();
            let args = [("team", self.group.call_config().key.number().into()), ("call", plan.index.into())];
            timeline::span("step", "gradients", now, now, &args);
        }
        // Only a call that uses or carries a mean reads its own mean later.
        let is_plain = plan.before.is_none() && plan.weights.left == 0.0;
        let own = InFlightMean::new(results, if is_plain { Vec::new() } else { call.outputs() });
        let in_flight = Arc::clone(&own);
        // Under the lock, so that the schedule counts calls in the order in which the group runs them.
        let work = self.group.new_work(call, &options, Box::new(move |result| in_flight.end(&result)));
        schedule.carry(list_hash, Arc::clone(&own), plan.weights.left);
        drop(schedule);
        self.group.run(work);
        let (schedule, wait_time) = (Arc::clone(&self.schedule), Arc::clone(&self.wait_time));
        ResultAssembly { schedule, wait_time, list_hash, plan, own, done, return_weights, waiting_since }.start();
    }

    /// [`Group::try_small`] for a mean; `None` if a schedule is set.
    ///
    /// # Safety
    /// The memory of `views` is valid and not accessed by others until the call returns.
    pub unsafe fn try_small_allreduce(&self, name: &str, views: &[View<'_>], timeout: Timeout) -> Option<Result<()>> {
        if !self.unscheduled.load(Ordering::Relaxed) {
            return None;
        }
        // SAFETY: guaranteed by the caller.
        let (result, waited) = unsafe {
            self.group.try_small(None, || Some(SmallCallInput { op: Op::MEAN, name, by_name: false, views }), timeout)
        }?;
        if let Some(waited) = waited.filter(|_| self.counts_waits()) {
            self.wait_time.add(waited.as_secs_f64());
        }
        Some(result)
    }

    /// Refuses a non-blocking call on GPU memory unless the caller adds the means: the core adds means in host memory
    /// only.
    fn check_device(&self, call: Call, owner: u64, return_weights: bool) -> Result<Call> {
        if call.producer().is_some() && !return_weights && self.may_return_early(owner) {
            return Err(Error::Invalid(format!(
                "team {} is on a schedule with non-blocking calls, which GPU tensors have in dl_comm.torch's optimizer only; \
                 use another team, or host tensors",
                self.group.call_config().key.number()
            )));
        }
        Ok(call)
    }

    /// The control group (broadcasts, metrics) does not count waits.
    fn counts_waits(&self) -> bool {
        self.group.call_config().key.number() >= 0
    }

    fn schedule(&self) -> MutexGuard<'_, ScheduleState> {
        lock(&self.schedule)
    }

    /// Starts `schedule` with the next call of [`Team::gradients`].
    pub fn configure(&self, schedule: Schedule) {
        let mut state = self.schedule();
        state.configure(schedule);
        let unscheduled = schedule == Schedule::BLOCKING && state.undelivered_means() == 0;
        self.unscheduled.store(unscheduled, Ordering::Relaxed);
    }

    /// Whether future calls of `owner` may return before their allreduce completes, or return a carried mean.
    pub fn may_return_early(&self, owner: u64) -> bool {
        self.schedule().may_return_early(owner)
    }

    /// Drops the lists of `owner` and their carried means.
    pub fn release(&self, owner: u64) {
        self.schedule().release(owner);
    }

    /// Drops the carried means of `owner`.
    pub fn discard_carried(&self, owner: u64) {
        self.schedule().discard_carried(owner);
    }

    /// The staging pool for bindings whose callers keep their tensors.
    pub fn staging(&self) -> &Arc<StagingPool> {
        &self.staging
    }

    /// Adds `seconds` of waiting, for calls without `count_wait`.
    pub fn add_waited(&self, seconds: f64) {
        self.wait_time.add(seconds);
    }

    /// The verbosity, and the total seconds that callers have waited.
    pub fn waited(&self) -> (Verbosity, f64) {
        let small = if self.counts_waits() { self.group.small_call_wait() } else { 0.0 };
        (self.schedule().verbosity(), self.wait_time.total() + small)
    }

    /// The number of carried means that no call has returned.
    pub fn undelivered_means(&self) -> usize {
        self.schedule().undelivered_means()
    }

    /// The group's statistics with exposed time and overlap (0 to 1).
    pub fn stats(&self) -> Value {
        let mut stats = self.group.stats();
        let (_, exposed) = self.waited();
        let comm = stats["comm_s"].as_f64().unwrap_or(0.0);
        stats["exposed_s"] = exposed.into();
        stats["overlap"] = (if comm > 0.0 { (1.0 - exposed / comm).clamp(0.0, 1.0) } else { 0.0 }).into();
        stats
    }
}

/// Prints the waited time of this rank over all `teams`, if one of them is verbose.
pub fn report_waited<'a>(teams: impl Iterator<Item = &'a Arc<Team>>, rank: usize) {
    let waited: Vec<(Verbosity, f64)> = teams.map(|team| team.waited()).collect();
    if waited.iter().any(|(verbosity, _)| verbosity.prints_on(rank)) {
        print_total(rank, waited.iter().map(|(_, seconds)| seconds).sum());
    }
}
