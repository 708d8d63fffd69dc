//! Primary contexts of GPUs, which all frameworks of a process share, and the properties of a device.
//!
//! A retained context is kept for the life of the process, as in the frameworks: it must outlive all of its streams.
//! Thread rule: any thread may use a [`Context`]; a [`ContextGuard`] stays on its thread.

use std::collections::BTreeMap;
use std::marker::PhantomData;
use std::ptr;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

use cudarc::driver::result::{device, primary_ctx};
use cudarc::driver::sys::{self, CUdevice_attribute as Attribute};

use super::driver::{Handle, check, start};
use super::ipc::{IpcExports, IpcImports};
use super::kernels::Kernels;
use super::launch_order::LaunchOrder;
use crate::error::{Error, Result};
use crate::lock::lock;

/// What is to be said to ranks that share a GPU without MPS.
pub const TAKE_TURNS: &str = "ranks share a GPU, and their kernels take turns in time slices: start MPS, NVIDIA's \
                              Multi-Process Service (nvidia-cuda-mps-control -d)";

/// Whether the work of all streams of this process runs in the order in which the GPU gets it: CUDA's own variable.
pub fn has_one_queue() -> bool {
    std::env::var("CUDA_DEVICE_MAX_CONNECTIONS").is_ok_and(|value| value.trim() == "1")
}

/// The primary context of a GPU, with its kernels and IPC tables.
pub struct Context {
    /// The number of the GPU in this process.
    pub ordinal: i32,
    /// The product's name.
    pub name: String,
    /// The UUID in hexadecimal; the same in all processes that use this GPU.
    pub uuid: String,
    handle: Handle<sys::CUctx_st>,
    /// The compute capability, major and minor.
    capability: (i32, i32),
    multiprocessors: u32,
    kernels: OnceLock<Result<Kernels>>,
    exports: Mutex<IpcExports>,
    imports: Mutex<IpcImports>,
    /// The calls that have not started on this GPU.
    pub launches: Arc<LaunchOrder>,
    /// Free events, for reuse.
    pub(super) events: Mutex<Vec<Handle<sys::CUevent_st>>>,
}

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
        let mut known = lock(&CONTEXTS);
        if let Some(context) = known.get(&ordinal) {
            return Ok(Arc::clone(context));
        }
        let context = Arc::new(Context::retain(ordinal)?);
        known.insert(ordinal, Arc::clone(&context));
        Ok(context)
    }

    fn retain(ordinal: i32) -> Result<Context> {
        start()?;
        let device = check(&format!("asking for GPU {ordinal}"), device::get(ordinal))?;
        // SAFETY: here and below, the device is from the driver.
        let retained = check("retaining the context of a GPU", unsafe { primary_ctx::retain(device) });
        let handle = retained.map_err(|error| explain(error, device))?;
        // SAFETY: as above.
        let attribute = |name| check("asking about a GPU", unsafe { device::get_attribute(device, name) });
        let uuid = check("asking for the UUID of a GPU", device::get_uuid(device))?;
        Ok(Context {
            ordinal,
            name: check("asking for the name of a GPU", device::get_name(device))?,
            handle: Handle(handle),
            uuid: uuid.bytes.iter().map(|byte| format!("{byte:02x}")).collect(),
            capability: (
                attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
                attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
            ),
            multiprocessors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?.unsigned_abs(),
            kernels: OnceLock::new(),
            exports: Mutex::default(),
            imports: Mutex::default(),
            launches: Arc::default(),
            events: Mutex::default(),
        })
    }

    /// Makes the context current on this thread.
    pub fn push(&self) -> Result<ContextGuard<'_>> {
        // SAFETY: the context is retained.
        check("entering the context of a GPU", unsafe { sys::cuCtxPushCurrent_v2(self.handle.0) }.result())?;
        let mut capture = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the out pointer is valid; it gets the thread's previous mode.
        let code = unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut capture) };
        let guard = ContextGuard { capture, _context: PhantomData };
        check("leaving captures to others", code.result()).map(|()| guard)
    }

    /// Allocations of this GPU that other processes may open.
    pub fn exports(&self) -> MutexGuard<'_, IpcExports> {
        lock(&self.exports)
    }

    /// Allocations of other processes, opened on this GPU.
    pub(super) fn imports(&self) -> MutexGuard<'_, IpcImports> {
        lock(&self.imports)
    }

    /// The kernels; the first call compiles them.
    ///
    /// # Errors
    /// [`Error::System`] without NVRTC, or if compiling or loading fails.
    pub fn kernels(&self) -> Result<&Kernels> {
        let compiled = self.kernels.get_or_init(|| {
            let _guard = self.push()?;
            Kernels::compile(self.capability, self.multiprocessors)
        });
        compiled.as_ref().map_err(Error::clone)
    }
}

/// Says why a process gets no context of a GPU that only one process may use.
fn explain(error: Error, device: sys::CUdevice) -> Error {
    // SAFETY: the device is from the driver.
    let mode = unsafe { device::get_attribute(device, Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_MODE) };
    if mode != Ok(sys::CUcomputemode::CU_COMPUTEMODE_EXCLUSIVE_PROCESS as i32) {
        return error;
    }
    Error::System(format!(
        "{}: the GPU is in the mode EXCLUSIVE_PROCESS, for one process; give each rank a GPU of its own, start MPS \
         (nvidia-cuda-mps-control -d), or set the mode DEFAULT (nvidia-smi -c 0)",
        error.detail()
    ))
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
