//! C API of the collectives on a group: one entry for all of them.

use std::ffi::{CString, c_char, c_int, c_void};
use std::mem::{offset_of, size_of};
use std::ptr;
use std::sync::Arc;
use std::time::Duration;

use super::arguments::{CBuffer, CDevice, Views, array, number, tensors, text, to_device, views};
use super::functions::status;
use crate::error::{Error, Result};
use crate::group::{CallHandle, CallOptions, Group, OnComplete, Timeout};
use crate::runtime;
use crate::runtime::collectives::{self, Request};
use crate::runtime::point_to_point::Transfer;

/// `dl_comm_group_t` of `dl_comm.h`.
pub struct CGroup(pub(super) Arc<Group>);

/// `dl_comm_work_t` of `dl_comm.h`.
pub enum CWork {
    /// A collective.
    Call(CallHandle),
    /// A send or receive.
    Message(Transfer),
}

/// `dl_comm_call_t`; see `dl_comm.h` for the contract.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct CCall {
    /// Bytes of the structure that the caller knows.
    pub size: usize,
    /// The code of the collective.
    pub collective: c_int,
    /// The code of the operator.
    pub reduce: c_int,
    /// The root.
    pub root: c_int,
    /// Reserved; 0.
    pub flags: c_int,
    /// The tensors.
    pub buffers: *const CBuffer,
    /// The number of tensors.
    pub count: usize,
    /// The lengths of the blocks that this rank sends, or of all ranks' blocks, or null.
    pub send_counts: *const usize,
    /// The lengths of the blocks that this rank receives, or null.
    pub receive_counts: *const usize,
    /// The name, or null.
    pub name: *const c_char,
    /// The deadline in seconds; 0 for the group's, negative for none.
    pub timeout: f64,
    /// The GPU of the tensors, or null.
    pub device: *const CDevice,
    /// The factor of every input, for the scaled sum.
    pub prescale: f64,
    /// The factor of the sum, for the scaled sum.
    pub postscale: f64,
    /// Called with the result, or null.
    pub done: Option<unsafe extern "C" fn(*mut c_void, c_int, *const c_char)>,
    /// The first argument of `done`.
    pub context: *mut c_void,
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

impl CCall {
    /// Reads the fields that the caller's version of the structure has; the others are 0.
    ///
    /// # Safety
    /// `call` is NULL or has the bytes that its `size` says.
    unsafe fn read(call: *const CCall) -> Result<CCall> {
        if call.is_null() {
            return Err(Error::Invalid("the call is NULL".into()));
        }
        // SAFETY: the caller's promise; a zeroed structure is valid.
        unsafe {
            let size = ptr::read(call.cast::<usize>());
            if size < offset_of!(CCall, done) {
                return Err(Error::Invalid(format!("size is {size}; set it to sizeof(dl_comm_call_t)")));
            }
            let mut copy = std::mem::zeroed::<CCall>();
            ptr::copy_nonoverlapping(call.cast::<u8>(), (&raw mut copy).cast(), size.min(size_of::<CCall>()));
            Ok(copy)
        }
    }

    fn request(&self) -> Result<Request> {
        if self.flags != 0 {
            return Err(Error::Invalid(format!("flags is {}; this version of dl_comm knows none", self.flags)));
        }
        Request::from_codes(self.collective, self.reduce, (self.prescale, self.postscale), self.root)
    }

    /// # Safety
    /// The strings and structures are valid or NULL; the counts have `ranks` entries.
    unsafe fn options(&self, request: Request, ranks: usize) -> Result<CallOptions> {
        let timeout = match self.timeout {
            0.0 => Timeout::GroupDefault,
            seconds if seconds > 0.0 => Timeout::from_seconds(seconds),
            _ => Timeout::Override(None),
        };
        // SAFETY: the caller's promise.
        let lengths = |counts: *const usize, name: &str| unsafe {
            (!counts.is_null()).then(|| array(counts, ranks, name)).transpose()
        };
        let send = lengths(self.send_counts, "send_counts")?;
        let counts = request.counts(send, lengths(self.receive_counts, "receive_counts")?)?;
        // SAFETY: the caller's promise.
        let (name, device) = unsafe { (text(self.name).into_owned(), to_device(self.device)) };
        Ok(CallOptions { name, timeout, device, counts, ..CallOptions::default() })
    }
}

/// # Safety
/// `pointer` is NULL or valid.
pub(super) unsafe fn reference<'a, T>(pointer: *const T, what: &str) -> Result<&'a T> {
    // SAFETY: the caller's promise.
    unsafe { pointer.as_ref() }.ok_or_else(|| Error::Invalid(format!("{what} is NULL")))
}

