//! Waits for something that must be polled: naps that become longer, and regular checks of the limits.
//!
//! Thread rule: one per wait.

use std::thread;
use std::time::{Duration, Instant};

use super::sync;
use crate::error::Result;

/// Polls before the first sleep. Giving up the processor is cheaper than a short sleep.
const YIELDS: u32 = 500;
/// Polls before the sleeps become longer.
const SHORT_SLEEPS: u32 = 2000;
const SHORT_SLEEP: Duration = Duration::from_micros(20);
const LONG_SLEEP: Duration = Duration::from_micros(200);
/// Interval of the checks.
const CHECK_EVERY: Duration = Duration::from_millis(20);

/// The state of a wait that polls.
#[derive(Debug)]
pub struct Backoff {
    polls: u32,
    last_check: Instant,
}

impl Default for Backoff {
    fn default() -> Backoff {
        Backoff { polls: 0, last_check: Instant::now() }
    }
}

impl Backoff {
    /// Starts again with short naps: something has happened.
    pub fn reset(&mut self) {
        self.polls = 0;
    }

    /// Pauses between two polls. Calls `check` regularly.
    ///
    /// # Errors
    /// Those of `check`.
    pub fn nap(&mut self, check: impl FnOnce() -> Result<()>) -> Result<()> {
        self.polls = self.polls.saturating_add(1);
        match self.polls {
            0..YIELDS => sync::yield_now(),
            YIELDS..SHORT_SLEEPS => thread::sleep(SHORT_SLEEP),
            _ => thread::sleep(LONG_SLEEP),
        }
        if self.polls > YIELDS && self.last_check.elapsed() > CHECK_EVERY {
            check()?;
            self.last_check = Instant::now();
        }
        Ok(())
    }
}
