//! Groups and started calls: classes over the C API's handles. Private; `dl_comm.Group` and `dl_comm.Work` use them.
//!
//! A started call owns references to its arrays until it has ended, also if Python drops its handle.

use std::ffi::{CString, c_char, c_int, c_void};
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::{Arc, Mutex, PoisonError};

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString};

use crate::api::ffi::{
    self, dl_comm_call_t, dl_comm_group_options_t, dl_comm_group_t, dl_comm_message_t, dl_comm_status_t, dl_comm_work_t,
};
use crate::api::{argument_error, call};
use crate::arrays::Buffers;
use crate::c_name;

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

/// A group of ranks.
#[pyclass(frozen)]
pub struct Group {
    handle: Handle<dl_comm_group_t>,
}

/// Makes a group of these ranks of the job; `None`: of all. Collective among them. `threads` and `timeout` as in
/// `dl_comm_group_options_t`; empty names mean those of the environment.
#[pyfunction]
#[pyo3(signature = (ranks, name, threads, timeout, algorithm, gpu_path))]
pub fn create_group(
    py: Python<'_>,
    ranks: Option<Vec<c_int>>,
    name: &Bound<'_, PyString>,
    threads: c_int,
    timeout: f64,
    algorithm: &Bound<'_, PyString>,
    gpu_path: &Bound<'_, PyString>,
) -> PyResult<Group> {
    let [name, algorithm, gpu_path] = [c_name(Some(name))?, c_name(Some(algorithm))?, c_name(Some(gpu_path))?];
    if ranks.as_ref().is_some_and(Vec::is_empty) {
        return Err(argument_error(py, "ranks is empty; a group has at least one rank"));
    }
    let listed = ranks.as_deref().unwrap_or_default();
    let number = c_int::try_from(listed.len())?;
    let mut handle = Handle::new(ffi::dl_comm_group_free);
    call(py, || {
        let handle = &mut handle;
        let ranks = if listed.is_empty() { ptr::null() } else { listed.as_ptr() };
        let options = dl_comm_group_options_t {
            size: size_of::<dl_comm_group_options_t>(),
            threads,
            timeout,
            algorithm: algorithm.as_ptr(),
            gpu_path: gpu_path.as_ptr(),
        };
        let (options, place) = (&raw const options, handle.place());
        // SAFETY: the pointers are valid during the call.
        unsafe { ffi::dl_comm_group_create_with(ranks, number, name.as_ptr(), options, place) }
    })?;
    Ok(Group { handle })
}

/// The group of all ranks that runs the calls of a team.
#[pyfunction]
pub fn group_of_team(py: Python<'_>, team: c_int) -> PyResult<Group> {
    let mut handle = Handle::new(ffi::dl_comm_group_free);
    call(py, || {
        let handle = &mut handle;
        // SAFETY: the pointer is valid during the call.
        unsafe { ffi::dl_comm_team_group(team, handle.place()) }
    })?;
    Ok(Group { handle })
}

/// Contributes zeros to the calls of the other ranks in the group, or on all teams, until all have joined; returns the
/// last one.
#[pyfunction]
#[pyo3(signature = (group, timeout))]
pub fn join(py: Python<'_>, group: Option<&Bound<'_, Group>>, timeout: f64) -> PyResult<c_int> {
    let mut last = 0;
    let group = group.map(Bound::get);
    call(py, || {
        let group = group.map_or(ptr::null_mut(), |group| group.handle.raw());
        // SAFETY: a live handle or NULL; `last` is valid.
        unsafe { ffi::dl_comm_join(group, timeout, &raw mut last) }
    })?;
    Ok(last)
}

/// A call as Python describes it: collective, operator, root, the number of blocks in the shorter array, read arrays and
/// written arrays (`None` where this rank has none; [`Buffers::of_call`] says what they are), counts, name, deadline as in `dl_comm_call_t`, the factors of a scaled
/// operator, and whether it matches by its name. A tuple, because reading it is fast.
type CallSpec<'py> = (
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
struct CCall {
    raw: dl_comm_call_t,
    _buffers: Buffers,
    _counts: [Option<Vec<usize>>; 2],
    _name: CString,
    arrays: Arrays,
}

