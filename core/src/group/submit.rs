//! A group, and the submission of calls to its threads.
//!
//! Thread rule: any thread may use a [`Group`].

use std::sync::atomic::AtomicU64;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use serde_json::Value;

use super::callers::{Caller, Origin};
use super::handle::CallHandle;
use super::held::HeldCall;
use super::lead::{Lead, Leading};
use super::lost::Loss;
use super::messenger::Messenger;
use super::queue::QueueItem;
use super::small_calls::{self, CallWords, SmallCallInput};
use super::state::GroupState;
use super::work::{CallOptions, OnComplete, Role, Timeout, Work, wait_for_result};
use crate::buffer::Tensor;
use crate::collective::{Call, CallConfig, Op};
use crate::deadline::{Deadline, SetBy};
use crate::device::Device;
use crate::error::{Error, Result, guard};
use crate::signals;
use crate::timeline;
use crate::topology::Topology;
use crate::transport::gpu::CallerStream;

/// A group whose threads run calls; see [`crate::group`].
pub struct Group {
    pub(super) shared: Arc<GroupState>,
    pub(super) topology: Arc<Topology>,
    pub(super) lead: Arc<Lead>,
    /// Made by the first send or receive.
    pub(super) messenger: OnceLock<Messenger>,
    /// How many calls of unknown lengths there were.
    pub(super) ragged_calls: AtomicU64,
}

/// How often a started small call looks for the other ranks: about as long as its bookkeeping takes if it must go on.
const START_SPINS: u32 = 16;

/// A submitted call. If its caller leads, it passes this to [`Group::run`].
#[must_use]
pub(crate) struct Submitted<'a>(Option<(Leading<'a>, Arc<Work>)>);

/// `input`, unless its call ends alone ([`Work::ends_alone`]).
#[inline]
fn without_own_end<'v>(
    input: impl FnOnce() -> Option<SmallCallInput<'v>>,
    timeout: Timeout,
) -> impl FnOnce() -> Option<SmallCallInput<'v>> {
    let ends_alone = matches!(timeout, Timeout::Override(Some(_)));
    move || input().filter(|input| !(input.by_name && ends_alone))
}

impl Group {
    /// The number of this rank.
    pub fn rank(&self) -> usize {
        self.shared.rank
    }

    /// A number of this group in this process: from 1, never used again.
    pub fn number(&self) -> u64 {
        self.shared.number
    }

    /// The common settings of its calls.
    pub fn call_config(&self) -> &CallConfig {
        &self.shared.config
    }

    /// Enqueues `op` on `replicas` (lists of the same tensors) and returns. Calls `done` once, immediately if the call
    /// is rejected.
    ///
    /// # Safety
    /// The tensors' memory is valid until `done` is called; nothing else writes `src` or uses `dst` until then.
    pub unsafe fn submit(&self, op: Op, replicas: Vec<Vec<Tensor>>, mut options: CallOptions, done: OnComplete) {
        match self.new_call(op, replicas, &mut options) {
            Ok(call) => self.run(self.new_work(call, &options, done)),
            Err(error) => done(Err(error)),
        }
    }

