//! A call of the C API, as its caller writes it, and how it is read: once, from the first field to the last.
//!
//! Thread rule: plain data; a [`CallReader`] belongs to the call of a function.

use std::borrow::Cow;
use std::ffi::{c_char, c_int, c_void};
use std::{ptr, slice};

use super::arguments::{CBuffer, CDevice, Views, array, text, to_device, to_timeout, views};
use crate::buffer::Tensor;
use crate::collective::Op;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::group::{CallOptions, CallWords, RaggedTensor, SmallCallInput, TensorWords, Timeout};
use crate::runtime::collectives::{CollectiveRequest, RaggedCall};

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
    /// The lengths of the blocks that this rank sends, or of all ranks' blocks, of each tensor, or null.
    pub send_counts: *const usize,
    /// The lengths of the blocks that this rank receives, of each tensor, or null.
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

/// Reads a call. What is in its memory is read when it is first needed: the fast path needs nothing of a call whose words it
/// knows.
pub(super) struct CallReader<'a> {
    call: &'a CCall,
    pub timeout: Timeout,
    device: Option<Device>,
    /// Once all of the following is read.
    request: Option<CollectiveRequest>,
    /// Filled in place: moving the list slows small messages.
    pub views: Views<'a>,
    name: Cow<'a, str>,
}

impl<'a> CallReader<'a> {
    /// # Safety
    /// The pointers of `call` are valid as the header says, as long as the reader is used.
    #[inline(always)]
    pub unsafe fn new(call: &'a CCall) -> CallReader<'a> {
        // SAFETY: the caller's promise.
        let device = unsafe { to_device(call.device) };
        let timeout = to_timeout(call.timeout);
        CallReader { call, timeout, device, request: None, views: Views::new(), name: Cow::Borrowed("") }
    }

    /// Whether it has even blocks and host memory, as the calls of the fast path.
    pub fn is_plain(&self) -> bool {
        self.call.send_counts.is_null() && self.call.receive_counts.is_null() && self.device.is_none()
    }

    /// Whether its caller ends it by waiting for it.
    pub fn ends_on_wait(&self) -> bool {
        self.call.flags & ON_WAIT != 0
    }

    fn is_by_name(&self) -> bool {
        self.call.flags & BY_NAME != 0
    }

    /// What it asks for, its tensors and its name.
    ///
    /// # Errors
    /// [`Error::Invalid`] and [`Error::DType`] for arguments that there are not.
    ///
    /// # Safety
    /// As for [`CallReader::new`].
    pub unsafe fn read(&mut self) -> Result<(CollectiveRequest, &Views<'a>, &str)> {
        let request = match self.request {
            Some(request) => request,
            None => {
                let &CCall { collective, reduce, root, flags, prescale, postscale, .. } = self.call;
                if flags & !(BY_NAME | ON_WAIT) != 0 {
                    return Err(unknown_flags(flags));
                }
                let request = CollectiveRequest::from_codes(collective, reduce, (prescale, postscale), root)?;
                self.views.clear();
                // SAFETY: the caller's promise.
                unsafe {
                    views(self.call.buffers, self.call.count, &mut self.views)?;
                    self.name = text(self.call.name);
                }
                *self.request.insert(request)
            }
        };
        Ok((request, &self.views, &self.name))
    }

    /// The call for the fast path.
    ///
    /// # Safety
    /// As for [`CallReader::new`].
    pub unsafe fn small(&mut self) -> Option<SmallCallInput<'_>> {
        let by_name = self.is_by_name();
        // SAFETY: the caller's promise. The general way reports an error.
        match unsafe { self.read() }.ok()? {
            (CollectiveRequest::Collective(op), views, name) => Some(SmallCallInput { op, name, by_name, views }),
            (CollectiveRequest::Adasum, ..) => None,
        }
    }

