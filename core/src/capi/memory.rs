//! Memory that the ranks of a host share, memory of results, and GPUs.

use std::ffi::{c_char, c_int, c_void};
use std::path::Path;
use std::ptr;

use super::arguments::{number, text};
use super::status::{catch, safe_functions, status};
use crate::error::{Error, guard};
use crate::result_memory;
use crate::runtime;
use crate::transport::gpu;

safe_functions! {
    fn dl_comm_synchronize() -> c_int { status(runtime::synchronize) }
    fn dl_comm_gpu_count() -> c_int { catch(|| number(gpu::count()?)) }
    fn dl_comm_device_of_pointer(memory: *const c_void) -> c_int {
        guard(|| Ok(gpu::device_of_pointer(memory.addr()))).ok().flatten().unwrap_or(-1)
    }
}

/// `dl_comm_alloc` of `dl_comm.h`.
///
/// # Safety
/// `memory` is NULL or a valid out pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dl_comm_alloc(bytes: usize, memory: *mut *mut c_void) -> c_int {
    status(|| {
        // SAFETY: the caller's promise.
        let out = unsafe { memory.as_mut() }.ok_or_else(|| Error::Invalid("memory is NULL".into()))?;
        *out = ptr::null_mut();
        *out = runtime::alloc(bytes)?.cast();
        Ok(())
    })
}

/// `dl_comm_free` of `dl_comm.h`.
///
/// # Safety
/// The memory is not used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dl_comm_free(memory: *mut c_void) -> c_int {
    // SAFETY: the caller's promise.
    status(|| unsafe { runtime::free(memory.cast()) })
}

/// `dl_comm_result_alloc` of `dl_comm.h`.
#[unsafe(no_mangle)]
pub extern "C" fn dl_comm_result_alloc(bytes: usize) -> *mut c_void {
    guard(|| Ok(result_memory::alloc(bytes))).ok().flatten().map_or(ptr::null_mut(), |memory| memory.as_ptr().cast())
}

/// `dl_comm_result_free` of `dl_comm.h`.
///
/// # Safety
/// The memory is not used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dl_comm_result_free(memory: *mut c_void) {
    let _freed = guard(|| {
        // SAFETY: the caller's promise.
        unsafe { result_memory::free(memory.cast()) };
        Ok(())
    });
}

/// `dl_comm_device_alloc` of `dl_comm.h`.
///
/// # Safety
/// `memory` is valid for the address.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dl_comm_device_alloc(device: c_int, bytes: usize, memory: *mut *mut c_void) -> c_int {
    status(|| {
        let address = gpu::alloc(&*gpu::Context::for_device(device)?, bytes.max(1))?;
        let address =
            usize::try_from(address).map_err(|_| Error::Internal("an address is longer than a word".into()))?;
        // SAFETY: the caller's promise.
        unsafe { *memory = ptr::without_provenance_mut(address) };
        Ok(())
    })
}

/// `dl_comm_device_free` of `dl_comm.h`.
///
/// # Safety
/// The memory is from [`dl_comm_device_alloc`] for this GPU or NULL, and is not used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dl_comm_device_free(device: c_int, memory: *mut c_void) -> c_int {
    status(|| {
        if memory.is_null() {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        unsafe { gpu::free(&*gpu::Context::for_device(device)?, memory.addr() as gpu::Address) }
    })
}

/// `dl_comm_compile_kernels` of `dl_comm.h`.
///
/// # Safety
/// `folder` is a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dl_comm_compile_kernels(folder: *const c_char, capability: c_int) -> c_int {
    // SAFETY: the caller's promise.
    catch(|| number(gpu::compile_kernels_into(Path::new(unsafe { text(folder) }.as_ref()), capability)?))
}
