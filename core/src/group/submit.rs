//! A group, and how calls get to its threads.
//!
//! Thread rule: a [`Group`] may be used by any thread.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde_json::Value;

use super::executor::{Executor, ExecutorGuard};
use super::small_calls;
use super::state::GroupState;
use super::work::{CallOptions, OnComplete, QueueItem, Timeout, Work, wait_for_result};
use crate::buffer::{Tensor, View};
use crate::collective::{Call, CallConfig, Op, PostedCall};
use crate::device::Device;
use crate::error::{Error, Result, guard};
use crate::signals;
use crate::timeline;
use crate::topology::Topology;
use crate::transport::gpu::CallerStream;

/// A team of threads that carries out calls; see the module's text.
pub struct Group {
    pub(super) shared: Arc<GroupState>,
    pub(super) topology: Arc<Topology>,
    pub(super) config: CallConfig,
    pub(super) executor: Arc<Executor>,
    pub(super) threads: Mutex<Vec<JoinHandle<()>>>,
}

/// A submitted call: in the queue, or with the executor that its caller holds. Ends with [`Group::run`].
#[must_use]
pub(crate) struct Placed<'a>(Option<(ExecutorGuard<'a>, Arc<Work>)>);

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

    /// Makes a call on device memory of `call`.
    fn on_device(&self, call: Call, device: Device) -> Result<Call> {
        if let Some(ordinal) = self.shared.gpu_info.get().and_then(|gpus| gpus["gpu"].as_i64())
            && ordinal != i64::from(device.ordinal)
        {
            return Err(Error::Invalid(format!(
                "the tensors are on GPU {}, and team {} of this rank works on GPU {ordinal}; a team has one GPU on each rank",
                device.ordinal, self.config.team
            )));
        }
        let producer = guard(|| CallerStream::new(device))?;
        call.on_device(Arc::new(producer), self.shared.settings.device.chunk)
    }

    /// What is known of the way that calls on device memory take, after the first.
    pub fn gpus(&self) -> Option<Value> {
        let mut gpus = self.shared.gpu_info.get()?.clone();
        gpus["device_bytes"] = self.shared.device_bytes.load(Ordering::Relaxed).into();
        gpus["calls_in_chunks"] = self.shared.calls_in_chunks.load(Ordering::Relaxed).into();
        Some(gpus)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        self.stop();
    }
}
