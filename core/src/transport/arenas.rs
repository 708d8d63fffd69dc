//! The arenas of the ranks of a host: memory that they can access in each other's. Collectives on tensors in an arena need
//! no copies.
//!
//! A rank allocates in its own arena, without the others. Allocation reserves the pages: a full file system is an error
//! here, not a bus error later. Freeing releases whole pages; slots of slabs are kept for reuse, and so are the addresses
//! of segments.
//! Thread rule: may be used from any thread.

use std::fmt;
use std::fs::File;
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::{Errno, retry_on_intr};

use super::arena::{Arena, FIRST_SEGMENT, GAP, HEADER_BYTES, Segment, map_failed};
use super::peer_memory::PeerMemory;
use super::range_allocator::{Allocation, HUGE, RangeAllocator, SLAB, SMALL};
use crate::error::{Error, Result};
use crate::lock::lock;
use crate::log::log_line;

fn no_memory(len: usize, why: &dyn fmt::Display) -> Error {
    Error::System(format!("there are no {} KiB of shared memory: {why}", len.div_ceil(1024)))
}

/// The space of a file system, in bytes.
struct Space {
    total: u64,
    free: u64,
}

impl Space {
    /// That of `file`; that of the memory if the file system has no limit.
    fn of(file: &File) -> Space {
        let system = rustix::fs::fstatvfs(file).ok().filter(|system| system.f_blocks > 0);
        system.map_or_else(Space::of_memory, |system| Space {
            total: system.f_blocks.saturating_mul(system.f_frsize),
            free: system.f_bavail.saturating_mul(system.f_frsize),
        })
    }

    fn of_memory() -> Space {
        let system = rustix::system::sysinfo();
        let bytes = |units: u64| units.saturating_mul(u64::from(system.mem_unit));
        Space { total: bytes(system.totalram), free: bytes(system.freeram) }
    }
}

impl fmt::Display for Space {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} of {} KiB are free; make /dev/shm larger, or choose another folder with DL_COMM_SHM_DIR",
            self.free >> 10,
            self.total >> 10
        )
    }
}

/// The arenas of all ranks of a host, as one rank sees them.
pub struct Arenas {
    /// By local rank.
    all: Vec<Arena>,
    me: usize,
    /// The most bytes of an arena that a rank may map.
    max_len: usize,
    ranges: Mutex<RangeAllocator>,
}

/// Keeps memory of this rank's arena from being allocated again, also after it was freed, until it is dropped.
pub struct Hold {
    arenas: Arc<Arenas>,
    offset: usize,
}

impl Drop for Hold {
    fn drop(&mut self) {
        let mut ranges = lock(&self.arenas.ranges);
        if let Some(allocation) = ranges.end_hold(self.offset) {
            // SAFETY: its owner has freed it, and nobody holds it.
            unsafe { self.arenas.release(&mut ranges, self.offset, allocation) };
        }
    }
}

impl Arenas {
    /// The arenas with these files, by local rank; rank `me` is this one. All ranks map up to `max_len` bytes of each.
    ///
    /// # Errors
    /// [`Error::System`] when the file system or the address space is full.
    pub fn new(files: Vec<File>, me: usize, max_len: usize) -> Result<Arenas> {
        let all: Vec<Arena> = files.into_iter().map(Arena::new).collect::<Result<_>>()?;
        let arenas = Arenas { all, me, max_len, ranges: Mutex::new(RangeAllocator::new()) };
        let mut ranges = lock(&arenas.ranges);
        arenas.enlarge(FIRST_SEGMENT)?;
        ranges.add(0..FIRST_SEGMENT);
        // The first range of an empty allocator starts at 0.
        arenas.reserve(&mut ranges, HEADER_BYTES)?;
        drop(ranges);
        Ok(arenas)
    }

    fn own(&self) -> &Arena {
        &self.all[self.me]
    }

    /// The first [`HEADER_BYTES`] of the arena of `local_rank`.
    ///
    /// # Panics
    /// If there is no such rank.
    pub fn header(&self, local_rank: usize) -> *mut u8 {
        self.all[local_rank].header()
    }

