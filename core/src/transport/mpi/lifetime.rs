//! The MPI library of this process: its description, initialization and finalization, once per process. MPI stays
//! initialized until the process exits, so that a job can start again: after its end, or after a start that failed.
//!
//! Thread rule: any thread. MPI requires initialization and finalization on one thread; the program ensures that.

use std::sync::{Arc, Mutex, Once};
use std::time::Duration;

use mpi::Threading;
use mpi::environment::{
    Universe, initialize_with_threading, is_finalized, is_initialized, library_version, threading_support, version,
};
use mpi::ffi;
use serde::Serialize;

use super::comm::Comm;
use super::startup::{Others, StartupWatch};
use crate::config::Config;
use crate::error::{Error, Result};
use crate::fork;
use crate::lock::lock;
use crate::log::log_line;
use crate::transport::wait_context::with_limits;

/// Time limit of MPI_Finalize once all ranks call it.
const FINALIZE_TIMEOUT: Duration = Duration::from_secs(30);

/// What MPICH 5 takes of /dev/shm for each rank of a host (1.1 MiB), and UCX 1.19 (4.2 MiB), with some room.
const SHM_BYTES: u64 = 5 << 18;
const UCX_SHM_BYTES: u64 = 21 << 18;

/// MPI as dl_comm has initialized it. Dropping it finalizes MPI.
struct OwnedMpi {
    _universe: Universe,
    /// Whether the last job has ended, or its start has failed, in step with the other ranks.
    has_ended: bool,
    /// How long this rank waits for the exit of the others, if the launcher does not end it when another is lost.
    exit_limit: Option<Duration>,
}

// SAFETY: see the thread rule.
unsafe impl Send for OwnedMpi {}

static OWNED: Mutex<Option<OwnedMpi>> = Mutex::new(None);

/// Initializes MPI, or adopts an initialized one, under `watch`. Returns the granted thread level.
///
/// # Errors
/// [`Error::State`] when MPI is already finalized.
pub fn start(config: &Config, watch: &StartupWatch) -> Result<Threading> {
    if is_finalized() {
        return Err(Error::State("MPI is finalized already and cannot be started again in this process".into()));
    }
    if !is_initialized() {
        check_shared_memory(|name| std::env::var(name).ok(), shm_bytes)?;
    }
    let mut owned_mpi = lock(&OWNED);
    // MPI_Init waits for all ranks without a deadline.
    watch.begin();
    match initialize_with_threading(Threading::Multiple) {
        Some((universe, granted)) => {
            let exit_limit = config.timeout.filter(|_| std::env::var_os("SLURM_STEP_ID").is_some());
            *owned_mpi = Some(OwnedMpi { _universe: universe, has_ended: false, exit_limit });
            static ONCE: Once = Once::new();
            ONCE.call_once(|| {
                // SAFETY: the handler has the calling convention of C. Without memory for it, MPI is not finalized.
                let _registered = unsafe { libc::atexit(end_at_exit) };
            });
            Ok(granted)
        }
        None => {
            owned_mpi.iter_mut().for_each(|mpi| mpi.has_ended = false);
            Ok(threading_support())
        }
    }
}

/// The bytes of /dev/shm, if they are limited.
fn shm_bytes() -> Option<u64> {
    let system = rustix::fs::statvfs("/dev/shm").ok().filter(|system| system.f_blocks > 0)?;
    Some(system.f_blocks.saturating_mul(system.f_frsize))
}

/// MPI crashes if /dev/shm is too small for its segments: MPICH with a bus error, UCX with address 0. The ranks of a host
/// see the same size, so all of them fail here.
fn check_shared_memory(lookup: impl Fn(&str) -> Option<String>, size: impl Fn() -> Option<u64>) -> Result<()> {
    let Some(ranks) = lookup("MPI_LOCALNRANKS").and_then(|ranks| ranks.parse::<u64>().ok()) else { return Ok(()) };
    let without_posix = lookup("UCX_TLS").is_some_and(|list| list.starts_with('^') && list.contains("posix"));
    let needed = ranks * if without_posix { SHM_BYTES } else { SHM_BYTES + UCX_SHM_BYTES };
    match size() {
        Some(size) if size < needed => Err(Error::System(format!(
            "MPI needs {} MiB in /dev/shm for the {ranks} ranks of this host, and it has {} MiB: make it larger \
             (containers: --shm-size)",
            needed.div_ceil(1 << 20),
            size >> 20
        ))),
        _ => Ok(()),
    }
}

/// The watch for [`start`].
///
/// # Errors
/// [`Error::System`]
pub fn prepare(config: &Config, others: Others) -> Result<StartupWatch> {
    StartupWatch::prepare("MPI_Init", config.stall_warn, config.timeout, others)
}

