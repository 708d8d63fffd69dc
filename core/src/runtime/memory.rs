//! Shared memory of the local ranks.
//!
//! Thread rule: any thread.

use std::collections::HashSet;
use std::sync::{Arc, Mutex};

use super::state::{check_fork, not_started, started};
use crate::error::{Error, Result};
use crate::lock::lock;
use crate::transport::arenas::Arenas;
use crate::transport::peer_memory::PeerMemory;

/// The arenas of a job.
struct Kept {
    arenas: Arc<Arenas>,
    /// The addresses that callers hold.
    held: HashSet<usize>,
}

/// The arenas of this host: of the jobs of this process, the current one last. Those of an ended job stay while callers
/// hold memory in them.
static ARENAS: Mutex<Vec<Kept>> = Mutex::new(Vec::new());

/// Stores the arenas of this host.
pub(super) fn keep(arenas: &Arc<Arenas>) {
    lock(&ARENAS).push(Kept { arenas: Arc::clone(arenas), held: HashSet::new() });
}

/// Drops the arenas of ended jobs in which nobody holds memory.
pub(super) fn drop_unused() {
    lock(&ARENAS).retain(|kept| !kept.held.is_empty());
}

/// Allocates `len` zeroed bytes of memory shared by the local ranks; see [`PeerMemory::alloc_zeroed`].
///
/// # Errors
/// [`Error::System`] if the memory is exhausted; [`Error::State`] before [`start`](super::start).
pub fn alloc(len: usize) -> Result<*mut u8> {
    started(|_| Ok(()))?;
    let mut all = lock(&ARENAS);
    let Kept { arenas, held } = all.last_mut().ok_or_else(not_started)?;
    let memory = arenas.alloc_zeroed(len)?;
    held.insert(memory.addr());
    Ok(memory)
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
    let index = all.iter_mut().position(|kept| kept.held.remove(&memory.addr()));
    let Some((index, kept)) = index.and_then(|index| Some((index, all.get(index)?))) else {
        return Err(Error::Invalid("this memory is not from dl_comm_alloc, or was given back before".into()));
    };
    // SAFETY: the caller's promise.
    unsafe { kept.arenas.free(memory) }?;
    if index + 1 < all.len() && kept.held.is_empty() {
        drop(all.remove(index));
    }
    Ok(())
}
