//! The functions of `dl_comm.h`. An error becomes the return code, and the calling thread's last error.

use std::cell::RefCell;
use std::ffi::{CString, c_char, c_int, c_void};
use std::path::Path;
use std::ptr;

use super::arguments::{
    CBuffer, CDevice, Views, copy_text, device_of, number, tensors, text, to_device, towers, views,
};
use super::store::{CStore, to_store};
use crate::config::{RankSource, Rendezvous};
use crate::dump;
use crate::error::{Error, Result, guard};
use crate::group::Timeout;
use crate::log::{Sink, set_sink};
use crate::plugin::{Arguments, Cooldown};
use crate::process_info::process_info;
use crate::result_memory;
use crate::runtime;
use crate::runtime::collectives::{self, SmallCall};
use crate::signals;
use crate::stacks;
use crate::transport::gpu;

thread_local! {
    static LAST_ERROR: RefCell<CString> = RefCell::default();
}

/// Runs `body`; an error becomes the return code and the thread's last error.
fn catch(body: impl FnOnce() -> Result<c_int>) -> c_int {
    guard(body).unwrap_or_else(|error| {
        let text = error.to_string().replace('\0', " ");
        // Thread-local storage may be gone at exit; the code still returns.
        let _kept = LAST_ERROR.try_with(|last| *last.borrow_mut() = CString::new(text).unwrap_or_default());
        error.code()
    })
}

pub(super) fn status(body: impl FnOnce() -> Result<()>) -> c_int {
    catch(|| body().map(|()| 0))
}

/// Frees a handle; NULL is ignored.
///
/// # Safety
/// `handle` is NULL, or from a `Box` and not used again.
pub(super) unsafe fn free<T>(handle: *mut T) -> c_int {
    status(|| {
        if !handle.is_null() {
            // SAFETY: the caller's promise.
            drop(unsafe { Box::from_raw(handle) });
        }
        Ok(())
    })
}

/// Defines functions that any arguments are safe for.
macro_rules! safe_functions {
    ($(fn $name:ident($($argument:ident: $type:ty),*) $(-> $result:ty)? { $($body:tt)* })*) => {$(
        #[doc = concat!("`", stringify!($name), "` of `dl_comm.h`.")]
        #[unsafe(no_mangle)]
        pub extern "C" fn $name($($argument: $type),*) $(-> $result)? { $($body)* }
    )*};
}

