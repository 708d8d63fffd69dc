//! DLPack: reads the capsules of other libraries, and makes those of results in GPU memory.
//!
//! Thread rule: functions need the GIL; any thread may drop memory, and call the deleter of a capsule.

use std::ffi::{CStr, c_void};
use std::process;
use std::ptr;
use std::sync::Arc;

use pyo3::exceptions::{PyBufferError, PyTypeError};
use pyo3::ffi::{PyCapsule_GetPointer, PyCapsule_IsValid, PyCapsule_New, PyObject};
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyCapsuleMethods};

use crate::api::{call, ffi};

/// `DLDevice`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Device {
    kind: i32,
    ordinal: i32,
}

/// `kDLCUDA`.
const CUDA: i32 = 2;

/// `DLDataType`.
#[repr(C)]
#[derive(Clone, Copy)]
struct DataType {
    code: u8,
    bits: u8,
    lanes: u16,
}

/// `DLTensor`.
#[repr(C)]
struct Tensor {
    data: *mut c_void,
    device: Device,
    ndim: i32,
    dtype: DataType,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

type Deleter<T> = Option<unsafe extern "C" fn(*mut T)>;

/// `DLManagedTensor`, which libraries before DLPack 1.0 exchange.
#[repr(C)]
struct Managed {
    tensor: Tensor,
    context: *mut c_void,
    deleter: Deleter<Managed>,
}

/// `DLManagedTensorVersioned`.
#[repr(C)]
struct Versioned {
    major: u32,
    minor: u32,
    context: *mut c_void,
    deleter: Deleter<Versioned>,
    flags: u64,
    tensor: Tensor,
}

/// `DLPACK_FLAG_BITMASK_READ_ONLY`.
const READ_ONLY: u64 = 1;
/// The version of DLPack that this file knows; later minor ones are compatible.
const VERSION: (u32, u32) = (1, 0);

/// A structure in a capsule.
trait Form: Sized {
    /// The name of a capsule that nobody has taken over.
    const NAME: &CStr;

    fn new(tensor: Tensor, deleter: Deleter<Self>) -> Self;
}

impl Form for Managed {
    const NAME: &CStr = c"dltensor";

    fn new(tensor: Tensor, deleter: Deleter<Managed>) -> Managed {
        Managed { tensor, context: ptr::null_mut(), deleter }
    }
}

impl Form for Versioned {
    const NAME: &CStr = c"dltensor_versioned";

    fn new(tensor: Tensor, deleter: Deleter<Versioned>) -> Versioned {
        Versioned { major: VERSION.0, minor: VERSION.1, context: ptr::null_mut(), deleter, flags: 0, tensor }
    }
}

/// What a capsule describes: kind and ordinal of the device, address, element type (code, bits, lanes), shape, strides in
/// elements (`None`: C order), and whether it is read-only, if it says so.
type Described = (i32, i32, usize, (u8, u8, u16), Vec<i64>, Option<Vec<i64>>, Option<bool>);

/// Reads a capsule, which must outlive all use of its memory: it is not taken over.
#[pyfunction]
pub fn read_dlpack(capsule: &Bound<'_, PyCapsule>) -> PyResult<Described> {
    if let Ok(found) = capsule.pointer_checked(Some(Versioned::NAME)) {
        let found = found.cast::<Versioned>().as_ptr();
        // SAFETY: a capsule of this name has this structure, and later versions begin like it.
        let (major, minor, flags) = unsafe { ((*found).major, (*found).minor, (*found).flags) };
        if major != VERSION.0 {
            return Err(PyBufferError::new_err(format!("dl_comm knows DLPack 1, not {major}.{minor}")));
        }
        // SAFETY: as above.
        return Ok(unsafe { describe(&(*found).tensor, Some(flags & READ_ONLY != 0)) });
    }
    let found = capsule.pointer_checked(Some(Managed::NAME)).map_err(|_| {
        PyTypeError::new_err("__dlpack__ has returned a capsule without a DLPack tensor, or of one that was taken over")
    })?;
    // SAFETY: as above.
    Ok(unsafe { describe(&(*found.cast::<Managed>().as_ptr()).tensor, None) })
}

/// # Safety
/// Shape and strides have `ndim` entries, or are null.
unsafe fn describe(tensor: &Tensor, read_only: Option<bool>) -> Described {
    let ndim = usize::try_from(tensor.ndim).unwrap_or(0);
    let list = |start: *const i64| {
        // SAFETY: the caller's promise.
        (!start.is_null()).then(|| unsafe { std::slice::from_raw_parts(start, ndim) }.to_vec())
    };
    let offset = usize::try_from(tensor.byte_offset).unwrap_or(0);
    let DataType { code, bits, lanes } = tensor.dtype;
    (
        tensor.device.kind,
        tensor.device.ordinal,
        tensor.data.addr() + offset,
        (code, bits, lanes),
        list(tensor.shape).unwrap_or_default(),
        list(tensor.strides),
        read_only,
    )
}

/// Memory of a GPU, freed with its last user.
struct Allocation {
    device: i32,
    address: *mut c_void,
    /// The process that has allocated it.
    owner: u32,
}

// SAFETY: any thread may free the memory, and nobody here reads it.
unsafe impl Send for Allocation {}
// SAFETY: as above.
unsafe impl Sync for Allocation {}

impl Drop for Allocation {
    fn drop(&mut self) {
        // A forked child has no context.
        if self.address.is_null() || self.owner != process::id() {
            return;
        }
        let allocation = &*self;
        let free = || {
            // SAFETY: from `dl_comm_device_alloc`, and freed once. Nobody can act on an error.
            let _code = unsafe { ffi::dl_comm_device_free(allocation.device, allocation.address) };
        };
        // The driver waits for the GPU, whose work may include functions of Python.
        if Python::try_attach(|py| py.detach(free)).is_none() {
            free();
        }
    }
}

/// Memory of a result.
#[pyclass(frozen)]
pub struct DeviceMemory(Arc<Allocation>);

/// Allocates memory of a GPU; of no bytes, it has the address 0.
#[pyfunction]
pub fn device_memory(py: Python<'_>, device: i32, bytes: usize) -> PyResult<DeviceMemory> {
    let mut allocation = Allocation { device, address: ptr::null_mut(), owner: process::id() };
    if bytes > 0 {
        call(py, || {
            let allocation = &mut allocation;
            // SAFETY: the out pointer is valid.
            unsafe { ffi::dl_comm_device_alloc(device, bytes, &raw mut allocation.address) }
        })?;
    }
    Ok(DeviceMemory(Arc::new(allocation)))
}

#[pymethods]
impl DeviceMemory {
    #[getter]
    fn address(&self) -> usize {
        self.0.address.addr()
    }

