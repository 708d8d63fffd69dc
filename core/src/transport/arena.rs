//! The arena of a rank: a file that all ranks of the host have opened, and what one of them has mapped of it.
//!
//! It grows by segments, whose places the rank shows in the header; the others map a segment when they first need it. So
//! an offset addresses the memory in every rank, and nobody maps more than is used. [`super::arenas`] allocates in it.
//! Thread rule: may be used from any thread.

use std::fs::File;
use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use memmap2::{Advice, MmapOptions, MmapRaw};

use super::range_allocator::HUGE;
use crate::address_space::AddressSpace;
use crate::error::{Error, Result};

/// Bytes at the start of each arena that are not allocated: what its rank shows to all ranks of the host. Zero at first.
pub const HEADER_BYTES: usize = 64 << 10;
/// The bytes at the end of the header that show the segments.
pub const HEADER_SEGMENTS: usize = size_of::<[ShownSegment; MAX_SEGMENTS]>();

/// The first segment of an arena, which all ranks of the host map at start.
pub(super) const FIRST_SEGMENT: usize = HUGE;
/// A segment has at least a half of the bytes before it, so an arena of 2^46 bytes has fewer.
const MAX_SEGMENTS: usize = 64;
/// What is between two segments in the file, so that no allocation lies in both.
pub(super) const GAP: usize = HUGE;

/// The place of a segment in its file; 0 bytes: there is none.
#[repr(C)]
pub(super) struct ShownSegment {
    pub start: AtomicU64,
    pub len: AtomicU64,
}

/// A part of a file that is mapped in one piece.
pub(super) struct Segment {
    pub start: usize,
    pub map: MmapRaw,
}

impl Segment {
    pub fn new(file: &File, start: usize, len: usize) -> std::io::Result<Segment> {
        let map = MmapOptions::new().offset(start as u64).len(len).map_raw(file)?;
        // Only a hint: enables transparent huge pages where the system supports them.
        let _hint = map.advise(Advice::HugePage);
        Ok(Segment { start, map })
    }

    pub fn end(&self) -> usize {
        self.start + self.map.len()
    }
}

/// The arena of a rank, as this rank sees it.
pub(super) struct Arena {
    pub file: File,
    /// Those that this rank has mapped: a part of those that its rank shows, from the first.
    pub segments: [OnceLock<Segment>; MAX_SEGMENTS],
}

impl Arena {
    pub fn new(file: File) -> Result<Arena> {
        let first = Segment::new(&file, 0, FIRST_SEGMENT).map_err(|error| map_failed(FIRST_SEGMENT, error))?;
        let arena = Arena { file, segments: std::array::from_fn(|_| OnceLock::new()) };
        // It is empty.
        let _set = arena.segments[0].set(first);
        Ok(arena)
    }

    pub fn mapped(&self) -> impl Iterator<Item = &Segment> {
        self.segments.iter().map_while(OnceLock::get)
    }

    pub fn header(&self) -> *mut u8 {
        self.segments[0].get().map_or(std::ptr::null_mut(), |first| first.map.as_mut_ptr())
    }

    /// The places of the segments after the first.
    pub fn shown(&self) -> &[ShownSegment; MAX_SEGMENTS] {
        // SAFETY: the end of the header, mapped as long as `self` lives; valid when zero, and all fields are atomics.
        unsafe { &*self.header().add(HEADER_BYTES - HEADER_SEGMENTS).cast() }
    }

    /// The address of `len` bytes at `offset`, if this rank has mapped them.
    pub fn address(&self, offset: usize, len: usize) -> Option<*mut u8> {
        let end = offset.checked_add(len)?;
        let segment = self.mapped().find(|segment| segment.start <= offset && end <= segment.end())?;
        Some(segment.map.as_mut_ptr().wrapping_add(offset - segment.start))
    }

    /// The offset of a range of addresses of this process. One that begins where a segment ends is in the next one, also if it
    /// is empty: the kernel may have mapped them side by side.
    pub fn offset(&self, range: &Range<usize>) -> Option<usize> {
        self.mapped().find_map(|segment| {
            let start = segment.map.as_ptr().addr();
            let end = start + segment.map.len();
            let is_inside = (start..end).contains(&range.start) && range.end <= end;
            is_inside.then(|| range.start - start + segment.start)
        })
    }

    /// Maps the segments that the rank of this arena has shown since.
    pub fn map_shown(&self) -> Result<()> {
        for (shown, mapped) in self.shown().iter().zip(&self.segments).skip(1) {
            let len = shown.len.load(Ordering::Acquire) as usize;
            if len == 0 {
                break;
            }
            if mapped.get().is_none() {
                let start = shown.start.load(Ordering::Relaxed) as usize;
                let segment = Segment::new(&self.file, start, len).map_err(|error| map_failed(len, error))?;
                // Another thread may have mapped it, too; then this map ends here.
                let _set = mapped.set(segment);
            }
        }
        Ok(())
    }
}

pub(super) fn map_failed(len: usize, error: std::io::Error) -> Error {
    Error::system(format!("mapping {} MiB of shared memory ({})", len.div_ceil(1 << 20), AddressSpace::now()), error)
}
