//! A call from submission to completion.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use oneshot::RecvTimeoutError;

use super::callers::Caller;
use super::join_state::JoinState;
use super::lost::Loss;
use super::record::Record;
use super::recorder::Recorder;
use crate::collective::device::HostCopy;
use crate::collective::{Call, ChunkPlan, Counts};
use crate::deadline::{Deadline, SetBy};
use crate::device::Device;
use crate::error::{Error, Result, guard};
use crate::lock::{Wakeup, lock};
use crate::log::log_line;
use crate::signals;
use crate::transport::gpu::{Event, Place};

/// Called once with the result of a call: on the thread that completes the call, or on the submitting thread if the
/// call is rejected. It must not block, and may submit further calls.
pub type OnComplete = Box<dyn FnOnce(Result<()>) + Send>;

/// Interval at which a blocked caller checks for signals.
pub(super) const SIGNAL_POLL: Duration = Duration::from_millis(100);

/// Calls `start` with a completion callback and waits for its result. If a signal should end the wait, calls
/// `interrupt`, which must soon cause a result.
///
/// # Errors
/// The result; [`Error::Internal`] if the callback was dropped.
pub fn wait_for_result<T: Send + 'static>(
    interrupt: impl Fn(),
    start: impl FnOnce(Box<dyn FnOnce(Result<T>) + Send>),
) -> Result<T> {
    let (sender, receiver) = oneshot::channel();
    start(Box::new(move |result| {
        // The receiver below is waiting.
        let _delivered = sender.send(result);
    }));
    loop {
        match receiver.recv_timeout(SIGNAL_POLL) {
            Ok(result) => return result,
            Err(RecvTimeoutError::Disconnected) => {
                return Err(Error::Internal("a call was dropped without an outcome".into()));
            }
            Err(RecvTimeoutError::Timeout) if signals::interrupted() => interrupt(),
            Err(RecvTimeoutError::Timeout) => {}
        }
    }
}

/// The options of a call.
#[derive(Debug, Clone, Default)]
pub struct CallOptions {
    /// Part of the signature: all ranks must give the same name.
    pub name: String,
    /// The call matches that of its name, wherever the ranks make it; calls of one name keep their order. Part of the
    /// signature.
    pub by_name: bool,
    /// Distinguishes calls of one name that are in flight together. Part of the signature.
    pub instance_id: String,
    /// Names of the tensors for messages: a line each, or empty.
    pub tensor_names: String,
    /// The calling thread makes no other call before this one has ended. A call without a counterpart then fails
    /// sooner.
    pub caller_blocks: bool,
    /// A thread of a pool makes the call for somebody else: which of them makes which call is chance.
    pub by_pool: bool,
    /// The deadline.
    pub timeout: Timeout,
    /// The device of the tensors; `None`: host memory.
    pub device: Option<Device>,
    /// The lengths of the blocks.
    pub counts: Counts,
    /// That of the handle of the call, which reports its result to the program; `None` if `done` does.
    pub loss: Option<Loss>,
}

impl CallOptions {
    /// What the calling thread does then.
    pub(super) fn caller(&self) -> Caller {
        match (self.by_pool, self.caller_blocks) {
            (true, _) => Caller::OfPool,
            (false, true) => Caller::Waits,
            (false, false) => Caller::GoesOn,
        }
    }
}

/// The deadline of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Timeout {
    /// The group's deadline.
    #[default]
    GroupDefault,
    /// This deadline; `None` for none.
    Override(Option<Duration>),
}

impl Timeout {
    /// Converts a binding's value in seconds: negative or NaN for the group's deadline, 0 for none.
    pub fn from_seconds(seconds: f64) -> Timeout {
        if seconds > 0.0 {
            // 1e9 s is about 32 years and fits a Duration.
            return Timeout::Override(Some(Duration::from_secs_f64(seconds.min(1e9))));
        }
        if seconds == 0.0 { Timeout::Override(None) } else { Timeout::GroupDefault }
    }
}

/// What a call is to its group.
pub(super) enum Role {
    /// A call of this rank.
    Own,
    /// A call of this rank on copies of tensors in device memory, which are complete after the event.
    Copied(Event),
    /// The contribution of a rank that has no call for a round.
    Absent,
    /// The contribution of a rank that has joined to a call of the others.
    StandIn,
    /// The call of a rank that joins.
    Join(Arc<JoinState>),
}

