//! The primary context of a GPU, which a process's frameworks share, and what is known of the device.
//!
//! A context that was used once is kept for the life of the process: frameworks do the same, and a context must not go
//! while a stream of it is in use.
//! Thread rule: a [`Context`] may be used from any thread; [`ContextGuard`] stays on its own.

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

/// A GPU's primary context.
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
    /// Events that are not in use.
    pub(super) events: Mutex<Vec<sys::CUevent>>,
}

// SAFETY: handles of the driver may be used from any thread; the rest is plain data behind locks.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

/// The context is the thread's current one as long as this lives; then it is what it was. Meanwhile a capture of somebody else's
/// into a CUDA graph does not keep this thread from the functions that are not for captures: it has no part in that.
pub struct ContextGuard<'a> {
    capture: sys::CUstreamCaptureMode,
    _context: PhantomData<(&'a Context, *const ())>,
}

impl Context {
    /// The context of GPU `ordinal`, as this process counts them.
    ///
    /// # Errors
    /// [`Error::System`], and [`Error::Invalid`] for a number that no GPU has.
    pub fn for_device(ordinal: i32) -> Result<Arc<Context>> {
        static KNOWN: Mutex<BTreeMap<i32, Arc<Context>>> = Mutex::new(BTreeMap::new());
        let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
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
        // SAFETY: the driver has started; here and below the places are valid.
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
        // SAFETY: the driver ends the name within the length.
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

    /// Makes the context the current one of this thread.
    ///
    /// # Errors
    /// [`Error::System`]
    pub fn push(&self) -> Result<ContextGuard<'_>> {
        // SAFETY: the context is retained.
        check("entering the context of a GPU", unsafe { sys::cuCtxPushCurrent_v2(self.handle) })?;
        let mut capture = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the place is valid; it gets the mode that the thread had.
        let code = unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut capture) };
        let entered = ContextGuard { capture, _context: PhantomData };
        check("leaving captures to others", code).map(|()| entered)
    }

    /// The number of the GPU in this process.
    pub fn ordinal(&self) -> i32 {
        self.ordinal
    }

    /// The product's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What is the same in all processes that use this GPU, in hexadecimal digits.
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

    /// What other processes see of this GPU's memory.
    pub fn exports(&self) -> MutexGuard<'_, IpcExports> {
        self.exports.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What this process sees of the memory of others, opened for this GPU.
    pub(super) fn imports(&self) -> MutexGuard<'_, IpcImports> {
        self.imports.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The kernels, compiled when they are first asked for.
    ///
    /// # Errors
    /// [`Error::System`] without NVRTC, and when the driver does not take what it makes.
    pub fn kernels(&self) -> Result<&Kernels> {
        let made = self.kernels.get_or_init(|| {
            let _entered = self.push()?;
            Kernels::compile(self.capability, self.processors)
        });
        made.as_ref().map_err(Error::clone)
    }
}

impl Drop for ContextGuard<'_> {
    fn drop(&mut self) {
        let mut left = ptr::null_mut();
        // SAFETY: the place is valid, the mode one that the thread had.
        unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut self.capture) };
        // SAFETY: pops what `enter` pushed, on the same thread; it cannot fail while that is there.
        unsafe { sys::cuCtxPopCurrent_v2(&raw mut left) };
    }
}
