//! The memory of the mailboxes of ranks that are threads of one process: the heap.
//!
//! Thread rule: any thread.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::error::{Error, Result};
use crate::transport::mailbox::memory::MailboxMemory;
use crate::transport::mailbox::notice::{MAX_RANKS, MailboxHeader};
use crate::transport::mailbox::ring::Ring;
use crate::transport::mailbox::staging::Staging;
use crate::transport::memory::Aligned;

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