    /// Runs a call on this thread if it is small, a call like it is cached, and nothing is queued. `None`: no effect.
    /// Otherwise the result, and the wait time if the statistics of small calls do not include it. `input` reads the call,
    /// unless its `words` are those of a call before; it must not wait.
    ///
    /// # Safety
    /// The memory of the tensors is valid and not used otherwise.
    #[inline]
    pub unsafe fn try_small<'v>(
        &self,
        words: Option<CallWords<'_>>,
        input: impl FnOnce() -> Option<SmallCallInput<'v>>,
        timeout: Timeout,
    ) -> Option<(Result<()>, Option<Duration>)> {
        let (mut leading, origin) = self.lead_small(Caller::Waits)?;
        let recorder = &self.shared.recorder;
        let since = small_calls::is_sampled(self.shared.matched()).then(Instant::now);
        let (index, posted) = match leading.start_small(words, without_own_end(input, timeout), since, u32::MAX)? {
            Ok(None) => return Some((Ok(()), None)),
            Ok(Some(posted)) => posted,
            Err(error) => return Some((Err(error), None)),
        };
        let (started, submission) = (Instant::now(), recorder.submission());
        let result = wait_for_result(
            || self.shared.process_groups.interrupt(),
            |done| leading.run_held(HeldCall { index, posted, submission, since, origin, timeout, done }),
        );
        Some((result, Some(started.elapsed())))
    }

    /// As [`Group::try_small`], but starts the call: it only waits for other ranks when its caller waits for the handle.
    /// Takes `then`, for [`CallHandle::new`], unless it has no effect.
    ///
    /// # Safety
    /// The memory of the tensors is valid and not used otherwise until the call has ended.
    pub unsafe fn try_start_small<'v>(
        &self,
        words: Option<CallWords<'_>>,
        input: impl FnOnce() -> Option<SmallCallInput<'v>>,
        timeout: Timeout,
        then: &mut Option<OnComplete>,
    ) -> Option<CallHandle> {
        // A call by name needs this rank for the decision on the order, whatever this rank does meanwhile.
        let input = || input().filter(|input| !input.by_name);
        let (mut leading, origin) = self.lead_small(Caller::GoesOn)?;
        let since = small_calls::is_sampled(self.shared.matched()).then(Instant::now);
        let started = leading.start_small(words, input, since, START_SPINS)?;
        let (handle, done) = CallHandle::new(then.take());
        let (index, posted) = match started {
            Ok(Some(posted)) => posted,
            ended => {
                drop(leading);
                done(ended.map(|_none| ()));
                return Some(handle);
            }
        };
        let submission = self.shared.recorder.submission();
        leading.hold(HeldCall { index, posted, submission, since, origin, timeout, done });
        Some(handle.of_held(&self.lead, submission.number))
    }

    /// `handle`, of a call of this group: whoever waits may run it.
    #[must_use]
    pub fn led(&self, handle: CallHandle) -> CallHandle {
        handle.led_by(&self.lead)
    }

    /// The role for the caller of a small call, if that may take the fast path.
    #[inline]
    fn lead_small(&self, caller: Caller) -> Option<(Leading<'_>, Origin)> {
        if timeline::is_on() || self.shared.has_failed() || signals::checking() {
            return None;
        }
        let origin = self.shared.callers.record(caller);
        self.lead.try_lead_idle().map(|leading| (leading, origin))
    }

    /// Seconds that callers have waited in small allreduces that completed inline.
    pub fn small_call_wait(&self) -> f64 {
        self.shared.recorder.small_call_wait()
    }

    /// Validates and lays out a call without submitting it. The call takes the names of the tensors out of `options`.
    pub(crate) fn new_call(&self, op: Op, replicas: Vec<Vec<Tensor>>, options: &mut CallOptions) -> Result<Call> {
        self.checked_call(op, replicas, options).inspect_err(|error| self.note_refusal(error))
    }

    /// If `error` is about the arguments of a call: notes that this rank has refused it.
    pub(super) fn note_refusal(&self, error: &Error) {
        if matches!(error, Error::Invalid(_) | Error::DType(_)) {
            self.shared.process_groups.refuse(error.to_string());
        }
    }

    fn checked_call(&self, op: Op, replicas: Vec<Vec<Tensor>>, options: &mut CallOptions) -> Result<Call> {
        options.loss.iter().for_each(|loss| loss.of(&self.shared.recorder.lost));
        if let Some(error) = self.shared.failure() {
            return Err(match &options.loss {
                Some(_) => error,
                None => self.shared.recorder.lost.report(error),
            });
        }
        if signals::checking() {
            let text = "a handler of a signal called dl_comm while its thread waits in a call; let the call end first";
            return Err(Error::State(text.into()));
        }
        let CallOptions { name, by_name, instance_id, tensor_names, device, counts, .. } = options;
        let (labels, counts) = (std::mem::take(tensor_names), std::mem::take(counts));
        let call = Call::new(op, replicas, counts, name, instance_id, labels, self.shared.config.clone())?;
        let call = if *by_name { call.into_by_name()? } else { call };
        match device {
            None => Ok(call),
            Some(device) => self.on_device(call, *device),
        }
    }

    /// Submits a call: to the group's thread, or, if its caller blocks and can lead, for [`Group::run`].
    pub(crate) fn new_work(&self, call: Call, options: &CallOptions, done: OnComplete) -> Submitted<'_> {
        let work = self.work(call, Role::Own, options.caller(), options.timeout, done, options.loss.clone());
        self.accept(work, options.caller_blocks)
    }

    /// As [`Group::new_work`], for a call that [`Group::work`] has made.
    pub(super) fn accept(&self, work: Arc<Work>, caller_blocks: bool) -> Submitted<'_> {
        self.shared.download_early(&work);
        if caller_blocks
            && !work.ends_alone()
            && let Some(leading) = self.lead.try_lead_with(&work)
        {
            return Submitted(Some((leading, work)));
        }
        if let Some(QueueItem::Call(work)) = self.shared.send(QueueItem::Call(work)) {
            work.finish(Err(self.shared.ended()));
        }
        Submitted(None)
    }

    /// Creates the work of a call that is submitted now.
    pub(super) fn work(
        &self,
        call: Call,
        role: Role,
        caller: Caller,
        timeout: Timeout,
        done: OnComplete,
        loss: Option<Loss>,
    ) -> Arc<Work> {
        let origin = self.shared.callers.record(caller);
        let work = self.shared.work(call, role, None, origin, timeout, done).submitted(self.shared.number, loss);
        work.record.set_unmatched(work.ends_alone());
        Arc::new(work)
    }

    /// Runs a submitted call on this thread, if its caller leads.
    pub(crate) fn run(&self, submitted: Submitted<'_>) {
        if let Some((leading, work)) = submitted.0 {
            leading.run_until_ended(&work);
        }
    }

    /// Sets the deadline of later calls; `None` for none. It may differ between ranks.
    pub fn set_timeout(&self, timeout: Option<Duration>) {
        self.shared.deadline.set(Deadline { after: timeout, set_by: SetBy::Group });
    }

    /// Fails the group with `error`, here and on the other ranks of the host. Calls `on_failure` on the other ranks
    /// only.
    pub fn fail(&self, error: &Error) {
        self.shared.set_failure(error);
    }

    /// The error that ended the group, if one did.
    pub fn failure(&self) -> Option<Error> {
        self.shared.failure()
    }

    /// Converts `call` to a call on device memory.
    fn on_device(&self, call: Call, device: Device) -> Result<Call> {
        self.check_gpu(device)?;
        let producer = guard(|| CallerStream::new(device))?;
        let call = call.on_device(Arc::new(producer), self.shared.settings.device.chunk)?;
        self.shared.gpu.check_capture(&call)?;
        Ok(call)
    }

    /// Whether this rank's calls are on the GPU `device`.
    fn check_gpu(&self, device: Device) -> Result<()> {
        if let Some(ordinal) = self.shared.gpu.ordinal()
            && ordinal != i64::from(device.ordinal)
        {
            return Err(Error::Invalid(format!(
                "the tensors are on GPU {}, and {} of this rank works on GPU {ordinal}; a group has one GPU on each rank",
                device.ordinal,
                self.shared.config.key.name()
            )));
        }
        Ok(())
    }

    /// The path of calls on device memory as JSON, after the first such call.
    pub fn gpus(&self) -> Option<Value> {
        self.shared.gpu.describe()
    }
}