/// Whether MPI has been initialized, by any component of the process.
pub fn is_started() -> bool {
    is_initialized()
}

/// Whether dl_comm initialized MPI and must finalize it.
pub fn is_owned() -> bool {
    lock(&OWNED).is_some()
}

/// Never finalizes MPI: other ranks may never call MPI_Finalize.
pub fn leak() {
    std::mem::forget(lock(&OWNED).take());
}

/// The job has ended. If dl_comm initialized MPI and did not leak it, the process finalizes it when it exits, unless
/// another job starts.
pub fn end() {
    lock(&OWNED).iter_mut().for_each(|mpi| mpi.has_ended = true);
}

/// Finalizes MPI. A launcher treats a rank that exits without it as a failed job, and ends the others.
extern "C" fn end_at_exit() {
    let Some(mpi) = lock(&OWNED).take() else { return };
    let may_end = mpi.has_ended && !fork::is_child() && !is_finalized();
    if !may_end || !wait_for_exit(mpi.exit_limit) {
        std::mem::forget(mpi);
        return;
    }
    // After a failure, MPI_Finalize may wait for messages that never arrive.
    // Ranks may end before this one here.
    let others = Others { lost: Arc::new(|| None), ..Others::default() };
    let watch = StartupWatch::prepare("MPI_Finalize", None, Some(FINALIZE_TIMEOUT), others);
    watch.iter().for_each(StartupWatch::begin);
    drop(mpi);
    if let Err(error) = watch {
        log_line(&error.to_string());
    }
}

/// Waits until all ranks exit, which may take as long as what the program does after the job: without a processor, unlike
/// MPI_Finalize. Returns whether they do.
fn wait_for_exit(limit: Option<Duration>) -> bool {
    let lost = Others::default().lost;
    let reason = || lost().map(Error::PeerLost);
    let all = Comm::world();
    let wait = || with_limits("the exit of the process", limit, None, &reason, |ctx| all.barrier(ctx));
    let waited = all.return_errors().and_then(|()| wait());
    waited.inspect_err(|error| log_line(&format!("MPI_Finalize is left out: {error}"))).is_ok()
}

/// The MPI library of this process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct LibraryInfo {
    /// The text of `MPI_Get_library_version`; it starts with the vendor.
    pub library_version: String,
    /// The version of the MPI standard, such as "4.1".
    pub standard: String,
    /// Whether MPI has been initialized, by any component of the process.
    pub initialized: bool,
    /// Whether MPI has been finalized.
    pub finalized: bool,
    /// The granted thread level by its standard name; known while MPI is running.
    pub thread_level: Option<&'static str>,
    /// The address of a library function: identifies the loaded library file.
    #[serde(skip)]
    pub symbol_address: usize,
}

/// Queries the library, for `dl_comm_describe`. MPI allows that before initialization and after finalization.
pub fn library_info() -> LibraryInfo {
    let (major, minor) = version();
    let (initialized, finalized) = (is_initialized(), is_finalized());
    let level = || match threading_support() {
        Threading::Single => "MPI_THREAD_SINGLE",
        Threading::Funneled => "MPI_THREAD_FUNNELED",
        Threading::Serialized => "MPI_THREAD_SERIALIZED",
        Threading::Multiple => "MPI_THREAD_MULTIPLE",
    };
    LibraryInfo {
        // No known library returns other text than UTF-8; report the other fields even then.
        library_version: library_version()
            .map_or_else(|error| format!("not UTF-8: {error}"), |text| text.trim().into()),
        standard: format!("{major}.{minor}"),
        initialized,
        finalized,
        thread_level: (initialized && !finalized).then(level),
        symbol_address: ffi::MPI_Get_library_version as *const () as usize,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn too_little_shared_memory_for_mpi_is_an_error() {
        let check = |ranks: &str, tls: &str, size: Option<u64>| {
            let variable = |name: &str| Some(if name == "UCX_TLS" { tls } else { ranks }.to_owned());
            check_shared_memory(variable, || size)
        };
        let error = check("4", "all", Some(24 << 20)).unwrap_err().to_string();
        assert!(error.contains("26 MiB") && error.contains("4 ranks") && error.contains("24 MiB"), "{error}");
        for accepted in
            [("4", "all", Some(26 << 20)), ("4", "^posix", Some(24 << 20)), ("4", "", None), ("", "", Some(1))]
        {
            assert!(check(accepted.0, accepted.1, accepted.2).is_ok(), "{accepted:?}");
        }
    }
}
