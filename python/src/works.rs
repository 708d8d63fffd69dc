//! Handles of the C API, and started calls. Private; `dl_comm.Work` uses them.
//!
//! A started call owns references to its arrays until it has ended, also if Python drops its handle.

use std::ffi::{c_char, c_int, c_void};
use std::ptr;
use std::sync::Arc;

use pyo3::prelude::*;

use crate::api::call;
use crate::api::ffi::{self, dl_comm_status_t, dl_comm_work_t};
use crate::received::{Memory, Received};

/// Arrays that a call uses.
pub type Arrays = Vec<Py<PyAny>>;

/// A handle of the C API.
pub struct Handle<T> {
    raw: *mut T,
    free: unsafe extern "C" fn(*mut T) -> c_int,
}

// SAFETY: any thread may use and free the C API's handles.
unsafe impl<T> Send for Handle<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Handle<T> {}

impl<T> Handle<T> {
    /// A place for a handle that `free` frees.
    pub fn new(free: unsafe extern "C" fn(*mut T) -> c_int) -> Handle<T> {
        Handle { raw: ptr::null_mut(), free }
    }

    /// Where the C API stores the handle.
    pub fn place(&mut self) -> *mut *mut T {
        &raw mut self.raw
    }

    /// The handle. As a method, so that closures hold the `Handle`, which threads may share.
    pub fn raw(&self) -> *mut T {
        self.raw
    }
}

impl<T> Drop for Handle<T> {
    fn drop(&mut self) {
        let handle = &*self;
        let free = || {
            // SAFETY: a live handle, freed once. Nobody can act on an error.
            let _code = unsafe { (handle.free)(handle.raw) };
        };
        // A group that ends waits for its calls, so other threads need the GIL. While the interpreter ends nobody has it.
        if Python::try_attach(|py| py.detach(free)).is_none() {
            free();
        }
    }
}

/// A started call.
#[pyclass(frozen)]
pub struct Work {
    handle: Handle<dl_comm_work_t>,
    _arrays: Arc<Arrays>,
    received: Option<Arc<Received>>,
}

impl Work {
    /// The call with this handle, which uses `arrays`, or of which `received` has what arrives.
    pub fn new(handle: Handle<dl_comm_work_t>, arrays: Arc<Arrays>, received: Option<Arc<Received>>) -> Work {
        Work { handle, _arrays: arrays, received }
    }
}

#[pymethods]
impl Work {
    /// Takes what a call of unknown lengths, which has ended, has received: for each array the lengths of its blocks, and
    /// their memory.
    fn received(&self) -> Vec<(Vec<usize>, Memory)> {
        self.received.as_ref().map(|received| received.take()).unwrap_or_default()
    }

    /// Whether the call has ended; raises its error.
    fn test(&self, py: Python<'_>) -> PyResult<bool> {
        let mut ended = 0;
        // SAFETY: a live handle; `ended` is valid.
        call(py, || unsafe { ffi::dl_comm_test(self.handle.raw(), &raw mut ended) })?;
        Ok(ended != 0)
    }

    /// Waits until the call has ended, at most `timeout` seconds (0: no limit); raises its error.
    fn wait(&self, py: Python<'_>, timeout: f64) -> PyResult<()> {
        // SAFETY: a live handle.
        call(py, || unsafe { ffi::dl_comm_wait(self.handle.raw(), timeout) })?;
        Ok(())
    }

    /// Source, tag and bytes of a send or receive that has ended.
    fn status(&self, py: Python<'_>) -> PyResult<(c_int, c_int, usize)> {
        let mut status = dl_comm_status_t { source: 0, tag: 0, bytes: 0 };
        // SAFETY: a live handle; `status` is valid.
        call(py, || unsafe { ffi::dl_comm_work_status(self.handle.raw(), &raw mut status) })?;
        Ok((status.source, status.tag, status.bytes))
    }
}

/// The `done` of a started call: releases its arrays. `context` is the `Arc` of them.
pub unsafe extern "C" fn release(context: *mut c_void, _code: c_int, _message: *const c_char) {
    // SAFETY: from `Arc::into_raw`, and called once. Without the GIL, PyO3 releases the references later.
    drop(unsafe { Arc::from_raw(context.cast::<Arrays>().cast_const()) });
}

/// Starts a call: `start` gets the function and context for its end, and the place of its handle.
pub fn start(
    py: Python<'_>,
    arrays: Arrays,
    start: impl FnOnce(*mut c_void, *mut *mut dl_comm_work_t) -> c_int + Send,
) -> PyResult<Work> {
    let arrays = Arc::new(arrays);
    let context = Shared(Arc::into_raw(Arc::clone(&arrays)).cast_mut().cast());
    let mut handle = Handle::new(ffi::dl_comm_work_free);
    let started = call(py, || {
        let (context, handle) = (&context, &mut handle);
        start(context.0, handle.place())
    });
    if started.is_err() {
        // SAFETY: nothing was started, so `release` is not called.
        drop(unsafe { Arc::from_raw(context.0.cast::<Arrays>().cast_const()) });
    }
    started.map(|_| Work::new(handle, arrays, None))
}

/// A context that another thread may have.
pub struct Shared(pub *mut c_void);

// SAFETY: points to an `Arc` of references that any thread may have.
unsafe impl Sync for Shared {}
// SAFETY: as above.
unsafe impl Send for Shared {}
