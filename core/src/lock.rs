//! Mutexes without poisoning: a panic becomes an error of its call ([`crate::error::guard`]), and the other calls go on.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Locks `mutex`, also after a panic of a thread that held it.
pub fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A condition variable that costs no system call if nobody waits. Its waiters share a mutex, and check what they wait
/// for under it.
#[derive(Debug, Default)]
pub struct Wakeup {
    waiting: AtomicUsize,
    condvar: Condvar,
}

impl Wakeup {
    /// Waits until somebody notifies, or until `timeout` has passed. Returns whether it has.
    pub fn wait<'a, T>(&self, guard: MutexGuard<'a, T>, timeout: Option<Duration>) -> (MutexGuard<'a, T>, bool) {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let (guard, is_late) = match timeout {
            None => (self.condvar.wait(guard).unwrap_or_else(PoisonError::into_inner), false),
            Some(timeout) => {
                let waited = self.condvar.wait_timeout(guard, timeout);
                let (guard, outcome) = waited.unwrap_or_else(PoisonError::into_inner);
                (guard, outcome.timed_out())
            }
        };
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        (guard, is_late)
    }

    /// Wakes all waiters, after what they wait for has changed under the mutex. A waiter that this does not see has the
    /// mutex later, and sees the change.
    pub fn notify_all(&self) {
        if self.waiting.load(Ordering::Relaxed) > 0 {
            self.condvar.notify_all();
        }
    }
}
