//! Conversion of C arguments and results.

use std::borrow::Cow;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::{ptr, slice};

use smallvec::SmallVec;

use crate::buffer::{Buffer, Tensor, View};
use crate::device::Device;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::group::Timeout;
use crate::transport::gpu;

/// `dl_comm_buffer_t`; see `dl_comm.h` for the contract.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct CBuffer {
    /// The source.
    pub src: *const c_void,
    /// The destination.
    pub dst: *mut c_void,
    /// The number of elements.
    pub length: usize,
    /// The code of the element type.
    pub dtype: c_int,
    /// The number of extents in `shape`.
    pub ndim: c_int,
    /// The extents, or null.
    pub shape: *const i64,
}

/// `dl_comm_device_t`; see `dl_comm.h` for the contract.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct CDevice {
    /// The number of the GPU.
    pub device: c_int,
    /// Its stream.
    pub stream: *mut c_void,
    /// Whether the call blocks the host until the results are there.
    pub block_host: c_int,
}

/// The device of the tensors; `None` for host memory.
///
/// # Safety
/// `device` is NULL or valid.
pub(super) unsafe fn to_device(device: *const CDevice) -> Option<Device> {
    // SAFETY: the caller's promise.
    let device = unsafe { device.as_ref() }?;
    (device.device >= 0).then(|| Device {
        ordinal: device.device,
        stream: device.stream.addr(),
        block_host: device.block_host != 0,
    })
}

/// The deadline of the structures: 0 for the group's, negative for none.
pub(super) fn to_timeout(seconds: f64) -> Timeout {
    match seconds {
        0.0 => Timeout::GroupDefault,
        seconds if seconds < 0.0 => Timeout::Override(None),
        // NaN is the group's, too.
        seconds => Timeout::from_seconds(seconds),
    }
}

/// The GPU whose memory holds the tensors, with its default stream; `None` for host memory.
///
/// # Errors
/// [`Error::Invalid`] if the tensors are on several devices.
pub(super) fn device_of(towers: &[Vec<Tensor>]) -> Result<Option<Device>> {
    let mut tensors = towers.iter().flatten().filter(|tensor| !tensor.buffer.is_empty());
    let owner = |tensor: &Tensor| gpu::device_of_pointer(tensor.buffer.dst().addr());
    // A process with GPU memory has loaded the driver.
    let Some(first) = tensors.next().filter(|_| gpu::is_loaded()).map(owner) else { return Ok(None) };
    if tensors.any(|tensor| owner(tensor) != first) {
        return Err(Error::Invalid("the tensors are in the memory of different devices; average them apart".into()));
    }
    Ok(first.map(|ordinal| Device { ordinal, stream: 0, block_host: false }))
}

/// Converts a number to a C return value.
pub(super) fn number(value: usize) -> Result<c_int> {
    c_int::try_from(value).map_err(|_| Error::Internal("a number is too large for int".into()))
}

/// Copies `message` to `text`, cut to `capacity` bytes with the NUL, and returns the full length.
///
/// # Safety
/// `text` has room for `capacity` bytes.
pub(super) unsafe fn copy_text(message: &str, text: *mut c_char, capacity: usize) -> Result<c_int> {
    if text.is_null() && capacity > 0 {
        return Err(Error::Invalid("the place for the text is NULL".into()));
    }
    let len = message.floor_char_boundary(capacity.saturating_sub(1));
    if capacity > 0 {
        // SAFETY: the caller's promise; `len` is below `capacity`.
        unsafe {
            ptr::copy_nonoverlapping(message.as_ptr().cast(), text, len);
            *text.add(len) = 0;
        }
    }
    number(message.len())
}

/// Converts a C string; NULL gives an empty string.
///
/// # Safety
/// `name` is a C string or NULL.
#[inline(always)]
pub(super) unsafe fn text<'a>(name: *const c_char) -> Cow<'a, str> {
    if name.is_null() {
        return Cow::Borrowed("");
    }
    // SAFETY: the caller's promise.
    unsafe { CStr::from_ptr(name) }.to_string_lossy()
}

/// The array at `data`; `what` names it in errors.
///
/// # Safety
/// `data` is NULL or has `count` valid entries.
#[inline(always)]
pub(super) unsafe fn array<'a, T>(data: *const T, count: usize, what: &str) -> Result<&'a [T]> {
    if count == 0 {
        return Ok(&[]);
    }
    if data.is_null() || !data.is_aligned() {
        return Err(misaligned(what));
    }
    // SAFETY: the caller's promise.
    Ok(unsafe { slice::from_raw_parts(data, count) })
}

#[cold]
fn misaligned(what: &str) -> Error {
    Error::Invalid(format!("{what} is NULL or misaligned"))
}

/// Converts an array of buffers to tensors.
///
/// # Safety
/// `buffers` has `count` entries, and each `shape` that is not NULL has `ndim` entries.
pub(super) unsafe fn tensors(buffers: *const CBuffer, count: usize) -> Result<Vec<Tensor>> {
    let mut list = Views::new();
    // SAFETY: the caller's promise.
    unsafe { views(buffers, count, &mut list) }?;
    Ok(list.iter().map(|view| view.to_tensor()).collect())
}

/// A list of tensors on the stack.
pub(super) type Views<'a> = SmallVec<[View<'a>; 4]>;

