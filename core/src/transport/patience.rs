//! How long a wait goes on: the deadline of a call, the warning before it, and the reasons to stop earlier.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::say::say;

/// The patience of one call. Waits ask it when they have slept a little; it costs nothing while data flows.
/// Thread rule: one per thread and call.
pub struct Patience<'a> {
    started: Instant,
    timeout: Option<Duration>,
    warn: Option<Duration>,
    warned: &'a AtomicBool,
    describe: &'a dyn Fn() -> String,
    interrupted: &'a dyn Fn() -> Option<Error>,
}

impl<'a> Patience<'a> {
    /// Patience for a call that started at `started`. `warned` is shared by all who wait for the call, so that
    /// one of them warns; `describe` names it in messages; `interrupted` is asked for a failure that ends every wait.
    pub fn new(
        started: Instant,
        timeout: Option<Duration>,
        warn: Option<Duration>,
        warned: &'a AtomicBool,
        describe: &'a dyn Fn() -> String,
        interrupted: &'a dyn Fn() -> Option<Error>,
    ) -> Patience<'a> {
        Patience { started, timeout, warn, warned, describe, interrupted }
    }

    /// Whether to go on waiting, `grace` past the deadline at most; `late` names who is being waited for.
    ///
    /// # Errors
    /// [`Error::Timeout`] past the deadline, or what `interrupted` found.
    pub fn check(&self, grace: Duration, late: &dyn Fn() -> String) -> Result<()> {
        if let Some(error) = (self.interrupted)() {
            return Err(error);
        }
        let waited = self.started.elapsed();
        if self.timeout.is_some_and(|timeout| waited >= timeout + grace) {
            return Err(Error::Timeout(format!(
                "{} was not complete after {:.1} s (DL_COMM_TIMEOUT_S); still waiting for {}",
                (self.describe)(),
                waited.as_secs_f64(),
                late()
            )));
        }
        if self.warn.is_some_and(|warn| waited >= warn + grace) && !self.warned.swap(true, Ordering::Relaxed) {
            say(&format!(
                "{} has waited {:.0} s for {} (DL_COMM_STALL_WARN_S)",
                (self.describe)(),
                waited.as_secs_f64(),
                late()
            ));
        }
        Ok(())
    }
}
