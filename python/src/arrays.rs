//! NumPy arrays as buffers of the C API. Refuses arrays without plain memory or with an unknown element type. Arrays in GPU
//! memory are tuples that `dl_comm._arrays.cuda_arrays` makes.

use numpy::{PyArrayDescrMethods, PyUntypedArray, PyUntypedArrayMethods};
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::api::ffi::{self, dl_comm_buffer_t, dl_comm_device_t};
use crate::api::{argument_error, dtype_error};

/// `NPY_ARRAY_WRITEABLE` and `NPY_ARRAY_ALIGNED` of NumPy's C API.
const WRITEABLE: i32 = 0x0400;
const ALIGNED: i32 = 0x0100;

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// The array is read.
    Read,
    /// The array is written.
    Write,
}

/// Element types that a function takes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Types {
    /// Those of the plugin.
    Plugin,
    /// All that the collectives know.
    All,
}

/// The buffers of a list of arrays. Holds no references: the caller keeps the arrays alive.
pub struct Buffers {
    buffers: Vec<dl_comm_buffer_t>,
    /// The shapes that the buffers point to.
    _shapes: Vec<Box<[i64]>>,
    /// The GPU of the arrays.
    device: Option<Box<dl_comm_device_t>>,
}

/// An array in GPU memory: its address, the code of its element type, its shape, where it is, and what keeps the memory.
type DeviceArray<'py> = (usize, u32, Vec<i64>, (i32, usize, bool), Bound<'py, PyAny>);

// SAFETY: only the C API dereferences the pointers, while the arrays are alive.
unsafe impl Sync for Buffers {}

impl Buffers {
    /// Buffers that are read from `sources` and written to `destinations`, pairwise.
    pub fn new(py: Python<'_>, sources: &[Bound<'_, PyAny>], destinations: &[Bound<'_, PyAny>]) -> PyResult<Buffers> {
        if sources.len() != destinations.len() {
            let (given, expected) = (destinations.len(), sources.len());
            return Err(argument_error(
                py,
                format!("out holds {given} arrays; it must be like the {expected} tensors"),
            ));
        }
        let mut shapes = Vec::with_capacity(sources.len());
        let mut buffers = Vec::with_capacity(sources.len());
        for (index, (source, destination)) in sources.iter().zip(destinations).enumerate() {
            let (mut buffer, shape) = describe(source, index, Access::Read, Types::Plugin)?;
            buffer.shape = shape.as_ptr();
            let (target, target_shape) = describe(destination, index, Access::Write, Types::Plugin)?;
            if target_shape != shape || target.dtype != buffer.dtype {
                return Err(argument_error(
                    py,
                    format!(
                        "out: array {index} has the shape {} and type {}, tensor {index} {} and {}; they must be alike",
                        tuple(&target_shape),
                        destination.getattr("dtype")?,
                        tuple(&shape),
                        source.getattr("dtype")?
                    ),
                ));
            }
            buffer.dst = target.dst;
            buffers.push(buffer);
            shapes.push(shape);
        }
        Ok(Buffers { buffers, _shapes: shapes, device: None })
    }

