//! Whether something goes on, for other threads.
//!
//! Thread rule: one thread begins it at a time; any thread asks.

use std::sync::atomic::{AtomicBool, Ordering};

/// See the module's documentation.
#[derive(Debug, Default)]
pub(super) struct Active(AtomicBool);

/// As long as it lives, something goes on: also after a panic it ends.
#[must_use]
pub(super) struct Activity<'a>(&'a Active);

impl Active {
    pub fn begin(&self) -> Activity<'_> {
        self.0.store(true, Ordering::Release);
        Activity(self)
    }

    pub fn goes_on(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

impl Drop for Activity<'_> {
    fn drop(&mut self) {
        self.0.0.store(false, Ordering::Release);
    }
}