    /// The words of the call; `None` if the call has a name or shapes, whose memory may change.
    ///
    /// # Safety
    /// As for [`CallReader::new`].
    #[inline(always)]
    pub unsafe fn words(&self) -> Option<CallWords<'a>> {
        // SAFETY: the caller's promise.
        let buffers = unsafe { array(self.call.buffers, self.call.count, "the list of buffers") }.ok()?;
        if !self.call.name.is_null() || buffers.iter().any(|buffer| !buffer.shape.is_null()) {
            return None;
        }
        let pair = |low: c_int, high: c_int| u64::from(low.cast_unsigned()) | u64::from(high.cast_unsigned()) << 32;
        let CCall { collective, reduce, root, prescale, postscale, .. } = *self.call;
        // It says nothing of the call itself.
        let flags = self.call.flags & !ON_WAIT;
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
    pub unsafe fn ragged(&mut self, allocate: CAllocate, ranks: usize) -> Result<(RaggedCall, CallOptions)> {
        // SAFETY: the caller's promise, here and below.
        let (request, views, name) = unsafe { self.read() }?;
        let CollectiveRequest::Collective(op) = request else {
            return Err(Error::Invalid("adasum takes no `allocate`: the results are as long as the tensors".into()));
        };
        let (tensors, name): (Vec<Tensor>, _) = (views.iter().map(|view| view.to_tensor()).collect(), name.to_owned());
        let &CCall { send_counts, receive_counts, context, .. } = self.call;
        if !receive_counts.is_null() || (send_counts.is_null() == (op == Op::ALLTOALL)) {
            let text = "with `allocate`, receive_counts is NULL, and send_counts too, but for DL_COMM_ALLTOALL";
            return Err(Error::Invalid(text.into()));
        }
        let count = tensors.len();
        let sent = |(index, tensor): (usize, Tensor)| {
            let lengths = match send_counts.is_null() {
                true => vec![tensor.buffer.len()],
                // SAFETY: as above.
                false => unsafe { array(send_counts.add(index * ranks), ranks, "send_counts") }?.to_vec(),
            };
            Ok(RaggedTensor { tensor, sent: lengths })
        };
        let tensors = tensors.into_iter().enumerate().map(sent).collect::<Result<Vec<_>>>()?;
        let context = Context(context);
        let places = move |lengths: &[usize]| {
            let mut places = vec![ptr::null_mut::<c_void>(); count];
            // SAFETY: by contract, the function is callable with its context.
            match unsafe { allocate(context.raw(), lengths.as_ptr(), places.as_mut_ptr()) } {
                0 => Ok(places.into_iter().map(<*mut c_void>::cast).collect()),
                code => Err(Error::System(format!("there is no memory for the results: `allocate` returned {code}"))),
            }
        };
        let options = CallOptions { name, ..self.common_options() };
        Ok(((op, tensors, Box::new(places)), options))
    }

    /// Its options, after [`CallReader::read`]; `ranks`: those of its group.
    ///
    /// # Errors
    /// [`Error::Invalid`] for counts that the collective does not take.
    ///
    /// # Safety
    /// As for [`CallReader::new`]; the counts have `ranks` entries for each tensor.
    pub unsafe fn options(&self, request: CollectiveRequest, ranks: usize) -> Result<CallOptions> {
        // SAFETY: the caller's promise.
        let tensors = self.views.len();
        // SAFETY: the caller's promise.
        let lengths = |counts: *const usize, name: &str| unsafe {
            (!counts.is_null()).then(|| array(counts, tensors * ranks, name)).transpose()
        };
        let send = lengths(self.call.send_counts, "send_counts")?;
        let counts = request.counts(tensors, send, lengths(self.call.receive_counts, "receive_counts")?)?;
        Ok(CallOptions { name: self.name.clone().into_owned(), counts, ..self.common_options() })
    }

    fn common_options(&self) -> CallOptions {
        CallOptions { by_name: self.is_by_name(), timeout: self.timeout, device: self.device, ..CallOptions::default() }
    }
}
