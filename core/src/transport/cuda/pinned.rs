//! Host memory that a GPU can access, and the core's own device memory.
//!
//! Thread rule: any thread.

use std::ptr;
use std::sync::Arc;

use cudarc::driver::sys;

use super::context::Context;
use super::driver::{Address, attribute_of, check, start};
use crate::error::Result;

/// Pins host memory and maps it for a GPU while it lives. It does not own the memory.
pub struct HostRegistration {
    context: Arc<Context>,
    memory: *mut u8,
    address: Address,
}

// SAFETY: an address, and a handle that any thread may use.
unsafe impl Send for HostRegistration {}
// SAFETY: as above.
unsafe impl Sync for HostRegistration {}

impl HostRegistration {
    /// Pins `len` bytes at `memory`, which is a multiple of the page size.
    ///
    /// # Errors
    /// [`crate::error::Error::System`], also if the memory is already pinned.
    ///
    /// # Safety
    /// The memory outlives the registration.
    pub unsafe fn new(context: &Arc<Context>, memory: *mut u8, len: usize) -> Result<HostRegistration> {
        let _guard = context.push()?;
        let flags = sys::CU_MEMHOSTREGISTER_DEVICEMAP | sys::CU_MEMHOSTREGISTER_PORTABLE;
        // SAFETY: the caller's promise.
        check("pinning host memory", unsafe { sys::cuMemHostRegister_v2(memory.cast(), len, flags) })?;
        let mut registration = HostRegistration { context: Arc::clone(context), memory, address: 0 };
        registration.address = address_of(memory)?;
        Ok(registration)
    }

    /// The address for the host.
    pub fn memory(&self) -> *mut u8 {
        self.memory
    }

    /// The address for the GPU.
    pub fn address(&self) -> Address {
        self.address
    }
}

impl Drop for HostRegistration {
    fn drop(&mut self) {
        if let Ok(_guard) = self.context.push() {
            // SAFETY: `new` registered the memory.
            unsafe { sys::cuMemHostUnregister(self.memory.cast()) };
        }
    }
}

/// The GPU's address of pinned memory.
fn address_of(memory: *mut u8) -> Result<Address> {
    let mut address = 0;
    // SAFETY: the out pointer is valid; the memory is pinned.
    let code = unsafe { sys::cuMemHostGetDevicePointer_v2(&raw mut address, memory.cast(), 0) };
    check("mapping host memory", code).map(|()| address)
}

/// Device memory that the core allocates.
pub struct DeviceBuffer {
    context: Arc<Context>,
    address: Address,
    len: usize,
}

impl DeviceBuffer {
    /// Allocates `len` bytes; `len` is not 0.
    ///
    /// # Errors
    /// [`crate::error::Error::System`]
    pub fn new(context: &Arc<Context>, len: usize) -> Result<DeviceBuffer> {
        let _guard = context.push()?;
        let mut address = 0;
        // SAFETY: the out pointer is valid.
        check(&format!("taking {len} bytes of a GPU's memory"), unsafe { sys::cuMemAlloc_v2(&raw mut address, len) })?;
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

/// Pinned, page-aligned host memory that the core allocates.
pub struct PinnedHostBuffer {
    context: Arc<Context>,
    memory: *mut u8,
    address: Address,
    len: usize,
}

// SAFETY: as for `HostRegistration`.
unsafe impl Send for PinnedHostBuffer {}
// SAFETY: as for `HostRegistration`.
unsafe impl Sync for PinnedHostBuffer {}

impl PinnedHostBuffer {
    /// Allocates `len` bytes; `len` is not 0.
    ///
    /// # Errors
    /// [`crate::error::Error::System`]
    pub fn new(context: &Arc<Context>, len: usize) -> Result<PinnedHostBuffer> {
        let _guard = context.push()?;
        let mut memory = ptr::null_mut();
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: the out pointer is valid.
        check("taking pinned host memory", unsafe { sys::cuMemHostAlloc(&raw mut memory, len, flags) })?;
        let mut buffer = PinnedHostBuffer { context: Arc::clone(context), memory: memory.cast(), address: 0, len };
        buffer.address = address_of(buffer.memory)?;
        Ok(buffer)
    }

    /// The address for the host.
    pub fn memory(&self) -> *mut u8 {
        self.memory
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
            // SAFETY: allocated by `new`; the owner drops it when no enqueued work uses it.
            unsafe { sys::cuMemFreeHost(self.memory.cast()) };
        }
    }
}
