//! GPU arrays, described by `dl_comm._cuda_arrays` as addresses, lengths, element types and shapes.

use std::ffi::c_char;

use pyo3::prelude::*;
use pyo3::types::PyString;

use crate::api::call;
use crate::api::ffi::{self, dl_comm_buffer_t, dl_comm_device_t};
use crate::c_name;

/// Source address, destination address, number of elements, element type and shape.
type DeviceArray = (usize, usize, usize, u32, Vec<i64>);

/// The arguments of a call; the arrays must outlive it.
struct DeviceArgs {
    device: dl_comm_device_t,
    buffers: Vec<dl_comm_buffer_t>,
}

// SAFETY: only the C API dereferences the addresses.
unsafe impl Sync for DeviceArgs {}

impl DeviceArgs {
    fn new(device: i32, stream: usize, places: &[DeviceArray]) -> PyResult<DeviceArgs> {
        let buffer = |(src, dst, length, dtype, shape): &DeviceArray| {
            let ndim = i32::try_from(shape.len())?;
            let (src, dst) = (std::ptr::without_provenance(*src), std::ptr::without_provenance_mut(*dst));
            Ok(dl_comm_buffer_t { src, dst, length: *length, dtype: *dtype, ndim, shape: shape.as_ptr() })
        };
        let buffers = places.iter().map(buffer).collect::<PyResult<_>>()?;
        Ok(DeviceArgs {
            device: dl_comm_device_t { device, stream: std::ptr::without_provenance_mut(stream), block_host: 0 },
            buffers,
        })
    }

    /// Calls `function` with the device, the buffers, their number and the name.
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

/// Averages arrays on GPU `device` over all ranks, ordered by `stream`.
#[pyfunction]
#[pyo3(signature = (device, stream, places, team, name=None, timeout=-1.0))]
pub fn average_on(
    py: Python<'_>,
    device: i32,
    stream: usize,
    places: Vec<DeviceArray>,
    team: i32,
    name: Option<&Bound<'_, PyString>>,
    timeout: f64,
) -> PyResult<()> {
    DeviceArgs::new(device, stream, &places)?.run(py, name, |device, buffers, count, name| {
        // SAFETY: the caller keeps the arrays alive; the list and the name outlive the call.
        unsafe { ffi::dl_comm_average_on(device, buffers, count, team, name, timeout) }
    })
}

/// Copies the arrays of rank `root` to all ranks, ordered by `stream`.
#[pyfunction]
#[pyo3(signature = (device, stream, places, root, name=None, timeout=-1.0))]
pub fn broadcast_on(
    py: Python<'_>,
    device: i32,
    stream: usize,
    places: Vec<DeviceArray>,
    root: i32,
    name: Option<&Bound<'_, PyString>>,
    timeout: f64,
) -> PyResult<()> {
    DeviceArgs::new(device, stream, &places)?.run(py, name, |device, buffers, count, name| {
        // SAFETY: the caller keeps the arrays alive; the list and the name outlive the call.
        unsafe { ffi::dl_comm_broadcast_on(device, buffers, count, root, name, timeout) }
    })
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
