//! Groups: a class over the C API's handles, and its calls. Private; `dl_comm.Group` uses it.

use std::ffi::c_int;
use std::ptr;
use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::PyString;

use crate::api::ffi::{self, dl_comm_group_options_t, dl_comm_group_t, dl_comm_status_t};
use crate::api::{argument_error, call};
use crate::c_name;
use crate::calls::{CCall, CMessage, CallSpec, MessageSpec};
use crate::received::{Memory, Received, make_room, release_received};
use crate::works::{Handle, Shared, Work, release, start};

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
        started.map(|_| Work::new(handle, Arc::default(), Some(received)))
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
        Ok((request, Arc::new(Received::new(ranks, has_results, sizes, arrays))))
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
