//! The staging area of a ring: parts of long messages whose data is in private memory. The sender copies into free
//! parts, the receiver copies out of filled ones, in order.
//!
//! Counters start shortly before they wrap. Zeroed memory is an empty area.
//! Thread rule: each end is used by one thread at a time.

use std::cell::UnsafeCell;

use super::line::Line;
use crate::transport::counter::START;
use crate::transport::sync::{AtomicU32, Ordering, check_read, check_write};

/// Number of parts, a power of two.
const PARTS: u32 = if cfg!(loom) { 2 } else { 8 };
/// Size of a part in bytes. All parts fit a second-level cache.
pub const PART_BYTES: usize = if cfg!(loom) { 64 } else { 64 << 10 };

/// What a part holds.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PartInfo {
    /// The number of the long message.
    pub id: u64,
    /// Where its bytes belong in the message.
    pub offset: u64,
    /// Number of bytes.
    pub len: u64,
}

/// The shared part of a staging area.
#[repr(C)]
pub struct Staging {
    /// Distances from [`START`].
    filled: Line<AtomicU32>,
    emptied: Line<AtomicU32>,
    infos: [Line<UnsafeCell<PartInfo>>; PARTS as usize],
    data: UnsafeCell<[Part; PARTS as usize]>,
}

impl PartInfo {
    /// The length of the part at `offset` of a message of `total` bytes: short enough that both ends work at once.
    pub fn len_at(offset: usize, total: usize) -> usize {
        let len = (total / 4).next_multiple_of(4096).clamp(4 * 4096, PART_BYTES.max(4 * 4096)).min(PART_BYTES);
        len.min(total - offset)
    }
}

#[repr(C, align(4096))]
struct Part([u8; PART_BYTES]);

// SAFETY: a part is accessed by its owner only.
unsafe impl Sync for Staging {}

impl Staging {
    /// Makes `memory` a staging area.
    ///
    /// # Safety
    /// As for [`super::ring::Ring::create`]; aligned to 4096 bytes.
    pub(super) unsafe fn create<'a>(memory: *mut u8) -> &'a Staging {
        let staging = memory.cast::<Staging>();
        // Loom's atomics are invalid when zero.
        #[cfg(loom)]
        // SAFETY: guaranteed by the caller.
        unsafe {
            (&raw mut (*staging).filled).write(Line::default());
            (&raw mut (*staging).emptied).write(Line::default());
        }
        // SAFETY: guaranteed by the caller; zero is valid.
        unsafe { &*staging }
    }

    fn part(&self, number: u32) -> (*mut PartInfo, *mut u8) {
        let index = (number % PARTS) as usize;
        // Only an address: no reference to a part that the other end owns.
        let data = self.data.get().cast::<u8>().wrapping_add(index * PART_BYTES);
        (self.infos[index].0.get(), data)
    }
}

/// The sender's end.
pub struct StagingSender {
    staging: &'static Staging,
    next: u32,
}

impl StagingSender {
    /// The end of a new area.
    pub(super) fn new(staging: &'static Staging) -> StagingSender {
        StagingSender { staging, next: START }
    }

    /// Whether a part is free. The receiver rings for the sender after each part.
    pub fn has_room(&self) -> bool {
        let emptied = self.staging.emptied.0.load(Ordering::Acquire).wrapping_add(START);
        self.next.wrapping_sub(emptied) < PARTS
    }

    /// Sends a part, which `fill` writes. The caller then rings for the receiver.
    ///
    /// # Safety
    /// A part is free. `fill` writes `info.len` bytes, up to [`PART_BYTES`], at the address that it gets.
    pub unsafe fn send(&mut self, info: PartInfo, fill: impl FnOnce(*mut u8)) {
        let (place, data) = self.staging.part(self.next);
        check_write(place.cast(), size_of::<PartInfo>());
        // SAFETY: the part is free, so it belongs to the sender.
        unsafe { place.write(info) };
        check_write(data, info.len as usize);
        fill(data);
        self.next = self.next.wrapping_add(1);
        self.staging.filled.0.store(self.next.wrapping_sub(START), Ordering::Release);
    }
}

/// The receiver's end.
pub struct StagingReceiver {
    staging: &'static Staging,
    next: u32,
}

impl StagingReceiver {
    /// The end of a new area.
    pub(super) fn new(staging: &'static Staging) -> StagingReceiver {
        StagingReceiver { staging, next: START }
    }

    /// The next part and its data, if it is filled. It stays until [`StagingReceiver::take`].
    pub fn peek(&self) -> Option<(PartInfo, *const u8)> {
        if self.staging.filled.0.load(Ordering::Acquire).wrapping_add(START) == self.next {
            return None;
        }
        let (place, data) = self.staging.part(self.next);
        check_read(place.cast(), size_of::<PartInfo>());
        // SAFETY: the part is filled.
        Some((unsafe { place.read() }, data))
    }

    /// Gives the peeked part back. The caller then rings for the sender.
    pub fn take(&mut self) {
        self.next = self.next.wrapping_add(1);
        self.staging.emptied.0.store(self.next.wrapping_sub(START), Ordering::Release);
    }
}