/// A call that a group runs.
pub(super) struct Work {
    pub call: Call,
    pub role: Role,
    pub deadline: Deadline,
    pub warned: AtomicBool,
    /// Set after the first chunk.
    plan: OnceLock<ChunkPlan>,
    pub record: Arc<Record>,
    unmatched_since: Mutex<Option<Instant>>,
    /// Ranks that lacked it when the ranks compared their calls, if it matches by name.
    lacking: Mutex<Vec<usize>>,
    /// The copies of a call on device memory that were started early.
    host_copy: Mutex<Option<HostCopy>>,
    recorder: Arc<Recorder>,
    /// As in [`CallOptions`].
    pub loss: Option<Loss>,
    /// Where a call on device memory starts among those of its GPU, until that is decided.
    place: Mutex<Option<Place>>,
    parts: AtomicUsize,
    outcome: Mutex<(Option<OnComplete>, Result<()>)>,
    /// Whether the call has ended, its completion too.
    ended: Mutex<bool>,
    ends: Wakeup,
}

impl Work {
    pub fn new(
        call: Call,
        role: Role,
        on_complete: OnComplete,
        deadline: Deadline,
        record: Arc<Record>,
        recorder: Arc<Recorder>,
    ) -> Work {
        Work {
            loss: None,
            place: Mutex::default(),
            call,
            role,
            deadline,
            warned: AtomicBool::new(false),
            plan: OnceLock::new(),
            record,
            unmatched_since: Mutex::default(),
            lacking: Mutex::default(),
            host_copy: Mutex::default(),
            recorder,
            parts: AtomicUsize::new(1),
            outcome: Mutex::new((Some(on_complete), Ok(()))),
            ended: Mutex::new(false),
            ends: Wakeup::default(),
        }
    }

    /// This work, with the last place on its GPU, if it is on one. `loss` as in [`CallOptions`].
    pub fn submitted(self, group: u64, loss: Option<Loss>) -> Work {
        let place = self.call.producer().map(|producer| Place::new(&producer.context().launches, group));
        Work { loss, place: Mutex::new(place), ..self }
    }

    /// Its place, once.
    pub fn take_place(&self) -> Option<Place> {
        lock(&self.place).take()
    }

    /// This work with a description that replaces that of its call. Nobody uses the old one any more, but for its
    /// description.
    pub fn with_call(&self, call: Call) -> Work {
        let on_complete = lock(&self.outcome).0.take();
        Work { host_copy: Mutex::new(self.take_host_copy()), ..self.replaced(call, Role::Own, on_complete) }
    }

    /// This work, a call on device memory, as `call` on copies in host memory that are complete after `ready`. `upload`
    /// runs after a call that succeeded. Nobody uses the old one any more, but for its description.
    pub fn copied(&self, call: Call, ready: Event, upload: impl FnOnce() -> Result<()> + Send + 'static) -> Work {
        let on_complete = lock(&self.outcome).0.take();
        let on_complete = on_complete.map(|on_complete| -> OnComplete {
            Box::new(move |result: Result<()>| on_complete(result.and_then(|()| upload())))
        });
        self.replaced(call, Role::Copied(ready), on_complete)
    }

    /// This work, a call on device memory, after all that its caller has enqueued until now. Nobody uses the old one any
    /// more.
    ///
    /// # Errors
    /// [`Error::System`] of the GPU's driver.
    pub fn again_on_stream(&self) -> Result<Work> {
        // Copies that were made early have the old data.
        drop(self.take_host_copy());
        self.call.again_on_stream().map(|call| self.with_call(call))
    }

    fn replaced(&self, call: Call, role: Role, on_complete: Option<OnComplete>) -> Work {
        Work {
            loss: self.loss.clone(),
            place: Mutex::new(self.take_place()),
            call,
            role,
            deadline: self.deadline,
            warned: AtomicBool::new(self.warned.load(Ordering::Relaxed)),
            plan: OnceLock::new(),
            record: Arc::clone(&self.record),
            unmatched_since: Mutex::new(*lock(&self.unmatched_since)),
            lacking: Mutex::default(),
            host_copy: Mutex::default(),
            recorder: Arc::clone(&self.recorder),
            parts: AtomicUsize::new(1),
            outcome: Mutex::new((on_complete, Ok(()))),
            ended: Mutex::new(false),
            ends: Wakeup::default(),
        }
    }

