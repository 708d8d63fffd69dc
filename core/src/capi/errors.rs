//! Errors of the C API: a return code, and the calling thread's last error.

use std::cell::RefCell;
use std::ffi::{CString, c_int};

use crate::error::{Result, guard};

thread_local! {
    pub(super) static LAST_ERROR: RefCell<CString> = RefCell::default();
}

/// Runs `body`; an error becomes the return code and the thread's last error.
pub(super) fn catch(body: impl FnOnce() -> Result<c_int>) -> c_int {
    guard(body).unwrap_or_else(|error| {
        let text = error.to_string().replace('\0', " ");
        // Thread-local storage may be gone at exit; the code still returns.
        let _kept = LAST_ERROR.try_with(|last| *last.borrow_mut() = CString::new(text).unwrap_or_default());
        error.code()
    })
}

pub(super) fn status(body: impl FnOnce() -> Result<()>) -> c_int {
    catch(|| body().map(|()| 0))
}
