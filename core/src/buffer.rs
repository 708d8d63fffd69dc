//! Memory and shape of a tensor. The only place where a caller's raw pointer becomes a slice.
//!
//! The caller owns the memory and keeps it valid until the call has completed. The bindings state this contract.

use std::ops::Range;

use crate::dtype::DType;
use crate::error::{Error, Result};

/// Contiguous host memory of one tensor: read from `src`, written to `dst` (often the same address).
#[derive(Debug, Clone, Copy)]
pub struct Buffer {
    src: *const u8,
    dst: *mut u8,
    len: usize,
    dtype: DType,
}

// SAFETY: a Buffer is only an address. The caller guarantees that the memory outlives the call, and that no other code
// writes to it meanwhile (see the bindings).
unsafe impl Send for Buffer {}
// SAFETY: as above; the group's threads access disjoint ranges.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// Describes `len` elements of `dtype`. Does not access the memory.
    pub fn new(src: *const u8, dst: *mut u8, len: usize, dtype: DType) -> Buffer {
        Buffer { src, dst, len, dtype }
    }

    /// A buffer whose result overwrites its input.
    pub fn in_place(ptr: *mut u8, len: usize, dtype: DType) -> Buffer {
        Buffer::new(ptr, ptr, len, dtype)
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the buffer has no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Checks both addresses: not null, aligned, and no address overflow.
    ///
    /// # Errors
    /// [`Error::Invalid`]
    #[inline]
    pub fn check(&self) -> Result<()> {
        self.check_source()?;
        if self.is_in_place() { Ok(()) } else { self.check_pointer(self.dst.cast_const(), self.len) }
    }

    /// Checks the source address only, for a buffer that is never written.
    ///
    /// # Errors
    /// [`Error::Invalid`]
    #[inline]
    pub fn check_source(&self) -> Result<()> {
        self.check_source_of(self.len)
    }

    /// Checks that `len` elements are addressable.
    ///
    /// # Errors
    /// [`Error::Invalid`]
    #[inline(always)]
    pub fn check_length(&self, len: usize) -> Result<()> {
        match len.checked_mul(self.dtype.size()) {
            Some(bytes) if bytes <= isize::MAX as usize => Ok(()),
            _ => Err(self.not_addressable(len)),
        }
    }

    #[cold]
    fn not_addressable(&self, len: usize) -> Error {
        Error::Invalid(format!("{len} elements of {} are not addressable", self.dtype.name()))
    }

    /// Checks the source address for `len` elements.
    ///
    /// # Errors
    /// [`Error::Invalid`]
    #[inline(always)]
    pub fn check_source_of(&self, len: usize) -> Result<()> {
        self.check_length(len)?;
        self.check_pointer(self.src, len)
    }

    /// Checks the destination address for `len` elements.
    ///
    /// # Errors
    /// [`Error::Invalid`]
    #[inline(always)]
    pub fn check_destination_of(&self, len: usize) -> Result<()> {
        self.check_length(len)?;
        self.check_pointer(self.dst.cast_const(), len)
    }

    #[inline(always)]
    fn check_pointer(&self, pointer: *const u8, len: usize) -> Result<()> {
        let is_null = len > 0 && pointer.is_null();
        let is_in_memory = pointer.addr().checked_add(len * self.dtype.size()).is_some();
        if !is_null && is_in_memory && pointer.addr().is_multiple_of(self.dtype.align()) {
            return Ok(());
        }
        Err(self.bad_pointer(len, is_null, is_in_memory))
    }

    #[cold]
    fn bad_pointer(&self, len: usize, is_null: bool, is_in_memory: bool) -> Error {
        Error::Invalid(match (is_null, is_in_memory) {
            (true, _) => "the pointer is null".into(),
            (false, false) => format!("{len} elements from there are beyond the address space"),
            (false, true) => format!("the pointer is not aligned for {}", self.dtype.name()),
        })
    }

    /// The address ranges of source and destination.
    pub fn byte_ranges(&self) -> (Range<usize>, Range<usize>) {
        (self.source_bytes(0..self.len), self.destination_bytes(0..self.len))
    }

    /// The addresses of `elements` of the source. They may wrap around: a rank need not use its source.
    pub fn source_bytes(&self, elements: Range<usize>) -> Range<usize> {
        let address = |element: usize| self.src.addr().wrapping_add(element * self.dtype.size());
        address(elements.start)..address(elements.end)
    }

    /// The addresses of `elements` of the destination, as of the source.
    pub fn destination_bytes(&self, elements: Range<usize>) -> Range<usize> {
        let address = |element: usize| self.dst.addr().wrapping_add(element * self.dtype.size());
        address(elements.start)..address(elements.end)
    }

    /// Whether these are its addresses.
    #[inline]
    pub fn is_at(&self, src: *const u8, dst: *mut u8) -> bool {
        self.src == src && self.dst == dst
    }

    /// As many elements of this type at other addresses.
    #[inline]
    pub fn moved_to(&self, src: *const u8, dst: *mut u8) -> Buffer {
        Buffer::new(src, dst, self.len, self.dtype)
    }

    /// Whether source and destination are the same address.
    pub fn is_in_place(&self) -> bool {
        self.src.addr() == self.dst.addr()
    }

    /// The destination address.
    pub fn dst(&self) -> *mut u8 {
        self.dst
    }

    /// The address of element `index` of the source, which may have more elements than [`Buffer::len`].
    pub fn source_at(&self, index: usize) -> *const u8 {
        self.src.wrapping_add(index * self.dtype.size())
    }

    /// The address of element `index` of the destination, as for [`Buffer::source_at`].
    pub fn destination_at(&self, index: usize) -> *mut u8 {
        self.dst.wrapping_add(index * self.dtype.size())
    }

    /// The address of byte `at` of the source, as for [`Buffer::source_at`].
    pub fn source_byte(&self, at: usize) -> *const u8 {
        self.src.wrapping_add(at)
    }

    /// The address of byte `at` of the destination, as for [`Buffer::source_at`].
    pub fn destination_byte(&self, at: usize) -> *mut u8 {
        self.dst.wrapping_add(at)
    }

    /// The address of element `start` in the source.
    ///
    /// # Safety
    /// The memory is valid, and `start` is at most its length.
    pub unsafe fn read_at(&self, start: usize) -> *const u8 {
        debug_assert!(start <= self.len);
        // SAFETY: guaranteed by the caller.
        unsafe { self.src.add(start * self.dtype.size()) }
    }

    /// The address of element `start` in the destination.
    ///
    /// # Safety
    /// As for [`Buffer::read_at`].
    pub unsafe fn written_at(&self, start: usize) -> *mut u8 {
        debug_assert!(start <= self.len);
        // SAFETY: guaranteed by the caller.
        unsafe { self.dst.add(start * self.dtype.size()) }
    }

    /// The bytes of elements `start .. start + count` of the source.
    ///
    /// # Safety
    /// The memory is valid, the range lies in it, and nothing writes to it while the slice lives.
    pub unsafe fn bytes(&self, start: usize, count: usize) -> &[u8] {
        debug_assert!(start + count <= self.len);
        if count == 0 {
            return &[];
        }
        let size = self.dtype.size();
        // SAFETY: guaranteed by the caller; the range was checked when the call was created.
        unsafe { std::slice::from_raw_parts(self.src.add(start * size), count * size) }
    }

    /// The bytes of elements `start .. start + count` of the destination.
    ///
    /// # Safety
    /// The memory is valid, the range lies in it, and nothing else accesses it while the slice lives.
    #[allow(clippy::mut_from_ref)] // a Buffer is an address, not an owner; see the safety section
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

/// A buffer with its framework's shape. The shape serves matching and messages only.
#[derive(Debug, Clone)]
pub struct Tensor {
    /// The elements.
    pub buffer: Buffer,
    shape: Box<[i64]>,
}

/// A tensor that borrows its shape.
#[derive(Debug, Clone, Copy)]
pub struct View<'a> {
    /// The elements.
    pub buffer: Buffer,
    /// The shape, as for [`Tensor::new`].
    pub shape: &'a [i64],
}

