//! Which thread starts or ends dl_comm. The state's lock is not held meanwhile: a start calls functions of the program,
//! such as those of a store, which may ask for the state on any thread.
//!
//! Thread rule: any thread.

use std::sync::{Condvar, Mutex, PoisonError};
use std::thread::{self, ThreadId};
use std::time::Duration;

use crate::error::{Error, Result};
use crate::lock::lock;
use crate::signals;

/// Interval at which a waiting thread looks for a signal.
const SIGNAL_CHECK: Duration = Duration::from_millis(100);

static HOLDER: Mutex<Option<ThreadId>> = Mutex::new(None);
static RELEASED: Condvar = Condvar::new();

/// The right to start or end dl_comm, until it is dropped.
pub(super) struct Turn;

impl Turn {
    /// Waits until no other thread has the turn. The caller has checked that this process is no forked child.
    ///
    /// # Errors
    /// [`Error::State`] if this thread has it; [`Error::PeerLost`] if a signal handler has raised an exception.
    pub fn take() -> Result<Turn> {
        let me = thread::current().id();
        let mut holder = lock(&HOLDER);
        while let Some(other) = *holder {
            if other == me {
                return Err(Error::State(
                    "dl_comm is being started on this thread, and has called the program, which must not start or end it"
                        .into(),
                ));
            }
            holder = RELEASED.wait_timeout(holder, SIGNAL_CHECK).unwrap_or_else(PoisonError::into_inner).0;
            if holder.is_some() {
                // A signal handler may use dl_comm.
                drop(holder);
                if signals::interrupted() {
                    return Err(Error::PeerLost("the wait for a start on another thread was interrupted".into()));
                }
                holder = lock(&HOLDER);
            }
        }
        *holder = Some(me);
        Ok(Turn)
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        *lock(&HOLDER) = None;
        RELEASED.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering};

    #[test]
    fn one_thread_at_a_time_has_the_turn() {
        let inside = AtomicU32::new(0);
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..20 {
                        let turn = Turn::take().unwrap();
                        assert_eq!(inside.fetch_add(1, Ordering::Relaxed), 0);
                        assert!(matches!(Turn::take(), Err(Error::State(text)) if text.contains("on this thread")));
                        thread::yield_now();
                        inside.fetch_sub(1, Ordering::Relaxed);
                        drop(turn);
                    }
                });
            }
        });
    }
}
