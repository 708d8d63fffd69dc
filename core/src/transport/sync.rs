//! The atomics and the futex in shared memory. With `--cfg loom`, `loom_sync.rs` replaces this file, so that Loom
//! checks the real protocol; see `docs/verification.md`.
//!
//! Thread rule: everything works between threads and between processes.

use rustix::io::Errno;
use rustix::thread::futex;
use rustix::time::Timespec;

pub use std::sync::atomic::{AtomicI32, AtomicU8, AtomicU32, AtomicU64, Ordering, fence};
pub use std::thread::yield_now;

/// Interval at which a sleeping wait checks for a deadline or an abort.
const FUTEX_TIMEOUT: Timespec = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };

/// A futex. Zeroed memory is valid.
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

    /// As [`AtomicU32::fetch_add`].
    pub fn fetch_add(&self, value: u32, order: Ordering) -> u32 {
        self.0.fetch_add(value, order)
    }

    /// As [`AtomicU32::swap`].
    #[inline]
    pub fn swap(&self, value: u32, order: Ordering) -> u32 {
        self.0.swap(value, order)
    }

    /// As [`AtomicU32::compare_exchange`].
    ///
    /// # Errors
    /// The value, if it is not `seen`.
    #[inline]
    pub fn compare_exchange(&self, seen: u32, new: u32, success: Ordering, failure: Ordering) -> Result<u32, u32> {
        self.0.compare_exchange(seen, new, success, failure)
    }

    /// Sleeps while the value is `seen`: until a wake, a signal or a timeout of 50 ms.
    ///
    /// # Errors
    /// Those of futex(2): `AGAIN` when the value differs, `INTR`, `TIMEDOUT`.
    pub fn futex_wait(&self, seen: u32) -> Result<(), Errno> {
        futex::wait(&self.0, futex::Flags::empty(), seen, Some(&FUTEX_TIMEOUT))
    }

    /// As [`FutexWord::futex_wait`], for at most `nanoseconds`, less than a second.
    ///
    /// # Errors
    /// As for [`FutexWord::futex_wait`].
    pub fn futex_nap(&self, seen: u32, nanoseconds: u32) -> Result<(), Errno> {
        let timeout = Timespec { tv_sec: 0, tv_nsec: i64::from(nanoseconds) };
        futex::wait(&self.0, futex::Flags::empty(), seen, Some(&timeout))
    }

    /// Wakes all sleepers.
    pub fn wake(&self) {
        // Fails only for an invalid address.
        let _woken = futex::wake(&self.0, futex::Flags::empty(), i32::MAX as u32);
    }
}

/// Records a read of a slot or a tensor under Loom; does nothing here.
#[inline(always)]
pub fn check_read(_from: *const u8, _len: usize) {}

/// Records a write of a slot or a tensor under Loom; does nothing here.
#[inline(always)]
pub fn check_write(_to: *mut u8, _len: usize) {}

/// Brings the cache line at `address` into the cache of this processor, where the compiler has a portable way to.
#[inline(always)]
pub fn prefetch(address: *mut u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch of any address has no effect that a program sees.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(address.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}
