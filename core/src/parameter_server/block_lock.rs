//! A lock in shared memory, for a block of a shard: spin, then sleep on a futex (Drepper, "Futexes Are Tricky", 2011).
//!
//! Works between threads and between processes. A holder that dies keeps it: whoever waits learns of that by its check.

use std::hint;

use rustix::io::Errno;

use crate::error::{Error, Result};
use crate::transport::sync::{FutexWord, Ordering, yield_now};

const FREE: u32 = 0;
const HELD: u32 = 1;
/// Held, and somebody may sleep.
const AWAITED: u32 = 2;

/// A lock. Zeroed memory is a free one.
#[repr(C, align(64))]
#[derive(Debug, Default)]
pub struct BlockLock(FutexWord);

/// The right to use the block until it is dropped.
#[must_use]
#[derive(Debug)]
pub struct Held<'a>(&'a BlockLock);

impl BlockLock {
    /// Takes the lock, after at most `spins` polls by a sleep. Calls `check` after every timeout and wake of it.
    ///
    /// # Errors
    /// Errors of `check`, or of the futex call; the lock is not taken then.
    #[inline]
    pub fn take(&self, spins: u32, check: &mut dyn FnMut() -> Result<()>) -> Result<Held<'_>> {
        if self.0.compare_exchange(FREE, HELD, Ordering::Acquire, Ordering::Relaxed).is_err() {
            self.take_slow(spins, check)?;
        }
        Ok(Held(self))
    }

    #[cold]
    fn take_slow(&self, spins: u32, check: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        for spin in 0..spins {
            let seen = self.0.load(Ordering::Relaxed);
            if seen == FREE && self.0.compare_exchange(FREE, HELD, Ordering::Acquire, Ordering::Relaxed).is_ok() {
                return Ok(());
            }
            if spin % 64 == 63 { yield_now() } else { hint::spin_loop() }
        }
        // The next holder does not know whether others sleep, so it wakes them.
        while self.0.swap(AWAITED, Ordering::Acquire) != FREE {
            match self.0.futex_wait(AWAITED) {
                Err(Errno::AGAIN) => {}
                Ok(()) | Err(Errno::INTR | Errno::TIMEDOUT) => check()?,
                Err(error) => return Err(Error::system("futex wait", error)),
            }
        }
        Ok(())
    }
}

impl Drop for Held<'_> {
    #[inline]
    fn drop(&mut self) {
        if self.0.0.swap(FREE, Ordering::Release) == AWAITED {
            self.0.0.wake();
        }
    }
}

#[cfg(all(test, not(loom)))]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::cell::UnsafeCell;
    use std::thread;

    use super::*;

    struct Counter(BlockLock, UnsafeCell<u64>);
    // SAFETY: the number is used under the lock.
    unsafe impl Sync for Counter {}

    #[test]
    fn nothing_is_lost_between_threads() {
        let counter = Counter(BlockLock::default(), UnsafeCell::new(0));
        let counter = &counter;
        thread::scope(|scope| {
            for spins in [0, 0, 10, 1000] {
                scope.spawn(move || {
                    for _ in 0..20_000 {
                        let _held = counter.0.take(spins, &mut || Ok(())).unwrap();
                        // SAFETY: the lock is held.
                        unsafe { *counter.1.get() += 1 };
                    }
                });
            }
        });
        // SAFETY: the threads have ended.
        assert_eq!(unsafe { *counter.1.get() }, 80_000);
    }

    #[test]
    fn a_check_ends_the_wait_for_a_lost_holder() {
        let lock = BlockLock::default();
        std::mem::forget(lock.take(0, &mut || Ok(())).unwrap());
        let lost = Error::PeerLost("gone".into());
        assert_eq!(lock.take(5, &mut || Err(lost.clone())).err(), Some(lost));
    }
}
