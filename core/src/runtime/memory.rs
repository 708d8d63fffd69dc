//! Memory that the ranks of this host see in each other.

use std::sync::{Arc, OnceLock};

use super::state::{check_fork, not_started, started};
use crate::error::{Error, Result};
use crate::transport::arena::Arenas;

/// The arenas of this host, or why there are none; they stay as long as the process, since somebody may have memory of them.
static ARENAS: OnceLock<Result<Arc<Arenas>>> = OnceLock::new();

/// Keeps the arenas of this host, or why there are none.
pub(super) fn keep(arenas: &Result<Arc<Arenas>>) {
    let _first = ARENAS.set(arenas.clone());
}

/// `len` zero bytes that the ranks of this host see in each other; see [`crate::transport::arena::Arenas::alloc`].
///
/// # Errors
/// [`Error::System`] when there is not so much memory; why there is none of this kind; [`Error::State`] before [`init_mpi`].
pub fn alloc(len: usize) -> Result<*mut u8> {
    started(|_| arenas()?.alloc(len))
}

/// Gives back what [`alloc`] returned, after [`finalize`] too. Nothing happens for null.
///
/// # Errors
/// [`Error::Invalid`] for anything else.
///
/// # Safety
/// Nobody uses the memory any more.
pub unsafe fn free(memory: *mut u8) -> Result<()> {
    check_fork()?;
    if memory.is_null() {
        return Ok(());
    }
    // SAFETY: the caller's promise.
    unsafe { arenas()?.free(memory) }
}

fn arenas() -> Result<&'static Arc<Arenas>> {
    ARENAS.get().ok_or_else(not_started)?.as_ref().map_err(Error::clone)
}
