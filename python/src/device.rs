//! Arrays in the memory of a GPU, as `dl_comm._cuda_arrays` takes them apart: addresses, lengths, element types, shapes.

use std::ffi::c_char;

use pyo3::prelude::*;
use pyo3::types::PyString;

use crate::api::call;
use crate::api::ffi::{self, dl_comm_buffer_t, dl_comm_device_t};
use crate::c_name;

/// Where an array is read and written, how many elements it has, of which type, and its shape.
type Place = (usize, usize, usize, u32, Vec<i64>);

/// What the C API gets of a list of arrays; the places outlive it.
struct Call {
    device: dl_comm_device_t,
    buffers: Vec<dl_comm_buffer_t>,
}

// SAFETY: addresses, which only the C API looks at.
unsafe impl Sync for Call {}

impl Call {
    fn new(device: i32, stream: usize, places: &[Place]) -> PyResult<Call> {
        let buffer = |(src, dst, length, dtype, shape): &Place| {
            let ndim = i32::try_from(shape.len())?;
            let (src, dst) = (std::ptr::without_provenance(*src), std::ptr::without_provenance_mut(*dst));
            Ok(dl_comm_buffer_t { src, dst, length: *length, dtype: *dtype, ndim, shape: shape.as_ptr() })
        };
        let buffers = places.iter().map(buffer).collect::<PyResult<_>>()?;
        Ok(Call {
            device: dl_comm_device_t { device, stream: std::ptr::without_provenance_mut(stream), block_host: 0 },
            buffers,
        })
    }

    /// Calls `function` of the C API with the GPU, the buffers, their number and the name.
    fn run(
        &self,
        py: Python<'_>,
        name: Option<&Bound<'_, PyString>>,
        function: impl Fn(*const dl_comm_device_t, *const dl_comm_buffer_t, usize, *const c_char) -> i32 + Send + Sync,
    ) -> PyResult<()> {
        let name = c_name(name)?;
        call(py, || function(&raw const self.device, self.buffers.as_ptr(), self.buffers.len(), name.as_ptr()))?;
        Ok(())
    }
}

/// Averages arrays of GPU `device` over all ranks, in the order of `stream`.
#[pyfunction]
#[pyo3(signature = (device, stream, places, team, name=None, timeout=-1.0))]
pub fn average_on(
    py: Python<'_>,
    device: i32,
    stream: usize,
    places: Vec<Place>,
    team: i32,
    name: Option<&Bound<'_, PyString>>,
    timeout: f64,
) -> PyResult<()> {
    Call::new(device, stream, &places)?.run(py, name, |device, buffers, count, name| {
        // SAFETY: the arrays are held by the caller; the list and the name outlive the call.
        unsafe { ffi::dl_comm_average_on(device, buffers, count, team, name, timeout) }
    })
}

/// Copies the arrays of rank `root` into those of all ranks, in the order of `stream`.
#[pyfunction]
#[pyo3(signature = (device, stream, places, root, name=None, timeout=-1.0))]
pub fn broadcast_on(
    py: Python<'_>,
    device: i32,
    stream: usize,
    places: Vec<Place>,
    root: i32,
    name: Option<&Bound<'_, PyString>>,
    timeout: f64,
) -> PyResult<()> {
    Call::new(device, stream, &places)?.run(py, name, |device, buffers, count, name| {
        // SAFETY: the arrays are held by the caller; the list and the name outlive the call.
        unsafe { ffi::dl_comm_broadcast_on(device, buffers, count, root, name, timeout) }
    })
}

/// The number of GPUs that this process sees.
#[pyfunction]
pub fn gpu_count(py: Python<'_>) -> PyResult<i32> {
    // SAFETY: the function takes nothing and may be called at any time.
    call(py, || unsafe { ffi::dl_comm_gpu_count() })
}

/// The GPU whose memory is at `address`; -1 for host memory.
#[pyfunction]
pub fn device_of_pointer(address: usize) -> i32 {
    // SAFETY: nothing is read from the address.
    unsafe { ffi::dl_comm_device_of_pointer(std::ptr::without_provenance(address)) }
}
