//! The MPI library of this process: its description, initialization and finalization, once per process. MPI stays
//! initialized when the start of a world fails, so that the start can be retried.
//!
//! Thread rule: any thread. MPI requires initialization and finalization on one thread; the program ensures that.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use mpi::Threading;
use mpi::environment::{
    Universe, initialize_with_threading, is_finalized, is_initialized, library_version, threading_support, version,
};
use mpi::ffi;
use serde::Serialize;

use super::startup::{Others, StartupWatch};
use crate::config::Config;
use crate::error::{Error, Result};
use crate::lock::lock;
use crate::log::log_line;

/// Time limit of MPI_Finalize once all ranks call it.
const FINALIZE_TIMEOUT: Duration = Duration::from_secs(30);

/// Finalizes MPI on drop.
struct OwnedMpi(#[expect(dead_code, reason = "for its drop")] Universe);

// SAFETY: see the thread rule.
unsafe impl Send for OwnedMpi {}

static OWNED: Mutex<Option<OwnedMpi>> = Mutex::new(None);

/// Initializes MPI, or adopts an initialized one, under `watch`. Returns the granted thread level.
///
/// # Errors
/// [`Error::State`] when MPI is already finalized.
pub fn start(watch: &StartupWatch) -> Result<Threading> {
    if is_finalized() {
        return Err(Error::State("MPI is finalized already and cannot be started again in this process".into()));
    }
    let mut owned_mpi = lock(&OWNED);
    // MPI_Init waits for all ranks without a deadline.
    watch.begin();
    match initialize_with_threading(Threading::Multiple) {
        Some((universe, granted)) => {
            *owned_mpi = Some(OwnedMpi(universe));
            Ok(granted)
        }
        None => Ok(threading_support()),
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

/// Finalizes MPI if dl_comm initialized it and did not leak it. All ranks must call it.
pub fn end() {
    let Some(owned_mpi) = lock(&OWNED).take() else { return };
    // After a failure, MPI_Finalize may wait for messages that never arrive.
    // Ranks may end before this one here.
    let others = Others { lost: Arc::new(|| None), ..Others::default() };
    let watch = StartupWatch::prepare("MPI_Finalize", None, Some(FINALIZE_TIMEOUT), others);
    watch.iter().for_each(StartupWatch::begin);
    drop(owned_mpi);
    if let Err(error) = watch {
        log_line(&error.to_string());
    }
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