/// Builds the views in place in `list`: moving them slows small messages.
///
/// # Safety
/// As for [`tensors`]; the shapes do not change while the views are used.
#[inline(always)]
pub(super) unsafe fn views<'a>(buffers: *const CBuffer, count: usize, list: &mut Views<'a>) -> Result<()> {
    // SAFETY: the caller's promise.
    let buffers = unsafe { array(buffers, count, "the list of buffers") }?;
    list.reserve(count);
    for buffer in buffers {
        let ndim = if buffer.shape.is_null() { 0 } else { usize::try_from(buffer.ndim).unwrap_or(0) };
        // SAFETY: the caller's promise.
        let shape = unsafe { array(buffer.shape, ndim, "a shape") }?;
        let dtype = DType::from_code(buffer.dtype)?;
        list.push(View { buffer: Buffer::new(buffer.src.cast(), buffer.dst.cast(), buffer.length, dtype), shape });
    }
    Ok(())
}

/// Converts the towers of the plugin's lists.
///
/// # Safety
/// The arrays have the sizes documented for `dl_comm_gradients` in the header.
pub(super) unsafe fn towers(
    all_tensors: *mut *mut *mut c_void,
    lengths: *mut *mut c_int,
    dtypes: *mut *mut c_int,
    ntensors_on_tower: *mut c_int,
    ntowers: c_int,
) -> Result<Vec<Vec<Tensor>>> {
    let ntowers = usize::try_from(ntowers).ok().filter(|&ntowers| ntowers > 0);
    let ntowers = ntowers.ok_or_else(|| Error::Invalid("ntowers is below 1".into()))?;
    // SAFETY: the caller's promise, here and below.
    let (counts, tensors, lengths, dtypes) = unsafe {
        (
            array(ntensors_on_tower, ntowers, "ntensors_on_tower")?,
            array(all_tensors, ntowers, "all_tensors")?,
            array(lengths, ntowers, "lengths")?,
            array(dtypes, ntowers, "dtypes")?,
        )
    };
    let mut towers = Vec::with_capacity(ntowers);
    for tower in 0..ntowers {
        let count = usize::try_from(counts[tower])
            .map_err(|_| Error::Invalid(format!("ntensors_on_tower[{tower}] is negative")))?;
        // SAFETY: as above.
        let (tensors, lengths, dtypes) = unsafe {
            (
                array(tensors[tower], count, "all_tensors[i]")?,
                array(lengths[tower], count, "lengths[i]")?,
                array(dtypes[tower], count, "dtypes[i]")?,
            )
        };
        let mut list = Vec::with_capacity(count);
        for index in 0..count {
            let length = usize::try_from(lengths[index])
                .map_err(|_| Error::Invalid(format!("lengths[{tower}][{index}] is negative")))?;
            let buffer = Buffer::in_place(tensors[index].cast(), length, DType::from_code(dtypes[index])?);
            list.push(Tensor::new(buffer, &[]));
        }
        towers.push(list);
    }
    Ok(towers)
}

/// Reads a structure that starts with its size, as the caller's version of it says; the fields that it does not have are
/// 0. `required`: the bytes that all versions have; `name`: the structure is `dl_comm_<name>_t`.
///
/// # Safety
/// `structure` is NULL or has the bytes that its size says; zeros are valid for all fields.
#[inline(always)]
pub(super) unsafe fn sized<'a, T: Copy>(structure: *const T, required: usize, name: &str) -> Result<Given<'a, T>> {
    // SAFETY: the caller's promise.
    unsafe {
        let size = *reference(structure.cast::<usize>(), name)?;
        if size >= size_of::<T>() { Ok(Given::Whole(&*structure)) } else { older(structure, size, required, name) }
    }
}

/// # Safety
/// As for [`sized`].
#[cold]
unsafe fn older<'a, T: Copy>(structure: *const T, size: usize, required: usize, name: &str) -> Result<Given<'a, T>> {
    if size < required {
        return Err(Error::Invalid(format!("size is {size}; set it to sizeof(dl_comm_{name}_t)")));
    }
    // SAFETY: the caller's promise.
    unsafe {
        let mut copy = Box::new(std::mem::zeroed::<T>());
        ptr::copy_nonoverlapping(structure.cast::<u8>(), (&raw mut *copy).cast(), size);
        Ok(Given::Older(copy))
    }
}

/// A structure of the caller.
pub(super) enum Given<'a, T> {
    /// As this version knows it, or a longer one.
    Whole(&'a T),
    /// One of an older version, with zeros for what it lacks.
    Older(Box<T>),
}

impl<T> std::ops::Deref for Given<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        match self {
            Given::Whole(given) => given,
            Given::Older(copy) => copy,
        }
    }
}

/// # Safety
/// `pointer` is NULL or valid.
#[inline(always)]
pub(super) unsafe fn reference<'a, T>(pointer: *const T, what: &str) -> Result<&'a T> {
    // SAFETY: the caller's promise.
    match unsafe { pointer.as_ref() } {
        Some(reference) => Ok(reference),
        None => Err(null(what)),
    }
}

#[cold]
fn null(what: &str) -> Error {
    Error::Invalid(format!("{what} is NULL"))
}

/// # Safety
/// `place` is NULL or valid.
pub(super) unsafe fn store<T>(place: *mut T, value: T, what: &str) -> Result<()> {
    if place.is_null() {
        return Err(null(what));
    }
    // SAFETY: the caller's promise.
    unsafe { place.write(value) };
    Ok(())
}