impl View<'_> {
    /// Copies the shape.
    pub fn to_tensor(self) -> Tensor {
        Tensor::new(self.buffer, self.shape)
    }
}

impl Tensor {
    /// Creates a tensor. An empty `shape` means one-dimensional, unless the buffer has exactly one element.
    pub fn new(buffer: Buffer, shape: &[i64]) -> Tensor {
        let flat = i64::try_from(buffer.len()).unwrap_or(i64::MAX);
        let shape = if shape.is_empty() && flat != 1 { Box::from([flat]) } else { Box::from(shape) };
        Tensor { buffer, shape }
    }

    /// Shape.
    pub fn shape(&self) -> &[i64] {
        &self.shape
    }

    /// Whether `view` has the same element type and shape.
    pub fn matches(&self, view: &View<'_>) -> bool {
        // An empty shape means a scalar for one element, else one dimension (as in `Tensor::new`).
        let same = || match view.shape {
            [] => self.shape.len() == usize::from(view.buffer.len() != 1),
            shape => *shape == *self.shape,
        };
        self.buffer.dtype() == view.buffer.dtype() && self.buffer.len() == view.buffer.len() && same()
    }

    /// The form in error messages: `float32[64, 10]`.
    pub fn describe(&self) -> String {
        format!("{}{:?}", self.buffer.dtype().name(), self.shape)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_memory_is_refused() {
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
    fn shapes_are_described() {
        let buffer = Buffer::in_place(std::ptr::null_mut(), 6, DType::BF16);
        assert_eq!(Tensor::new(buffer, &[2, 3]).describe(), "bfloat16[2, 3]");
        assert_eq!(Tensor::new(buffer, &[]).describe(), "bfloat16[6]");
    }
}
