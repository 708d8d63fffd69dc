//! The exit status of a process whose job has failed: other than 0, so that the launcher sees it.
//!
//! Thread rule: any thread.

use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::{Mutex, Once};

use crate::lock::lock;

unsafe extern "C" {
    /// on_exit(3) of glibc: like atexit(3), but the handler gets the status.
    fn on_exit(handler: extern "C" fn(c_int, *mut c_void), argument: *mut c_void) -> c_int;
}

/// Functions that return whether the exit is a failure.
static CONDITIONS: Mutex<Vec<fn() -> bool>> = Mutex::new(Vec::new());

/// Replaces status 0 by 1, after the exit handlers that were registered later.
extern "C" fn replace(status: c_int, _argument: *mut c_void) {
    // A thread that holds the lock now only adds a condition.
    if status == 0 && lock(&CONDITIONS).iter().any(|failed| failed()) {
        // SAFETY: flushes all streams of the C library, then ends the process.
        unsafe {
            libc::fflush(ptr::null_mut());
            libc::_exit(1);
        }
    }
}

/// Makes the process exit with a status other than 0 if `failed` is true then.
pub fn fail_at_exit_while(failed: fn() -> bool) {
    static ONCE: Once = Once::new();
    let mut conditions = lock(&CONDITIONS);
    if !conditions.iter().any(|&known| ptr::fn_addr_eq(known, failed)) {
        conditions.push(failed);
    }
    ONCE.call_once(|| {
        // SAFETY: the handler uses only the C library and the conditions. Registration fails only without memory; the
        // logged line remains.
        let _registered = unsafe { on_exit(replace, ptr::null_mut()) };
    });
}

/// Makes the process exit with a status other than 0.
pub fn fail_at_exit() {
    fail_at_exit_while(|| true);
}
