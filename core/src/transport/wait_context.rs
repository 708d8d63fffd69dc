//! How long a wait goes on: the deadline of a call, the warning before it, and the reasons to stop earlier.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::timings::CallTimings;

/// The wait context of one call. Waits ask it when they have slept a little; it costs nothing while data flows.
/// Thread rule: one per thread and call.
pub struct WaitContext<'a> {
    started: Instant,
    timeout: Option<Duration>,
    warn: Option<Duration>,
    warned: &'a AtomicBool,
    timings: &'a CallTimings,
    describe: &'a dyn Fn() -> String,
    abort_reason: &'a dyn Fn() -> Option<Error>,
    on_stall: &'a dyn Fn(&str),
}

/// What a [`Patience`] asks and tells; functions, because they cost something and are needed seldom.
pub struct WaitCallbacks<'a> {
    /// Names the call in messages.
    pub describe: &'a dyn Fn() -> String,
    /// Asked for a failure that ends every wait.
    pub abort_reason: &'a dyn Fn() -> Option<Error>,
    /// Told the warning.
    pub on_stall: &'a dyn Fn(&str),
}

impl<'a> WaitContext<'a> {
    /// Patience for a call that started at `started`, whose time goes into `log`. `warned` is shared by all who wait for
    /// the call, so that one of them warns.
    pub fn new(
        started: Instant,
        timeout: Option<Duration>,
        warn: Option<Duration>,
        warned: &'a AtomicBool,
        log: &'a CallTimings,
        callbacks: &WaitCallbacks<'a>,
    ) -> WaitContext<'a> {
        let WaitCallbacks { describe, abort_reason: interrupted, on_stall: stalled } = *callbacks;
        WaitContext {
            started,
            timeout,
            warn,
            warned,
            timings: log,
            describe,
            abort_reason: interrupted,
            on_stall: stalled,
        }
    }

    /// The log of the call.
    pub fn log(&self) -> &'a CallTimings {
        self.timings
    }

    /// Whether to go on waiting, `grace` past the deadline at most; `late` names who is being waited for.
    ///
    /// # Errors
    /// [`Error::Timeout`] past the deadline, or what `interrupted` found.
    pub fn check(&self, grace: Duration, waiting_for: &dyn Fn() -> String) -> Result<()> {
        if let Some(error) = (self.abort_reason)() {
            return Err(error);
        }
        let waited = self.started.elapsed();
        if self.timeout.is_some_and(|timeout| waited >= timeout + grace) {
            return Err(Error::Timeout(format!(
                "{} was not complete after {:.1} s (DL_COMM_TIMEOUT_S); still waiting for {}",
                (self.describe)(),
                waited.as_secs_f64(),
                waiting_for()
            )));
        }
        if self.warn.is_some_and(|warn| waited >= warn + grace) && !self.warned.swap(true, Ordering::Relaxed) {
            (self.on_stall)(&format!(
                "{} has waited {:.0} s for {} (DL_COMM_STALL_WARN_S)",
                (self.describe)(),
                waited.as_secs_f64(),
                waiting_for()
            ));
        }
        Ok(())
    }
}
