//! Signal checks of a language runtime that handles signals only at its own points (Python). While the main thread
//! waits in a call, it calls the registered function about ten times a second.
//!
//! Thread rule: [`set_check`] may be called from any thread; the function runs on the main thread only.

use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Runs the pending signal handlers; nonzero aborts the wait.
pub type Check = extern "C" fn() -> i32;

/// The address of the function; 0 if unset.
static CHECK: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    static CHECKING: Cell<bool> = const { Cell::new(false) };
}

/// Sets or clears the function.
pub fn set_check(check: Option<Check>) {
    CHECK.store(check.map_or(0, |check| check as usize), Ordering::Release);
}

/// Whether this thread is inside the function. A call from there would wait for the call that it interrupts.
pub fn checking() -> bool {
    CHECKING.try_with(Cell::get).unwrap_or(false)
}

/// Calls the function if this is the main thread. Returns whether to abort the wait.
pub fn interrupted() -> bool {
    let check = CHECK.load(Ordering::Acquire);
    if check == 0 || checking() || rustix::thread::gettid() != rustix::process::getpid() {
        return false;
    }
    // SAFETY: `set_check` is the only writer and stores only such functions.
    let check = unsafe { std::mem::transmute::<usize, Check>(check) };
    CHECKING.set(true);
    let abort = check() != 0;
    CHECKING.set(false);
    abort
}
