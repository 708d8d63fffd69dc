//! A call from its submission to its completion.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::record::{self, Record};
use super::schedule_state::ResultBuffer;
use crate::collective::Call;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::signals;

/// What to do when a call has ended: with the result buffer that holds the result, or `None` when that is where the call's own
/// tensors are written. Runs on a thread of the team, or on the submitting thread when the call is refused or need not wait;
/// it must not block, and may submit further calls.
pub type OnComplete = Box<dyn FnOnce(Result<Option<Arc<dyn ResultBuffer>>>) + Send>;

/// How often a caller that waits looks for signals.
const SIGNAL_POLL: Duration = Duration::from_millis(100);

/// Calls `start` with something to give an outcome to, and waits for that. When a signal comes meanwhile that wants the wait
/// to end, calls `interrupt`, after which the outcome must come soon.
///
/// # Errors
/// The outcome; [`Error::Internal`] when none comes any more.
pub fn wait_for_result<T: Send + 'static>(
    interrupt: impl Fn(),
    start: impl FnOnce(Box<dyn FnOnce(Result<T>) + Send>),
) -> Result<T> {
    let (sender, receiver) = sync_channel(1);
    start(Box::new(move |result| {
        // The receiver is below, waiting.
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

/// What goes with a call beside its tensors.
pub struct CallOptions {
    pub(super) done: OnComplete,
    pub(super) name: String,
    pub(super) instance_id: String,
    pub(super) tensor_names: String,
    pub(super) results: Option<Arc<dyn ResultBuffer>>,
    pub(super) owner: u64,
    pub(super) continues_step: bool,
    pub(super) return_weights: bool,
    pub(super) count_wait: bool,
    pub(super) caller_blocks: bool,
    pub(super) timeout: Timeout,
    pub(super) device: Option<Device>,
}

/// The deadline of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Timeout {
    /// That of its team.
    #[default]
    GroupDefault,
    /// This one; `None` for none.
    Override(Option<Duration>),
}

impl Timeout {
    /// The limit that a binding gives in seconds: negative or not a number for that of the team, 0 for none.
    pub fn from_seconds(seconds: f64) -> Timeout {
        if seconds > 0.0 {
            // Longer than anybody waits, and what a Duration holds.
            return Timeout::Override(Some(Duration::from_secs_f64(seconds.min(1e9))));
        }
        if seconds == 0.0 { Timeout::Override(None) } else { Timeout::GroupDefault }
    }
}

impl CallOptions {
    /// A request without a name.
    pub fn new(done: OnComplete) -> CallOptions {
        CallOptions {
            done,
            name: String::new(),
            instance_id: String::new(),
            tensor_names: String::new(),
            results: None,
            owner: 0,
            continues_step: false,
            return_weights: false,
            count_wait: true,
            caller_blocks: false,
            timeout: Timeout::GroupDefault,
            device: None,
        }
    }

    /// Says that the calling thread makes no other call before this one has ended: a call that no other rank has a
    /// counterpart for is then given up sooner.
    pub fn with_caller_blocks(self, blocks: bool) -> CallOptions {
        CallOptions { caller_blocks: blocks, ..self }
    }

    /// Gives the call a deadline of its own.
    pub fn with_timeout(self, timeout: Timeout) -> CallOptions {
        CallOptions { timeout, ..self }
    }

    /// Says that the tensors are in device memory, made and used on a stream of it.
    pub fn with_device(self, device: Option<Device>) -> CallOptions {
        CallOptions { device, ..self }
    }

    /// Adds the name, which all ranks must agree on, and the tensors' names (a line each, may be empty) for messages.
    pub fn with_name(self, name: &str, labels: &str) -> CallOptions {
        CallOptions { name: name.to_owned(), tensor_names: labels.to_owned(), ..self }
    }

    /// Adds what tells apart calls of one name that are under way at once; the ranks must agree on it too.
    pub fn instance(self, instance: &str) -> CallOptions {
        CallOptions { instance_id: instance.to_owned(), ..self }
    }

    /// Adds the owner of the memory, so that the call may return before its average has ended.
    pub fn with_results(self, results: Arc<dyn ResultBuffer>) -> CallOptions {
        CallOptions { results: Some(results), ..self }
    }

    /// Tells apart equal lists of tensors of one name, of two optimizers say, on a schedule. The ranks need not agree on it:
    /// it is a matter of who gets the mean.
    pub fn with_owner(self, owner: u64) -> CallOptions {
        CallOptions { owner, ..self }
    }

    /// Makes the call a further part of the one before, which the schedule does not count.
    pub fn part(self, part: bool) -> CallOptions {
        CallOptions { continues_step: part, ..self }
    }

    /// Leaves the call's own mean and the one before apart, for a caller that may yet throw its own away; see
    /// [`ResultBuffer::settle`]. Only with a result buffer.
    pub fn return_weights(self, return_weights: bool) -> CallOptions {
        CallOptions { return_weights, ..self }
    }

    /// Whether the time until the call is done is time that the caller waits; true by default.
    pub fn timed(self, timed: bool) -> CallOptions {
        CallOptions { count_wait: timed, ..self }
    }

    /// Refuses the call before it reaches a team.
    pub fn fail(self, error: Error) {
        (self.done)(Err(error));
    }
}

/// What to do when all parts of a call have ended.
pub(super) type OnAllParts = Box<dyn FnOnce(Result<()>) + Send>;

/// A call that a team carries out.
pub(super) struct Work {
    pub call: Call,
    pub timeout: Option<Duration>,
    pub warned: AtomicBool,
    /// What [`crate::collective::Channel::is_direct`] told after the first chunk.
    pub zero_copy: AtomicBool,
    pub record: Arc<Record>,
    unmatched_since: Mutex<Option<Instant>>,
    recorder: Arc<record::Recorder>,
    parts: AtomicUsize,
    outcome: Mutex<(Option<OnAllParts>, Result<()>)>,
}

impl Work {
    pub fn new(
        call: Call,
        ended: OnAllParts,
        timeout: Option<Duration>,
        record: Arc<Record>,
        recorder: Arc<record::Recorder>,
    ) -> Work {
        Work {
            call,
            timeout,
            warned: AtomicBool::new(false),
            zero_copy: AtomicBool::new(false),
            record,
            unmatched_since: Mutex::default(),
            recorder,
            parts: AtomicUsize::new(1),
            outcome: Mutex::new((Some(ended), Ok(()))),
        }
    }

    /// What a rank brings to a step for which it has no call.
    pub fn absent(call: Call, recorder: Arc<record::Recorder>) -> Work {
        let record = Arc::new(Record::detached(&call));
        Work::new(call, Box::new(|_| {}), None, record, recorder)
    }

    /// Whether it is such a call.
    pub fn is_absent(&self) -> bool {
        self.call.is_absent()
    }

    /// Since when the ranks know that not all of them have it, and nothing before it could be carried out; now, if they
    /// have not known before.
    pub fn alone_since(&self) -> Instant {
        *self.unmatched_since.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_with(Instant::now)
    }

    /// Something before it could be carried out.
    pub fn reset_unmatched(&self) {
        *self.unmatched_since.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// Says that `more` further threads will end a part each; called before they start.
    pub fn add_parts(&self, more: usize) {
        self.parts.fetch_add(more, Ordering::Relaxed);
    }

    /// Ends a part; the last to end completes the call, with the first error if there was one.
    pub fn finish(&self, result: Result<()>) {
        let mut outcome = self.outcome.lock().unwrap_or_else(PoisonError::into_inner);
        if outcome.1.is_ok() {
            outcome.1 = result;
        }
        let last = self.parts.fetch_sub(1, Ordering::AcqRel) == 1;
        let ended = if last { outcome.0.take() } else { None };
        let result = outcome.1.clone();
        drop(outcome);
        if let Some(ended) = ended {
            self.recorder.close(&self.record, &result);
            ended(result);
        }
    }
}