// SAFETY: only the C API dereferences the pointers, into memory that the structure owns.
unsafe impl Send for CCall {}
// SAFETY: as above.
unsafe impl Sync for CCall {}

impl CCall {
    fn new(py: Python<'_>, spec: CallSpec<'_>) -> PyResult<CCall> {
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

/// The `done` of a started call: releases its arrays. `context` is the `Arc` of them.
pub unsafe extern "C" fn release(context: *mut c_void, _code: c_int, _message: *const c_char) {
    // SAFETY: from `Arc::into_raw`, and called once. Without the GIL, PyO3 releases the references later.
    drop(unsafe { Arc::from_raw(context.cast::<Arrays>().cast_const()) });
}

/// Memory of a result, for NumPy's `__array_interface__`: bytes.
#[pyclass(frozen)]
pub struct Memory {
    address: usize,
    bytes: usize,
    _words: Vec<MaybeUninit<u128>>,
}

impl Memory {
    fn new(bytes: usize) -> Option<Memory> {
        let mut words = Vec::<MaybeUninit<u128>>::new();
        let count = bytes.div_ceil(size_of::<u128>()).max(1);
        words.try_reserve_exact(count).ok()?;
        // SAFETY: there is room for them, and they need no value.
        unsafe { words.set_len(count) };
        Some(Memory { address: words.as_mut_ptr().expose_provenance(), bytes, _words: words })
    }
}

#[pymethods]
impl Memory {
    #[getter]
    fn __array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let described = PyDict::new(py);
        described.set_item("version", 3)?;
        described.set_item("typestr", "|u1")?;
        described.set_item("shape", (self.bytes,))?;
        described.set_item("data", (self.address, false))?;
        Ok(described)
    }
}

/// What a call of unknown lengths receives: for each array the lengths of its blocks, and their memory.
pub struct Received {
    ranks: usize,
    /// Whether this rank gets the blocks; in a gather the root does.
    has_results: bool,
    /// The bytes of an element of each array.
    sizes: Vec<usize>,
    parts: Mutex<Vec<(Vec<usize>, Memory)>>,
    _arrays: Arrays,
}

impl Received {
    /// Makes room for blocks of these lengths; `None`: there is no memory.
    fn allocate(&self, lengths: &[usize]) -> Option<Vec<*mut c_void>> {
        let part = |(lengths, size): (&[usize], &usize)| {
            let total = lengths.iter().try_fold(0usize, |total, length| total.checked_add(*length))?;
            let bytes = if self.has_results { total.checked_mul(*size)? } else { 0 };
            Some((lengths.to_vec(), Memory::new(bytes)?))
        };
        let made = lengths.chunks(self.ranks).zip(&self.sizes).map(part).collect::<Option<Vec<_>>>()?;
        let places = made.iter().map(|(_, memory)| ptr::with_exposed_provenance_mut(memory.address)).collect();
        *self.parts.lock().unwrap_or_else(PoisonError::into_inner) = made;
        Some(places)
    }

