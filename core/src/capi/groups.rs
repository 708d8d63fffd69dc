//! C API of groups.

use std::ffi::{c_char, c_int};
use std::ptr;
use std::sync::Arc;
use std::time::Duration;

use super::arguments::{array, number, reference, sized, store, text};
use super::status::{free, status};
use crate::error::{Error, Result};
use crate::group::{Group, Timeout};
use crate::runtime::collectives;
use crate::runtime::{self, GroupOptions};

/// `dl_comm_group_t` of `dl_comm.h`.
pub struct CGroup(pub(super) Arc<Group>);

/// `dl_comm_team_group` of `dl_comm.h`.
///
/// # Safety
/// `group` is NULL or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dl_comm_team_group(team: c_int, group: *mut *mut CGroup) -> c_int {
    // SAFETY: the caller's promise.
    status(|| unsafe {
        store(group, ptr::null_mut(), "group")?;
        store(group, Box::into_raw(Box::new(CGroup(runtime::group_of_team(team)?))), "group")
    })
}

/// `dl_comm_group_options_t`; see `dl_comm.h` for the contract.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct CGroupOptions {
    /// Bytes of the structure that the caller knows.
    pub size: usize,
    /// The number of threads, or 0.
    pub threads: c_int,
    /// The deadline in seconds; 0 for that of the environment, negative for none.
    pub timeout: f64,
    /// The algorithm between hosts, or null.
    pub algorithm: *const c_char,
    /// The path for GPUs, or null.
    pub gpu_path: *const c_char,
}

/// `dl_comm_group_create` of `dl_comm.h`.
///
/// # Safety
/// `ranks` is NULL or has `nranks` entries; `name`, `options` and `group` are NULL or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dl_comm_group_create(
    ranks: *const c_int,
    nranks: c_int,
    name: *const c_char,
    group: *mut *mut CGroup,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { dl_comm_group_create_with(ranks, nranks, name, ptr::null(), group) }
}

/// `dl_comm_group_create_with` of `dl_comm.h`.
///
/// # Safety
/// As for [`dl_comm_group_create`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dl_comm_group_create_with(
    ranks: *const c_int,
    nranks: c_int,
    name: *const c_char,
    options: *const CGroupOptions,
    group: *mut *mut CGroup,
) -> c_int {
    // SAFETY: the caller's promise.
    status(|| unsafe {
        store(group, ptr::null_mut(), "group")?;
        let listed = usize::try_from(nranks).map_err(|_| Error::Invalid(format!("nranks {nranks} is negative")))?;
        let ranks: Vec<usize> = if ranks.is_null() && listed == 0 {
            (0..runtime::topology()?.size()).collect()
        } else {
            let rank =
                |&rank: &c_int| usize::try_from(rank).map_err(|_| Error::Invalid(format!("rank {rank} is negative")));
            array(ranks, listed, "ranks")?.iter().map(rank).collect::<Result<_>>()?
        };
        let zeros = CGroupOptions { size: 0, threads: 0, timeout: 0.0, algorithm: ptr::null(), gpu_path: ptr::null() };
        let given = if options.is_null() { zeros } else { *sized(options, size_of::<usize>(), "group_options")? };
        let (algorithm, gpu_path) = (text(given.algorithm), text(given.gpu_path));
        let settings = GroupOptions {
            threads: (given.threads != 0).then(|| usize::try_from(given.threads).unwrap_or(0)),
            timeout: (given.timeout != 0.0)
                .then(|| (given.timeout > 0.0).then(|| Duration::from_secs_f64(given.timeout.min(1e9)))),
            algorithm: (!algorithm.is_empty()).then_some(&algorithm),
            gpu_path: (!gpu_path.is_empty()).then_some(&gpu_path),
        };
        let created = runtime::create_group(&text(name), &ranks, &settings)?;
        store(group, Box::into_raw(Box::new(CGroup(created))), "group")
    })
}

/// `dl_comm_group_free` of `dl_comm.h`.
///
/// # Safety
/// `group` is NULL, or a handle that is not used again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dl_comm_group_free(group: *mut CGroup) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { free(group) }
}

/// `dl_comm_group_abort` of `dl_comm.h`.
///
/// # Safety
/// `group` is NULL or valid; `why` is NULL or a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dl_comm_group_abort(group: *const CGroup, why: *const c_char) -> c_int {
    // SAFETY: the caller's promise.
    status(|| unsafe {
        collectives::abort(&reference(group, "group")?.0, &text(why));
        Ok(())
    })
}

/// `dl_comm_group_rank` of `dl_comm.h`.
///
/// # Safety
/// The pointers are NULL or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dl_comm_group_rank(group: *const CGroup, rank: *mut c_int) -> c_int {
    // SAFETY: the caller's promise.
    status(|| unsafe { store(rank, number(reference(group, "group")?.0.rank())?, "rank") })
}

/// `dl_comm_group_size` of `dl_comm.h`.
///
/// # Safety
/// The pointers are NULL or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dl_comm_group_size(group: *const CGroup, size: *mut c_int) -> c_int {
    // SAFETY: the caller's promise.
    status(|| unsafe { store(size, number(reference(group, "group")?.0.call_config().ranks)?, "size") })
}

/// `dl_comm_group_number` of `dl_comm.h`.
///
/// # Safety
/// The pointers are NULL or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dl_comm_group_number(group: *const CGroup, number: *mut u64) -> c_int {
    // SAFETY: the caller's promise.
    status(|| unsafe { store(number, reference(group, "group")?.0.number(), "number") })
}

/// `dl_comm_join` of `dl_comm.h`.
///
/// # Safety
/// The pointers are NULL or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dl_comm_join(group: *const CGroup, timeout: f64, last: *mut c_int) -> c_int {
    // The time depends on the other ranks' data, so there is no deadline of the group.
    let timeout = Timeout::Override((timeout > 0.0).then(|| Duration::from_secs_f64(timeout.min(1e9))));
    // SAFETY: the caller's promise.
    status(|| unsafe {
        let rank = number(collectives::join(group.as_ref().map(|group| &group.0), timeout)?)?;
        if last.is_null() { Ok(()) } else { store(last, rank, "last") }
    })
}
