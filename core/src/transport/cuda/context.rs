//! Primary contexts of GPUs, which all frameworks of a process share, and the properties of a device.
//!
//! A retained context is kept for the life of the process, as in the frameworks: it must outlive all of its streams.
//! Thread rule: any thread may use a [`Context`]; a [`ContextGuard`] stays on its thread.

use std::collections::BTreeMap;
use std::ffi::{CStr, c_int};
use std::marker::PhantomData;
use std::ptr;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use cudarc::driver::sys::{self, CUdevice_attribute as Attribute};

use super::driver::{check, start};
use super::ipc::{IpcExports, IpcImports};
use super::kernels::Kernels;
use crate::error::{Error, Result};

/// The primary context of a GPU, with its kernels and IPC tables.
pub struct Context {
    ordinal: i32,
    handle: sys::CUcontext,
    name: String,
    uuid: [u8; 16],
    capability: (i32, i32),
    processors: u32,
    kernels: OnceLock<Result<Kernels>>,
    exports: Mutex<IpcExports>,
    imports: Mutex<IpcImports>,
    /// Free events, for reuse.
    pub(super) events: Mutex<Vec<sys::CUevent>>,
}

// SAFETY: any thread may use the driver's handles; locks guard the rest.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

/// Keeps a context current on this thread; dropping it restores the previous one.
/// While it lives, CUDA graph captures by other threads do not block this thread's driver calls.
pub struct ContextGuard<'a> {
    capture: sys::CUstreamCaptureMode,
    _context: PhantomData<(&'a Context, *const ())>,
}

impl Context {
    /// The context of GPU `ordinal`, by this process's numbering.
    ///
    /// # Errors
    /// [`Error::System`]; [`Error::Invalid`] if there is no such GPU.
    pub fn for_device(ordinal: i32) -> Result<Arc<Context>> {
        static CONTEXTS: Mutex<BTreeMap<i32, Arc<Context>>> = Mutex::new(BTreeMap::new());
        let mut known = CONTEXTS.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(context) = known.get(&ordinal) {
            return Ok(Arc::clone(context));
        }
        let context = Arc::new(Context::retain(ordinal)?);
        known.insert(ordinal, Arc::clone(&context));
        Ok(context)
    }

    fn retain(ordinal: i32) -> Result<Context> {
        start()?;
        let mut device = 0;
        // SAFETY: the driver has started; here and below the out pointers are valid.
        check(&format!("asking for GPU {ordinal}"), unsafe { sys::cuDeviceGet(&raw mut device, ordinal) })?;
        let mut handle = ptr::null_mut();
        // SAFETY: as above.
        check("retaining the context of a GPU", unsafe { sys::cuDevicePrimaryCtxRetain(&raw mut handle, device) })?;
        let attribute = |attribute| {
            let mut value = 0;
            // SAFETY: as above.
            check("asking about a GPU", unsafe { sys::cuDeviceGetAttribute(&raw mut value, attribute, device) })?;
            Ok::<c_int, Error>(value)
        };
        let mut uuid = sys::CUuuid { bytes: [0; 16] };
        // SAFETY: as above.
        check("asking for the UUID of a GPU", unsafe { sys::cuDeviceGetUuid_v2(&raw mut uuid, device) })?;
        let mut name = [0; 128];
        // SAFETY: the driver terminates the name with NUL within the given length.
        check("asking for the name of a GPU", unsafe { sys::cuDeviceGetName(name.as_mut_ptr(), 128, device) })?;
        // SAFETY: as above.
        let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
        Ok(Context {
            ordinal,
            handle,
            name,
            uuid: uuid.bytes.map(|byte| byte.cast_unsigned()),
            capability: (
                attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
                attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
            ),
            processors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?.unsigned_abs(),
            kernels: OnceLock::new(),
            exports: Mutex::default(),
            imports: Mutex::default(),
            events: Mutex::default(),
        })
    }

    /// Makes the context current on this thread.
    ///
    /// # Errors
    /// [`Error::System`]
    pub fn push(&self) -> Result<ContextGuard<'_>> {
        // SAFETY: the context is retained.
        check("entering the context of a GPU", unsafe { sys::cuCtxPushCurrent_v2(self.handle) })?;
        let mut capture = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the out pointer is valid; it gets the thread's previous mode.
        let code = unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut capture) };
        let guard = ContextGuard { capture, _context: PhantomData };
        check("leaving captures to others", code).map(|()| guard)
    }

    /// The number of the GPU in this process.
    pub fn ordinal(&self) -> i32 {
        self.ordinal
    }

    /// The product's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The UUID in hexadecimal; the same in all processes that use this GPU.
    pub fn uuid(&self) -> String {
        self.uuid.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// The compute capability, major and minor.
    pub fn capability(&self) -> (i32, i32) {
        self.capability
    }

    /// The number of multiprocessors.
    pub fn processors(&self) -> u32 {
        self.processors
    }

    /// Allocations of this GPU that other processes may open.
    pub fn exports(&self) -> MutexGuard<'_, IpcExports> {
        self.exports.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Allocations of other processes, opened on this GPU.
    pub(super) fn imports(&self) -> MutexGuard<'_, IpcImports> {
        self.imports.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The kernels; the first call compiles them.
    ///
    /// # Errors
    /// [`Error::System`] without NVRTC, or if compiling or loading fails.
    pub fn kernels(&self) -> Result<&Kernels> {
        let compiled = self.kernels.get_or_init(|| {
            let _guard = self.push()?;
            Kernels::compile(self.capability, self.processors)
        });
        compiled.as_ref().map_err(Error::clone)
    }
}

impl Drop for ContextGuard<'_> {
    fn drop(&mut self) {
        let mut popped = ptr::null_mut();
        // SAFETY: the pointer is valid, and the mode is the thread's previous one.
        unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut self.capture) };
        // SAFETY: pops what `push` pushed on the same thread; that cannot fail.
        unsafe { sys::cuCtxPopCurrent_v2(&raw mut popped) };
    }
}