    /// Keeps copies of the tensors of a call on device memory until it is known to need them.
    pub fn set_host_copy(&self, copy: HostCopy) {
        *lock(&self.host_copy) = Some(copy);
    }

    /// These copies, once.
    pub fn take_host_copy(&self) -> Option<HostCopy> {
        lock(&self.host_copy).take()
    }

    /// The contribution of a rank that has no call for a round.
    pub fn absent(call: Call, recorder: Arc<Recorder>) -> Work {
        let record = Arc::new(Record::detached(&call));
        Work::new(call, Role::Absent, Box::new(|_| {}), Deadline::default(), record, recorder)
    }

    /// Whether it is such a contribution.
    pub fn is_absent(&self) -> bool {
        matches!(self.role, Role::Absent)
    }

    /// Whether it matches by its name and has a deadline of its own, which ends only this call. Then the ranks decide on it
    /// before one of them starts with it.
    pub fn ends_alone(&self) -> bool {
        let has_deadline = self.deadline.set_by == SetBy::Call && self.deadline.after.is_some();
        has_deadline && self.call.is_by_name() && self.call.has_peers()
    }

    /// When the ranks first found this call unmatched with nothing runnable before it; now, if never.
    pub fn unmatched_since(&self) -> Instant {
        *lock(&self.unmatched_since).get_or_insert_with(Instant::now)
    }

    /// Keeps the ranks that lack it.
    pub fn set_lacking(&self, ranks: &[usize]) {
        *lock(&self.lacking) = ranks.to_vec();
    }

    /// The ranks that lacked it, as far as they are known.
    pub fn lacking(&self) -> Vec<usize> {
        lock(&self.lacking).clone()
    }

    /// An earlier call could run, so restart the time.
    pub fn reset_unmatched(&self) {
        *lock(&self.unmatched_since) = None;
    }

    /// Sets how the chunks after the first run; call it once, before other threads run them.
    pub fn set_plan(&self, plan: ChunkPlan) {
        // Only a matched call has a plan, and a call matches once.
        let _first = self.plan.set(plan);
    }

    /// How the chunks after the first run.
    pub fn plan(&self) -> ChunkPlan {
        self.plan.get().copied().unwrap_or_default()
    }

    /// Adds `more` parts, to be finished by other threads; call it before they start.
    pub fn add_parts(&self, more: usize) {
        self.parts.fetch_add(more, Ordering::Relaxed);
    }

    /// Finishes a part; the last one completes the call, with the first error if any.
    pub fn finish(&self, result: Result<()>) {
        let mut outcome = lock(&self.outcome);
        if outcome.1.is_ok() {
            outcome.1 = result;
        }
        let last = self.parts.fetch_sub(1, Ordering::AcqRel) == 1;
        let on_complete = if last { outcome.0.take() } else { None };
        let result = outcome.1.clone();
        drop(outcome);
        if last {
            // A call that has not started gives it up.
            drop(self.take_place());
        }
        let result = match result {
            Err(error) if on_complete.is_some() && self.loss.is_none() && !error.is_recoverable() => {
                Err(self.recorder.lost.report(error))
            }
            result => result,
        };
        if let Some(on_complete) = on_complete {
            self.record.end(&result);
            // The thread that completes a call has others to complete.
            let completed = guard(|| {
                on_complete(result);
                Ok(())
            });
            if let Err(error) = completed {
                log_line(&format!("the completion of {} failed: {error}", self.call.full_name()));
            }
            *lock(&self.ended) = true;
            self.ends.notify_all();
        }
    }

    /// Whether the call has ended, its completion too.
    pub fn has_ended(&self) -> bool {
        *lock(&self.ended)
    }

    /// Waits until it has. Only for calls whose parts other threads run.
    pub fn wait_until_ended(&self) {
        let mut ended = lock(&self.ended);
        while !*ended {
            ended = self.ends.wait(ended, None).0;
        }
    }
}
