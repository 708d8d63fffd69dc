//! The status with which the process ends after a failure that nobody can be given as an error any more.

use std::ffi::{c_int, c_void};
use std::sync::Once;

unsafe extern "C" {
    /// on_exit(3) of glibc: as atexit(3), and the handler gets the status.
    fn on_exit(handler: extern "C" fn(c_int, *mut c_void), argument: *mut c_void) -> c_int;
}

/// Turns status 0 into 1, once everything that the program has registered before is done.
extern "C" fn replace(status: c_int, _argument: *mut c_void) {
    if status == 0 {
        // SAFETY: flushes all streams of the C library, then ends the process.
        unsafe {
            libc::fflush(std::ptr::null_mut());
            libc::_exit(1);
        }
    }
}

/// From now on the process does not end with status 0: a launcher must not take it for a success.
pub(super) fn fail() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: the handler uses nothing but the C library. It is refused for want of memory only; the line that was
        // written remains.
        let _registered = unsafe { on_exit(replace, std::ptr::null_mut()) };
    });
}
