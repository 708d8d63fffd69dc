//! Rust declarations of the C API, and its errors as Python exceptions.

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
    unused_imports,
    clippy::undocumented_unsafe_blocks
)]
pub mod ffi {
    include!(concat!(env!("OUT_DIR"), "/dl_comm.rs"));
}

/// Copies a C string.
///
/// # Safety
/// `text` is a valid C string.
pub unsafe fn text(text: *const c_char) -> String {
    // SAFETY: guaranteed by the caller.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

/// The exception that a signal handler raised while a call waited.
static RAISED: Mutex<Option<PyErr>> = Mutex::new(None);

/// Runs pending signal handlers. Returns 1 if one raised an exception, and stores it for [`raised`].
extern "C" fn run_handlers() -> i32 {
    let raised = Python::try_attach(|py| py.check_signals().err()).flatten();
    let raises = raised.is_some();
    raised.into_iter().for_each(raise);
    i32::from(raises)
}

/// Raises the exception of [`RAISED`] in Python, if it is still there.
extern "C" fn raise_later(_nothing: *mut c_void) -> c_int {
    let raise = |py: Python<'_>| {
        raised().map_or(0, |error| {
            error.restore(py);
            -1
        })
    };
    Python::try_attach(raise).unwrap_or(0)
}

/// Makes waits of the main thread run signal handlers.
pub fn run_handlers_while_waiting() {
    // SAFETY: may be called at any time.
    unsafe { ffi::dl_comm_set_signal_check(Some(run_handlers)) };
}

/// Keeps an exception that the current call is to raise, or the main thread after it.
pub fn raise(error: PyErr) {
    *RAISED.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
    // Needed if the call succeeds at this moment, or its error is not translated. A full queue has other calls that
    // raise.
    // SAFETY: the callback ignores its argument.
    let _queued = unsafe { pyo3::ffi::Py_AddPendingCall(Some(raise_later), ptr::null_mut()) };
}

/// Takes the exception that a handler has raised since the last call.
pub fn raised() -> Option<PyErr> {
    RAISED.lock().unwrap_or_else(PoisonError::into_inner).take()
}

/// Creates an `ArgumentError`.
pub fn argument_error(py: Python<'_>, message: impl Into<String>) -> PyErr {
    exception(py, ffi::DL_COMM_ERROR_INVALID, message.into())
}

/// Creates a `DTypeError`.
pub fn dtype_error(py: Python<'_>, message: impl Into<String>) -> PyErr {
    exception(py, ffi::DL_COMM_ERROR_DTYPE, message.into())
}

fn exception(py: Python<'_>, code: i32, message: String) -> PyErr {
    let value = py.import("dl_comm._base.errors").and_then(|module| module.call_method1("from_code", (code, message)));
    value.map_or_else(|error| error, PyErr::from_value)
}

/// Calls the C API without the GIL. A negative result becomes an exception, by `dl_comm._base.errors`.
pub fn call(py: Python<'_>, function: impl FnOnce() -> i32 + Send) -> PyResult<i32> {
    let result = py.detach(function);
    if result >= 0 {
        return Ok(result);
    }
    if let Some(error) = raised() {
        return Err(error);
    }
    // SAFETY: this thread made the call, so the last error is its error.
    let message = unsafe { text(ffi::dl_comm_last_error()) };
    Err(exception(py, result, message))
}
