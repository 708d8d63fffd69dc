//! Signals that a language handles at points of its own: while the main thread waits in a call, the function that the
//! language has set is asked about ten times a second whether the wait shall end.
//!
//! Thread rule: [`set_check`] may be called from any thread; the function runs on the main thread only.

use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Runs the handlers of signals that have come; not 0 when one of them wants the wait to end.
pub type Check = extern "C" fn() -> i32;

/// The address of the function; 0 for none.
static CHECK: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    static CHECKING: Cell<bool> = const { Cell::new(false) };
}

/// Sets the function; `None` for none.
pub fn set_check(check: Option<Check>) {
    CHECK.store(check.map_or(0, |check| check as usize), Ordering::Release);
}

/// Whether this thread is in the function: a call that it made there would wait for the one that it interrupts.
pub fn checking() -> bool {
    CHECKING.try_with(Cell::get).unwrap_or(false)
}

/// Asks the function on the main thread; whether the wait shall end.
pub fn interrupted() -> bool {
    let check = CHECK.load(Ordering::Acquire);
    if check == 0 || checking() || rustix::thread::gettid() != rustix::process::getpid() {
        return false;
    }
    // SAFETY: nothing but such functions is stored.
    let check = unsafe { std::mem::transmute::<usize, Check>(check) };
    CHECKING.set(true);
    let wants = check() != 0;
    CHECKING.set(false);
    wants
}