    /// Makes the file of this rank `len` bytes long, without memory.
    fn enlarge(&self, len: usize) -> Result<()> {
        self.own().file.set_len(len as u64).map_err(|error| Error::system("growing the shared memory", error))
    }

    /// Adds a segment with room for `len` bytes.
    fn grow(&self, ranges: &mut RangeAllocator, len: usize) -> Result<()> {
        let own = self.own();
        let mapped: usize = own.mapped().map(|segment| segment.map.len()).sum();
        let (count, end) = own.mapped().fold((0, 0), |(count, _), segment| (count + 1, segment.end()));
        let (len, room) = (len.checked_next_multiple_of(HUGE), self.max_len.saturating_sub(mapped) / HUGE * HUGE);
        let (Some(len), Some(place)) = (len.filter(|&len| len <= room), own.segments.get(count)) else {
            let (max, mapped) = (self.max_len >> 20, mapped >> 20);
            return Err(Error::System(format!(
                "{mapped} of the {max} MiB that a rank can have here are in use; raise the limits of the address space \
                 (ulimit -v, RLIMIT_AS) and of files (ulimit -f) on all ranks"
            )));
        };
        let start = end + GAP;
        let map = |len: usize| {
            self.enlarge(start + len)?;
            Segment::new(&own.file, start, len).map_err(|error| map_failed(len, error))
        };
        let segment = map(len.max(mapped / 2 / HUGE * HUGE).min(room)).or_else(|_| map(len))?;
        let area = segment.start..segment.end();
        // Only this function adds segments here, under the lock of `ranges`.
        let _set = place.set(segment);
        let shown = &own.shown()[count];
        shown.start.store(area.start as u64, Ordering::Relaxed);
        shown.len.store(area.len() as u64, Ordering::Release);
        ranges.add(area);
        Ok(())
    }

    /// Bytes of the file that have memory.
    #[cfg(test)]
    pub fn used_bytes(&self) -> u64 {
        rustix::fs::fstat(&self.own().file).map_or(0, |stat| stat.st_blocks.cast_unsigned() * 512)
    }

    /// Allocates a range of pages, without memory.
    fn alloc_range(&self, ranges: &mut RangeAllocator, len: usize) -> Result<Range<usize>> {
        if let Some(range) = ranges.alloc(len) {
            return Ok(range);
        }
        let space = Space::of(&self.own().file);
        if len as u64 > space.total {
            return Err(no_memory(len, &space));
        }
        self.grow(ranges, len).map_err(|error| no_memory(len, &error))?;
        ranges.alloc(len).ok_or_else(|| Error::Internal("a new segment is too small".into()))
    }

    /// Makes the memory of a range of the file.
    fn reserve_range(&self, range: &Range<usize>) -> Result<()> {
        let file = &self.own().file;
        let reserve = || fallocate(file, FallocateFlags::empty(), range.start as u64, range.len() as u64);
        retry_on_intr(reserve).map_err(|error| match error {
            Errno::NOSPC => no_memory(range.len(), &Space::of(file)),
            error => no_memory(range.len(), &error),
        })
    }

    /// Allocates a range of pages with memory.
    fn reserve(&self, ranges: &mut RangeAllocator, len: usize) -> Result<usize> {
        let range = self.alloc_range(ranges, len)?;
        self.reserve_range(&range).inspect_err(|_| ranges.free(range.start))?;
        Ok(range.start)
    }

    /// Allocates `len` zero bytes whose memory is made by [`Arenas::reserve_part`]; only then they may be used.
    ///
    /// # Errors
    /// [`Error::System`] when the address space is full.
    pub fn alloc_addresses(&self, len: usize) -> Result<*mut u8> {
        let range = self.alloc_range(&mut lock(&self.ranges), len)?;
        self.own().address(range.start, len).ok_or_else(|| Error::Internal("an arena lost its memory".into()))
    }

