//! Initialization and finalization of MPI: once per process. MPI stays initialized when the start of a world fails, so
//! that the start can be retried.
//!
//! Thread rule: any thread. MPI requires initialization and finalization on one thread; the program ensures that.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use mpi::Threading;
use mpi::environment::{Universe, initialize_with_threading, is_finalized, threading_support};

use super::startup::StartupWatch;
use crate::config::Config;
use crate::error::{Error, Result};
use crate::log::log_line;

/// Time limit of MPI_Finalize once all ranks call it.
const FINALIZE_TIMEOUT: Duration = Duration::from_secs(30);

/// Finalizes MPI on drop.
struct OwnedMpi(#[expect(dead_code, reason = "for its drop")] Universe);

// SAFETY: see the thread rule.
unsafe impl Send for OwnedMpi {}

static OWNED: Mutex<Option<OwnedMpi>> = Mutex::new(None);

fn owned() -> MutexGuard<'static, Option<OwnedMpi>> {
    OWNED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Initializes MPI, or adopts an initialized one. Returns the granted thread level.
///
/// # Errors
/// [`Error::State`] when MPI is already finalized; [`Error::System`].
pub fn start(config: &Config) -> Result<Threading> {
    if is_finalized() {
        return Err(Error::State("MPI is finalized already and cannot be started again in this process".into()));
    }
    let mut owned_mpi = owned();
    // MPI_Init waits for all ranks without a deadline.
    let _watch = StartupWatch::start("MPI_Init", config.stall_warn, config.timeout)?;
    match initialize_with_threading(Threading::Multiple) {
        Some((universe, granted)) => {
            *owned_mpi = Some(OwnedMpi(universe));
            Ok(granted)
        }
        None => Ok(threading_support()),
    }
}

/// Whether dl_comm initialized MPI and must finalize it.
pub fn is_owned() -> bool {
    owned().is_some()
}

/// Never finalizes MPI: other ranks may never call MPI_Finalize.
pub fn leak() {
    std::mem::forget(owned().take());
}

/// Finalizes MPI if dl_comm initialized it and did not leak it. All ranks must call it.
pub fn end() {
    let Some(owned_mpi) = owned().take() else { return };
    // After a failure, MPI_Finalize may wait for messages that never arrive.
    match StartupWatch::start("MPI_Finalize", None, Some(FINALIZE_TIMEOUT)) {
        Ok(_watch) => drop(owned_mpi),
        Err(error) => {
            log_line(&error.to_string());
            drop(owned_mpi);
        }
    }
}
