//! Start, end and identity of a job.

use std::ffi::{c_char, c_int};

use super::arguments::{number, text};
use super::status::{catch, safe_functions, status};
use super::store::{CStore, to_store};
use crate::config::{RankSource, Rendezvous};
use crate::error::{Error, Result};
use crate::runtime;

safe_functions! {
    fn dl_comm_init_mpi() -> c_int { status(runtime::start) }
    fn dl_comm_init() -> c_int { status(runtime::init) }
    fn dl_comm_init_teams(nteams: c_int, nthreads: c_int) -> c_int {
        status(|| runtime::init_teams(nteams, (nthreads > 0).then_some(nthreads)))
    }
    fn dl_comm_finalize() -> c_int { status(runtime::finalize) }
    fn dl_comm_is_initialized() -> c_int { c_int::from(runtime::is_initialized()) }
    fn dl_comm_is_helper() -> c_int { c_int::from(runtime::is_helper()) }
    fn dl_comm_get_rank() -> c_int { catch(|| number(runtime::rank_info()?.rank)) }
    fn dl_comm_localrank() -> c_int { catch(|| number(runtime::rank_info()?.local_rank)) }
    fn dl_comm_get_nranks() -> c_int { catch(|| number(runtime::rank_info()?.size)) }
    fn dl_comm_get_local_nranks() -> c_int { catch(|| number(runtime::rank_info()?.local_size)) }
    fn dl_comm_get_nhosts() -> c_int { catch(|| number(runtime::rank_info()?.hosts)) }
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