    /// Takes what has arrived.
    fn take(&self) -> Vec<(Vec<usize>, Memory)> {
        std::mem::take(&mut *self.parts.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// The `allocate` of a call of unknown lengths. `context` is its `Received`.
unsafe extern "C" fn make_room(context: *mut c_void, lengths: *const usize, results: *mut *mut c_void) -> c_int {
    // SAFETY: the context is valid until the call has ended, and the lists have an entry for each array (and rank).
    unsafe {
        let received = &*context.cast::<Received>();
        let lengths = std::slice::from_raw_parts(lengths, received.ranks * received.sizes.len());
        let Some(places) = received.allocate(lengths) else { return 1 };
        results.copy_from_nonoverlapping(places.as_ptr(), places.len());
    }
    0
}

/// The `done` of a started call of unknown lengths. `context` is the `Arc` of its `Received`.
unsafe extern "C" fn release_received(context: *mut c_void, _code: c_int, _message: *const c_char) {
    // SAFETY: as for `release`.
    drop(unsafe { Arc::from_raw(context.cast::<Received>().cast_const()) });
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
    started.map(|_| Work { handle, _arrays: arrays, received: None })
}

/// A context that another thread may have.
struct Shared(*mut c_void);

// SAFETY: points to an `Arc` of references that any thread may have.
unsafe impl Sync for Shared {}
// SAFETY: as above.
unsafe impl Send for Shared {}

#[pymethods]
impl Group {
    /// This process's rank in the group.
    fn rank(&self, py: Python<'_>) -> PyResult<c_int> {
        let mut rank = 0;
        // SAFETY: a live handle; `rank` is valid.
        call(py, || unsafe { ffi::dl_comm_group_rank(self.handle.raw(), &raw mut rank) })?;
        Ok(rank)
    }

    /// The number of ranks.
    fn size(&self, py: Python<'_>) -> PyResult<c_int> {
        let mut size = 0;
        // SAFETY: as above.
        call(py, || unsafe { ffi::dl_comm_group_size(self.handle.raw(), &raw mut size) })?;
        Ok(size)
    }

    /// The number by which the ops of PyTorch and TensorFlow name the group.
    fn number(&self, py: Python<'_>) -> PyResult<u64> {
        let mut number = 0;
        // SAFETY: as above.
        call(py, || unsafe { ffi::dl_comm_group_number(self.handle.raw(), &raw mut number) })?;
        Ok(number)
    }

    /// Runs a call to its end.
    fn run(&self, py: Python<'_>, spec: CallSpec<'_>) -> PyResult<()> {
        let request = CCall::new(py, spec)?;
        let (request, group) = (&request, &self.handle);
        // SAFETY: the arrays live until the call has ended.
        call(py, || unsafe { ffi::dl_comm_run(group.raw(), &raw const request.raw) })?;
        Ok(())
    }

    /// Starts a call.
    fn start(&self, py: Python<'_>, spec: CallSpec<'_>) -> PyResult<Work> {
        let mut request = CCall::new(py, spec)?;
        let arrays = std::mem::take(&mut request.arrays);
        let group = &self.handle;
        start(py, arrays, |context, work| {
            let mut request = request;
            request.raw.done = Some(release);
            request.raw.context = context;
            request.raw.flags |= ffi::DL_COMM_ON_WAIT.cast_signed();
            // SAFETY: `release` keeps the arrays until the call has ended.
            unsafe { ffi::dl_comm_start(group.raw(), &raw const request.raw, work) }
        })
    }

    /// Runs a call of which this rank knows only the lengths that it sends; returns what has arrived.
    fn run_unknown(&self, py: Python<'_>, spec: CallSpec<'_>) -> PyResult<Vec<(Vec<usize>, Memory)>> {
        let (request, received) = self.of_unknown_lengths(py, spec)?;
        let group = &self.handle;
        let context = Shared(Arc::as_ptr(&received).cast_mut().cast());
        call(py, || {
            let (request, context) = (request, context);
            let mut raw = request.raw;
            raw.context = context.0;
            // SAFETY: arrays and context live until the call has ended.
            unsafe { ffi::dl_comm_run(group.raw(), &raw const raw) }
        })?;
        Ok(received.take())
    }

    /// Starts such a call; its `received` has what has arrived.
    fn start_unknown(&self, py: Python<'_>, spec: CallSpec<'_>) -> PyResult<Work> {
        let (request, received) = self.of_unknown_lengths(py, spec)?;
        let group = &self.handle;
        let context = Shared(Arc::into_raw(Arc::clone(&received)).cast_mut().cast());
        let mut handle = Handle::new(ffi::dl_comm_work_free);
        let started = call(py, || {
            let (request, context, handle) = (request, &context, &mut handle);
            let mut raw = request.raw;
            raw.done = Some(release_received);
            raw.context = context.0;
            // SAFETY: `release_received` keeps arrays and context until the call has ended.
            unsafe { ffi::dl_comm_start(group.raw(), &raw const raw, handle.place()) }
        });
        if started.is_err() {
            // SAFETY: nothing was started, so `release_received` is not called.
            drop(unsafe { Arc::from_raw(context.0.cast::<Received>().cast_const()) });
        }
        started.map(|_| Work { handle, _arrays: Arc::default(), received: Some(received) })
    }

    /// Starts to send arrays.
    fn send(&self, py: Python<'_>, message: MessageSpec<'_>) -> PyResult<Work> {
        self.transfer(py, message, true)
    }

    /// Starts to receive arrays.
    fn receive(&self, py: Python<'_>, message: MessageSpec<'_>) -> PyResult<Work> {
        self.transfer(py, message, false)
    }

    /// Sends and receives, and waits for both. Returns source, tag and bytes of what was received.
    fn send_receive(
        &self,
        py: Python<'_>,
        send: Option<MessageSpec<'_>>,
        receive: Option<MessageSpec<'_>>,
    ) -> PyResult<(c_int, c_int, usize)> {
        let send = send.map(|message| CMessage::new(py, message, true)).transpose()?;
        let receive = receive.map(|message| CMessage::new(py, message, false)).transpose()?;
        let mut status = dl_comm_status_t { source: 0, tag: 0, bytes: 0 };
        let group = &self.handle;
        call(py, || {
            let place =
                |message: &Option<CMessage>| message.as_ref().map_or(ptr::null(), |message| &raw const message.raw);
            // SAFETY: the arrays live until both have ended.
            unsafe { ffi::dl_comm_sendrecv(group.raw(), place(&send), place(&receive), &raw mut status) }
        })?;
        Ok((status.source, status.tag, status.bytes))
    }
}

impl Group {
    /// The handle of the C API.
    pub fn raw(&self) -> *const dl_comm_group_t {
        self.handle.raw()
    }

    /// A call that makes room for its results when the lengths are known, and the place of these.
    fn of_unknown_lengths(&self, py: Python<'_>, spec: CallSpec<'_>) -> PyResult<(CCall, Arc<Received>)> {
        let sources = spec.4.as_deref().unwrap_or_default();
        let size_of_element = |array: &Bound<'_, PyAny>| array.getattr("itemsize")?.extract::<usize>();
        let sizes = sources.iter().map(size_of_element).collect::<PyResult<Vec<_>>>()?;
        let ranks = usize::try_from(self.size(py)?)?;
        let is_gather = spec.0.cast_unsigned() == ffi::dl_comm_collective_DL_COMM_GATHER;
        let has_results = !is_gather || spec.2 == self.rank(py)?;
        let mut request = CCall::new(py, spec)?;
        request.raw.allocate = Some(make_room);
        let arrays = std::mem::take(&mut request.arrays);
        let received = Received { ranks, has_results, sizes, parts: Mutex::default(), _arrays: arrays };
        Ok((request, Arc::new(received)))
    }

    fn transfer(&self, py: Python<'_>, message: MessageSpec<'_>, sends: bool) -> PyResult<Work> {
        let mut message = CMessage::new(py, message, sends)?;
        let arrays = std::mem::take(&mut message.arrays);
        let group = &self.handle;
        start(py, arrays, move |context, work| {
            let mut message = message;
            message.raw.done = Some(release);
            message.raw.context = context;
            let function = if sends { ffi::dl_comm_send } else { ffi::dl_comm_receive };
            // SAFETY: `release` keeps the arrays until the message has arrived.
            unsafe { function(group.raw(), &raw const message.raw, work) }
        })
    }
}

/// A message as Python describes it: arrays, and peer, tag, name and deadline as in `dl_comm_message_t`.
type MessageSpec<'py> = (Vec<Bound<'py, PyAny>>, c_int, c_int, Option<Bound<'py, PyString>>, f64);

/// A message with everything that its C structure points to.
struct CMessage {
    raw: dl_comm_message_t,
    _buffers: Buffers,
    _name: CString,
    arrays: Arrays,
}

// SAFETY: only the C API dereferences the pointers, into memory that the structure owns.
unsafe impl Send for CMessage {}
// SAFETY: as above.
unsafe impl Sync for CMessage {}

impl CMessage {
    fn new(py: Python<'_>, spec: MessageSpec<'_>, sends: bool) -> PyResult<CMessage> {
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

/// A started call.
#[pyclass(frozen)]
pub struct Work {
    handle: Handle<dl_comm_work_t>,
    _arrays: Arc<Arrays>,
    received: Option<Arc<Received>>,
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
