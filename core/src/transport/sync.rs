//! The atomics and the futex that ranks meet on in shared memory. Built with `--cfg loom`, `loom_sync.rs` stands in for this
//! file, so that a model checker runs the very protocol; `docs/verification.md` tells what it finds.
//!
//! Thread rule: everything here is for use between threads and between processes.

use rustix::io::Errno;
use rustix::thread::futex;
use rustix::time::Timespec;

pub use std::sync::atomic::{AtomicI32, AtomicU8, AtomicU32, AtomicU64, Ordering, fence};

/// How long a sleeping wait goes without asking whether to go on.
const FUTEX_TIMEOUT: Timespec = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };

/// A number to sleep on until it changes. Zero bytes are a valid one.
#[repr(transparent)]
#[derive(Debug, Default)]
pub struct FutexWord(AtomicU32);

impl FutexWord {
    /// As [`AtomicU32::load`].
    #[inline]
    pub fn load(&self, order: Ordering) -> u32 {
        self.0.load(order)
    }

    /// As [`AtomicU32::store`].
    #[inline]
    pub fn store(&self, value: u32, order: Ordering) {
        self.0.store(value, order);
    }

    /// Sleeps while the number is `seen`: until a wake, a signal or the end of a nap (50 ms).
    ///
    /// # Errors
    /// Those of futex(2): `AGAIN` when the number is another, `INTR`, `TIMEDOUT`.
    pub fn futex_wait(&self, seen: u32) -> Result<(), Errno> {
        futex::wait(&self.0, futex::Flags::empty(), seen, Some(&FUTEX_TIMEOUT))
    }

    /// Wakes all who sleep.
    pub fn wake(&self) {
        // Fails for no reason but a bad address.
        let _woken = futex::wake(&self.0, futex::Flags::empty(), i32::MAX as u32);
    }
}

/// Tells a model that the caller now reads these bytes of a slot; nothing else.
#[inline(always)]
pub fn check_read(_from: *const u8, _len: usize) {}

/// Tells a model that the caller now writes these bytes of a slot; nothing else.
#[inline(always)]
pub fn check_write(_to: *mut u8, _len: usize) {}