safe_functions! {
    fn dl_comm_init_mpi() -> c_int { status(runtime::start) }
    fn dl_comm_init() -> c_int { status(runtime::init) }
    fn dl_comm_init_teams(nteams: c_int, nthreads: c_int) -> c_int {
        status(|| runtime::init_teams(nteams, (nthreads > 0).then_some(nthreads)))
    }
    fn dl_comm_finalize() -> c_int { status(runtime::finalize) }
    fn dl_comm_synchronize() -> c_int { status(runtime::synchronize) }
    fn dl_comm_is_initialized() -> c_int { c_int::from(runtime::is_initialized()) }
    fn dl_comm_is_helper() -> c_int { c_int::from(runtime::is_helper()) }

    fn dl_comm_get_rank() -> c_int { catch(|| number(runtime::rank_info()?.rank)) }
    fn dl_comm_localrank() -> c_int { catch(|| number(runtime::rank_info()?.local_rank)) }
    fn dl_comm_get_nranks() -> c_int { catch(|| number(runtime::rank_info()?.size)) }
    fn dl_comm_get_local_nranks() -> c_int { catch(|| number(runtime::rank_info()?.local_size)) }
    fn dl_comm_get_nhosts() -> c_int { catch(|| number(runtime::rank_info()?.hosts)) }
    fn dl_comm_get_nteams() -> c_int { catch(|| number(runtime::nteams()?)) }

    fn dl_create_team(teamID: c_int, nthreads_in_team: c_int, prec_level: c_int) -> c_int {
        status(|| runtime::create_team(teamID, nthreads_in_team, prec_level))
    }
    fn dl_comm_create_team(teamID: c_int, nthreads_in_team: c_int, prec_level: c_int) -> c_int {
        dl_create_team(teamID, nthreads_in_team, prec_level)
    }
    fn dl_comm_ensure_team(id: c_int, nthreads: c_int) -> c_int {
        status(|| runtime::ensure_team(id, (nthreads != 0).then_some(nthreads)))
    }
    fn dl_comm_config_team(team: c_int, trans_alg: c_int, ksteps: c_int, max_steps: c_int, verbosity: c_int,
                           perf_freq: c_int, cooldown: c_int) -> c_int {
        status(|| {
            runtime::config_team(team, |default| {
                let cooldown = Cooldown::from_code(cooldown, default)?;
                Ok(Arguments { trans_alg, ksteps, max_steps, verbosity, perf_freq, cooldown })
            })
        })
    }
    fn dl_comm_release_owner(team: c_int, owner: u64) -> c_int {
        status(|| {
            runtime::release(team, owner);
            Ok(())
        })
    }
    fn dl_comm_set_timeout(team: c_int, seconds: f64) -> c_int {
        status(|| match Timeout::from_seconds(seconds) {
            Timeout::Override(timeout) => runtime::set_timeout(team, timeout),
            Timeout::GroupDefault => {
                Err(Error::Invalid(format!("the timeout is {seconds}; it is in seconds, 0 for no limit")))
            }
        })
    }
    fn dl_comm_get_waited(team: c_int) -> f64 {
        let mut seconds = 0.0;
        let code = status(|| runtime::waited(team).map(|waited| seconds = waited));
        if code == 0 { seconds } else { f64::from(code) }
    }

    fn dl_comm_barrier() -> c_int { dl_comm_barrier_timeout(-1.0) }
    fn dl_comm_barrier_timeout(timeout: f64) -> c_int {
        status(|| runtime::barrier("", Timeout::from_seconds(timeout)))
    }

    fn dl_comm_gpu_count() -> c_int { catch(|| number(gpu::count()?)) }
    fn dl_comm_device_of_pointer(memory: *const c_void) -> c_int {
        guard(|| Ok(gpu::device_of_pointer(memory.addr()))).ok().flatten().unwrap_or(-1)
    }

    fn dl_comm_stacks_from(signal: c_int, fd: c_int) -> c_int {
        status(|| {
            stacks::come_from(signal, fd);
            Ok(())
        })
    }
    fn dl_comm_dump_on_signal(enabled: c_int) { dump::listen_for_signal(enabled != 0); }
    fn dl_comm_timeline_stop() -> c_int { status(runtime::stop_timeline) }
    fn dl_comm_set_signal_check(check: Option<signals::Check>) { signals::set_check(check); }
    fn dl_comm_set_log(log: Option<Sink>) { set_sink(log); }
    fn dl_comm_last_error() -> *const c_char {
        LAST_ERROR.try_with(|last| last.borrow().as_ptr()).unwrap_or(c"".as_ptr())
    }
    fn dl_comm_core_id() -> usize { runtime::core_id() }
    fn dl_comm_version() -> *const c_char { concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast() }
}

/// `dl_comm_init_store` of `dl_comm.h`.
///
/// # Safety
/// `store` is NULL or valid, as the header documents; its functions may be called until dl_comm_finalize has returned.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dl_comm_init_store(store: *const CStore, rank: c_int, nranks: c_int) -> c_int {
    status(|| {
        let (rank, size) = position(rank, nranks)?;
        // SAFETY: the caller's promise.
        runtime::start_by_store(rank, size, &unsafe { to_store(store) }?)
    })
}

/// `dl_comm_init_address` of `dl_comm.h`.
///
/// # Safety
/// `address` and `key` are NULL or C strings.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dl_comm_init_address(
    address: *const c_char,
    rank: c_int,
    nranks: c_int,
    key: *const c_char,
) -> c_int {
    status(|| {
        let (rank, size) = position(rank, nranks)?;
        // SAFETY: the caller's promise.
        let (address, key) = unsafe { (text(address), text(key)) };
        runtime::start_by_address(&Rendezvous::new(RankSource::Arguments, rank, size, &address, &key)?)
    })
}

