//! Arenas: memory of a rank that the other ranks of its host can access. Collectives on tensors in an arena need no
//! copies.
//!
//! Each rank has one arena: a sparse file as large as its file system, mapped by all ranks of the host at start. So a
//! rank can allocate without the others, and an offset addresses the memory in every rank. Allocation reserves the
//! pages: a full file system is an error here, not a bus error later. Freeing releases whole pages; slots of slabs are
//! kept for reuse.
//! Thread rule: may be used from any thread.

use std::fs::File;
use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use memmap2::{Advice, MmapRaw};
use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::retry_on_intr;

use super::range_allocator::{Allocation, RangeAllocator, SLAB, SMALL};
use crate::error::{Error, Result};
use crate::lock::lock;
use crate::log::log_line;

/// Calls that may copy directly from tensor to tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DirectCopies {
    /// Bytes of a call that only moves data from which on the ranks choose between slots and direct copies.
    pub min: usize,
    /// Whether they choose direct copies without measuring.
    pub always: bool,
    /// Whether the ranks can copy out of each other's private memory.
    pub private: bool,
}

impl DirectCopies {
    /// No call.
    pub const NONE: DirectCopies = DirectCopies { min: usize::MAX, always: false, private: false };
}

/// Below this, slots are faster than system calls, and than another round of flags.
pub const DIRECT_MIN_BYTES: usize = 16 << 10;

/// Shared memory of the local ranks, addressed by offset.
pub trait PeerMemory: Send + Sync {
    /// The offset of `range` (addresses of this process) for the other ranks; `None` if it is not shared.
    fn offset_of(&self, range: Range<usize>) -> Option<u64>;

    /// The address in this process of `len` bytes at `offset` of rank `local_rank`; `None` if they are not shared.
    fn resolve(&self, local_rank: usize, offset: u64, len: usize) -> Option<*mut u8>;

    /// The calls that may copy directly from tensor to tensor; the same on all ranks of the host.
    fn direct_copies(&self) -> DirectCopies {
        DirectCopies { min: DIRECT_MIN_BYTES, always: false, private: false }
    }

    /// Copies `len` bytes at `address` of the process of `local_rank` to `to`. Returns false if the system refuses.
    ///
    /// # Safety
    /// `to` has room for `len` bytes. The other rank leaves its memory as it is meanwhile.
    unsafe fn read_private(&self, _local_rank: usize, _address: u64, _to: *mut u8, _len: usize) -> bool {
        false
    }

    /// After a failure, peers may still write to shared memory: never reuse freed memory.
    fn quarantine(&self) {}

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

/// Bytes at the start of each arena that are not allocated: what its rank shows to all ranks of the host. Zero at first.
pub const HEADER_BYTES: usize = 64 << 10;

/// The arenas of all ranks of a host, mapped by one rank.
pub struct Arenas {
    /// By local rank.
    maps: Vec<MmapRaw>,
    me: usize,
    file: File,
    ranges: Mutex<RangeAllocator>,
    quarantined: AtomicBool,
}

impl Arenas {
    /// Wraps `maps` (by local rank); `file` is the file of rank `me`.
    ///
    /// # Errors
    /// [`Error::System`] when the file system is full.
    pub fn new(maps: Vec<MmapRaw>, me: usize, file: File) -> Result<Arenas> {
        let ranges = Mutex::new(RangeAllocator::new(maps[me].len()));
        // Only a hint: enables transparent huge pages where the system supports them.
        for map in &maps {
            let _hint = map.advise(Advice::HugePage);
        }
        let arenas = Arenas { maps, me, file, ranges, quarantined: AtomicBool::new(false) };
        // The first range of an empty allocator starts at 0.
        arenas.reserve(&mut lock(&arenas.ranges), HEADER_BYTES)?;
        Ok(arenas)
    }

    /// The first [`HEADER_BYTES`] of the arena of `local_rank`.
    ///
    /// # Panics
    /// If there is no such rank.
    pub fn header(&self, local_rank: usize) -> *mut u8 {
        self.maps[local_rank].as_mut_ptr()
    }

