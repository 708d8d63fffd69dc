//! A counter in shared memory that one rank raises and others wait for: spin, then sleep on a futex.
//!
//! Works between threads and between processes. Counters start and wrap as in [`super::counter`].

use std::hint;
use std::sync::atomic::Ordering;
use std::thread;

use rustix::io::Errno;

use super::counter::{START, reached};
use super::sync::{AtomicU32, FutexWord, fence};
use crate::error::{Error, Result};

/// A counter. Stores the distance from [`START`], so zeroed memory is a valid flag.
#[repr(C)]
#[derive(Debug, Default)]
pub struct Flag {
    value: FutexWord,
    sleepers: AtomicU32,
}

impl Flag {
    /// Raises the counter and wakes all waiters. A waiter that sees the new value also sees all earlier writes of the
    /// caller.
    pub fn raise(&self, value: u32) {
        self.raise_no_wake(value);
        self.wake_sleepers();
    }

    /// Raises the counter without waking sleepers. The caller must call [`Flag::wake_sleepers`] before it sleeps or
    /// does other work. Meanwhile it may poll other flags while the store propagates.
    pub fn raise_no_wake(&self, value: u32) {
        self.value.store(value.wrapping_sub(START), Ordering::Release);
    }

    /// Wakes all sleepers, if any.
    pub fn wake_sleepers(&self) {
        // Either this load sees the sleeper, or the sleeper's futex call sees the value that was raised before.
        fence(Ordering::SeqCst);
        if self.sleepers.load(Ordering::Relaxed) > 0 {
            self.wake();
        }
    }

    /// The value that the owner has raised the counter to.
    pub fn raised(&self) -> u32 {
        self.value.load(Ordering::Relaxed).wrapping_add(START)
    }

    /// Wakes all sleepers, so that they check their wait context.
    pub fn wake(&self) {
        self.value.wake();
    }

    /// Ends all current and future timed waits; Loom has no clock.
    #[cfg(loom)]
    pub fn end_waits(&self) {
        self.value.end_waits();
    }

    /// Whether the counter has reached `target`.
    pub fn reached(&self, target: u32) -> bool {
        reached(self.value.load(Ordering::Acquire).wrapping_add(START), target)
    }

    /// Checks up to `spins + 1` times whether the counter has reached `target`, and calls `between` between the checks.
    /// Yields after every `interval` checks, a power of two.
    #[inline]
    pub fn spin(&self, target: u32, spins: u32, interval: u32, between: impl Fn()) -> bool {
        for spin in 0..spins {
            if self.reached(target) {
                return true;
            }
            between();
            if spin & (interval - 1) == interval - 1 {
                thread::yield_now();
            } else {
                hint::spin_loop();
            }
        }
        self.reached(target)
    }

    /// Sleeps until the counter has reached `target`. Calls `check` after every timeout and wake.
    ///
    /// # Errors
    /// Errors of `check`, or of the futex call.
    pub fn sleep(&self, target: u32, check: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        let result = self.wait_slow(target, check);
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
        result
    }

    fn wait_slow(&self, target: u32, check: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        loop {
            let seen = self.value.load(Ordering::SeqCst);
            if reached(seen.wrapping_add(START), target) {
                return Ok(());
            }
            match self.value.futex_wait(seen) {
                Err(Errno::AGAIN) => {}
                // Check also after a signal or a wake: both may repeat forever.
                Ok(()) | Err(Errno::INTR | Errno::TIMEDOUT) => {
                    if self.reached(target) {
                        return Ok(());
                    }
                    check()?;
                }
                Err(error) => return Err(Error::system("futex wait", error)),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;
    use std::time::{Duration, Instant};

    #[test]
    fn reached_handles_the_wrap() {
        let flag = Flag::default();
        flag.raise(u32::MAX);
        assert!(flag.reached(u32::MAX) && flag.reached(u32::MAX - 1) && !flag.reached(0));
        flag.raise(1);
        assert!(flag.reached(u32::MAX) && flag.reached(0) && !flag.reached(2));
    }

    #[test]
    fn raising_wakes_a_sleeper_and_check_ends_a_wait() {
        let flag = Flag::default();
        thread::scope(|scope| {
            let waiter = scope.spawn(|| flag.sleep(3, &mut || Ok(())));
            for value in 1..=3 {
                thread::yield_now();
                flag.raise(value);
            }
            assert_eq!(waiter.join().unwrap(), Ok(()));
        });
        let stop = Error::Timeout("now".into());
        assert_eq!(flag.sleep(4, &mut || Err(stop.clone())), Err(stop));
        assert_eq!(flag.sleepers.load(Ordering::SeqCst), 0);
    }

    /// Signals and wakes may be more frequent than futex timeouts.
    #[test]
    fn wakes_do_not_hide_the_deadline() {
        let flag = Flag::default();
        let deadline = Instant::now() + Duration::from_millis(100);
        let stop = Error::Timeout("late".into());
        let mut check = || if Instant::now() < deadline { Ok(()) } else { Err(stop.clone()) };
        let ended = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                while !ended.load(Ordering::Relaxed) {
                    flag.wake();
                    thread::sleep(Duration::from_millis(1));
                }
            });
            assert_eq!(flag.sleep(1, &mut check), Err(stop.clone()));
            ended.store(true, Ordering::Relaxed);
        });
    }
}
