//! The C API as Rust sees it, and its errors as Python exceptions.

use std::ffi::{CStr, c_char};

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

/// Calls the C API without the GIL; a negative result becomes the exception that `dl_comm._errors` makes of it.
pub fn call(py: Python<'_>, function: impl FnOnce() -> i32 + Send) -> PyResult<i32> {
    let result = py.detach(function);
    if result >= 0 {
        return Ok(result);
    }
    // SAFETY: the last error of this thread, which made the call.
    let message = unsafe { text(ffi::dl_comm_last_error()) };
    let error = py.import("dl_comm._errors")?.call_method1("from_code", (result, message))?;
    Err(PyErr::from_value(error))
}