/// # Safety
/// `place` is NULL or valid.
pub(super) unsafe fn store<T>(place: *mut T, value: T, what: &str) -> Result<()> {
    if place.is_null() {
        return Err(Error::Invalid(format!("{what} is NULL")));
    }
    // SAFETY: the caller's promise.
    unsafe { place.write(value) };
    Ok(())
}

/// Frees a handle; NULL is ignored.
///
/// # Safety
/// `handle` is NULL, or from a `Box` and not used again.
unsafe fn free<T>(handle: *mut T) -> c_int {
    status(|| {
        if !handle.is_null() {
            // SAFETY: the caller's promise.
            drop(unsafe { Box::from_raw(handle) });
        }
        Ok(())
    })
}

/// `dl_comm_team_group` of `dl_comm.h`.
///
/// # Safety
/// `group` is NULL or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dl_comm_team_group(team: c_int, group: *mut *mut CGroup) -> c_int {
    // SAFETY: the caller's promise.
    status(|| unsafe {
        store(group, ptr::null_mut(), "group")?;
        store(group, Box::into_raw(Box::new(CGroup(runtime::group_of_team(team)?))), "group")
    })
}

/// `dl_comm_group_create` of `dl_comm.h`.
///
/// # Safety
/// `ranks` is NULL or has `nranks` entries; `name` and `group` are NULL or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dl_comm_group_create(
    ranks: *const c_int,
    nranks: c_int,
    name: *const c_char,
    group: *mut *mut CGroup,
) -> c_int {
    // SAFETY: the caller's promise.
    status(|| unsafe {
        store(group, ptr::null_mut(), "group")?;
        let listed = usize::try_from(nranks).map_err(|_| Error::Invalid(format!("nranks {nranks} is negative")))?;
        let ranks: Vec<usize> = if ranks.is_null() && listed == 0 {
            (0..runtime::topology()?.size()).collect()
        } else {
            let rank =
                |&rank: &c_int| usize::try_from(rank).map_err(|_| Error::Invalid(format!("rank {rank} is negative")));
            array(ranks, listed, "ranks")?.iter().map(rank).collect::<Result<_>>()?
        };
        let created = runtime::create_group(&text(name), &ranks)?;
        store(group, Box::into_raw(Box::new(CGroup(created))), "group")
    })
}

/// `dl_comm_group_free` of `dl_comm.h`.
///
/// # Safety
/// `group` is NULL, or a handle that is not used again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dl_comm_group_free(group: *mut CGroup) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { free(group) }
}

/// `dl_comm_group_rank` of `dl_comm.h`.
///
/// # Safety
/// The pointers are NULL or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dl_comm_group_rank(group: *const CGroup, rank: *mut c_int) -> c_int {
    // SAFETY: the caller's promise.
    status(|| unsafe { store(rank, number(reference(group, "group")?.0.rank())?, "rank") })
}

/// `dl_comm_group_size` of `dl_comm.h`.
///
/// # Safety
/// The pointers are NULL or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dl_comm_group_size(group: *const CGroup, size: *mut c_int) -> c_int {
    // SAFETY: the caller's promise.
    status(|| unsafe { store(size, number(reference(group, "group")?.0.call_config().ranks)?, "size") })
}

/// `dl_comm_group_number` of `dl_comm.h`.
///
/// # Safety
/// The pointers are NULL or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dl_comm_group_number(group: *const CGroup, number: *mut u64) -> c_int {
    // SAFETY: the caller's promise.
    status(|| unsafe { store(number, reference(group, "group")?.0.number(), "number") })
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
        let (group, call) = (&reference(group, "group")?.0, CCall::read(call)?);
        let callback = call.done.map(|done| Callback { done, context: call.context });
        let then = callback.map(|callback| -> OnComplete { Box::new(move |result| callback.call(&result)) });
        let request = call.request()?;
        let options = call.options(request, group.call_config().ranks)?;
        let handle = collectives::start(group, request, tensors(call.buffers, call.count)?, options, then)?;
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
        let (group, call) = (&reference(group, "group")?.0, CCall::read(call)?);
        if call.done.is_some() {
            return Err(Error::Invalid("dl_comm_run calls no `done`; use dl_comm_start".into()));
        }
        let request = call.request()?;
        let options = call.options(request, group.call_config().ranks)?;
        let mut list = Views::new();
        views(call.buffers, call.count, &mut list)?;
        collectives::run(group, request, &list, options)
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
            CWork::Message(transfer) => transfer.test()?.map(|result| result.map(drop)),
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
        CWork::Message(transfer) => transfer.wait(timeout).map(drop),
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
