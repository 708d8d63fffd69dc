//! A call from its submission to its completion.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::collective::Job;
use crate::error::Result;

/// What to do when a call has ended. Runs on a thread of the team, or on the submitting thread when the call is refused; it
/// must not block, and may submit further calls.
pub type Done = Box<dyn FnOnce(Result<()>) + Send>;

/// What goes with a call beside its tensors.
pub struct Request {
    pub(super) done: Done,
    pub(super) name: String,
    pub(super) labels: String,
}

impl Request {
    /// A request without a name.
    pub fn new(done: Done) -> Request {
        Request { done, name: String::new(), labels: String::new() }
    }

    /// Adds the name, which all ranks must agree on, and the tensors' names (a line each, may be empty) for messages.
    pub fn named(self, name: &str, labels: &str) -> Request {
        Request { name: name.to_owned(), labels: labels.to_owned(), ..self }
    }

    /// Refuses the call before it reaches a team.
    pub fn refuse(self, error: crate::error::Error) {
        (self.done)(Err(error));
    }
}

/// A call that a team carries out.
pub(super) struct Call {
    pub job: Job,
    pub started: Instant,
    pub timeout: Option<Duration>,
    pub warned: AtomicBool,
    parts: AtomicUsize,
    outcome: Mutex<(Option<Done>, Result<()>)>,
}

impl Call {
    pub fn new(job: Job, done: Done, timeout: Option<Duration>) -> Call {
        let outcome = Mutex::new((Some(done), Ok(())));
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
        let done = if last { outcome.0.take() } else { None };
        let result = outcome.1.clone();
        drop(outcome);
        if let Some(done) = done {
            done(result);
        }
    }
}
