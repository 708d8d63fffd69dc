//! The exit status after a failure that cannot be reported as an error.

use std::ffi::{c_int, c_void};
use std::sync::Once;

unsafe extern "C" {
    /// on_exit(3) of glibc: like atexit(3), but the handler gets the status.
    fn on_exit(handler: extern "C" fn(c_int, *mut c_void), argument: *mut c_void) -> c_int;
}

/// Replaces status 0 by 1, after the exit handlers that were registered later.
extern "C" fn replace(status: c_int, _argument: *mut c_void) {
    if status == 0 {
        // SAFETY: flushes all streams of the C library, then ends the process.
        unsafe {
            libc::fflush(std::ptr::null_mut());
            libc::_exit(1);
        }
    }
}

/// Makes the process exit with a status other than 0, so that the launcher sees a failure.
pub(super) fn fail() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: the handler uses only the C library. Registration fails only without memory; the logged line remains.
        let _registered = unsafe { on_exit(replace, std::ptr::null_mut()) };
    });
}