    /// Makes the memory of a part of an allocation, whose other parts stay as they are.
    ///
    /// # Errors
    /// [`Error::System`] when the file system is full.
    pub fn reserve_part(&self, memory: *mut u8, part: &Range<usize>) -> Result<()> {
        let start = memory.addr() + part.start;
        let offset = self.own().offset(&(start..start + part.len()));
        let offset = offset.ok_or_else(|| Error::Internal("an arena lost its memory".into()))?;
        self.reserve_range(&(offset..offset + part.len()))
    }

    /// Frees memory from [`PeerMemory::alloc_zeroed`].
    ///
    /// # Errors
    /// [`Error::Invalid`] for any other address.
    ///
    /// # Safety
    /// The memory is no longer used.
    pub unsafe fn free(&self, memory: *mut u8) -> Result<()> {
        let offset = self.own().offset(&(memory.addr()..memory.addr())).unwrap_or(usize::MAX);
        let unknown = || Error::Invalid("this memory is not from dl_comm_alloc, or was given back before".into());
        let mut ranges = lock(&self.ranges);
        let allocation = ranges.find(offset).ok_or_else(unknown)?;
        if !ranges.free_later(offset) {
            // SAFETY: the caller's promise.
            unsafe { self.release(&mut ranges, offset, allocation) };
        }
        Ok(())
    }

    /// Holds the allocation with these addresses, if there is one in this rank's arena.
    pub fn hold(self: &Arc<Self>, range: &Range<usize>) -> Option<Hold> {
        let offset = lock(&self.ranges).hold(self.own().offset(range)?)?;
        Some(Hold { arenas: Arc::clone(self), offset })
    }

    /// Frees an allocation.
    ///
    /// # Safety
    /// The memory is no longer used.
    unsafe fn release(&self, ranges: &mut RangeAllocator, offset: usize, allocation: Allocation) {
        // Punching a hole frees the pages; the next user gets zeros. Where the file system cannot do that, zero the
        // memory.
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let own = self.own();
        let (len, keeps_pages) = match allocation {
            Allocation::Pages(len) => {
                (len, retry_on_intr(|| fallocate(&own.file, hole, offset as u64, len as u64)).is_err())
            }
            Allocation::SlabSlot(len) => (len, true),
        };
        if let Some(memory) = own.address(offset, len).filter(|_| keeps_pages) {
            // SAFETY: the range belongs to this rank's arena and is no longer used.
            unsafe { std::ptr::write_bytes(memory, 0, len) };
        }
        ranges.free(offset);
    }
}

impl PeerMemory for Arenas {
    fn offset_of(&self, range: Range<usize>) -> Option<u64> {
        self.own().offset(&range).map(|offset| offset as u64)
    }

    fn resolve(&self, local_rank: usize, offset: u64, len: usize) -> Option<*mut u8> {
        let arena = self.all.get(local_rank)?;
        let offset = usize::try_from(offset).ok()?;
        arena.address(offset, len).or_else(|| {
            // The caller says that it cannot access the memory; only this line says why.
            arena.map_shown().inspect_err(|error| log_line(&error.to_string())).ok()?;
            arena.address(offset, len)
        })
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
        self.own().address(offset, len).ok_or_else(|| Error::Internal("an arena lost its memory".into()))
    }