    /// The buffers of a collective, pairwise. A rank without inputs has no `sources`, one without outputs no
    /// `destinations`. The shorter array has `blocks` blocks, of the length that the buffer gets. All arrays are on one GPU, or
    /// none is.
    pub fn of_call(
        py: Python<'_>,
        sources: Option<&[Bound<'_, PyAny>]>,
        destinations: Option<&[Bound<'_, PyAny>]>,
        blocks: usize,
    ) -> PyResult<Buffers> {
        let number = sources.or(destinations).map_or(0, <[_]>::len);
        if destinations.is_some_and(|list| list.len() != number) {
            return Err(argument_error(py, format!("out has another number of arrays than the {number} inputs")));
        }
        let (mut buffers, mut shapes, mut device) = (Vec::with_capacity(number), Vec::with_capacity(number), None);
        for index in 0..number {
            let mut of = |list: &[Bound<'_, PyAny>], access| match list[index].cast::<PyTuple>() {
                Ok(array) => on_device(array, &mut device),
                Err(_) => describe(&list[index], index, access, Types::All),
            };
            let read = sources.map(|list| of(list, Access::Read)).transpose()?;
            let written = destinations.map(|list| of(list, Access::Write)).transpose()?;
            if let (Some((one, _)), Some((other, _))) = (&read, &written)
                && one.dtype != other.dtype
            {
                let text = format!("out: array {index} has another element type than the input");
                return Err(argument_error(py, text));
            }
            let [src, dst] = [
                read.as_ref().map_or(std::ptr::null(), |(buffer, _)| buffer.src),
                written.as_ref().map_or(std::ptr::null_mut(), |(buffer, _)| buffer.dst).cast_const(),
            ];
            // The array with one block, or one of those with all.
            let (mut buffer, mut shape) = match (read, written) {
                (Some(one), Some(other)) => {
                    if one.0.length > other.0.length {
                        other
                    } else {
                        one
                    }
                }
                (Some(one), None) | (None, Some(one)) => one,
                (None, None) => continue,
            };
            (buffer.src, buffer.dst) = (src, dst.cast_mut());
            if blocks > 1 {
                buffer.length /= blocks;
                let rows = i64::try_from(blocks).unwrap_or(i64::MAX);
                shape.iter_mut().take(1).for_each(|extent| *extent /= rows);
            }
            // The ranks must agree on the shape of a block.
            (buffer.ndim, buffer.shape) = (i32::try_from(shape.len()).unwrap_or(0), shape.as_ptr());
            buffers.push(buffer);
            shapes.push(shape);
        }
        Ok(Buffers { buffers, _shapes: shapes, device })
    }

    /// Buffers of arrays, or of memory given by its address, elements and code of the type, whose owner the caller keeps alive.
    /// They are written if `writes`.
    pub fn of_memory(py: Python<'_>, given: &[Bound<'_, PyAny>], writes: bool) -> PyResult<Buffers> {
        let access = if writes { Access::Write } else { Access::Read };
        let buffer = |(index, object): (usize, &Bound<'_, PyAny>)| match object.cast::<PyTuple>() {
            Ok(memory) => {
                let (address, length, dtype) = memory.extract::<(usize, usize, i32)>()?;
                let data = std::ptr::with_exposed_provenance_mut(address);
                let dtype =
                    u32::try_from(dtype).map_err(|_| dtype_error(py, format!("no type has the code {dtype}")))?;
                Ok(dl_comm_buffer_t { src: data, dst: data, length, dtype, ndim: 0, shape: std::ptr::null() })
            }
            Err(_) => Ok(describe(object, index, access, Types::All)?.0),
        };
        let buffers = given.iter().enumerate().map(buffer).collect::<PyResult<_>>()?;
        Ok(Buffers { buffers, _shapes: Vec::new(), device: None })
    }

    pub fn read_only(arrays: &[Bound<'_, PyAny>]) -> PyResult<Buffers> {
        let mut shapes = Vec::with_capacity(arrays.len());
        let mut buffers = Vec::with_capacity(arrays.len());
        for (index, array) in arrays.iter().enumerate() {
            let (mut buffer, shape) = describe(array, index, Access::Read, Types::Plugin)?;
            buffer.shape = shape.as_ptr();
            buffers.push(buffer);
            shapes.push(shape);
        }
        Ok(Buffers { buffers, _shapes: shapes, device: None })
    }

    /// The GPU of the arrays as an argument of the C API; NULL for host memory.
    pub fn device(&self) -> *const dl_comm_device_t {
        self.device.as_deref().map_or(std::ptr::null(), std::ptr::from_ref)
    }

    /// The list as an argument of the C API.
    pub fn as_ptr(&self) -> *const dl_comm_buffer_t {
        self.buffers.as_ptr()
    }

    /// Length of the list.
    pub fn len(&self) -> usize {
        self.buffers.len()
    }
}

/// A shape in Python syntax.
fn tuple(shape: &[i64]) -> String {
    let extents: Vec<String> = shape.iter().map(i64::to_string).collect();
    format!("({}{})", extents.join(", "), if shape.len() == 1 { "," } else { "" })
}

/// The buffer of an array in GPU memory; stores where that is.
fn on_device(
    array: &Bound<'_, PyTuple>,
    device: &mut Option<Box<dl_comm_device_t>>,
) -> PyResult<(dl_comm_buffer_t, Box<[i64]>)> {
    let (address, dtype, shape, (ordinal, stream, block_host), _keeper) = array.extract::<DeviceArray<'_>>()?;
    let stream = std::ptr::without_provenance_mut(stream);
    *device = Some(Box::new(dl_comm_device_t { device: ordinal, stream, block_host: i32::from(block_host) }));
    let data = std::ptr::without_provenance_mut(address);
    let length = shape.iter().map(|&extent| usize::try_from(extent).unwrap_or(0)).product();
    let ndim = i32::try_from(shape.len())?;
    let buffer = dl_comm_buffer_t { src: data, dst: data, length, dtype, ndim, shape: std::ptr::null() };
    Ok((buffer, shape.into()))
}

fn describe(
    object: &Bound<'_, PyAny>,
    index: usize,
    access: Access,
    types: Types,
) -> PyResult<(dl_comm_buffer_t, Box<[i64]>)> {
    let Ok(array) = object.cast::<PyUntypedArray>() else {
        let kind = object.get_type().fully_qualified_name()?;
        return Err(dtype_error(object.py(), format!("array {index} is a {kind}; make it one: numpy.array(...)")));
    };
    let py = object.py();
    let dtype = element_type(array, index, types)?;
    let shape: Box<[i64]> = array.shape().iter().map(|&extent| i64::try_from(extent).unwrap_or(i64::MAX)).collect();
    if !array.is_c_contiguous() {
        return Err(argument_error(
            py,
            format!(
                "array {index} of shape {} is not C-contiguous; pass numpy.ascontiguousarray(...) of it",
                tuple(&shape)
            ),
        ));
    }
    // SAFETY: a live array.
    let (data, flags) = unsafe {
        let raw = array.as_array_ptr();
        ((*raw).fields.data.cast::<std::ffi::c_void>(), (*raw).fields.flags)
    };
    if flags & ALIGNED == 0 {
        return Err(argument_error(py, format!("array {index} is not aligned; pass a copy of it")));
    }
    if access == Access::Write && flags & WRITEABLE == 0 {
        return Err(argument_error(py, format!("array {index} is read-only; pass a copy of it")));
    }
    let ndim = i32::try_from(shape.len())?;
    let buffer = dl_comm_buffer_t { src: data, dst: data, length: array.len(), dtype, ndim, shape: std::ptr::null() };
    Ok((buffer, shape))
}

fn element_type(array: &Bound<'_, PyUntypedArray>, index: usize, types: Types) -> PyResult<ffi::dlDataType_t> {
    let descriptor = array.dtype();
    let native = descriptor.is_native_byteorder().unwrap_or(true);
    let code = match (descriptor.kind(), descriptor.itemsize()) {
        (b'f', 2) => Some(ffi::dlDataType_DL_COMM_FLOAT16),
        (b'f', 4) => Some(ffi::dlDataType_DL_COMM_FLOAT32),
        (b'f', 8) => Some(ffi::dlDataType_DL_COMM_FLOAT64),
        (b'i', 1) => Some(ffi::dlDataType_DL_COMM_INT8),
        (b'u', 1) => Some(ffi::dlDataType_DL_COMM_UINT8),
        (b'i', 4) => Some(ffi::dlDataType_DL_COMM_INT32),
        (b'i', 8) => Some(ffi::dlDataType_DL_COMM_INT64),
        (b'b', 1) => Some(ffi::dlDataType_DL_COMM_BOOL),
        // bfloat16 is a type of the package ml_dtypes; only its name identifies it.
        (_, 2) if descriptor.str()?.to_cow()? == "bfloat16" => Some(ffi::dlDataType_DL_COMM_BFLOAT16),
        _ if types == Types::Plugin => None,
        (b'i', 2) => Some(ffi::dlDataType_DL_COMM_INT16),
        (b'u', 2) => Some(ffi::dlDataType_DL_COMM_UINT16),
        (b'u', 4) => Some(ffi::dlDataType_DL_COMM_UINT32),
        (b'u', 8) => Some(ffi::dlDataType_DL_COMM_UINT64),
        (b'c', 8) => Some(ffi::dlDataType_DL_COMM_COMPLEX64),
        (b'c', 16) => Some(ffi::dlDataType_DL_COMM_COMPLEX128),
        _ => None,
    };
    code.filter(|_| native).ok_or_else(|| {
        let supported = match types {
            Types::Plugin => "float16, bfloat16, float32, float64, int8, uint8, int32, int64 and (broadcast only) bool",
            Types::All => {
                "float16, bfloat16, float32, float64, complex64, complex128, integers of 8 to 64 bits and bool"
            }
        };
        dtype_error(array.py(), format!("array {index} has the element type {descriptor}; {supported} are supported"))
    })
}
