//! What the threads of a parameter server share.
//!
//! Thread rule: any thread.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use super::shards::Shards;
use crate::error::Result;
use crate::fork;
use crate::group::Group;
use crate::transport::peer_memory::PeerMemory;

/// What the threads of a server share.
pub(super) struct ServerState {
    pub shards: Shards,
    pub rank: usize,
    /// Counts the operations that need messages.
    pub operations: AtomicU32,
    /// Before the group: others may use the memory until this rank leaves the group.
    pub own: OwnMemory,
    pub group: Arc<Group>,
}

/// The memory of this rank's shards.
pub struct OwnMemory {
    arenas: Arc<dyn PeerMemory>,
    memory: *mut u8,
    len: usize,
    /// Whether no rank uses it any more.
    unused: AtomicBool,
}

// SAFETY: an address; the memory is used under locks.
unsafe impl Send for OwnMemory {}
// SAFETY: as above.
unsafe impl Sync for OwnMemory {}

impl OwnMemory {
    /// Allocates `len` zero bytes that the ranks of the host share.
    ///
    /// # Errors
    /// [`Error::System`] when there is not enough memory.
    pub fn new(arenas: Arc<dyn PeerMemory>, len: usize) -> Result<OwnMemory> {
        let memory = arenas.alloc_zeroed(len)?;
        Ok(OwnMemory { arenas, memory, len, unused: AtomicBool::new(false) })
    }

    /// Its place for the other ranks.
    pub fn offset(&self) -> Option<u64> {
        self.arenas.offset_of(self.memory.addr()..self.memory.addr() + self.len)
    }

    /// Its address.
    pub fn address(&self) -> *mut u8 {
        self.memory
    }

    /// No rank uses it any more.
    pub(super) fn set_unused(&self) {
        self.unused.store(true, Ordering::Release);
    }
}

impl Drop for OwnMemory {
    fn drop(&mut self) {
        if fork::is_child() {
            // It is the parent's.
            return;
        }
        if !self.unused.load(Ordering::Acquire) {
            self.arenas.hold(self.memory.addr()..self.memory.addr() + self.len);
        }
        // SAFETY: this rank does not use it any more; what others may use is held until they have left the group.
        unsafe { self.arenas.free_zeroed(self.memory) };
    }
}
