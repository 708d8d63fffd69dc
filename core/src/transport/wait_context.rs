//! The limits of a wait: the deadline of a call, the stall warning before it, and reasons to abort.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::log::log_line;
use crate::timings::CallTimings;

/// The limits of the waits of one call. A wait checks them only after it has slept, so they cost nothing while data
/// flows.
/// Thread rule: one thread.
#[derive(Clone, Copy)]
pub struct WaitContext<'a> {
    started: Instant,
    deadline: Deadline,
    warn: Option<Duration>,
    warned: &'a AtomicBool,
    timings: &'a CallTimings,
    callbacks: &'a dyn WaitCallbacks,
}

/// Callbacks of a wait; called rarely, because they are expensive.
pub trait WaitCallbacks {
    /// Describes the call in messages.
    fn describe(&self) -> String;
    /// Returns a failure that aborts every wait.
    fn abort_reason(&self) -> Option<Error>;
    /// Receives the stall warning.
    fn on_stall(&self, text: &str) {
        log_line(text);
    }
}

impl<'a> WaitContext<'a> {
    /// The limits of a call that started at `started`; its times are added to `timings`. All threads of the call share
    /// `warned`, so that one of them warns.
    pub fn new(
        started: Instant,
        deadline: Deadline,
        warn: Option<Duration>,
        warned: &'a AtomicBool,
        timings: &'a CallTimings,
        callbacks: &'a dyn WaitCallbacks,
    ) -> WaitContext<'a> {
        WaitContext { started, deadline, warn, warned, timings, callbacks }
    }

    /// The timings of the call.
    pub fn log(&self) -> &'a CallTimings {
        self.timings
    }

    /// Checks whether to continue waiting, at most `grace` past the deadline. `waiting_for` names the awaited ranks.
    ///
    /// # Errors
    /// [`Error::Timeout`] after the deadline, or the error of [`WaitCallbacks::abort_reason`].
    pub fn check(&self, grace: Duration, waiting_for: &dyn Fn() -> String) -> Result<()> {
        if let Some(error) = self.callbacks.abort_reason() {
            return Err(error);
        }
        let waited = self.started.elapsed();
        if self.deadline.is_over(waited.saturating_sub(grace)) {
            return Err(Error::Timeout(format!(
                "{} was not complete after {:.1} s ({}); still waiting for {}",
                self.callbacks.describe(),
                waited.as_secs_f64(),
                self.deadline.set_by,
                waiting_for()
            )));
        }
        if self.warn.is_some_and(|warn| waited >= warn + grace) && !self.warned.swap(true, Ordering::Relaxed) {
            self.callbacks.on_stall(&format!(
                "{} has waited {:.0} s for {} (DL_COMM_STALL_WARN_S)",
                self.callbacks.describe(),
                waited.as_secs_f64(),
                waiting_for()
            ));
        }
        Ok(())
    }
}

/// Runs `work` with these limits, from now on; `what` names the work in messages.
///
/// # Errors
/// Those of `work`.
pub fn with_limits<T>(
    what: &str,
    deadline: impl Into<Deadline>,
    warn: Option<Duration>,
    abort_reason: &dyn Fn() -> Option<Error>,
    work: impl FnOnce(&WaitContext<'_>) -> Result<T>,
) -> Result<T> {
    struct Limits<'a>(&'a str, &'a dyn Fn() -> Option<Error>);
    impl WaitCallbacks for Limits<'_> {
        fn describe(&self) -> String {
            self.0.to_owned()
        }
        fn abort_reason(&self) -> Option<Error> {
            self.1()
        }
    }
    let (warned, timings) = (AtomicBool::new(false), CallTimings::default());
    work(&WaitContext::new(Instant::now(), deadline.into(), warn, &warned, &timings, &Limits(what, abort_reason)))
}
