//! Calls and messages as Python describes them.

use std::ffi::{CString, c_int};
use std::ptr;

use pyo3::prelude::*;
use pyo3::types::PyString;

use crate::api::ffi::{self, dl_comm_call_t, dl_comm_message_t};
use crate::arrays::Buffers;
use crate::c_name;
use crate::works::Arrays;

/// A call as Python describes it: collective, operator, root, the number of blocks in the shorter array, read arrays and
/// written arrays (`None` where this rank has none; [`Buffers::of_call`] says what they are), counts, name, deadline as in `dl_comm_call_t`, the factors of a scaled
/// operator, and whether it matches by its name. A tuple, because reading it is fast.
pub type CallSpec<'py> = (
    c_int,
    c_int,
    c_int,
    usize,
    Option<Vec<Bound<'py, PyAny>>>,
    Option<Vec<Bound<'py, PyAny>>>,
    Option<Vec<usize>>,
    Option<Vec<usize>>,
    Option<Bound<'py, PyString>>,
    f64,
    (f64, f64),
    bool,
);

/// A call with everything that its C structure points to.
pub struct CCall {
    pub raw: dl_comm_call_t,
    _buffers: Buffers,
    _counts: [Option<Vec<usize>>; 2],
    _name: CString,
    /// The arrays of `raw`.
    pub arrays: Arrays,
}

// SAFETY: only the C API dereferences the pointers, into memory that the structure owns.
unsafe impl Send for CCall {}
// SAFETY: as above.
unsafe impl Sync for CCall {}

impl CCall {
    /// The call in C.
    ///
    /// # Errors
    /// Python's, for arrays that are none, and names with a null.
    pub fn new(py: Python<'_>, spec: CallSpec<'_>) -> PyResult<CCall> {
        let (collective, reduce, root, blocks, sources, destinations, ..) = spec;
        let (.., send_counts, receive_counts, name, timeout, (prescale, postscale), by_name) = spec;
        let buffers = Buffers::of_call(py, sources.as_deref(), destinations.as_deref(), blocks)?;
        let name = c_name(name.as_ref())?;
        let place = |counts: &Option<Vec<usize>>| counts.as_ref().map_or(ptr::null(), |counts| counts.as_ptr());
        let raw = dl_comm_call_t {
            size: size_of::<dl_comm_call_t>(),
            collective,
            reduce,
            root,
            flags: if by_name { ffi::DL_COMM_BY_NAME.cast_signed() } else { 0 },
            buffers: buffers.as_ptr(),
            count: buffers.len(),
            send_counts: place(&send_counts),
            receive_counts: place(&receive_counts),
            name: name.as_ptr(),
            timeout,
            device: buffers.device(),
            prescale,
            postscale,
            done: None,
            context: ptr::null_mut(),
            allocate: None,
        };
        let arrays = sources.into_iter().chain(destinations).flatten().map(Bound::unbind).collect();
        Ok(CCall { raw, _buffers: buffers, _counts: [send_counts, receive_counts], _name: name, arrays })
    }
}

/// A message as Python describes it: arrays, and peer, tag, name and deadline as in `dl_comm_message_t`.
pub type MessageSpec<'py> = (Vec<Bound<'py, PyAny>>, c_int, c_int, Option<Bound<'py, PyString>>, f64);

/// A message with everything that its C structure points to.
pub struct CMessage {
    pub raw: dl_comm_message_t,
    _buffers: Buffers,
    _name: CString,
    /// The arrays of `raw`.
    pub arrays: Arrays,
}

// SAFETY: only the C API dereferences the pointers, into memory that the structure owns.
unsafe impl Send for CMessage {}
// SAFETY: as above.
unsafe impl Sync for CMessage {}

impl CMessage {
    /// The message in C.
    ///
    /// # Errors
    /// As [`CCall::new`].
    pub fn new(py: Python<'_>, spec: MessageSpec<'_>, sends: bool) -> PyResult<CMessage> {
        let (arrays, peer, tag, name, timeout) = spec;
        let (read, written) = if sends { (Some(&*arrays), None) } else { (None, Some(&*arrays)) };
        let buffers = Buffers::of_call(py, read, written, 1)?;
        let name = c_name(name.as_ref())?;
        let raw = dl_comm_message_t {
            size: size_of::<dl_comm_message_t>(),
            buffers: buffers.as_ptr(),
            count: buffers.len(),
            peer,
            tag,
            name: name.as_ptr(),
            timeout,
            done: None,
            context: ptr::null_mut(),
            exact: 0,
            device: buffers.device(),
        };
        let arrays = arrays.into_iter().map(Bound::unbind).collect();
        Ok(CMessage { raw, _buffers: buffers, _name: name, arrays })
    }
}
