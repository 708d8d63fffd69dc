//! The memory of mailboxes: the arenas of the ranks of a host.
//!
//! Thread rule: any thread.

use std::ops::Range;
use std::sync::Arc;

use super::notice::MailboxHeader;
use crate::error::Result;
use crate::transport::arena::{HEADER_BYTES, HEADER_SEGMENTS};
use crate::transport::arenas::Arenas;
use crate::transport::peer_memory::PeerMemory;

/// Memory that the ranks of a host share. Ranks are numbered from 0 on the host.
pub trait MailboxMemory: Send + Sync {
    /// This rank.
    fn me(&self) -> usize;
    /// The number of ranks.
    fn ranks(&self) -> usize;
    /// The address of the [`MailboxHeader`] of a rank, aligned to 64 bytes and zero at first.
    fn header(&self, rank: usize) -> *mut u8;
    /// Allocates zero bytes of this rank, which are never freed.
    ///
    /// # Errors
    /// [`Error::System`](crate::error::Error::System) if there are none.
    fn alloc(&self, len: usize) -> Result<*mut u8>;
    /// The offset of `range` (addresses of this process) in this rank's memory, not 0; `None` if it is not there.
    fn offset_of(&self, range: Range<usize>) -> Option<u64>;
    /// The address of `len` bytes at `offset` in the memory of `rank`; `None` if they are not there.
    fn resolve(&self, rank: usize, offset: u64, len: usize) -> Option<*mut u8>;
}

/// Where the mailboxes' part of an arena's header starts; the bytes before it belong to groups.
const HEADER_START: usize = 4096;

const _: () = assert!(cfg!(loom) || size_of::<MailboxHeader>() <= HEADER_BYTES - HEADER_START - HEADER_SEGMENTS);

/// The place of the header of a rank of the job.
fn header_place(arenas: &Arenas, local_rank: usize) -> *mut u8 {
    arenas.header(local_rank).wrapping_add(HEADER_START)
}

/// What a rank of the job shows in its arena.
pub fn arena_header(arenas: &Arenas, local_rank: usize) -> &MailboxHeader {
    // SAFETY: the memory is zero at first, which is valid, is used for this only, and lives as long as the arenas.
    unsafe { &*header_place(arenas, local_rank).cast::<MailboxHeader>() }
}

/// The arenas of a host.
pub struct ArenaMemory {
    arenas: Arc<Arenas>,
    me: usize,
    ranks: usize,
}

impl ArenaMemory {
    /// The arenas of `ranks` ranks, as seen by rank `me`.
    pub fn new(arenas: Arc<Arenas>, me: usize, ranks: usize) -> ArenaMemory {
        ArenaMemory { arenas, me, ranks }
    }
}

impl MailboxMemory for ArenaMemory {
    fn me(&self) -> usize {
        self.me
    }
    fn ranks(&self) -> usize {
        self.ranks
    }
    fn header(&self, rank: usize) -> *mut u8 {
        header_place(&self.arenas, rank)
    }
    fn alloc(&self, len: usize) -> Result<*mut u8> {
        self.arenas.alloc_zeroed(len)
    }
    fn offset_of(&self, range: Range<usize>) -> Option<u64> {
        self.arenas.offset_of(range)
    }
    fn resolve(&self, rank: usize, offset: u64, len: usize) -> Option<*mut u8> {
        self.arenas.resolve(rank, offset, len)
    }
}
