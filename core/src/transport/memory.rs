//! Zeroed memory aligned to cache lines, for regions shared by threads and for message buffers. Pages that are never used take
//! no memory: the allocator zeroes nothing that comes zeroed from the system, unless it is asked for an alignment.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ptr::NonNull;
use std::slice;

use crate::wire_layout::ALIGN;

/// Owned, zeroed bytes, aligned to [`ALIGN`].
#[derive(Debug)]
pub struct Aligned {
    /// Fewer than [`ALIGN`] bytes before the first.
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: owns its bytes, like a boxed slice.
unsafe impl Send for Aligned {}
// SAFETY: as above; shared access returns a shared slice or a raw pointer.
unsafe impl Sync for Aligned {}

impl Aligned {
    /// Allocates `len` zero bytes.
    ///
    /// # Panics
    /// If `len` is not addressable.
    pub fn new(len: usize) -> Aligned {
        let layout = Aligned::layout(len);
        // SAFETY: the layout's size is not zero.
        let base = unsafe { alloc_zeroed(layout) };
        let Some(base) = NonNull::new(base) else { handle_alloc_error(layout) };
        Aligned { base, len }
    }

    /// With room for the alignment.
    fn layout(len: usize) -> Layout {
        match len.checked_add(ALIGN).map(Layout::array::<u8>) {
            Some(Ok(layout)) => layout,
            _ => panic!("{len} bytes are not addressable"),
        }
    }

    /// Address of the first byte.
    pub fn as_ptr(&self) -> *mut u8 {
        let base = self.base.as_ptr();
        base.wrapping_add(base.align_offset(ALIGN))
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the length is 0.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// All bytes.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: `len` initialized bytes.
        unsafe { slice::from_raw_parts(self.as_ptr(), self.len) }
    }

    /// All bytes, mutable.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: len initialized bytes, borrowed uniquely.
        unsafe { slice::from_raw_parts_mut(self.as_ptr(), self.len) }
    }
}

impl Drop for Aligned {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout.
        unsafe { dealloc(self.base.as_ptr(), Aligned::layout(self.len)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_zeroed_and_aligned() {
        for len in [0, 1, 63, 64, 65, 4096, 1 << 20] {
            let mut memory = Aligned::new(len);
            assert!(memory.as_ptr().addr().is_multiple_of(ALIGN));
            assert_eq!(memory.as_slice().len(), len);
            assert!(memory.as_slice().iter().all(|&byte| byte == 0));
            memory.as_mut_slice().fill(1);
            assert!(memory.as_slice().iter().all(|&byte| byte == 1));
        }
    }
}
