//! The driver library: found, started once per process, its codes made errors.
//!
//! cudarc panics where a library or one of its functions is missing, so both are looked for before the first call.

use std::ffi::CStr;
use std::sync::OnceLock;

use cudarc::driver::sys;

use crate::error::{Error, Result, guard};

/// An address in device memory.
pub type Address = u64;

/// The functions that the core calls. One that is missing means a driver older than any that PyTorch or TensorFlow still take.
const NEEDED: [&str; 40] = [
    "cuInit",
    "cuGetErrorName",
    "cuGetErrorString",
    "cuDeviceGetCount",
    "cuDeviceGet",
    "cuDeviceGetName",
    "cuDeviceGetUuid_v2",
    "cuDeviceGetAttribute",
    "cuDevicePrimaryCtxRetain",
    "cuCtxPushCurrent_v2",
    "cuCtxPopCurrent_v2",
    "cuMemAlloc_v2",
    "cuMemFree_v2",
    "cuMemGetAddressRange_v2",
    "cuPointerGetAttribute",
    "cuIpcGetMemHandle",
    "cuIpcOpenMemHandle_v2",
    "cuIpcCloseMemHandle",
    "cuMemHostRegister_v2",
    "cuMemHostUnregister",
    "cuMemHostGetDevicePointer_v2",
    "cuMemHostAlloc",
    "cuMemFreeHost",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpyDtoDAsync_v2",
    "cuStreamCreateWithPriority",
    "cuStreamDestroy_v2",
    "cuStreamWaitEvent",
    "cuStreamIsCapturing",
    "cuStreamWriteValue32_v2",
    "cuStreamWaitValue32_v2",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventRecord",
    "cuEventQuery",
    "cuModuleLoadData",
    "cuModuleGetFunction",
    "cuLaunchKernel",
    "cuThreadExchangeStreamCaptureMode",
];

/// Loads and starts the driver; only the first call does anything.
///
/// # Errors
/// [`Error::System`], which says what is missing.
pub fn start() -> Result<()> {
    static STARTED: OnceLock<Result<()>> = OnceLock::new();
    STARTED.get_or_init(|| guard(load)).clone()
}

fn load() -> Result<()> {
    // SAFETY: looks for the library, nothing else.
    if !unsafe { sys::is_culib_present() } {
        return Err(Error::System(
            "the tensors are on a GPU, but libcuda.so.1, which comes with the NVIDIA driver, is not found".into(),
        ));
    }
    for name in NEEDED {
        // SAFETY: the symbol is looked up, not called.
        let found = unsafe { sys::culib().get::<unsafe extern "C" fn()>(name.as_bytes()) };
        found.map_err(|_| Error::System(format!("the NVIDIA driver is too old for dl_comm: it has no {name}")))?;
    }
    // SAFETY: the library is there, and the first call.
    check("starting the NVIDIA driver", unsafe { sys::cuInit(0) })
}

/// The code of `what` as a result.
///
/// # Errors
/// [`Error::System`] with the driver's words.
pub fn check(what: &str, code: sys::CUresult) -> Result<()> {
    if code == sys::CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    Err(Error::System(format!("CUDA: {what}: {}", error_text(code))))
}

fn error_text(code: sys::CUresult) -> String {
    let ask = |function: unsafe fn(sys::CUresult, *mut *const std::ffi::c_char) -> sys::CUresult| {
        let mut text = std::ptr::null();
        // SAFETY: the place is valid; the driver's texts are constants.
        let found = unsafe { function(code, &raw mut text) } == sys::CUresult::CUDA_SUCCESS && !text.is_null();
        // SAFETY: as above.
        found.then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
    };
    match (ask(sys::cuGetErrorName), ask(sys::cuGetErrorString)) {
        (Some(name), Some(text)) => format!("{name} ({text})"),
        _ => format!("error {}", code as i32),
    }
}

/// The number of GPUs that this process sees.
///
/// # Errors
/// As for [`start`].
pub fn count() -> Result<usize> {
    start()?;
    let mut count = 0;
    // SAFETY: the driver has started; the place is valid.
    check("counting the GPUs", unsafe { sys::cuDeviceGetCount(&raw mut count) })?;
    Ok(usize::try_from(count).unwrap_or(0))
}

/// What the driver tells of the memory at `address`, or the code with which it does not: that of the host has none.
///
/// # Safety
/// The attribute is a number of this type.
pub unsafe fn attribute_of<T: Default>(
    address: Address,
    attribute: sys::CUpointer_attribute,
) -> std::result::Result<T, sys::CUresult> {
    let mut value = T::default();
    // SAFETY: the place holds what the attribute is, as the caller promises.
    let code = unsafe { sys::cuPointerGetAttribute((&raw mut value).cast(), attribute, address) };
    if code == sys::CUresult::CUDA_SUCCESS { Ok(value) } else { Err(code) }
}