fn position(rank: c_int, nranks: c_int) -> Result<(usize, usize)> {
    if !(0..nranks).contains(&rank) {
        return Err(Error::Invalid(format!("rank {rank} of {nranks} ranks; ranks go from 0 to nranks - 1")));
    }
    Ok((rank.unsigned_abs() as usize, nranks.unsigned_abs() as usize))
}

/// `dl_comm_abort` of `dl_comm.h`.
///
/// # Safety
/// `why` is NULL or a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dl_comm_abort(why: *const c_char) -> c_int {
    // SAFETY: the caller's promise.
    status(|| runtime::abort(&unsafe { text(why) }))
}

/// `dl_comm_gradients` of `dl_comm.h`.
///
/// # Safety
/// The arrays have the sizes documented in the header; the tensors are valid memory that is not used otherwise.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dl_comm_gradients(
    all_tensors: *mut *mut *mut c_void,
    lengths: *mut *mut c_int,
    dtypes: *mut *mut c_int,
    ntensors_on_tower: *mut c_int,
    ntowers: c_int,
    teamID: c_int,
) -> c_int {
    status(|| {
        // SAFETY: the caller's promise.
        let mut towers = unsafe { towers(all_tensors, lengths, dtypes, ntensors_on_tower, ntowers) }?;
        runtime::ensure_team(teamID, None)?;
        if let (Some(device), 1) = (device_of(&towers)?, towers.len()) {
            // SAFETY: as above.
            return unsafe { runtime::average_on(device, teamID, "", Timeout::GroupDefault, towers.remove(0)) };
        }
        // SAFETY: as above.
        unsafe { runtime::average_and_wait(teamID, "", Timeout::GroupDefault, towers) }
    })
}

/// `dl_comm_broadcast` of `dl_comm.h`.
///
/// # Safety
/// As for [`dl_comm_gradients`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dl_comm_broadcast(
    all_tensors: *mut *mut *mut c_void,
    lengths: *mut *mut c_int,
    dtypes: *mut *mut c_int,
    ntensors_on_tower: *mut c_int,
    ntowers: c_int,
    root: c_int,
) -> c_int {
    status(|| {
        // SAFETY: the caller's promise.
        let towers = unsafe { towers(all_tensors, lengths, dtypes, ntensors_on_tower, ntowers) }?;
        let device = device_of(&towers)?;
        // SAFETY: as above.
        unsafe { collectives::broadcast_towers(root, towers, device) }
    })
}

/// `dl_comm_stats` of `dl_comm.h`.
///
/// # Safety
/// `text` has room for `capacity` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dl_comm_stats(text: *mut c_char, capacity: usize) -> c_int {
    // SAFETY: the caller's promise.
    catch(|| unsafe { copy_text(&runtime::stats()?.to_string(), text, capacity) })
}

/// `dl_comm_dump` of `dl_comm.h`.
///
/// # Safety
/// `folder` is a C string or NULL; `path` has room for `capacity` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dl_comm_dump(folder: *const c_char, path: *mut c_char, capacity: usize) -> c_int {
    catch(|| {
        // SAFETY: the caller's promise.
        let folder = (!folder.is_null()).then(|| unsafe { text(folder) });
        let file = runtime::dump(folder.as_deref())?;
        // SAFETY: the caller's promise.
        unsafe { copy_text(&file.to_string_lossy(), path, capacity) }
    })
}

