//! A counter in shared memory that one rank raises and others wait for: spin, then sleep on a futex.
//!
//! Works between threads and between processes. Counters start and wrap as in [`super::step`].

use std::hint;
use std::sync::atomic::Ordering;
use std::thread;

use rustix::io::Errno;

use super::step::{START, reached};
use super::sync::{AtomicU32, FutexWord, fence};
use crate::error::{Error, Result};

/// One counter. All zero bytes are a valid flag at [`START`]: what is stored is the distance from there.
#[repr(C)]
#[derive(Debug, Default)]
pub struct Flag {
    value: FutexWord,
    sleepers: AtomicU32,
}

impl Flag {
    /// Raises the counter and wakes who waits. What the caller wrote before is visible to who sees the new value.
    pub fn raise(&self, value: u32) {
        self.raise_no_wake(value);
        self.wake_sleepers();
    }

    /// Raises the counter; who sleeps is not woken before [`Flag::wake_sleepers`], which the caller calls before it sleeps
    /// itself or goes on to something else. In between it may look what others have done: the store need not have ended.
    pub fn raise_no_wake(&self, value: u32) {
        self.value.store(value.wrapping_sub(START), Ordering::Release);
    }

    /// Wakes who sleeps, if anybody does.
    pub fn wake_sleepers(&self) {
        // Either this load sees the sleeper, or the sleeper's futex call sees the value that was raised before.
        fence(Ordering::SeqCst);
        if self.sleepers.load(Ordering::Relaxed) > 0 {
            self.wake();
        }
    }

    /// What the one who raises it has raised it to.
    pub fn raised(&self) -> u32 {
        self.value.load(Ordering::Relaxed).wrapping_add(START)
    }

    /// Wakes every sleeper, so that it asks its wait context.
    pub fn wake(&self) {
        self.value.wake();
    }

    /// Ends the naps of those who sleep, now and later; the model has no clock.
    #[cfg(loom)]
    pub fn end_waits(&self) {
        self.value.end_waits();
    }

    /// Whether the counter has come to `target`.
    pub fn reached(&self, target: u32) -> bool {
        reached(self.value.load(Ordering::Acquire).wrapping_add(START), target)
    }

    /// Looks up to `spins` times, and once more, whether the counter has come to `target`.
    pub fn spin(&self, target: u32, spins: u32) -> bool {
        for turn in 0..spins {
            if self.reached(target) {
                return true;
            }
            if turn % 64 == 63 {
                thread::yield_now();
            } else {
                hint::spin_loop();
            }
        }
        self.reached(target)
    }

    /// Sleeps until the counter has come to `target`. `check` is asked after every nap and wake.
    ///
    /// # Errors
    /// What `check` returns, or a futex that the system refuses.
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
                // Also after a signal or a wake: either may come again and again.
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
    fn reached_goes_on_past_the_wrap() {
        let flag = Flag::default();
        flag.raise(u32::MAX);
        assert!(flag.reached(u32::MAX) && flag.reached(u32::MAX - 1) && !flag.reached(0));
        flag.raise(1);
        assert!(flag.reached(u32::MAX) && flag.reached(0) && !flag.reached(2));
    }

    #[test]
    fn a_sleeper_is_woken_and_a_check_ends_a_wait() {
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

    /// Signals and wakes for others may come more often than naps end.
    #[test]
    fn wakes_do_not_hide_the_deadline() {
        let flag = Flag::default();
        let late = Instant::now() + Duration::from_millis(100);
        let stop = Error::Timeout("late".into());
        let mut check = || if Instant::now() < late { Ok(()) } else { Err(stop.clone()) };
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
