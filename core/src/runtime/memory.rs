//! Shared memory of the local ranks.

use std::sync::{Arc, Mutex};

use super::state::{check_fork, not_started, started};
use crate::error::{Error, Result};
use crate::lock::lock;
use crate::transport::arena::{Arenas, PeerMemory};

/// The arenas of this host: of the jobs of this process, the current one last. Those of an ended job stay while callers
/// hold memory in them.
static ARENAS: Mutex<Vec<Arc<Arenas>>> = Mutex::new(Vec::new());

/// Stores the arenas of this host.
pub(super) fn keep(arenas: &Arc<Arenas>) {
    lock(&ARENAS).push(Arc::clone(arenas));
}

/// Drops the arenas of ended jobs in which nobody holds memory.
pub(super) fn drop_unused() {
    lock(&ARENAS).retain(|arenas| arenas.is_in_use());
}

/// Allocates `len` zeroed bytes of memory shared by the local ranks; see [`PeerMemory::alloc_zeroed`].
///
/// # Errors
/// [`Error::System`] if the memory is exhausted; [`Error::State`] before
/// [`start`](super::start).
pub fn alloc(len: usize) -> Result<*mut u8> {
    started(|_| Ok(()))?;
    let arenas = lock(&ARENAS).last().cloned().ok_or_else(not_started)?;
    arenas.alloc_zeroed(len)
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
    let mut all = lock(&ARENAS);
    let index = all.iter().position(|arenas| arenas.contains(memory));
    let Some((index, arenas)) = index.and_then(|index| Some((index, all.get(index)?))) else {
        return Err(Error::Invalid("this memory is not from dl_comm_alloc".into()));
    };
    // SAFETY: the caller's promise.
    unsafe { arenas.free(memory) }?;
    if index + 1 < all.len() && !arenas.is_in_use() {
        drop(all.remove(index));
    }
    Ok(())
}
