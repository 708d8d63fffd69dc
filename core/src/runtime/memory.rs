//! Shared memory of the local ranks.

use std::sync::{Arc, OnceLock};

use super::state::{check_fork, not_started, started};
use crate::error::{Error, Result};
use crate::transport::arena::{Arenas, PeerMemory};

/// The arenas of this host, or the reason why there are none. Never freed, because callers may hold memory in them.
static ARENAS: OnceLock<Result<Arc<Arenas>>> = OnceLock::new();

/// Stores the arenas of this host, or the reason why there are none.
pub(super) fn keep(arenas: &Result<Arc<Arenas>>) {
    let _first = ARENAS.set(arenas.clone());
}

/// Allocates `len` zeroed bytes of memory shared by the local ranks; see [`PeerMemory::alloc_zeroed`].
///
/// # Errors
/// [`Error::System`] if the memory is exhausted; the reason why there is no shared memory; [`Error::State`] before
/// [`start`](super::start).
pub fn alloc(len: usize) -> Result<*mut u8> {
    started(|_| arenas()?.alloc_zeroed(len))
}

/// Frees memory from [`alloc`], also after [`finalize`](super::finalize). Does nothing for null.
///
/// # Errors
/// [`Error::Invalid`] for anything else.
///
/// # Safety
/// The memory is not used any more.
pub unsafe fn free(memory: *mut u8) -> Result<()> {
    check_fork()?;
    if memory.is_null() {
        return Ok(());
    }
    // SAFETY: the caller's promise.
    unsafe { arenas()?.free(memory) }
}

pub(super) fn arenas() -> Result<&'static Arc<Arenas>> {
    ARENAS.get().ok_or_else(not_started)?.as_ref().map_err(Error::clone)
}
