//! A call from its submission to its completion.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::record::{Record, Recorder};
use crate::collective::Call;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::signals;

/// Called once with the outcome of a call: on the thread that completes the call, or on the submitting thread when the call
/// is refused. It must not block, and may submit further calls.
pub type OnComplete = Box<dyn FnOnce(Result<()>) + Send>;

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

/// The options of a call.
#[derive(Debug, Clone, Default)]
pub struct CallOptions {
    /// Part of the signature: all ranks must give the same name.
    pub name: String,
    /// Tells apart calls of one name that are in flight at once. Part of the signature.
    pub instance_id: String,
    /// The names of the tensors, for messages: a line each, or empty.
    pub tensor_names: String,
    /// The calling thread makes no other call before this one has ended. A call without a counterpart then fails sooner.
    pub caller_blocks: bool,
    /// The deadline.
    pub timeout: Timeout,
    /// The tensors are in the memory of this device; `None`: in host memory.
    pub device: Option<Device>,
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

/// A call that a team carries out.
pub(super) struct Work {
    pub call: Call,
    pub timeout: Option<Duration>,
    pub warned: AtomicBool,
    /// What [`crate::collective::Channel::is_direct`] told after the first chunk.
    pub zero_copy: AtomicBool,
    pub record: Arc<Record>,
    unmatched_since: Mutex<Option<Instant>>,
    recorder: Arc<Recorder>,
    parts: AtomicUsize,
    outcome: Mutex<(Option<OnComplete>, Result<()>)>,
}

impl Work {
    pub fn new(
        call: Call,
        ended: OnComplete,
        timeout: Option<Duration>,
        record: Arc<Record>,
        recorder: Arc<Recorder>,
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
    pub fn absent(call: Call, recorder: Arc<Recorder>) -> Work {
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

/// Something for the thread that leads.
pub(super) enum QueueItem {
    /// A call.
    Call(Arc<Work>),
    /// A call was left in the executor.
    HandedBack,
    /// Other ranks wait long in a step for which there is no call here.
    JoinStalled,
}
