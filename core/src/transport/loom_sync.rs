//! Replaces `sync.rs` under `--cfg loom`: Loom's atomics, a futex built from Loom's mutex and condition variable, and
//! access checks for slots and tensors.
//!
//! The futex behaves as futex(2) specifies: comparing and falling asleep is atomic with respect to wakes, and both
//! calls start with a full barrier. It has no clock. A wait ends by a wake or by [`FutexWord::end_waits`], so Loom
//! reports a lost wake as a deadlock.
//! Thread rule: for the threads of one Loom execution, which share one system thread.

use std::cell::RefCell;
use std::ops::Range;

use loom::cell::UnsafeCell;
use loom::sync::{Condvar, Mutex};
use rustix::io::Errno;

pub use loom::sync::atomic::{AtomicI32, AtomicU8, AtomicU32, AtomicU64, Ordering, fence};
pub use loom::thread::yield_now;

use crate::wire_layout::ALIGN;

/// A futex.
#[derive(Debug, Default)]
pub struct FutexWord {
    value: AtomicU32,
    /// The kernel's lock; true once timed waits end at once.
    ended: Mutex<bool>,
    condvar: Condvar,
}

impl FutexWord {
    /// As `AtomicU32::load`.
    pub fn load(&self, order: Ordering) -> u32 {
        self.value.load(order)
    }

    /// As `AtomicU32::store`.
    pub fn store(&self, value: u32, order: Ordering) {
        self.value.store(value, order);
    }

    /// As `AtomicU32::fetch_add`.
    pub fn fetch_add(&self, value: u32, order: Ordering) -> u32 {
        self.value.fetch_add(value, order)
    }

    /// As `AtomicU32::swap`.
    pub fn swap(&self, value: u32, order: Ordering) -> u32 {
        self.value.swap(value, order)
    }

    /// As `AtomicU32::compare_exchange`.
    ///
    /// # Errors
    /// The value, if it is not `seen`.
    pub fn compare_exchange(&self, seen: u32, new: u32, success: Ordering, failure: Ordering) -> Result<u32, u32> {
        self.value.compare_exchange(seen, new, success, failure)
    }

    /// Sleeps while the value is `seen`, until a wake or [`FutexWord::end_waits`].
    ///
    /// # Errors
    /// `AGAIN` when the value differs, `TIMEDOUT` after [`FutexWord::end_waits`].
    pub fn futex_wait(&self, seen: u32) -> Result<(), Errno> {
        fence(Ordering::SeqCst);
        let ended = self.lock();
        if self.value.load(Ordering::Relaxed) != seen {
            return Err(Errno::AGAIN);
        }
        if *ended {
            return Err(Errno::TIMEDOUT);
        }
        drop(self.condvar.wait(ended));
        Ok(())
    }

    /// As [`FutexWord::futex_wait`]: Loom has no clock.
    ///
    /// # Errors
    /// As for [`FutexWord::futex_wait`].
    pub fn futex_nap(&self, seen: u32, _nanoseconds: u32) -> Result<(), Errno> {
        self.futex_wait(seen)
    }

    /// Wakes all sleepers.
    pub fn wake(&self) {
        fence(Ordering::SeqCst);
        let _awake = self.lock();
        self.condvar.notify_all();
    }

    /// Ends current and future waits.
    pub fn end_waits(&self) {
        *self.lock() = true;
        self.condvar.notify_all();
    }

    fn lock(&self) -> loom::sync::MutexGuard<'_, bool> {
        self.ended.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

/// Tracked memory: its address, and a cell for each cache line of [`ALIGN`] bytes.
struct Tracked {
    start: usize,
    lines: Vec<UnsafeCell<()>>,
}

thread_local! {
    static TRACKED: RefCell<Vec<Tracked>> = const { RefCell::new(Vec::new()) };
}

/// Forgets the memory of the previous execution. Call it at the start of each.
pub fn start_execution() {
    TRACKED.take();
}

/// Tracks accesses to the addresses `range`: slots, mailboxes, and tensors that other ranks access.
pub fn track(range: Range<usize>) {
    let lines = (0..range.len().div_ceil(ALIGN)).map(|_| UnsafeCell::new(())).collect();
    TRACKED.with_borrow_mut(|tracked| tracked.push(Tracked { start: range.start, lines }));
}

/// Records a read. Loom panics if an earlier write is not ordered before it. Does nothing for memory that is not tracked.
pub fn check_read(from: *const u8, len: usize) {
    each_line(from.addr(), len, |line| line.with(|_| ()));
}

/// Records a write. Loom panics if any other access is not ordered. Does nothing for memory that is not tracked.
pub fn check_write(to: *mut u8, len: usize) {
    each_line(to.addr(), len, |line| line.with_mut(|_| ()));
}

fn each_line(start: usize, len: usize, record: impl Fn(&UnsafeCell<()>)) {
    TRACKED.with_borrow(|tracked| {
        let overlaps =
            |memory: &&Tracked| start < memory.start + memory.lines.len() * ALIGN && memory.start < start + len;
        if let Some(memory) = tracked.iter().find(overlaps) {
            // An access that begins before tracked memory, or ends after it, panics here.
            let offset = start - memory.start;
            memory.lines[offset / ALIGN..(offset + len).div_ceil(ALIGN)].iter().for_each(record);
        }
    });
}

/// Loom has no caches.
pub fn prefetch(_address: *mut u8) {}