    /// Bytes of the file that have memory.
    #[cfg(test)]
    pub fn used_bytes(&self) -> u64 {
        rustix::fs::fstat(&self.file).map_or(0, |stat| stat.st_blocks.cast_unsigned() * 512)
    }

    /// Allocates a range of pages and reserves them in the file system.
    fn reserve(&self, ranges: &mut RangeAllocator, len: usize) -> Result<usize> {
        let full = |why: &str| {
            Error::system(
                format!(
                    "reserving {} KiB of shared memory ({why}; DL_COMM_SHM_DIR chooses the folder)",
                    len.div_ceil(1024)
                ),
                rustix::io::Errno::NOSPC,
            )
        };
        let range = ranges.alloc(len).ok_or_else(|| full("the arena is full"))?;
        let reserve = || fallocate(&self.file, FallocateFlags::empty(), range.start as u64, range.len() as u64);
        if let Err(error) = retry_on_intr(reserve) {
            ranges.free(range.start);
            return Err(full(&error.to_string()));
        }
        Ok(range.start)
    }

    /// Frees memory from [`PeerMemory::alloc_zeroed`].
    ///
    /// # Errors
    /// [`Error::Invalid`] for any other address.
    ///
    /// # Safety
    /// The memory is no longer used.
    pub unsafe fn free(&self, memory: *mut u8) -> Result<()> {
        let offset = memory.addr().wrapping_sub(self.maps[self.me].as_ptr().addr());
        let unknown = || Error::Invalid("this memory is not from dl_comm_alloc, or was given back before".into());
        let mut ranges = lock(&self.ranges);
        let allocation = ranges.find(offset).ok_or_else(unknown)?;
        if self.quarantined.load(Ordering::Relaxed) {
            return Ok(());
        }
        // Punching a hole frees the pages; the next user gets zeros. Where the file system cannot do that, zero the
        // memory.
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let (len, keeps_pages) = match allocation {
            Allocation::Pages(len) => {
                (len, retry_on_intr(|| fallocate(&self.file, hole, offset as u64, len as u64)).is_err())
            }
            Allocation::SlabSlot(len) => (len, true),
        };
        if keeps_pages {
            // SAFETY: the range belongs to this rank's arena and is no longer used.
            unsafe { std::ptr::write_bytes(memory, 0, len) };
        }
        ranges.free(offset);
        Ok(())
    }
}

impl PeerMemory for Arenas {
    fn offset_of(&self, range: Range<usize>) -> Option<u64> {
        let map = &self.maps[self.me];
        let start = map.as_ptr().addr();
        (range.start >= start && range.end <= start + map.len()).then(|| (range.start - start) as u64)
    }

    fn resolve(&self, local_rank: usize, offset: u64, len: usize) -> Option<*mut u8> {
        let map = self.maps.get(local_rank)?;
        let offset = usize::try_from(offset).ok()?;
        offset.checked_add(len).filter(|&end| end <= map.len()).map(|_| map.as_mut_ptr().wrapping_add(offset))
    }

    fn quarantine(&self) {
        self.quarantined.store(true, Ordering::Relaxed);
    }

    fn alloc_zeroed(&self, len: usize) -> Result<*mut u8> {
        let mut ranges = lock(&self.ranges);
        let offset = if len > SMALL {
            self.reserve(&mut ranges, len)?
        } else if let Some(offset) = ranges.alloc_slot(len) {
            offset
        } else {
            let slab = self.reserve(&mut ranges, SLAB)?;
            ranges.split_slab(slab, len)
        };
        Ok(self.maps[self.me].as_mut_ptr().wrapping_add(offset))
    }

    unsafe fn free_zeroed(&self, memory: *mut u8) {
        // SAFETY: guaranteed by the caller. `free` rejects addresses that are not from this arena.
        if let Err(error) = unsafe { self.free(memory) } {
            log_line(&error.to_string());
        }
    }
}
