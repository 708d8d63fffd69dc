//! Zeroed memory aligned to cache lines, for regions shared by threads and for message buffers.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ptr::NonNull;
use std::slice;

use crate::wire_layout::ALIGN;

/// Owned, zeroed bytes, aligned to [`ALIGN`].
#[derive(Debug)]
pub struct Aligned {
    ptr: NonNull<u8>,
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
        let ptr = unsafe { alloc_zeroed(layout) };
        let Some(ptr) = NonNull::new(ptr) else { handle_alloc_error(layout) };
        Aligned { ptr, len }
    }

    fn layout(len: usize) -> Layout {
        match Layout::from_size_align(len.max(1), ALIGN) {
            Ok(layout) => layout,
            Err(_) => panic!("{len} bytes are not addressable"),
        }
    }

    /// Address of the first byte.
    pub fn as_ptr(&self) -> *mut u8 {
        self.ptr.as_ptr()
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
        unsafe { slice::from_raw_parts(self.ptr.as_ptr(), self.len) }
    }

    /// All bytes, mutable.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: len initialized bytes, borrowed uniquely.
        unsafe { slice::from_raw_parts_mut(self.ptr.as_ptr(), self.len) }
    }
}

impl Drop for Aligned {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout.
        unsafe { dealloc(self.ptr.as_ptr(), Aligned::layout(self.len)) }
    }
}
