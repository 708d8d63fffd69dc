//! The CUDA driver library: loading, error codes, pointer attributes.
//!
//! cudarc panics if the library or a function is missing, so [`start`] checks both before the first call.

use std::ffi::CStr;
use std::sync::OnceLock;

use cudarc::driver::sys;

use crate::error::{Error, Result, guard};

/// An address in device memory.
pub type Address = u64;

/// The driver functions that the core calls. Every driver that PyTorch and TensorFlow support has them.
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

/// Loads and starts the driver. Later calls return the first result.
///
/// # Errors
/// [`Error::System`]; it names the missing part.
pub fn start() -> Result<()> {
    static STARTED: OnceLock<Result<()>> = OnceLock::new();
    STARTED.get_or_init(|| guard(load)).clone()
}

fn load() -> Result<()> {
    // SAFETY: only looks for the library.
    if !unsafe { sys::is_culib_present() } {
        return Err(Error::System(
            "the tensors are on a GPU, but libcuda.so.1, which comes with the NVIDIA driver, is not found".into(),
        ));
    }
    for name in NEEDED {
        // SAFETY: looks up the symbol without calling it.
        let found = unsafe { sys::culib().get::<unsafe extern "C" fn()>(name.as_bytes()) };
        found.map_err(|_| Error::System(format!("the NVIDIA driver is too old for dl_comm: it has no {name}")))?;
    }
    // SAFETY: the library is loaded; this is the first call.
    check("starting the NVIDIA driver", unsafe { sys::cuInit(0) })
}

/// Converts the driver's `code` for the action `what`.
///
/// # Errors
/// [`Error::System`] with the driver's text.
pub fn check(what: &str, code: sys::CUresult) -> Result<()> {
    if code == sys::CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    Err(Error::System(format!("CUDA: {what}: {}", error_text(code))))
}

fn error_text(code: sys::CUresult) -> String {
    let ask = |function: unsafe fn(sys::CUresult, *mut *const std::ffi::c_char) -> sys::CUresult| {
        let mut text = std::ptr::null();
        // SAFETY: the out pointer is valid; the driver's texts are constants.
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
/// [`Error::System`]; it names the missing part.
pub fn count() -> Result<usize> {
    start()?;
    let mut count = 0;
    // SAFETY: the driver has started; the out pointer is valid.
    check("counting the GPUs", unsafe { sys::cuDeviceGetCount(&raw mut count) })?;
    Ok(usize::try_from(count).unwrap_or(0))
}

/// An attribute of the memory at `address`. Ordinary host memory has none: the result is then the driver's code.
///
/// # Safety
/// `T` is the type of the attribute.
pub unsafe fn attribute_of<T: Default>(
    address: Address,
    attribute: sys::CUpointer_attribute,
) -> std::result::Result<T, sys::CUresult> {
    let mut value = T::default();
    // SAFETY: `value` has the attribute's type, as the caller promises.
    let code = unsafe { sys::cuPointerGetAttribute((&raw mut value).cast(), attribute, address) };
    if code == sys::CUresult::CUDA_SUCCESS { Ok(value) } else { Err(code) }
}
