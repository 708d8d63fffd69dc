//! What all functions of `dl_comm.h` share: an error becomes the return code, and the calling thread's last error.

use std::cell::RefCell;
use std::ffi::{CString, c_char, c_int};

use crate::error::{Result, guard};

thread_local! {
    static LAST_ERROR: RefCell<CString> = RefCell::default();
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

/// Frees a handle; NULL is ignored.
///
/// # Safety
/// `handle` is NULL, or from a `Box` and not used again.
pub(super) unsafe fn free<T>(handle: *mut T) -> c_int {
    status(|| {
        if !handle.is_null() {
            // SAFETY: the caller's promise.
            drop(unsafe { Box::from_raw(handle) });
        }
        Ok(())
    })
}

/// Defines functions that any arguments are safe for.
macro_rules! safe_functions {
    ($(fn $name:ident($($argument:ident: $type:ty),*) $(-> $result:ty)? { $($body:tt)* })*) => {$(
        #[doc = concat!("`", stringify!($name), "` of `dl_comm.h`.")]
        #[unsafe(no_mangle)]
        pub extern "C" fn $name($($argument: $type),*) $(-> $result)? { $($body)* }
    )*};
}

pub(super) use safe_functions;

safe_functions! {
    fn dl_comm_last_error() -> *const c_char {
        LAST_ERROR.try_with(|last| last.borrow().as_ptr()).unwrap_or(c"".as_ptr())
    }
}
