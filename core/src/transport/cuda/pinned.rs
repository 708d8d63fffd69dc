//! Host memory that a GPU can access, and the core's own device memory.
//!
//! Thread rule: any thread.

use std::sync::Arc;

use cudarc::driver::{result, sys};

use super::context::Context;
use super::driver::{Address, Handle, attribute_of, check, start};
use crate::error::Result;

/// Device memory that the core allocates.
pub struct DeviceBuffer {
    context: Arc<Context>,
    address: Address,
    len: usize,
}

impl DeviceBuffer {
    /// Allocates `len` bytes; `len` is not 0.
    pub fn new(context: &Arc<Context>, len: usize) -> Result<DeviceBuffer> {
        let address = alloc(context, len)?;
        Ok(DeviceBuffer { context: Arc::clone(context), address, len })
    }

    /// The device address.
    pub fn address(&self) -> Address {
        self.address
    }

    /// The length in bytes.
    pub fn bytes(&self) -> usize {
        self.len
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        if let Ok(_guard) = self.context.push() {
            // SAFETY: allocated by `new`; the owner drops it when no enqueued work uses it.
            unsafe { sys::cuMemFree_v2(self.address) };
        }
    }
}

/// Allocates `len` bytes, not 0, of the memory of a GPU.
pub fn alloc(context: &Context, len: usize) -> Result<Address> {
    let _guard = context.push()?;
    // SAFETY: the memory is written before it is read.
    check(&format!("taking {len} bytes of a GPU's memory"), unsafe { result::malloc_sync(len) })
}

/// Frees memory of [`alloc`]. The driver waits for the enqueued work of the GPU.
///
/// # Safety
/// The memory is from [`alloc`] with this context, and only enqueued work uses it.
pub unsafe fn free(context: &Context, address: Address) -> Result<()> {
    let _guard = context.push()?;
    // SAFETY: the caller's promise.
    check("freeing a GPU's memory", unsafe { sys::cuMemFree_v2(address) }.result())
}

/// Whether the process has loaded the driver library. Loads nothing.
pub fn is_loaded() -> bool {
    // SAFETY: looks only among the loaded libraries.
    let loaded = unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
    if !loaded.is_null() {
        // SAFETY: releases the handle from `dlopen`.
        unsafe { libc::dlclose(loaded) };
    }
    !loaded.is_null()
}

/// The GPU whose memory is at `address`; `None` for host memory, and if no GPU is in use.
pub fn device_of_pointer(address: usize) -> Option<i32> {
    if !is_loaded() || start().is_err() {
        return None;
    }
    type Attribute = sys::CUpointer_attribute;
    // SAFETY: the attribute is a `u32`.
    let kind = unsafe { attribute_of(address as Address, Attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE) };
    if kind != Ok(sys::CUmemorytype::CU_MEMORYTYPE_DEVICE as u32) {
        return None;
    }
    // SAFETY: the attribute is an `i32`.
    unsafe { attribute_of(address as Address, Attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL) }.ok()
}

/// Page-aligned host memory, pinned and mapped for a GPU: the core's own, or that of others.
pub struct PinnedHostBuffer {
    context: Arc<Context>,
    memory: Handle<u8>,
    address: Address,
    len: usize,
    owned: bool,
}

impl PinnedHostBuffer {
    /// Allocates `len` bytes; `len` is not 0.
    pub fn new(context: &Arc<Context>, len: usize) -> Result<PinnedHostBuffer> {
        let _guard = context.push()?;
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: the memory is written before it is read.
        let memory = check("taking pinned host memory", unsafe { result::malloc_host(len, flags) })?;
        PinnedHostBuffer::mapped(context, memory.cast(), len, true)
    }

    /// Pins `len` bytes at `memory`, which is a multiple of the page size. Fails also if the memory is already pinned.
    ///
    /// # Safety
    /// The memory outlives the result.
    pub unsafe fn register(context: &Arc<Context>, memory: *mut u8, len: usize) -> Result<PinnedHostBuffer> {
        let _guard = context.push()?;
        let flags = sys::CU_MEMHOSTREGISTER_DEVICEMAP | sys::CU_MEMHOSTREGISTER_PORTABLE;
        // SAFETY: the caller's promise.
        check("pinning host memory", unsafe { sys::cuMemHostRegister_v2(memory.cast(), len, flags) }.result())?;
        PinnedHostBuffer::mapped(context, memory, len, false)
    }

    /// Wraps pinned memory, and unpins it on an error.
    fn mapped(context: &Arc<Context>, memory: *mut u8, len: usize, owned: bool) -> Result<PinnedHostBuffer> {
        let context = Arc::clone(context);
        let mut buffer = PinnedHostBuffer { context, memory: Handle(memory), address: 0, len, owned };
        // SAFETY: the out pointer is valid; the memory is pinned.
        let code = unsafe { sys::cuMemHostGetDevicePointer_v2(&raw mut buffer.address, memory.cast(), 0) };
        check("mapping host memory", code.result()).map(|()| buffer)
    }

    /// The address for the host.
    pub fn memory(&self) -> *mut u8 {
        self.memory.0
    }

    /// The address for the GPU.
    pub fn address(&self) -> Address {
        self.address
    }

    /// The length in bytes.
    pub fn bytes(&self) -> usize {
        self.len
    }
}

impl Drop for PinnedHostBuffer {
    fn drop(&mut self) {
        if let Ok(_guard) = self.context.push() {
            let memory = self.memory.0.cast();
            // SAFETY: from `new` or `register`; the owner drops it when no enqueued work uses it.
            unsafe { if self.owned { sys::cuMemFreeHost(memory) } else { sys::cuMemHostUnregister(memory) } };
        }
    }
}
