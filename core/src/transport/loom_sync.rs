//! What stands in for `sync.rs` under `--cfg loom`: Loom's atomics, a futex made of Loom's mutex and condition variable, and
//! a watch over the slots that knows who may use them when.
//!
//! The futex is as futex(2) promises: it compares and falls asleep in one step against wakes, and both of its calls begin
//! with a full barrier. It has no clock: a nap ends by a wake, or when the test says so ([`FutexWord::end_waits`]), so a lost wake
//! of a raise is a deadlock, which Loom reports.
//! Thread rule: for the threads of one Loom execution, which all run on one thread of the system.

use std::cell::RefCell;
use std::ops::Range;

use loom::cell::UnsafeCell;
use loom::sync::{Condvar, Mutex};
use rustix::io::Errno;

pub use loom::sync::atomic::{AtomicI32, AtomicU8, AtomicU32, AtomicU64, Ordering, fence};

use crate::wire_layout::ALIGN;

/// A number to sleep on until it changes.
#[derive(Debug, Default)]
pub struct FutexWord {
    value: AtomicU32,
    /// What the kernel locks; true when naps end at once.
    awake: Mutex<bool>,
    bell: Condvar,
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

    /// Sleeps while the number is `seen`, until a wake or the end of naps.
    ///
    /// # Errors
    /// `AGAIN` when the number is another, `TIMEDOUT` when naps have ended.
    pub fn futex_wait(&self, seen: u32) -> Result<(), Errno> {
        fence(Ordering::SeqCst);
        let awake = self.lock();
        if self.value.load(Ordering::Relaxed) != seen {
            return Err(Errno::AGAIN);
        }
        if *awake {
            return Err(Errno::TIMEDOUT);
        }
        drop(self.bell.wait(awake));
        Ok(())
    }

    /// Wakes all who sleep.
    pub fn wake(&self) {
        fence(Ordering::SeqCst);
        let _awake = self.lock();
        self.bell.notify_all();
    }

    /// Ends naps from now on.
    pub fn end_waits(&self) {
        *self.lock() = true;
        self.bell.notify_all();
    }

    fn lock(&self) -> loom::sync::MutexGuard<'_, bool> {
        self.awake.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

/// The slots of an execution: where they start, and a cell for each line of [`ALIGN`] bytes.
struct Slots {
    start: usize,
    lines: Vec<UnsafeCell<()>>,
}

thread_local! {
    static SLOTS: RefCell<Slots> = const { RefCell::new(Slots { start: 0, lines: Vec::new() }) };
}

/// Watches the bytes `range` (addresses) from now on, in place of those of the execution before.
pub fn track(range: Range<usize>) {
    let lines = (0..range.len().div_ceil(ALIGN)).map(|_| UnsafeCell::new(())).collect();
    SLOTS.set(Slots { start: range.start, lines });
}

/// Tells the model that the caller now reads these bytes of a slot. Loom panics when a write to them is not ordered before.
pub fn check_read(from: *const u8, len: usize) {
    each_line(from.addr(), len, |line| line.with(|_| ()));
}

/// The same for a write and any use.
pub fn check_write(to: *mut u8, len: usize) {
    each_line(to.addr(), len, |line| line.with_mut(|_| ()));
}

fn each_line(start: usize, len: usize, tell: impl Fn(&UnsafeCell<()>)) {
    SLOTS.with_borrow(|slots| {
        let at = start - slots.start;
        slots.lines[at / ALIGN..(at + len).div_ceil(ALIGN)].iter().for_each(tell);
    });
}
