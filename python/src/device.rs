//! Calls of the plugin on arrays in GPU memory, which `dl_comm._arrays.cuda_arrays` describes ([`crate::arrays`]).

use pyo3::prelude::*;
use pyo3::types::PyString;

use crate::api::{argument_error, call, ffi};
use crate::arrays::Buffers;
use crate::c_name;

/// Averages arrays on a GPU over all ranks.
#[pyfunction]
#[pyo3(signature = (sources, destinations, team, name=None, timeout=-1.0))]
pub fn average_on(
    py: Python<'_>,
    sources: Vec<Bound<'_, PyAny>>,
    destinations: Vec<Bound<'_, PyAny>>,
    team: i32,
    name: Option<&Bound<'_, PyString>>,
    timeout: f64,
) -> PyResult<()> {
    let buffers = Buffers::of_call(py, Some(&sources), Some(&destinations), 1)?;
    if buffers.device().is_null() {
        return Err(argument_error(py, "the arrays are not in GPU memory"));
    }
    let (buffers, name) = (&buffers, c_name(name)?);
    call(py, || {
        // SAFETY: the caller keeps the arrays alive; the lists and the name outlive the call.
        unsafe {
            ffi::dl_comm_average_on(buffers.device(), buffers.as_ptr(), buffers.len(), team, name.as_ptr(), timeout)
        }
    })?;
    Ok(())
}

/// The number of GPUs visible to this process.
#[pyfunction]
pub fn gpu_count(py: Python<'_>) -> PyResult<i32> {
    // SAFETY: takes no arguments and may be called at any time.
    call(py, || unsafe { ffi::dl_comm_gpu_count() })
}

/// The GPU that owns the memory at `address`; -1 for host memory.
#[pyfunction]
pub fn device_of_pointer(address: usize) -> i32 {
    // SAFETY: nothing is read from the address.
    unsafe { ffi::dl_comm_device_of_pointer(std::ptr::without_provenance(address)) }
}
