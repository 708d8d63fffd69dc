//! C API of the collectives on a group: one entry for all of them.

use std::ffi::{CString, c_char, c_int, c_void};
use std::mem::offset_of;
use std::ptr;
use std::time::Duration;

use super::arguments::{reference, sized, store};
use super::call::{CCall, CallReader};
use super::groups::CGroup;
use super::status::{free, status};
use crate::error::{Error, Result};
use crate::group::{CallHandle, OnComplete};
use crate::p2p::Transfer;
use crate::runtime::collectives;
use crate::runtime::point_to_point;

/// `dl_comm_work_t` of `dl_comm.h`.
pub enum CWork {
    /// A collective.
    Call(CallHandle),
    /// A send or receive.
    Message(Transfer),
}

/// The caller's callback.
pub(super) struct Callback {
    pub done: unsafe extern "C" fn(*mut c_void, c_int, *const c_char),
    pub context: *mut c_void,
}

// SAFETY: by contract (dl_comm.h), any thread may call it.
unsafe impl Send for Callback {}

impl Callback {
    pub fn call(self, result: &Result<()>) {
        let (code, message) = match result {
            Ok(()) => (0, String::new()),
            Err(error) => (error.code(), error.to_string().replace('\0', " ")),
        };
        let message = CString::new(message).unwrap_or_default();
        // SAFETY: by contract, the function is callable with its context.
        unsafe { (self.done)(self.context, code, message.as_ptr()) };
    }
}

/// `dl_comm_start` of `dl_comm.h`.
///
/// # Safety
/// The pointers are valid as the header says; the tensors stay valid until the call has ended.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dl_comm_start(group: *const CGroup, call: *const CCall, work: *mut *mut CWork) -> c_int {
    // SAFETY: the caller's promise.
    status(|| unsafe {
        store(work, ptr::null_mut(), "work")?;
        let (group, call) = (&reference(group, "group")?.0, sized(call, offset_of!(CCall, done), "call")?);
        let callback = call.done.map(|done| Callback { done, context: call.context });
        let mut then = callback.map(|callback| -> OnComplete { Box::new(move |result| callback.call(&result)) });
        let (ranks, mut reader) = (group.call_config().ranks, CallReader::new(&call));
        if let Some(allocate) = call.allocate {
            let (ragged, options) = reader.ragged(allocate, ranks)?;
            let handle = collectives::start_ragged(group, ragged, options, then)?;
            return store(work, Box::into_raw(Box::new(CWork::Call(handle))), "work");
        }
        if reader.ends_on_wait() && reader.is_plain() {
            let (words, timeout) = (reader.words(), reader.timeout);
            if let Some(handle) = collectives::try_start_small(group, words, || reader.small(), timeout, &mut then) {
                return store(work, Box::into_raw(Box::new(CWork::Call(handle))), "work");
            }
        }
        let (request, views, _) = reader.read()?;
        let tensors = views.iter().map(|view| view.to_tensor()).collect();
        let handle = collectives::start(group, request, tensors, reader.options(request, ranks)?, then)?;
        store(work, Box::into_raw(Box::new(CWork::Call(handle))), "work")
    })
}

/// `dl_comm_run` of `dl_comm.h`.
///
/// # Safety
/// The pointers are valid as the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dl_comm_run(group: *const CGroup, call: *const CCall) -> c_int {
    // SAFETY: the caller's promise.
    status(|| unsafe {
        let (group, call) = (&reference(group, "group")?.0, sized(call, offset_of!(CCall, done), "call")?);
        if call.done.is_some() {
            return Err(Error::Invalid("dl_comm_run calls no `done`; use dl_comm_start".into()));
        }
        let (ranks, mut reader) = (group.call_config().ranks, CallReader::new(&call));
        if let Some(allocate) = call.allocate {
            let (ragged, options) = reader.ragged(allocate, ranks)?;
            return collectives::run_ragged(group, ragged, options);
        }
        if reader.is_plain() {
            let (words, timeout) = (reader.words(), reader.timeout);
            if let Some(result) = collectives::try_small(group, words, || reader.small(), timeout) {
                return result;
            }
        }
        let (request, ..) = reader.read()?;
        collectives::run(group, request, &reader.views, None, || reader.options(request, ranks))
    })
}

/// `dl_comm_test` of `dl_comm.h`.
///
/// # Safety
/// The pointers are NULL or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dl_comm_test(work: *const CWork, ended: *mut c_int) -> c_int {
    // SAFETY: the caller's promise.
    status(|| unsafe {
        let result = match reference(work, "work")? {
            CWork::Call(handle) => handle.test(),
            CWork::Message(transfer) => point_to_point::test(transfer)?.map(|result| result.map(drop)),
        };
        store(ended, c_int::from(result.is_some()), "ended")?;
        result.unwrap_or(Ok(()))
    })
}

/// `dl_comm_wait` of `dl_comm.h`.
///
/// # Safety
/// `work` is NULL or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dl_comm_wait(work: *const CWork, timeout: f64) -> c_int {
    let timeout = (timeout > 0.0).then(|| Duration::from_secs_f64(timeout.min(1e9)));
    // SAFETY: the caller's promise.
    status(|| match unsafe { reference(work, "work") }? {
        CWork::Call(handle) => collectives::wait_for(handle, timeout),
        CWork::Message(transfer) => point_to_point::wait(transfer, timeout).map(drop),
    })
}

/// `dl_comm_work_free` of `dl_comm.h`.
///
/// # Safety
/// `work` is NULL, or a handle that is not used again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dl_comm_work_free(work: *mut CWork) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { free(work) }
}
