//! The CUDA driver library: loading, error codes, pointer attributes.
//!
//! cudarc panics if the library or a function is missing, so [`start`] checks both before the first call.

use std::ffi::{CStr, OsStr, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::OnceLock;

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys;

use crate::error::{Error, Result, guard};

/// An address in device memory.
pub type Address = u64;

/// A pointer that any thread may use: a handle of the driver, or memory that the user of the pointer guards.
#[derive(Debug, Clone, Copy)]
pub struct Handle<T>(pub *mut T);

// SAFETY: see above; using the pointer is unsafe.
unsafe impl<T> Send for Handle<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Handle<T> {}

/// The driver functions that the core calls. Every driver that PyTorch and TensorFlow support has them.
const NEEDED: &str = "cuInit cuGetErrorName cuGetErrorString
    cuDeviceGetCount cuDeviceGet cuDeviceGetName cuDeviceGetUuid_v2 cuDeviceGetAttribute
    cuDevicePrimaryCtxRetain cuCtxPushCurrent_v2 cuCtxPopCurrent_v2 cuThreadExchangeStreamCaptureMode
    cuMemAlloc_v2 cuMemFree_v2 cuMemGetAddressRange_v2 cuPointerGetAttribute
    cuIpcGetMemHandle cuIpcOpenMemHandle_v2 cuIpcCloseMemHandle
    cuMemHostRegister_v2 cuMemHostUnregister cuMemHostGetDevicePointer_v2 cuMemHostAlloc cuMemFreeHost
    cuMemcpyDtoHAsync_v2 cuMemcpyHtoDAsync_v2 cuMemcpyDtoDAsync_v2
    cuStreamCreateWithPriority cuStreamDestroy_v2 cuStreamWaitEvent cuStreamIsCapturing
    cuStreamWriteValue32_v2 cuStreamWaitValue32_v2
    cuEventCreate cuEventDestroy_v2 cuEventRecord cuEventQuery
    cuModuleLoadData cuModuleGetFunction cuLaunchKernel";

/// Loads and starts the driver. Later calls return the first result.
///
/// # Errors
/// [`Error::System`]; it names the missing part.
pub fn start() -> Result<()> {
    static STARTED: OnceLock<Result<()>> = OnceLock::new();
    STARTED.get_or_init(|| guard(load)).clone()
}

fn load() -> Result<()> {
    check_name()?;
    // SAFETY: only looks for the library.
    if !unsafe { sys::is_culib_present() } {
        return Err(Error::System(
            "the tensors are on a GPU, but libcuda.so.1, which comes with the NVIDIA driver, is not found".into(),
        ));
    }
    for name in NEEDED.split_whitespace() {
        // SAFETY: looks up the symbol without calling it.
        let found = unsafe { sys::culib().get::<unsafe extern "C" fn()>(name.as_bytes()) };
        found.map_err(|_| Error::System(format!("the NVIDIA driver is too old for dl_comm: it has no {name}")))?;
    }
    check("starting the NVIDIA driver", result::init())
}

/// Checks that `libcuda.so`, which cudarc asks for first, is the driver that all others ask for. A second one would know
/// none of their memory.
fn check_name() -> Result<()> {
    // First, as another library may call itself by its name.
    let driver = File::open(c"libcuda.so.1");
    match (File::open(c"libcuda.so"), driver) {
        (Some(other), Some(driver)) if other.address != driver.address => Err(Error::System(format!(
            "{} is another library than the driver of this process, {}, but is found first, as libcuda.so: remove its folder, \
             such as 'stubs' of CUDA, from LD_LIBRARY_PATH",
            other.path.display(),
            driver.path.display()
        ))),
        _ => Ok(()),
    }
}

/// A loaded library.
pub(super) struct File {
    /// Different for each file.
    address: usize,
    pub path: PathBuf,
}

impl File {
    /// Loads the library with this name, for good, as far as it is not loaded.
    fn open(name: &CStr) -> Option<File> {
        // SAFETY: loading the driver has no effect before it is started.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_LAZY) };
        if handle.is_null() {
            return None;
        }
        // SAFETY: the handle is open; without the function, the symbol is null.
        File::with(unsafe { libc::dlsym(handle, c"cuInit".as_ptr()) })
    }

    /// The library that has the code at this address.
    pub(super) fn with(code: *const c_void) -> Option<File> {
        // SAFETY: all fields may be zero.
        let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
        // SAFETY: any address may be asked for, and the out pointer is valid.
        let found = unsafe { libc::dladdr(code, &raw mut info) };
        if found == 0 || info.dli_fname.is_null() {
            return None;
        }
        // SAFETY: a path that lives as long as the library.
        let path = unsafe { CStr::from_ptr(info.dli_fname) };
        Some(File { address: info.dli_fbase.addr(), path: OsStr::from_bytes(path.to_bytes()).into() })
    }
}

/// Converts the driver's result of the action `what`; the error has the driver's text.
pub fn check<T>(what: &str, result: std::result::Result<T, DriverError>) -> Result<T> {
    result.map_err(|error| {
        let text = match (error.error_name(), error.error_string()) {
            (Ok(name), Ok(text)) => format!("{} ({})", name.to_string_lossy(), text.to_string_lossy()),
            _ => format!("error {}", error.0 as i32),
        };
        Error::System(format!("CUDA: {what}: {text}"))
    })
}

/// The number of GPUs that this process sees.
///
/// # Errors
/// [`Error::System`]; it names the missing part.
pub fn count() -> Result<usize> {
    start()?;
    Ok(usize::try_from(check("counting the GPUs", result::device::get_count())?).unwrap_or(0))
}

/// An attribute of the memory at `address`. Ordinary host memory has none: the result is then the driver's error.
///
/// # Safety
/// `T` is the type of the attribute.
pub unsafe fn attribute_of<T: Default>(
    address: Address,
    attribute: sys::CUpointer_attribute,
) -> std::result::Result<T, DriverError> {
    let mut value = T::default();
    // SAFETY: `value` has the attribute's type, as the caller promises.
    unsafe { sys::cuPointerGetAttribute((&raw mut value).cast(), attribute, address) }.result().map(|()| value)
}
