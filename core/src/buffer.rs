//! A tensor's memory and shape as the core sees them. The only place where a caller's raw pointer becomes a slice.
//!
//! The caller owns the memory and keeps it valid until the call has ended; that promise is made at the bindings.

use std::ops::Range;

use crate::dtype::DType;
use crate::error::{Error, Result};

/// Contiguous host memory of one tensor: read from `src`, written to `dst` (often the same).
#[derive(Debug, Clone, Copy)]
pub struct Buffer {
    src: *const u8,
    dst: *mut u8,
    len: usize,
    dtype: DType,
}

// SAFETY: a Buffer is only an address; the promise that the memory outlives the call, and that nobody else writes to it
// meanwhile, is the caller's (see the bindings).
unsafe impl Send for Buffer {}
// SAFETY: as above; the team's threads touch disjoint ranges.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// Describes `len` elements of `dtype`. Nothing is read here.
    pub fn new(src: *const u8, dst: *mut u8, len: usize, dtype: DType) -> Buffer {
        Buffer { src, dst, len, dtype }
    }

    /// A buffer that is averaged or broadcast in place.
    pub fn in_place(ptr: *mut u8, len: usize, dtype: DType) -> Buffer {
        Buffer::new(ptr, ptr, len, dtype)
    }

    /// The number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Refuses what cannot be memory: a null or misaligned pointer to elements, a length that overflows.
    ///
    /// # Errors
    /// [`Error::Invalid`]
    pub fn check(&self) -> Result<()> {
        self.check_source()?;
        self.check_pointer(self.dst.cast_const())
    }

    /// The same for a buffer that is only read.
    ///
    /// # Errors
    /// [`Error::Invalid`]
    pub fn check_source(&self) -> Result<()> {
        let size = self.dtype.size();
        if self.len.checked_mul(size).is_none_or(|bytes| bytes > isize::MAX as usize) {
            return Err(Error::Invalid(format!("{} elements of {} are not addressable", self.len, self.dtype.name())));
        }
        self.check_pointer(self.src)
    }

    fn check_pointer(&self, pointer: *const u8) -> Result<()> {
        if self.len > 0 && pointer.is_null() {
            return Err(Error::Invalid("the pointer is null".into()));
        }
        if pointer.addr().checked_add(self.len * self.dtype.size()).is_none() {
            return Err(Error::Invalid(format!("{} elements from there are beyond the address space", self.len)));
        }
        if !pointer.addr().is_multiple_of(self.dtype.size()) {
            return Err(Error::Invalid(format!("the pointer is not aligned for {}", self.dtype.name())));
        }
        Ok(())
    }

    /// The addresses that are read and those that are written.
    pub fn byte_ranges(&self) -> (Range<usize>, Range<usize>) {
        let span = |start: usize| start..start + self.len * self.dtype.size();
        (span(self.src.addr()), span(self.dst.addr()))
    }

    /// Whether it is written where it is read.
    pub fn is_in_place(&self) -> bool {
        self.src.addr() == self.dst.addr()
    }

    /// Whether it is written where it is read, or nowhere near.
    pub fn is_disjoint_or_in_place(&self) -> bool {
        self.is_in_place() || self.src.addr().abs_diff(self.dst.addr()) >= self.len * self.dtype.size()
    }

    /// Where the buffer is written.
    pub fn dst(&self) -> *mut u8 {
        self.dst
    }

    /// Where element `start` is read.
    ///
    /// # Safety
    /// The memory is valid, and has this element or ends there.
    pub unsafe fn read_at(&self, start: usize) -> *const u8 {
        debug_assert!(start <= self.len);
        // SAFETY: the caller's promise.
        unsafe { self.src.add(start * self.dtype.size()) }
    }

    /// Where element `start` is written.
    ///
    /// # Safety
    /// As for [`Buffer::read_at`].
    pub unsafe fn written_at(&self, start: usize) -> *mut u8 {
        debug_assert!(start <= self.len);
        // SAFETY: the caller's promise.
        unsafe { self.dst.add(start * self.dtype.size()) }
    }

    /// The bytes of elements `start .. start + count`, to read.
    ///
    /// # Safety
    /// The memory is valid, the range lies in it, and nobody writes to it while the slice lives.
    pub unsafe fn bytes(&self, start: usize, count: usize) -> &[u8] {
        debug_assert!(start + count <= self.len);
        if count == 0 {
            return &[];
        }
        let size = self.dtype.size();
        // SAFETY: the caller's promise, and the range was checked when the call was made.
        unsafe { std::slice::from_raw_parts(self.src.add(start * size), count * size) }
    }

    /// The bytes of elements `start .. start + count`, to write.
    ///
    /// # Safety
    /// The memory is valid, the range lies in it, and nobody else uses it while the slice lives.
    #[allow(clippy::mut_from_ref)] // a Buffer is an address, not the owner; see the safety section
    pub unsafe fn bytes_mut(&self, start: usize, count: usize) -> &mut [u8] {
        debug_assert!(start + count <= self.len);
        if count == 0 {
            return &mut [];
        }
        let size = self.dtype.size();
        // SAFETY: as for `bytes`.
        unsafe { std::slice::from_raw_parts_mut(self.dst.add(start * size), count * size) }
    }
}

