//! C API functions for tensors in GPU memory.

use std::ffi::{c_char, c_int, c_void};
use std::ptr;

use super::arguments::{self, CBuffer, CDevice, number, tensors, text};
use super::errors::{catch, status};
use super::functions::dl_comm_average_towers;
use crate::error::guard;
use crate::group::Timeout;
use crate::runtime;
use crate::transport::gpu;

/// `dl_comm_average_on` of `dl_comm.h`.
///
/// # Safety
/// `device` is NULL or valid; the rest as for [`dl_comm_average`](super::dl_comm_average).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dl_comm_average_on(
    device: *const CDevice,
    buffers: *const CBuffer,
    count: usize,
    team: c_int,
    name: *const c_char,
    timeout: f64,
) -> c_int {
    // SAFETY: the caller's promise.
    let Some(device) = (unsafe { arguments::device(device) }) else {
        // SAFETY: as above.
        return unsafe { dl_comm_average_towers(buffers, count, 1, team, name, timeout) };
    };
    status(|| {
        // SAFETY: as above.
        unsafe {
            let tensors = tensors(buffers, count)?;
            runtime::average_on(device, team, &text(name), Timeout::from_seconds(timeout), tensors)
        }
    })
}

/// `dl_comm_broadcast_buffers` of `dl_comm.h`.
///
/// # Safety
/// As for [`dl_comm_average`](super::dl_comm_average).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dl_comm_broadcast_buffers(
    buffers: *const CBuffer,
    count: usize,
    root: c_int,
    name: *const c_char,
    timeout: f64,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { dl_comm_broadcast_on(ptr::null(), buffers, count, root, name, timeout) }
}

/// `dl_comm_broadcast_on` of `dl_comm.h`.
///
/// # Safety
/// As for [`dl_comm_average_on`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dl_comm_broadcast_on(
    device: *const CDevice,
    buffers: *const CBuffer,
    count: usize,
    root: c_int,
    name: *const c_char,
    timeout: f64,
) -> c_int {
    status(|| {
        // SAFETY: the caller's promise.
        let (device, tensors, name) = unsafe { (arguments::device(device), tensors(buffers, count)?, text(name)) };
        let timeout = Timeout::from_seconds(timeout);
        runtime::wait(&name, |options| {
            runtime::broadcast(root, options.with_timeout(timeout).with_device(device), || Ok(tensors))
        })
    })
}

/// `dl_comm_gpu_count` of `dl_comm.h`.
#[unsafe(no_mangle)]
pub extern "C" fn dl_comm_gpu_count() -> c_int {
    catch(|| number(gpu::count()?))
}

/// `dl_comm_device_of_pointer` of `dl_comm.h`.
#[unsafe(no_mangle)]
pub extern "C" fn dl_comm_device_of_pointer(memory: *const c_void) -> c_int {
    guard(|| Ok(gpu::device_of_pointer(memory.addr()))).ok().flatten().unwrap_or(-1)
}
