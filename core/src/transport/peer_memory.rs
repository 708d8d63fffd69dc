//! Memory of the tensors of a host's ranks that the others can access: shared memory by offsets, or private memory out of
//! which the system can copy.
//!
//! Thread rule: any thread.

use std::ops::Range;

use crate::error::{Error, Result};

/// Calls that may copy directly from tensor to tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DirectCopies {
    /// Whether calls that only move data may choose between slots and direct copies.
    pub possible: bool,
    /// Whether they choose direct copies without measuring.
    pub always: bool,
    /// Whether the ranks can copy out of each other's private memory.
    pub private: bool,
}

impl DirectCopies {
    /// No call.
    pub const NONE: DirectCopies = DirectCopies { possible: false, always: false, private: false };
}

/// Shared memory of the local ranks, addressed by offset.
pub trait PeerMemory: Send + Sync {
    /// The offset of `range` (addresses of this process) for the other ranks; `None` if it is not shared.
    fn offset_of(&self, range: Range<usize>) -> Option<u64>;

    /// The address in this process of `len` bytes at `offset` of rank `local_rank`; `None` if they are not shared.
    fn resolve(&self, local_rank: usize, offset: u64, len: usize) -> Option<*mut u8>;

    /// The calls that may copy directly from tensor to tensor; the same on all ranks of the host.
    fn direct_copies(&self) -> DirectCopies {
        DirectCopies { possible: true, always: false, private: false }
    }

    /// Copies `len` bytes at `address` of the process of `local_rank` to `to`. Returns false if the system refuses.
    ///
    /// # Safety
    /// `to` has room for `len` bytes. The other rank leaves its memory as it is meanwhile.
    unsafe fn read_private(&self, _local_rank: usize, _address: u64, _to: *mut u8, _len: usize) -> bool {
        false
    }

    /// The group has failed: what it has allocated is not used again before all of its ranks have left, because they may
    /// still write there.
    fn quarantine(&self) {}

    /// As [`PeerMemory::quarantine`], for the memory with these addresses, which the caller of the group has allocated.
    fn hold(&self, _range: Range<usize>) {}

    /// Allocates `len` zero bytes that all ranks of the host can access. Alignment: 64 bytes; 4096 for more than 2048
    /// bytes; 2 MiB for 2 MiB or more.
    ///
    /// # Errors
    /// [`Error::System`] when there is no shared memory or the file system is full.
    fn alloc_zeroed(&self, len: usize) -> Result<*mut u8> {
        Err(Error::System(format!("there are no {len} bytes of shared memory")))
    }

    /// Frees memory from [`PeerMemory::alloc_zeroed`].
    ///
    /// # Safety
    /// The memory is no longer used.
    unsafe fn free_zeroed(&self, _memory: *mut u8) {}
}
