//! Memory for transfers: host memory that a GPU can reach, and device memory of the core's own.
//!
//! Thread rule: may be used from any thread in whose context it is.

use std::ptr;
use std::sync::Arc;

use cudarc::driver::sys;

use super::context::Context;
use super::driver::{Address, attribute_of, check, start};
use crate::error::Result;

/// Host memory that is pinned and mapped for a GPU as long as this lives. The memory itself is somebody else's.
pub struct HostRegistration {
    context: Arc<Context>,
    memory: *mut u8,
    address: Address,
}

// SAFETY: an address, and a handle that may be used from any thread.
unsafe impl Send for HostRegistration {}
// SAFETY: as above.
unsafe impl Sync for HostRegistration {}

impl HostRegistration {
    /// Pins `len` bytes at `memory`, which is a multiple of the page's size.
    ///
    /// # Errors
    /// [`crate::error::Error::System`], for memory that is pinned already too.
    ///
    /// # Safety
    /// The memory outlives this.
    pub unsafe fn new(context: &Arc<Context>, memory: *mut u8, len: usize) -> Result<HostRegistration> {
        let _entered = context.push()?;
        let flags = sys::CU_MEMHOSTREGISTER_DEVICEMAP | sys::CU_MEMHOSTREGISTER_PORTABLE;
        // SAFETY: the caller's promise.
        check("pinning host memory", unsafe { sys::cuMemHostRegister_v2(memory.cast(), len, flags) })?;
        let mut pinned = HostRegistration { context: Arc::clone(context), memory, address: 0 };
        pinned.address = address_of(memory)?;
        Ok(pinned)
    }

    /// Where the host sees it.
    pub fn memory(&self) -> *mut u8 {
        self.memory
    }

    /// Where the GPU sees it.
    pub fn address(&self) -> Address {
        self.address
    }
}

impl Drop for HostRegistration {
    fn drop(&mut self) {
        if let Ok(_entered) = self.context.push() {
            // SAFETY: registered by `new`.
            unsafe { sys::cuMemHostUnregister(self.memory.cast()) };
        }
    }
}

/// Where the GPU sees pinned memory.
fn address_of(memory: *mut u8) -> Result<Address> {
    let mut address = 0;
    // SAFETY: the place is valid; the driver knows the memory.
    let code = unsafe { sys::cuMemHostGetDevicePointer_v2(&raw mut address, memory.cast(), 0) };
    check("mapping host memory", code).map(|()| address)
}

/// Device memory of the core's own.
pub struct DeviceBuffer {
    context: Arc<Context>,
    address: Address,
    len: usize,
}

impl DeviceBuffer {
    /// `len` bytes, more than none.
    ///
    /// # Errors
    /// [`crate::error::Error::System`]
    pub fn new(context: &Arc<Context>, len: usize) -> Result<DeviceBuffer> {
        let _entered = context.push()?;
        let mut address = 0;
        // SAFETY: the place is valid.
        check(&format!("taking {len} bytes of a GPU's memory"), unsafe { sys::cuMemAlloc_v2(&raw mut address, len) })?;
        Ok(DeviceBuffer { context: Arc::clone(context), address, len })
    }

    /// Where it is.
    pub fn address(&self) -> Address {
        self.address
    }

    /// How many bytes it has.
    pub fn bytes(&self) -> usize {
        self.len
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        if let Ok(_entered) = self.context.push() {
            // SAFETY: from `new`; the owner drops it when nothing enqueued uses it any more.
            unsafe { sys::cuMemFree_v2(self.address) };
        }
    }
}

/// Whether the process has loaded the driver's library; nothing is loaded for that.
pub fn is_loaded() -> bool {
    // SAFETY: looks for the library among those that are loaded.
    let loaded = unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
    if !loaded.is_null() {
        // SAFETY: gives back what was just taken.
        unsafe { libc::dlclose(loaded) };
    }
    !loaded.is_null()
}

/// The GPU whose memory is at `address`; `None` for host memory, and where no GPU is in use.
pub fn device_of_pointer(address: usize) -> Option<i32> {
    if !is_loaded() || start().is_err() {
        return None;
    }
    type Attribute = sys::CUpointer_attribute;
    // SAFETY: the attribute is such a number.
    let kind = unsafe { attribute_of(address as Address, Attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE) };
    if kind != Ok(sys::CUmemorytype::CU_MEMORYTYPE_DEVICE as u32) {
        return None;
    }
    // SAFETY: as above.
    unsafe { attribute_of(address as Address, Attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL) }.ok()
}

/// A page-aligned piece of host memory of the process's own, pinned.
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
    /// `len` bytes, more than none.
    ///
    /// # Errors
    /// [`crate::error::Error::System`]
    pub fn new(context: &Arc<Context>, len: usize) -> Result<PinnedHostBuffer> {
        let _entered = context.push()?;
        let mut memory = ptr::null_mut();
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: the place is valid.
        check("taking pinned host memory", unsafe { sys::cuMemHostAlloc(&raw mut memory, len, flags) })?;
        let mut taken = PinnedHostBuffer { context: Arc::clone(context), memory: memory.cast(), address: 0, len };
        taken.address = address_of(taken.memory)?;
        Ok(taken)
    }

    /// Where it is.
    pub fn memory(&self) -> *mut u8 {
        self.memory
    }

    /// Where the GPU sees it.
    pub fn address(&self) -> Address {
        self.address
    }

    /// How many bytes it has.
    pub fn bytes(&self) -> usize {
        self.len
    }
}

impl Drop for PinnedHostBuffer {
    fn drop(&mut self) {
        if let Ok(_entered) = self.context.push() {
            // SAFETY: from `new`; the owner drops it when nothing enqueued uses it any more.
            unsafe { sys::cuMemFreeHost(self.memory.cast()) };
        }
    }
}
