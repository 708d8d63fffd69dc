//! A call from its submission to its completion.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::pipeline::Parcel;
use crate::collective::Job;
use crate::error::Result;

/// What to do when a call has ended: with the parcel that holds the result, or `None` when that is where the call's own
/// tensors are written. Runs on a thread of the team, or on the submitting thread when the call is refused or need not wait;
/// it must not block, and may submit further calls.
pub type Done = Box<dyn FnOnce(Result<Option<Arc<dyn Parcel>>>) + Send>;

/// What goes with a call beside its tensors.
pub struct Request {
    pub(super) done: Done,
    pub(super) name: String,
    pub(super) instance: String,
    pub(super) labels: String,
    pub(super) parcel: Option<Arc<dyn Parcel>>,
    pub(super) owner: u64,
    pub(super) part: bool,
    pub(super) separate: bool,
    pub(super) timed: bool,
}

impl Request {
    /// A request without a name.
    pub fn new(done: Done) -> Request {
        Request {
            done,
            name: String::new(),
            instance: String::new(),
            labels: String::new(),
            parcel: None,
            owner: 0,
            part: false,
            separate: false,
            timed: true,
        }
    }

    /// Adds the name, which all ranks must agree on, and the tensors' names (a line each, may be empty) for messages.
    pub fn named(self, name: &str, labels: &str) -> Request {
        Request { name: name.to_owned(), labels: labels.to_owned(), ..self }
    }

    /// Adds what tells apart calls of one name that are under way at once; the ranks must agree on it too.
    pub fn instance(self, instance: &str) -> Request {
        Request { instance: instance.to_owned(), ..self }
    }

    /// Adds the owner of the memory, so that the call may return before its average has ended.
    pub fn keeping(self, parcel: Arc<dyn Parcel>) -> Request {
        Request { parcel: Some(parcel), ..self }
    }

    /// Tells apart equal lists of tensors of one name, of two optimizers say, on a schedule. The ranks need not agree on it:
    /// it is a matter of who gets the mean.
    pub fn owned_by(self, owner: u64) -> Request {
        Request { owner, ..self }
    }

    /// Makes the call a further part of the one before, which the schedule does not count.
    pub fn part(self, part: bool) -> Request {
        Request { part, ..self }
    }

    /// Leaves the call's own mean and the one before apart, for a caller that may yet throw its own away; see
    /// [`Parcel::settle`]. Only with a parcel.
    pub fn separate(self, separate: bool) -> Request {
        Request { separate, ..self }
    }

    /// Whether the time until the call is done is time that the caller waits; true by default.
    pub fn timed(self, timed: bool) -> Request {
        Request { timed, ..self }
    }

    /// Refuses the call before it reaches a team.
    pub fn refuse(self, error: crate::error::Error) {
        (self.done)(Err(error));
    }
}

/// What to do when all parts of a call have ended.
pub(super) type Ended = Box<dyn FnOnce(Result<()>) + Send>;

/// A call that a team carries out.
pub(super) struct Call {
    pub job: Job,
    pub started: Instant,
    pub timeout: Option<Duration>,
    pub warned: AtomicBool,
    parts: AtomicUsize,
    outcome: Mutex<(Option<Ended>, Result<()>)>,
}

impl Call {
    pub fn new(job: Job, ended: Ended, timeout: Option<Duration>) -> Call {
        let outcome = Mutex::new((Some(ended), Ok(())));
        Call {
            job,
            started: Instant::now(),
            timeout,
            warned: AtomicBool::new(false),
            parts: AtomicUsize::new(1),
            outcome,
        }
    }

    /// Says that `more` further threads will end a part each; called before they start.
    pub fn split(&self, more: usize) {
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
            ended(result);
        }
    }
}
