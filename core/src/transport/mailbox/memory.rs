//! The memory of mailboxes: the arenas of the ranks of a host, or the heap for ranks that are threads.
//!
//! Thread rule: any thread.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::notice::{MAX_RANKS, MailboxHeader};
use super::ring::Ring;
use super::staging::Staging;
use crate::error::{Error, Result};
use crate::transport::arena::{HEADER_BYTES, HEADER_SEGMENTS};
use crate::transport::arenas::Arenas;
use crate::transport::memory::Aligned;
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
    /// [`Error::System`] if there are none.
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

/// The memory of ranks that are threads of this process.
pub struct HeapMemory {
    heap: Arc<Heap>,
    me: usize,
    /// Whether messages may be read where the sender has them.
    shares: bool,
}

struct Heap {
    ranks: usize,
    memory: Aligned,
    used: AtomicUsize,
}

/// Bytes of a header in the heap.
const HEAP_HEADER: usize = size_of::<MailboxHeader>().next_multiple_of(4096);

impl HeapMemory {
    /// The memory of `ranks` ranks, by rank. With `shares`, all memory of the process counts as shared.
    ///
    /// # Panics
    /// If there are too many ranks.
    pub fn world(ranks: usize, shares: bool) -> Vec<HeapMemory> {
        assert!(ranks <= MAX_RANKS);
        let pair = size_of::<Ring>().next_multiple_of(4096) + size_of::<Staging>().next_multiple_of(4096);
        let memory = Aligned::new(4096 + ranks * HEAP_HEADER + ranks * ranks * pair);
        let start = memory.as_ptr().addr().next_multiple_of(4096) - memory.as_ptr().addr();
        #[cfg(loom)]
        {
            use crate::transport::sync::track;
            track(memory.as_ptr().addr()..memory.as_ptr().addr() + memory.len());
            for rank in 0..ranks {
                // SAFETY: new memory.
                unsafe { MailboxHeader::create(memory.as_ptr().add(start + rank * HEAP_HEADER)) };
            }
        }
        let heap = Arc::new(Heap { ranks, memory, used: AtomicUsize::new(start + ranks * HEAP_HEADER) });
        (0..ranks).map(|me| HeapMemory { heap: Arc::clone(&heap), me, shares }).collect()
    }

    fn contains(&self, range: &Range<usize>) -> bool {
        let start = self.heap.memory.as_ptr().addr();
        range.start >= start && range.end <= start + self.heap.memory.len()
    }
}

impl MailboxMemory for HeapMemory {
    fn me(&self) -> usize {
        self.me
    }
    fn ranks(&self) -> usize {
        self.heap.ranks
    }
    fn header(&self, rank: usize) -> *mut u8 {
        let base = self.heap.memory.as_ptr();
        let start = base.addr().next_multiple_of(4096) - base.addr();
        base.wrapping_add(start + rank * HEAP_HEADER)
    }
    fn alloc(&self, len: usize) -> Result<*mut u8> {
        let offset = self.heap.used.fetch_add(len.next_multiple_of(4096), Ordering::Relaxed);
        if offset + len > self.heap.memory.len() {
            return Err(Error::System(format!("there are no {len} bytes of shared memory")));
        }
        Ok(self.heap.memory.as_ptr().wrapping_add(offset))
    }
    fn offset_of(&self, range: Range<usize>) -> Option<u64> {
        (self.shares || self.contains(&range)).then_some(range.start as u64)
    }
    fn resolve(&self, _rank: usize, offset: u64, _len: usize) -> Option<*mut u8> {
        usize::try_from(offset).ok().map(std::ptr::with_exposed_provenance_mut)
    }
}