/// `dl_comm_timeline_start` of `dl_comm.h`.
///
/// # Safety
/// `folder` is a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dl_comm_timeline_start(folder: *const c_char) -> c_int {
    // SAFETY: the caller's promise.
    status(|| match unsafe { text(folder) } {
        folder if folder.is_empty() => Err(Error::Invalid("a timeline needs a folder".into())),
        folder => runtime::start_timeline(&folder),
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

/// `dl_comm_describe` of `dl_comm.h`.
///
/// # Safety
/// As for [`dl_comm_stats`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dl_comm_describe(text: *mut c_char, capacity: usize) -> c_int {
    // SAFETY: the caller's promise.
    catch(|| unsafe { copy_text(&process_info()?, text, capacity) })
}

/// `dl_comm_average` of `dl_comm.h`.
///
/// # Safety
/// `buffers` has `count` entries of valid memory that is not used otherwise; `name` is a C string or NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dl_comm_average(
    buffers: *const CBuffer,
    count: usize,
    team: c_int,
    name: *const c_char,
) -> c_int {
    status(|| {
        // SAFETY: the caller's promise.
        unsafe {
            let mut list = Views::new();
            views(buffers, count, &mut list)?;
            runtime::average_list(team, &text(name), Timeout::GroupDefault, &list)
        }
    })
}

/// `dl_comm_average_towers` of `dl_comm.h`.
///
/// # Safety
/// As for [`dl_comm_average`], with `ntowers * count` buffers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dl_comm_average_towers(
    buffers: *const CBuffer,
    count: usize,
    ntowers: usize,
    team: c_int,
    name: *const c_char,
    timeout: f64,
) -> c_int {
    status(|| {
        let all = count.checked_mul(ntowers).filter(|&all| all > 0);
        let all = all.ok_or_else(|| Error::Invalid("there are no towers, or no tensors in them".into()))?;
        let mut list = Views::new();
        // SAFETY: the caller's promise.
        unsafe { views(buffers, all, &mut list) }?;
        // SAFETY: as above.
        let name = unsafe { text(name) };
        let timeout = Timeout::from_seconds(timeout);
        if ntowers == 1 {
            // SAFETY: as above.
            return unsafe { runtime::average_list(team, &name, timeout, &list) };
        }
        let towers = list.chunks(count).map(|tower| tower.iter().map(|view| view.to_tensor()).collect()).collect();
        // SAFETY: as above.
        unsafe { runtime::average_and_wait(team, &name, timeout, towers) }
    })
}

/// `dl_comm_check_buffers_match` of `dl_comm.h`.
///
/// # Safety
/// As for [`dl_comm_average`], reading only.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dl_comm_check_buffers_match(buffers: *const CBuffer, count: usize, verbose: c_int) -> c_int {
    catch(|| {
        // SAFETY: the caller's promise.
        let tensors = unsafe { tensors(buffers, count) }?;
        // SAFETY: as above.
        unsafe { runtime::buffers_match(&tensors, verbose != 0) }.map(|equal| c_int::from(!equal))
    })
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

/// `dl_comm_average_on` of `dl_comm.h`.
///
/// # Safety
/// `device` is NULL or valid; the rest as for [`dl_comm_average`].
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
    let Some(device) = (unsafe { to_device(device) }) else {
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
/// As for [`dl_comm_average`].
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
        unsafe {
            let mut list = Views::new();
            views(buffers, count, &mut list)?;
            let call = SmallCall { name: &text(name), by_name: false, timeout: Timeout::from_seconds(timeout) };
            collectives::run_on_all(collectives::broadcast_from(root)?, &list, call, to_device(device))
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The length of a NULL list is ignored.
    #[test]
    fn null_lists_of_any_length_are_rejected() {
        let null_tensors = ptr::null_mut();
        // SAFETY: all pointers are NULL.
        unsafe {
            assert_eq!(dl_comm_average(ptr::null(), usize::MAX, 0, ptr::null()), -1);
            assert_eq!(dl_comm_average(ptr::null(), 1 << 40, 0, ptr::null()), -1);
            assert_eq!(
                dl_comm_gradients(null_tensors, ptr::null_mut(), ptr::null_mut(), ptr::null_mut(), c_int::MAX, 0),
                -1
            );
        }
    }
}
