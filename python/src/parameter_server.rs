//! Parameter servers: a class over the C API's handle. Private; `dl_comm.ParameterServer` uses it.

use std::ffi::{c_int, c_void};
use std::ptr;

use pyo3::prelude::*;

use crate::api::ffi::{self, dl_comm_buffer_t, dl_comm_parameter_server_t, dl_comm_update_t, dl_comm_work_t};
use crate::api::{argument_error, call};
use crate::arrays::Buffers;
use crate::groups::Group;
use crate::works::{Handle, Work, release, start};

/// A parameter server.
#[pyclass(frozen)]
pub struct ParameterServer {
    handle: Handle<dl_comm_parameter_server_t>,
}

/// Makes a parameter server of arrays, or of memory (address, elements, code of the type). Collective.
#[pyfunction]
pub fn create_parameter_server(
    py: Python<'_>,
    group: &Bound<'_, Group>,
    arrays: Vec<Bound<'_, PyAny>>,
    timeout: f64,
) -> PyResult<ParameterServer> {
    let buffers = Buffers::of_memory(py, &arrays, false)?;
    let group = group.get();
    let mut handle = Handle::new(ffi::dl_comm_parameter_server_free);
    call(py, || {
        let handle = &mut handle;
        let (list, count) = (buffers.as_ptr(), buffers.len());
        // SAFETY: live handles; the arrays outlive the call.
        unsafe { ffi::dl_comm_parameter_server_create(group.raw(), list, count, timeout, handle.place()) }
    })?;
    Ok(ParameterServer { handle })
}

/// An operation as Python describes it: whether it sends, the first tensor, the number of tensors, the arrays as for
/// `create_parameter_server`, the rule, its factor, and the deadline as in `dl_comm_update_t`.
type Operation<'py> = (bool, usize, usize, Vec<Bound<'py, PyAny>>, c_int, f64, f64);

/// An update with its list of buffers.
struct Update {
    raw: dl_comm_update_t,
    sends: bool,
    _buffers: Buffers,
}

// SAFETY: only the C API dereferences the pointers, while the arrays are alive.
unsafe impl Send for Update {}
// SAFETY: as above.
unsafe impl Sync for Update {}

impl Update {
    fn new(py: Python<'_>, operation: &Operation<'_>) -> PyResult<Update> {
        let &(sends, first, count, ref arrays, rule, factor, timeout) = operation;
        let buffers = Buffers::of_memory(py, arrays, !sends)?;
        if !arrays.is_empty() && buffers.len() != count {
            return Err(argument_error(py, format!("{} arrays for {count} tensors", buffers.len())));
        }
        let list: *const dl_comm_buffer_t = if arrays.is_empty() { ptr::null() } else { buffers.as_ptr() };
        let raw = dl_comm_update_t {
            size: size_of::<dl_comm_update_t>(),
            first,
            count,
            buffers: list,
            rule,
            factor,
            timeout,
            done: None,
            context: ptr::null_mut(),
        };
        Ok(Update { raw, sends, _buffers: buffers })
    }

    /// # Safety
    /// As for the functions of the C API.
    unsafe fn call(&self, server: *const dl_comm_parameter_server_t, work: *mut *mut dl_comm_work_t) -> c_int {
        // SAFETY: the caller's promise.
        unsafe {
            match self.sends {
                true => ffi::dl_comm_parameter_server_send(server, &raw const self.raw, work),
                false => ffi::dl_comm_parameter_server_receive(server, &raw const self.raw, work),
            }
        }
    }
}

/// A Python function that changes blocks, and its error.
struct Change {
    function: Py<PyAny>,
    error: Option<PyErr>,
}

/// The `change` of a shard: calls the function with address, position and elements of a block.
unsafe extern "C" fn change(context: *mut c_void, memory: *mut c_void, first: usize, count: usize) -> c_int {
    // SAFETY: from `modify`, which uses it again after the call.
    let change = unsafe { &mut *context.cast::<Change>() };
    let called = Python::try_attach(|py| change.function.call1(py, (memory.expose_provenance(), first, count)));
    match called {
        Some(Ok(_)) => 0,
        Some(Err(error)) => {
            change.error = Some(error);
            1
        }
        None => 2,
    }
}

#[pymethods]
impl ParameterServer {
    /// Runs an operation to its end.
    fn run(&self, py: Python<'_>, operation: Operation<'_>) -> PyResult<()> {
        let update = Update::new(py, &operation)?;
        let (update, server) = (&update, &self.handle);
        // SAFETY: a live handle; the arrays outlive the call.
        call(py, || unsafe { update.call(server.raw(), ptr::null_mut()) })?;
        Ok(())
    }

    /// Starts an operation; `kept` lives until it has ended.
    fn start(&self, py: Python<'_>, operation: Operation<'_>, kept: Vec<Py<PyAny>>) -> PyResult<Work> {
        let mut update = Update::new(py, &operation)?;
        let server = &self.handle;
        start(py, kept, move |context, work| {
            update.raw.done = Some(release);
            update.raw.context = context;
            // SAFETY: `release` keeps the arrays until the operation has ended.
            unsafe { update.call(server.raw(), work) }
        })
    }

    /// Calls `function` with address, position and elements of each block of this rank's shard.
    fn modify(&self, py: Python<'_>, tensor: usize, timeout: f64, function: Py<PyAny>) -> PyResult<()> {
        let (mut state, server) = (Change { function, error: None }, &self.handle);
        let result = call(py, || {
            let context = (&raw mut state).cast();
            // SAFETY: a live handle; `change` takes the state.
            unsafe { ffi::dl_comm_parameter_server_modify(server.raw(), tensor, timeout, Some(change), context) }
        });
        state.error.map_or(result.map(drop), Err)
    }

    /// Ends the server. Collective.
    fn close(&self, py: Python<'_>, timeout: f64) -> PyResult<()> {
        // SAFETY: a live handle.
        call(py, || unsafe { ffi::dl_comm_parameter_server_close(self.handle.raw(), timeout) })?;
        Ok(())
    }
}
