//! Memory of a rank that the other ranks of its host can read and write: averages of tensors that live there copy nothing.
//!
//! Every rank has one arena, a sparse file as large as the file system that all ranks of the host map when the job starts. So
//! memory can be had at any time without the others' doing, and an offset tells them where it is. Pages are reserved when
//! memory is asked for (a full file system is an error there, no bus error later) and given back when it is freed.
//! Thread rule: may be used from any thread.

use std::collections::BTreeMap;
use std::fs::File;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use memmap2::{Advice, MmapRaw};
use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::retry_on_intr;

use crate::error::{Error, Result};

/// Memory starts at a multiple of this, and is handed out in multiples of it.
const PAGE: usize = 4096;
/// The size of a huge page, at a multiple of which longer memory starts.
const HUGE: usize = 2 << 20;

/// Memory that the ranks of a host see in each other: how one rank names a place to the others.
pub trait Shared: Send + Sync {
    /// The name of `range` (addresses of this process) for the other ranks, if they see it.
    fn locate(&self, range: Range<usize>) -> Option<u64>;

    /// Where this process sees the `len` bytes that the rank with this local rank has named `place`, if it does.
    fn at(&self, local_rank: usize, place: u64, len: usize) -> Option<*mut u8>;

    /// Another rank may still write to memory that was named: from now on none is used again.
    fn retire(&self) {}
}

/// The arenas of the ranks of a host, as one of them sees them.
pub struct Arenas {
    /// By local rank.
    maps: Vec<MmapRaw>,
    me: usize,
    file: File,
    space: Mutex<Space>,
    retired: AtomicBool,
}

impl Arenas {
    /// The arenas `maps`, by local rank, of which `file` is that of rank `me`.
    pub fn new(maps: Vec<MmapRaw>, me: usize, file: File) -> Arenas {
        let space = Mutex::new(Space::new(maps[me].len()));
        // Where the system gives huge pages to who asks; elsewhere nothing happens.
        for map in &maps {
            let _given = map.advise(Advice::HugePage);
        }
        Arenas { maps, me, file, space, retired: AtomicBool::new(false) }
    }

    /// `len` zero bytes that all ranks of the host see, at a multiple of 4096.
    ///
    /// # Errors
    /// [`Error::System`] when the file system is full.
    pub fn alloc(&self, len: usize) -> Result<*mut u8> {
        let full = |why: &str| {
            Error::system(
                format!(
                    "reserving {} KiB of shared memory ({why}; DL_COMM_SHM_DIR chooses the folder)",
                    len.div_ceil(1024)
                ),
                rustix::io::Errno::NOSPC,
            )
        };
        let range = self.space().take(len).ok_or_else(|| full("the arena is full"))?;
        let reserve = || fallocate(&self.file, FallocateFlags::empty(), range.start as u64, range.len() as u64);
        if let Err(error) = retry_on_intr(reserve) {
            self.space().give(range.start);
            return Err(full(&error.to_string()));
        }
        Ok(self.maps[self.me].as_mut_ptr().wrapping_add(range.start))
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
        let len = *space.used.get(&at).ok_or_else(unknown)?;
        if self.retired.load(Ordering::Relaxed) {
            return Ok(());
        }
        // The pages go; the next who gets the range finds zeros. Where the file system cannot, they stay and are zeroed.
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        if retry_on_intr(|| fallocate(&self.file, hole, at as u64, len as u64)).is_err() {
            // SAFETY: the range is this rank's, and nobody uses it.
            unsafe { std::ptr::write_bytes(memory, 0, len) };
        }
        space.give(at);
        Ok(())
    }

    fn space(&self) -> std::sync::MutexGuard<'_, Space> {
        self.space.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Shared for Arenas {
    fn locate(&self, range: Range<usize>) -> Option<u64> {
        let map = &self.maps[self.me];
        let start = map.as_ptr().addr();
        (range.start >= start && range.end <= start + map.len()).then(|| (range.start - start) as u64)
    }

    fn at(&self, local_rank: usize, place: u64, len: usize) -> Option<*mut u8> {
        let map = self.maps.get(local_rank)?;
        let at = usize::try_from(place).ok()?;
        at.checked_add(len).filter(|&end| end <= map.len()).map(|_| map.as_mut_ptr().wrapping_add(at))
    }

    fn retire(&self) {
        self.retired.store(true, Ordering::Relaxed);
    }
}

/// Which ranges of an arena are in use: first fit.
struct Space {
    len: usize,
    /// By start: the length.
    used: BTreeMap<usize, usize>,
}

impl Space {
    fn new(len: usize) -> Space {
        Space { len, used: BTreeMap::new() }
    }

    fn take(&mut self, len: usize) -> Option<Range<usize>> {
        let align = if len >= HUGE { HUGE } else { PAGE };
        let len = len.max(1).checked_next_multiple_of(PAGE)?;
        let mut start = 0usize;
        for (&at, &taken) in &self.used {
            if start.checked_add(len)? <= at {
                break;
            }
            start = (at + taken).checked_next_multiple_of(align)?;
        }
        start.checked_add(len).filter(|&end| end <= self.len)?;
        self.used.insert(start, len);
        Some(start..start + len)
    }

    fn give(&mut self, start: usize) {
        self.used.remove(&start);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn ranges_in_use_never_meet(steps in prop::collection::vec((1usize..5 * HUGE, 0usize..8), 1..60)) {
            let mut space = Space::new(64 * HUGE);
            let mut held: Vec<Range<usize>> = Vec::new();
            for (len, free) in steps {
                if let Some(range) = space.take(len) {
                    prop_assert!(range.len() >= len && range.end <= 64 * HUGE && range.start.is_multiple_of(PAGE));
                    prop_assert!(len < HUGE || range.start.is_multiple_of(HUGE));
                    prop_assert!(held.iter().all(|other| range.end <= other.start || other.end <= range.start));
                    held.push(range);
                }
                if free < held.len() {
                    space.give(held.swap_remove(free).start);
                }
            }
        }
    }
}
