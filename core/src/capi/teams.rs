//! Teams, and the calls that name them by number.

use std::ffi::{c_char, c_int, c_void};
use std::ptr;

use super::arguments::{CBuffer, CDevice, Views, device_of, number, tensors, text, to_device, towers, views};
use super::status::{catch, safe_functions, status};
use crate::error::Error;
use crate::group::Timeout;
use crate::plugin::{Arguments, Cooldown};
use crate::runtime;
use crate::runtime::collectives::{self, SmallCallOptions};

safe_functions! {
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
            let call = SmallCallOptions { name: &text(name), by_name: false, timeout: Timeout::from_seconds(timeout) };
            collectives::run_on_all(collectives::broadcast_from(root)?, &list, call, to_device(device))
        }
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
