//! C API of the collectives on a group: one entry for all of them.

use std::borrow::Cow;
use std::ffi::{CString, c_char, c_int, c_void};
use std::mem::offset_of;
use std::time::Duration;
use std::{ptr, slice};

use super::arguments::{
    CBuffer, CDevice, Views, array, reference, sized, store, tensors, text, to_device, to_timeout, views,
};
use super::functions::{free, status};
use super::groups::CGroup;
use crate::buffer::Tensor;
use crate::collective::Op;
use crate::error::{Error, Result};
use crate::group::{CallHandle, CallOptions, CallWords, Group, OnComplete, RaggedTensor, SmallCallInput, TensorWords};
use crate::p2p::Transfer;
use crate::runtime::collectives::{self, RaggedCall, Request};
use crate::runtime::point_to_point;

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
    /// 0 or [`BY_NAME`].
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
    /// The factor of every input, for the scaled operators.
    pub prescale: f64,
    /// The factor of the result, for the scaled operators.
    pub postscale: f64,
    /// Called with the result, or null.
    pub done: Option<unsafe extern "C" fn(*mut c_void, c_int, *const c_char)>,
    /// The first argument of `done` and of `allocate`.
    pub context: *mut c_void,
    /// Makes room for results of unknown lengths, or null.
    pub allocate: Option<CAllocate>,
}

/// The caller's function that makes room for the results.
type CAllocate = unsafe extern "C" fn(*mut c_void, *const usize, *mut *mut c_void) -> c_int;

/// The caller's context, as an argument of its functions.
#[derive(Clone, Copy)]
struct Context(*mut c_void);

// SAFETY: by contract (dl_comm.h), any thread may call the functions with it.
unsafe impl Send for Context {}

impl Context {
    /// The context. As a method, so that closures hold the `Context`.
    fn raw(self) -> *mut c_void {
        self.0
    }
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

/// `DL_COMM_BY_NAME`
const BY_NAME: c_int = 1;
/// `DL_COMM_ON_WAIT`
const ON_WAIT: c_int = 2;

#[cold]
fn unknown_flags(flags: c_int) -> Error {
    Error::Invalid(format!(
        "flags is {flags}; this version of dl_comm knows DL_COMM_BY_NAME (1) and DL_COMM_ON_WAIT (2)"
    ))
}

impl CCall {
    #[inline(always)]
    fn request(&self) -> Result<Request> {
        if self.flags & !(BY_NAME | ON_WAIT) != 0 {
            return Err(unknown_flags(self.flags));
        }
        Request::from_codes(self.collective, self.reduce, (self.prescale, self.postscale), self.root)
    }

    fn is_by_name(&self) -> bool {
        self.flags & BY_NAME != 0
    }

    /// Whether it has even blocks and host memory, as the calls of the fast path.
    ///
    /// # Safety
    /// As for [`dl_comm_run`].
    unsafe fn is_plain(&self) -> bool {
        // SAFETY: the caller's promise.
        self.send_counts.is_null() && self.receive_counts.is_null() && unsafe { to_device(self.device) }.is_none()
    }

    /// Runs a plain call by the fast path. `None`: no effect.
    ///
    /// # Safety
    /// As for [`dl_comm_run`].
    unsafe fn try_small(&self, group: &Group) -> Option<Result<()>> {
        let (list, name) = (&mut Views::new(), &mut Cow::default());
        // SAFETY: the caller's promise.
        unsafe {
            let words = self.words(array(self.buffers, self.count, "the list of buffers").ok()?);
            collectives::try_small(group, words, move || self.small_input(list, name), to_timeout(self.timeout))
        }
    }

    /// Starts a plain call by the fast path. `None`: no effect.
    ///
    /// # Safety
    /// As for [`dl_comm_start`].
    unsafe fn try_start_small(&self, group: &Group, then: &mut Option<OnComplete>) -> Option<CallHandle> {
        let (list, name) = (&mut Views::new(), &mut Cow::default());
        // SAFETY: the caller's promise.
        unsafe {
            let words = self.words(array(self.buffers, self.count, "the list of buffers").ok()?);
            let timeout = to_timeout(self.timeout);
            collectives::try_start_small(group, words, move || self.small_input(list, name), timeout, then)
        }
    }