    unsafe fn free_zeroed(&self, memory: *mut u8) {
        // SAFETY: guaranteed by the caller. `free` rejects addresses that are not from this arena.
        if let Err(error) = unsafe { self.free(memory) } {
            log_line(&error.to_string());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::shm;

    /// The arenas of two ranks, as each of them sees them.
    fn two_ranks(max_len: usize) -> [Arenas; 2] {
        let files: Vec<_> = (0..2).map(|_| shm::create("/dev/shm", 2).unwrap()).collect();
        [0, 1].map(|me| {
            let opened = files.iter().map(|(_, name, _)| shm::open(name.path()).unwrap()).collect();
            Arenas::new(opened, me, max_len).unwrap()
        })
    }

    fn mapped(arena: &Arena) -> usize {
        arena.mapped().map(|segment| segment.map.len()).sum()
    }

    #[test]
    fn memory_that_is_allocated_later_is_seen_by_the_other_rank() {
        let [first, second] = two_ranks(usize::MAX);
        assert_eq!((mapped(&first.all[0]), mapped(&second.all[0])), (FIRST_SEGMENT, FIRST_SEGMENT));
        for (index, len) in [100, 5000, 3 << 20, 1 << 20, 70 << 20, 9 << 20].into_iter().enumerate() {
            let memory = first.alloc_zeroed(len).unwrap();
            let offset = first.offset_of(memory.addr()..memory.addr() + len).unwrap();
            assert!(len < HUGE || offset.is_multiple_of(HUGE as u64));
            assert_eq!(first.resolve(0, offset, len), Some(memory));
            let other = second.resolve(0, offset, len).unwrap();
            assert_eq!(second.offset_of(other.addr()..other.addr() + len), None, "memory of another rank");
            // SAFETY: `len` bytes of both maps.
            unsafe {
                assert_eq!(other.add(len - 1).read_volatile(), 0);
                memory.add(len - 1).write_volatile(index as u8);
                assert_eq!(other.add(len - 1).read_volatile(), index as u8);
            }
        }
        let used = 2 + 4 + 70 + 38;
        assert_eq!((mapped(&first.all[0]) >> 20, mapped(&first.all[1])), (used, FIRST_SEGMENT));
        assert_eq!(mapped(&second.all[0]) >> 20, used);
        assert_eq!(second.resolve(0, 0, FIRST_SEGMENT + 1), None);
        assert_eq!(second.resolve(0, u64::MAX, 2), None);
    }

    #[test]
    fn freed_addresses_are_used_again() {
        let [arenas, _other] = two_ranks(usize::MAX);
        for _ in 0..100 {
            let memory = arenas.alloc_zeroed(5 << 20).unwrap();
            // SAFETY: not used any more.
            unsafe { arenas.free(memory) }.unwrap();
            // SAFETY: `free` refuses it.
            assert!(unsafe { arenas.free(memory) }.is_err());
        }
        assert_eq!(mapped(arenas.own()), FIRST_SEGMENT + (6 << 20));
    }

    #[test]
    fn an_address_belongs_to_the_segment_that_begins_there() {
        let [arenas, _other] = two_ranks(usize::MAX);
        arenas.alloc_zeroed(5 << 20).unwrap();
        for segment in arenas.own().mapped() {
            let (start, end) = (segment.map.as_ptr().addr(), segment.map.as_ptr().addr() + segment.map.len());
            assert_eq!(arenas.own().offset(&(start..start)), Some(segment.start));
            let next = arenas.own().offset(&(end..end));
            assert!(next.is_none_or(|next| next != segment.end()), "{next:?} is after the segment");
        }
    }

    #[test]
    fn held_memory_is_used_again_after_the_hold() {
        let [arenas, _other] = two_ranks(usize::MAX).map(Arc::new);
        let before = arenas.used_bytes();
        let memory = arenas.alloc_zeroed(1 << 20).unwrap();
        let hold = arenas.hold(&(memory.addr() + 5..memory.addr() + 9)).unwrap();
        assert!(arenas.hold(&(0..1)).is_none(), "private memory");
        // SAFETY: not used any more.
        unsafe { arenas.free(memory) }.unwrap();
        assert_eq!(arenas.used_bytes(), before + (1 << 20));
        drop(hold);
        assert_eq!(arenas.used_bytes(), before);
        assert_eq!(arenas.alloc_zeroed(1 << 20).unwrap(), memory);
    }

    #[test]
    fn an_arena_has_a_limit_that_its_error_names() {
        let [arenas, _other] = two_ranks(16 << 20);
        arenas.alloc_zeroed(12 << 20).unwrap();
        let error = arenas.alloc_zeroed(4 << 20).unwrap_err().to_string();
        assert!(
            error.contains("4096 KiB") && error.contains("14 of the 16 MiB") && error.contains("ulimit -v"),
            "{error}"
        );
        let error = arenas.alloc_zeroed(1 << 50).unwrap_err().to_string();
        assert!(error.contains("KiB are free") && error.contains("DL_COMM_SHM_DIR"), "{error}");
        assert!(arenas.alloc_zeroed(1 << 20).is_ok(), "the first segment has room");
    }
}
