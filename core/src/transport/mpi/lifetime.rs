//! MPI as dl_comm has brought it up: once in a process, kept until its end, also when the start of a world fails, so that
//! the start can be tried again.
//!
//! Thread rule: any thread; MPI wants its start and its end on one thread, which is the program's affair.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use mpi::Threading;
use mpi::environment::{Universe, initialize_with_threading, is_finalized, threading_support};

use super::startup::StartupWatch;
use crate::config::Config;
use crate::error::{Error, Result};
use crate::log::log_line;

/// How long MPI's end may take once all ranks are there.
const END: Duration = Duration::from_secs(30);

/// What ends MPI when it is dropped.
struct OwnedMpi(#[expect(dead_code, reason = "for its drop")] Universe);

// SAFETY: see the thread rule.
unsafe impl Send for OwnedMpi {}

static OWNED: Mutex<Option<OwnedMpi>> = Mutex::new(None);

fn owned() -> MutexGuard<'static, Option<OwnedMpi>> {
    OWNED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Brings MPI up, or adopts one that is up; returns what it grants to threads.
///
/// # Errors
/// [`Error::State`] when it is finalized already; [`Error::System`].
pub fn start(config: &Config) -> Result<Threading> {
    if is_finalized() {
        return Err(Error::State("MPI is finalized already and cannot be started again in this process".into()));
    }
    let mut own = owned();
    // It waits for all ranks, for ever.
    let _watched = StartupWatch::start("MPI_Init", config.stall_warn, config.timeout)?;
    match initialize_with_threading(Threading::Multiple) {
        Some((universe, granted)) => {
            *own = Some(OwnedMpi(universe));
            Ok(granted)
        }
        None => Ok(threading_support()),
    }
}

/// Whether dl_comm has brought it up, and must end it.
pub fn is_owned() -> bool {
    owned().is_some()
}

/// Leaves MPI as it is from now on: other ranks may never come to its end.
pub fn leak() {
    std::mem::forget(owned().take());
}

/// Ends MPI if dl_comm has brought it up and not left it. All ranks are there.
pub fn end() {
    let Some(own) = owned().take() else { return };
    // After a failure it may wait for messages that never come.
    match StartupWatch::start("MPI_Finalize", None, Some(END)) {
        Ok(_watched) => drop(own),
        Err(error) => {
            log_line(&error.to_string());
            drop(own);
        }
    }
}