    /// A capsule of an array in this memory in C order, which keeps the memory. `dtype`: code and bits.
    fn capsule<'py>(
        &self,
        py: Python<'py>,
        dtype: (u8, u8),
        shape: Vec<i64>,
        versioned: bool,
    ) -> PyResult<Bound<'py, PyAny>> {
        if versioned {
            self.capsule_of::<Versioned>(py, dtype, shape)
        } else {
            self.capsule_of::<Managed>(py, dtype, shape)
        }
    }
}

/// A structure that another library gets, with what it points to.
#[repr(C)]
struct Exported<T> {
    /// First: its address is that of all.
    form: T,
    /// Shape, then strides.
    _extents: Vec<i64>,
    _memory: Arc<Allocation>,
}

impl DeviceMemory {
    fn capsule_of<'py, T: Form>(
        &self,
        py: Python<'py>,
        (code, bits): (u8, u8),
        shape: Vec<i64>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let ndim = shape.len();
        let mut extents = shape;
        extents.resize(2 * ndim, 1);
        for axis in (1..ndim).rev() {
            extents[ndim + axis - 1] = extents[ndim + axis] * extents[axis];
        }
        let tensor = Tensor {
            data: self.0.address,
            device: Device { kind: CUDA, ordinal: self.0.device },
            ndim: i32::try_from(ndim)?,
            dtype: DataType { code, bits, lanes: 1 },
            shape: extents.as_mut_ptr(),
            // SAFETY: the list has twice as many entries.
            strides: unsafe { extents.as_mut_ptr().add(ndim) },
            byte_offset: 0,
        };
        let form = T::new(tensor, Some(delete::<T>));
        let exported = Box::new(Exported { form, _extents: extents, _memory: Arc::clone(&self.0) });
        let exported = Box::into_raw(exported).cast::<T>();
        // SAFETY: the capsule owns the structure until it is taken over.
        let made = unsafe { PyCapsule_New(exported.cast(), T::NAME.as_ptr(), Some(end::<T>)) };
        // SAFETY: a new reference, or null with an exception.
        let made = unsafe { Bound::from_owned_ptr_or_err(py, made) };
        if made.is_err() {
            // SAFETY: no capsule owns it.
            unsafe { delete(exported) };
        }
        made
    }
}

/// The deleter of an exported structure.
unsafe extern "C" fn delete<T>(form: *mut T) {
    // SAFETY: from `capsule_of`, and called once.
    drop(unsafe { Box::from_raw(form.cast::<Exported<T>>()) });
}

/// The destructor of a capsule: deletes what nobody has taken over.
unsafe extern "C" fn end<T: Form>(capsule: *mut PyObject) {
    // SAFETY: Python calls it with the capsule, which has a `T` as long as it has its first name.
    unsafe {
        if PyCapsule_IsValid(capsule, T::NAME.as_ptr()) != 0 {
            delete(PyCapsule_GetPointer(capsule, T::NAME.as_ptr()).cast::<T>());
        }
    }
}
