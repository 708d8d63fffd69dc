//! Memory of a rank that the other ranks of its host can read and write: averages of tensors that live there copy nothing.
//!
//! Every rank has one arena, a sparse file as large as the file system that all ranks of the host map when the job starts. So
//! memory can be had at any time without the others' doing, and an offset tells them where it is. Pages are reserved when
//! memory is asked for (a full file system is an error there, no bus error later) and given back when it is freed; those of
//! small pieces, which share them, stay for others.
//! Thread rule: may be used from any thread.

use std::fs::File;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use memmap2::{Advice, MmapRaw};
use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::retry_on_intr;

use super::range_allocator::{Allocation, RangeAllocator, SLAB, SMALL};
use crate::error::{Error, Result};
use crate::log::log_line;

/// Memory that the ranks of a host see in each other: how one rank names a place to the others.
pub trait PeerMemory: Send + Sync {
    /// The name of `range` (addresses of this process) for the other ranks, if they see it.
    fn offset_of(&self, range: Range<usize>) -> Option<u64>;

    /// Where this process sees the `len` bytes that the rank with this local rank has named `place`, if it does.
    fn resolve(&self, local_rank: usize, place: u64, len: usize) -> Option<*mut u8>;

    /// Another rank may still write to memory that was named: from now on none is used again.
    fn quarantine(&self) {}

    /// `len` zero bytes that the other ranks see, at a page's start when they are more than 2048.
    ///
    /// # Errors
    /// [`Error::System`] when there is no such memory.
    fn alloc_zeroed(&self, len: usize) -> Result<*mut u8> {
        Err(Error::System(format!("there are no {len} bytes of shared memory")))
    }

    /// Gives back what [`Shared::take`] returned.
    ///
    /// # Safety
    /// Nobody uses the memory any more.
    unsafe fn free_zeroed(&self, _memory: *mut u8) {}
}

/// The arenas of the ranks of a host, as one of them sees them.
pub struct Arenas {
    /// By local rank.
    maps: Vec<MmapRaw>,
    me: usize,
    file: File,
    space: Mutex<RangeAllocator>,
    retired: AtomicBool,
}

impl Arenas {
    /// The arenas `maps`, by local rank, of which `file` is that of rank `me`.
    pub fn new(maps: Vec<MmapRaw>, me: usize, file: File) -> Arenas {
        let space = Mutex::new(RangeAllocator::new(maps[me].len()));
        // Where the system gives huge pages to who asks; elsewhere nothing happens.
        for map in &maps {
            let _given = map.advise(Advice::HugePage);
        }
        Arenas { maps, me, file, space, retired: AtomicBool::new(false) }
    }

    /// `len` zero bytes that all ranks of the host see, at a multiple of 64; of 4096 where they are more than 2048, of 2 MiB
    /// where they are as many.
    ///
    /// # Errors
    /// [`Error::System`] when the file system is full.
    pub fn alloc(&self, len: usize) -> Result<*mut u8> {
        let mut space = self.space();
        let at = if len > SMALL {
            self.reserve(&mut space, len)?
        } else if let Some(at) = space.piece(len) {
            at
        } else {
            let slab = self.reserve(&mut space, SLAB)?;
            space.split_slab(slab, len)
        };
        Ok(self.maps[self.me].as_mut_ptr().wrapping_add(at))
    }

    /// A range of pages, which the file system then has.
    fn reserve(&self, space: &mut RangeAllocator, len: usize) -> Result<usize> {
        let full = |why: &str| {
            Error::system(
                format!(
                    "reserving {} KiB of shared memory ({why}; DL_COMM_SHM_DIR chooses the folder)",
                    len.div_ceil(1024)
                ),
                rustix::io::Errno::NOSPC,
            )
        };
        let range = space.alloc(len).ok_or_else(|| full("the arena is full"))?;
        let reserve = || fallocate(&self.file, FallocateFlags::empty(), range.start as u64, range.len() as u64);
        if let Err(error) = retry_on_intr(reserve) {
            space.free(range.start);
            return Err(full(&error.to_string()));
        }
        Ok(range.start)
    }

    /// Gives back what [`Arenas::alloc`] returned.
    ///
    /// # Errors
    /// [`Error::Invalid`] for anything else.
    ///
    /// # Safety
    /// Nobody uses the memory any more.
    pub unsafe fn free(&self, memory: *mut u8) -> Result<()> {
        let at = memory.addr().wrapping_sub(self.maps[self.me].as_ptr().addr());
        let unknown = || Error::Invalid("this memory is not from dl_comm_alloc, or was given back before".into());
        let mut space = self.space();
        let held = space.find(at).ok_or_else(unknown)?;
        if self.retired.load(Ordering::Relaxed) {
            return Ok(());
        }
        // The pages go; the next who gets the range finds zeros. Where the file system cannot, they stay and are zeroed.
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let (len, stays) = match held {
            Allocation::Pages(len) => {
                (len, retry_on_intr(|| fallocate(&self.file, hole, at as u64, len as u64)).is_err())
            }
            Allocation::SlabSlot(len) => (len, true),
        };
        if stays {
            // SAFETY: the range is this rank's, and nobody uses it.
            unsafe { std::ptr::write_bytes(memory, 0, len) };
        }
        space.free(at);
        Ok(())
    }

    fn space(&self) -> MutexGuard<'_, RangeAllocator> {
        self.space.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl PeerMemory for Arenas {
    fn offset_of(&self, range: Range<usize>) -> Option<u64> {
        let map = &self.maps[self.me];
        let start = map.as_ptr().addr();
        (range.start >= start && range.end <= start + map.len()).then(|| (range.start - start) as u64)
    }

    fn resolve(&self, local_rank: usize, place: u64, len: usize) -> Option<*mut u8> {
        let map = self.maps.get(local_rank)?;
        let at = usize::try_from(place).ok()?;
        at.checked_add(len).filter(|&end| end <= map.len()).map(|_| map.as_mut_ptr().wrapping_add(at))
    }

    fn quarantine(&self) {
        self.retired.store(true, Ordering::Relaxed);
    }

    fn alloc_zeroed(&self, len: usize) -> Result<*mut u8> {
        self.alloc(len)
    }

    unsafe fn free_zeroed(&self, memory: *mut u8) {
        // SAFETY: the caller's promise. What is not from here stays where it is.
        if let Err(error) = unsafe { self.free(memory) } {
            log_line(&error.to_string());
        }
    }
}