/// A buffer with the shape that its framework gives it. The shape serves matching and messages only.
#[derive(Debug, Clone)]
pub struct Tensor {
    /// Where the elements are.
    pub buffer: Buffer,
    shape: Box<[i64]>,
}

/// A tensor whose shape somebody else holds.
#[derive(Debug, Clone, Copy)]
pub struct View<'a> {
    /// Where the elements are.
    pub buffer: Buffer,
    /// The shape, as for [`Tensor::new`].
    pub shape: &'a [i64],
}

impl View<'_> {
    /// The tensor.
    pub fn to_tensor(self) -> Tensor {
        Tensor::new(self.buffer, self.shape)
    }
}

impl Tensor {
    /// A tensor; an empty `shape` of a buffer that has not one element is taken as one-dimensional.
    pub fn new(buffer: Buffer, shape: &[i64]) -> Tensor {
        let flat = i64::try_from(buffer.len()).unwrap_or(i64::MAX);
        let shape = if shape.is_empty() && flat != 1 { Box::from([flat]) } else { Box::from(shape) };
        Tensor { buffer, shape }
    }

    /// The shape.
    pub fn shape(&self) -> &[i64] {
        &self.shape
    }

    /// Whether `view` has the same element type and shape.
    pub fn matches(&self, view: &View<'_>) -> bool {
        // Without a shape a single element has none either, and more are one-dimensional.
        let same = || match view.shape {
            [] => self.shape.len() == usize::from(view.buffer.len() != 1),
            shape => *shape == *self.shape,
        };
        self.buffer.dtype() == view.buffer.dtype() && self.buffer.len() == view.buffer.len() && same()
    }

    /// As error messages show it: `float32[64, 10]`.
    pub fn describe(&self) -> String {
        format!("{}{:?}", self.buffer.dtype().name(), self.shape)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_memory_is_refused() {
        let mut four = [0f32; 4];
        let ptr = four.as_mut_ptr().cast::<u8>();
        assert!(Buffer::in_place(ptr, 4, DType::F32).check().is_ok());
        assert!(Buffer::in_place(std::ptr::null_mut(), 0, DType::F32).check().is_ok());
        assert!(Buffer::in_place(std::ptr::null_mut(), 1, DType::F32).check().is_err());
        assert!(Buffer::in_place(ptr.wrapping_add(1), 1, DType::F32).check().is_err());
        assert!(Buffer::in_place(ptr, usize::MAX / 2, DType::F64).check().is_err());
        let last = std::ptr::without_provenance_mut(usize::MAX - 7);
        assert!(Buffer::in_place(last, 4, DType::F64).check().is_err());
    }

    #[test]
    fn shapes_are_shown() {
        let buffer = Buffer::in_place(std::ptr::null_mut(), 6, DType::BF16);
        assert_eq!(Tensor::new(buffer, &[2, 3]).describe(), "bfloat16[2, 3]");
        assert_eq!(Tensor::new(buffer, &[]).describe(), "bfloat16[6]");
    }
}
