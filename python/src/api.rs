//! The C API as Rust sees it, and its errors as Python exceptions.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr;
use std::sync::{Mutex, PoisonError};

use pyo3::prelude::*;

/// The declarations of `dl_comm.h`.
#[allow(
    missing_docs,
    non_camel_case_types,
    non_snake_case,
    non_upper_case_globals,
    dead_code,
    clippy::undocumented_unsafe_blocks
)]
pub mod ffi {
    include!(concat!(env!("OUT_DIR"), "/dl_comm.rs"));
}

/// A C string as text.
///
/// # Safety
/// `text` is a valid C string.
pub unsafe fn text(text: *const c_char) -> String {
    // SAFETY: the caller's promise.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

/// What the handler of a signal has raised while a call waited.
static RAISED: Mutex<Option<PyErr>> = Mutex::new(None);

/// Runs the handlers of signals that have come; 1 when one has raised, which [`raised`] then has.
extern "C" fn run_handlers() -> i32 {
    let raised = Python::try_attach(|py| py.check_signals().err()).flatten();
    let raises = raised.is_some();
    if raises {
        *RAISED.lock().unwrap_or_else(PoisonError::into_inner) = raised;
        // For a call that succeeds in this moment, or whose error nobody translates. A full queue has others that raise.
        // SAFETY: the function takes nothing.
        let _queued = unsafe { pyo3::ffi::Py_AddPendingCall(Some(raise_later), ptr::null_mut()) };
    }
    i32::from(raises)
}

/// Raises, back in Python, what nobody has taken from [`RAISED`].
extern "C" fn raise_later(_nothing: *mut c_void) -> c_int {
    let raise = |py: Python<'_>| {
        raised().map_or(0, |error| {
            error.restore(py);
            -1
        })
    };
    Python::try_attach(raise).unwrap_or(0)
}

/// Lets waits of the main thread run the handlers of signals.
pub fn run_handlers_while_waiting() {
    // SAFETY: the function may be called at any time.
    unsafe { ffi::dl_comm_set_signal_check(Some(run_handlers)) };
}

/// What a handler has raised since this was asked last.
pub fn raised() -> Option<PyErr> {
    RAISED.lock().unwrap_or_else(PoisonError::into_inner).take()
}

/// An `ArgumentError`.
pub fn argument_error(py: Python<'_>, message: impl Into<String>) -> PyErr {
    exception(py, ffi::DL_COMM_ERROR_INVALID, message.into())
}

/// A `DTypeError`.
pub fn dtype_error(py: Python<'_>, message: impl Into<String>) -> PyErr {
    exception(py, ffi::DL_COMM_ERROR_DTYPE, message.into())
}

fn exception(py: Python<'_>, code: i32, message: String) -> PyErr {
    let made = py.import("dl_comm._errors").and_then(|module| module.call_method1("from_code", (code, message)));
    made.map_or_else(|error| error, PyErr::from_value)
}

/// Calls the C API without the GIL; a negative result becomes the exception that `dl_comm._errors` makes of it.
pub fn call(py: Python<'_>, function: impl FnOnce() -> i32 + Send) -> PyResult<i32> {
    let result = py.detach(function);
    if result >= 0 {
        return Ok(result);
    }
    if let Some(error) = raised() {
        return Err(error);
    }
    // SAFETY: the last error of this thread, which made the call.
    let message = unsafe { text(ffi::dl_comm_last_error()) };
    Err(exception(py, result, message))
}