    /// The call for the fast path.
    ///
    /// # Safety
    /// As for [`dl_comm_run`].
    unsafe fn small_input<'b, 'a: 'b>(
        &self,
        list: &'b mut Views<'a>,
        name: &'b mut Cow<'a, str>,
    ) -> Option<SmallCallInput<'b>> {
        // SAFETY: the caller's promise.
        unsafe {
            views(self.buffers, self.count, list).ok()?;
            *name = text(self.name);
        }
        match self.request() {
            Ok(Request::Collective(op)) => Some(SmallCallInput { op, name, by_name: self.is_by_name(), views: list }),
            Ok(Request::Adasum) | Err(_) => None,
        }
    }

    /// The words of the call; `None` if the call has a name or shapes, whose memory may change.
    #[inline(always)]
    fn words<'a>(&self, buffers: &'a [CBuffer]) -> Option<CallWords<'a>> {
        if !self.name.is_null() || buffers.iter().any(|buffer| !buffer.shape.is_null()) {
            return None;
        }
        let pair = |low: c_int, high: c_int| u64::from(low.cast_unsigned()) | u64::from(high.cast_unsigned()) << 32;
        let CCall { collective, reduce, root, prescale, postscale, .. } = *self;
        // It says nothing of the call itself.
        let flags = self.flags & !ON_WAIT;
        let head = [pair(collective, reduce), pair(root, flags), prescale.to_bits(), postscale.to_bits()];
        const { assert!(size_of::<CBuffer>() == size_of::<TensorWords>()) };
        // SAFETY: both structures have two addresses first, then words without padding, and the same alignment.
        let tensors = unsafe { slice::from_raw_parts(buffers.as_ptr().cast::<TensorWords>(), buffers.len()) };
        Some(CallWords { head, tensors })
    }

    /// The call and its options if a rank knows only the lengths that it sends.
    ///
    /// # Safety
    /// The pointers are valid as the header says.
    unsafe fn ragged(&self, allocate: CAllocate, ranks: usize) -> Result<(RaggedCall, CallOptions)> {
        let Request::Collective(op) = self.request()? else {
            return Err(Error::Invalid("adasum takes no `allocate`: the results are as long as the tensors".into()));
        };
        if !self.receive_counts.is_null() || (self.send_counts.is_null() == (op == Op::ALLTOALL)) {
            let text = "with `allocate`, receive_counts is NULL, and send_counts too, but for DL_COMM_ALLTOALL";
            return Err(Error::Invalid(text.into()));
        }
        // SAFETY: the caller's promise, here and below.
        let (list, name, device) =
            unsafe { (tensors(self.buffers, self.count)?, text(self.name).into_owned(), to_device(self.device)) };
        let count = list.len();
        let sent = |(index, tensor): (usize, Tensor)| {
            let lengths = match self.send_counts.is_null() {
                true => vec![tensor.buffer.len()],
                // SAFETY: as above.
                false => unsafe { array(self.send_counts.add(index * ranks), ranks, "send_counts") }?.to_vec(),
            };
            Ok(RaggedTensor { tensor, sent: lengths })
        };
        let tensors = list.into_iter().enumerate().map(sent).collect::<Result<Vec<_>>>()?;
        let context = Context(self.context);
        let places = move |lengths: &[usize]| {
            let mut places = vec![ptr::null_mut::<c_void>(); count];
            // SAFETY: by contract, the function is callable with its context.
            match unsafe { allocate(context.raw(), lengths.as_ptr(), places.as_mut_ptr()) } {
                0 => Ok(places.into_iter().map(<*mut c_void>::cast).collect()),
                code => Err(Error::System(format!("there is no memory for the results: `allocate` returned {code}"))),
            }
        };
        let (timeout, by_name) = (to_timeout(self.timeout), self.is_by_name());
        let options = CallOptions { name, by_name, timeout, device, ..CallOptions::default() };
        Ok(((op, tensors, Box::new(places)), options))
    }

    /// # Safety
    /// The strings and structures are valid or NULL; the counts have `ranks` entries.
    unsafe fn options(&self, request: Request, ranks: usize) -> Result<CallOptions> {
        let timeout = to_timeout(self.timeout);
        // SAFETY: the caller's promise.
        let lengths = |counts: *const usize, name: &str| unsafe {
            (!counts.is_null()).then(|| array(counts, ranks, name)).transpose()
        };
        let send = lengths(self.send_counts, "send_counts")?;
        let counts = request.counts(send, lengths(self.receive_counts, "receive_counts")?)?;
        // SAFETY: the caller's promise.
        let (name, device) = unsafe { (text(self.name).into_owned(), to_device(self.device)) };
        Ok(CallOptions { name, by_name: self.is_by_name(), timeout, device, counts, ..CallOptions::default() })
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
        let ranks = group.call_config().ranks;
        if let Some(allocate) = call.allocate {
            let (ragged, options) = call.ragged(allocate, ranks)?;
            let handle = collectives::start_ragged(group, ragged, options, then)?;
            return store(work, Box::into_raw(Box::new(CWork::Call(handle))), "work");
        }
        if call.flags & ON_WAIT != 0
            && call.is_plain()
            && let Some(handle) = call.try_start_small(group, &mut then)
        {
            return store(work, Box::into_raw(Box::new(CWork::Call(handle))), "work");
        }
        let request = call.request()?;
        let options = call.options(request, ranks)?;
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
        let (group, call) = (&reference(group, "group")?.0, sized(call, offset_of!(CCall, done), "call")?);
        if call.done.is_some() {
            return Err(Error::Invalid("dl_comm_run calls no `done`; use dl_comm_start".into()));
        }
        if let Some(allocate) = call.allocate {
            let (ragged, options) = call.ragged(allocate, group.call_config().ranks)?;
            return collectives::run_ragged(group, ragged, options);
        }
        if call.is_plain()
            && let Some(result) = call.try_small(group)
        {
            return result;
        }
        let request = call.request()?;
        let mut list = Views::new();
        views(call.buffers, call.count, &mut list)?;
        collectives::run(group, request, &list, None, || call.options(request, group.call_config().ranks))
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
