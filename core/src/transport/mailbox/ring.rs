//! A ring of cells in shared memory, from one rank to another: one producer, one consumer.
//!
//! A cell starts with a line of 64 bytes: the number that makes it ready, the envelope, and the data of a short message.
//! So a short message moves one cache line. The receiver shows what it has taken every few cells only. Numbers start
//! shortly before they wrap, as in [`crate::transport::counter`]. Zeroed memory is an empty ring.
//! Ownership: a cell belongs to the sender until it is ready, then to the receiver until it shows it as taken.
//! Thread rule: each end is used by one thread at a time.

use std::cell::UnsafeCell;

use super::line::Line;
use crate::transport::counter::START;
use crate::transport::sync::{AtomicU32, AtomicU64, Ordering, check_read, check_write, fence};

/// Number of cells, a power of two.
pub(super) const CELLS: u32 = if cfg!(loom) { 2 } else { 16 };
/// The receiver shows what it has taken after this many cells.
const SHOWN_EVERY: u32 = CELLS / 2;
/// Data of a message that its cell holds, in bytes.
pub const CELL_BYTES: usize = if cfg!(loom) { 64 } else { 4096 };
/// Data in the first line of a cell, in bytes.
const LINE_BYTES: usize = 32;
/// Long messages of a ring that may be under way at once.
pub const LONG_SLOTS: usize = if cfg!(loom) { 1 } else { 16 };

/// A long message: its data is not in its cell.
pub const LONG: u16 = 1;

/// What a cell says about its message.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Envelope {
    /// The group.
    pub context: u64,
    /// Length of the message in bytes.
    pub total: u64,
    /// The tag.
    pub tag: u32,
    /// 0 or [`LONG`].
    pub kind: u16,
    /// The element types, for the receiver to compare.
    pub types: u16,
}

/// The announcement of a long message, in the first line of its cell.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LongEnvelope {
    /// Numbers the long messages of a ring.
    pub id: u64,
    /// The offset of the data in the sender's shared memory, plus 1; 0 if they are not there.
    pub place: u64,
    /// The index of its [`LongState`] in the ring.
    pub slot: u32,
    /// Bytes after the first line: what the receiver needs to open the data, if they are in the memory of a device.
    pub exported: u32,
    /// The address of the data in the sender's process; 0 if they are in several pieces.
    pub address: u64,
}

/// How far a long message is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum LongState {
    /// The slot is not used.
    Free = 0,
    /// The sender has announced it.
    Announced = 1,
    /// A receive has matched it, and copies from its place.
    Copying = 2,
    /// A receive has matched it, and wants its data in parts.
    Streaming = 3,
    /// The receiver has the data.
    Done = 4,
    /// The sender gave up.
    Aborted = 5,
    /// The receiver gave up.
    Refused = 6,
}

impl LongState {
    fn of(value: u32) -> LongState {
        use LongState::{Aborted, Announced, Copying, Done, Free, Refused, Streaming};
        [Free, Announced, Copying, Streaming, Done, Aborted]
            .into_iter()
            .find(|&state| state as u32 == value)
            .unwrap_or(Refused)
    }
}

/// The data of the first line.
type LineData = [u64; LINE_BYTES / 8];

#[repr(C, align(64))]
struct Cell {
    /// The distance of the message's number from [`START`], plus 1.
    ready: AtomicU32,
    envelope: UnsafeCell<Envelope>,
    line: UnsafeCell<LineData>,
    data: UnsafeCell<Data>,
}

#[repr(C, align(64))]
struct Data([u8; CELL_BYTES]);

/// The shared part of a ring.
#[repr(C)]
pub struct Ring {
    cells: [Cell; CELLS as usize],
    /// Written by the receiver: the distance of what it has taken from [`START`].
    taken: Line<AtomicU32>,
    /// Set by a sender that waits for `taken`.
    wants_room: Line<AtomicU32>,
    longs: Line<[AtomicU32; LONG_SLOTS]>,
    /// The offset of the staging area in the sender's shared memory; 0 if there is none.
    pub(super) staging: Line<AtomicU64>,
}

// SAFETY: the data of a cell is accessed by its owner only, see above.
unsafe impl Sync for Ring {}

impl Ring {
    /// Makes `memory` a ring.
    ///
    /// # Safety
    /// The memory is zero, large enough, aligned to 64 bytes, and lives as long as the ring is used.
    pub(super) unsafe fn create<'a>(memory: *mut u8) -> &'a Ring {
        let ring = memory.cast::<Ring>();
        // Loom's atomics are invalid when zero.
        #[cfg(loom)]
        // SAFETY: guaranteed by the caller.
        unsafe {
            let cell = || Cell {
                ready: AtomicU32::new(0),
                envelope: UnsafeCell::default(),
                line: UnsafeCell::default(),
                data: UnsafeCell::new(Data([0; CELL_BYTES])),
            };
            let cells = std::array::from_fn(|_| cell());
            let (taken, wants_room, longs) = Default::default();
            ring.write(Ring { cells, taken, wants_room, longs, staging: Line::default() });
        }
        // SAFETY: guaranteed by the caller; zero is valid.
        unsafe { &*ring }
    }

    fn cell(&self, number: u32) -> &Cell {
        &self.cells[(number % CELLS) as usize]
    }

    /// The state of the long message with this slot.
    pub fn long_state(&self, slot: usize) -> LongState {
        LongState::of(self.longs.0[slot].load(Ordering::Acquire))
    }

    /// Changes the state of a long message if it is `from`; returns the state that it has otherwise.
    ///
    /// # Errors
    /// The other state.
    pub fn change_long(&self, slot: usize, from: LongState, to: LongState) -> Result<(), LongState> {
        let state = &self.longs.0[slot];
        let changed = state.compare_exchange(from as u32, to as u32, Ordering::AcqRel, Ordering::Acquire);
        changed.map(drop).map_err(LongState::of)
    }

    /// Sets the state of a long message.
    pub fn set_long(&self, slot: usize, to: LongState) {
        self.longs.0[slot].store(to as u32, Ordering::Release);
    }
}

/// The sender's end.
pub struct RingSender {
    ring: &'static Ring,
    next: u32,
    /// What the receiver had taken when the sender last looked.
    taken: u32,
}

impl RingSender {
    /// The end of a new ring.
    pub(super) fn new(ring: &'static Ring) -> RingSender {
        RingSender { ring, next: START, taken: START }
    }

    /// The shared part.
    pub fn ring(&self) -> &'static Ring {
        self.ring
    }

    /// Whether a message can be put into a cell. If not, the receiver rings for this rank once there is room.
    pub fn has_room(&mut self) -> bool {
        if self.next.wrapping_sub(self.taken) < CELLS || self.look() {
            return true;
        }
        self.ring.wants_room.0.store(1, Ordering::Relaxed);
        // Either this look sees the cells taken, or the receiver sees the wish.
        fence(Ordering::SeqCst);
        self.look()
    }

    fn look(&mut self) -> bool {
        self.taken = self.ring.taken.0.load(Ordering::Acquire).wrapping_add(START);
        self.next.wrapping_sub(self.taken) < CELLS
    }

    /// Sends a message of up to [`CELL_BYTES`], which `fill` writes. The caller then rings for the receiver.
    ///
    /// # Safety
    /// There is room. `fill` writes `len` bytes at the address that it gets.
    pub unsafe fn send(&mut self, envelope: Envelope, len: usize, fill: impl FnOnce(*mut u8)) {
        debug_assert!(len <= CELL_BYTES);
        let cell = self.ring.cell(self.next);
        let to = if len <= LINE_BYTES { cell.line.get().cast::<u8>() } else { cell.data.get().cast::<u8>() };
        check_write(cell.envelope.get().cast(), size_of::<Envelope>());
        // SAFETY: the cell has room, so it belongs to the sender.
        unsafe { cell.envelope.get().write(envelope) };
        if len > 0 {
            check_write(to, len);
            fill(to);
        }
        cell.ready.store(self.next.wrapping_sub(START).wrapping_add(1), Ordering::Release);
        self.next = self.next.wrapping_add(1);
    }

    /// Announces a long message, with up to [`CELL_BYTES`] of `exported`. The caller then rings for the receiver.
    ///
    /// # Safety
    /// There is room.
    pub unsafe fn announce(&mut self, envelope: Envelope, long: LongEnvelope, exported: &[u8]) {
        debug_assert!(exported.len() <= CELL_BYTES && exported.len() == long.exported as usize);
        let envelope = Envelope { kind: LONG, ..envelope };
        if !exported.is_empty() {
            let data = self.ring.cell(self.next).data.get().cast::<u8>();
            check_write(data, exported.len());
            // SAFETY: the cell has room, so it belongs to the sender.
            unsafe { data.copy_from_nonoverlapping(exported.as_ptr(), exported.len()) };
        }
        // SAFETY: guaranteed by the caller; the announcement fits the line, which is aligned for it.
        unsafe { self.send(envelope, size_of::<LongEnvelope>(), |to| to.cast::<LongEnvelope>().write(long)) };
    }
}

/// The receiver's end.
pub struct RingReceiver {
    ring: &'static Ring,
    next: u32,
}

/// A message in its cell.
pub struct Arrived {
    /// What the cell says about it.
    pub envelope: Envelope,
    /// The data, or the [`LongEnvelope`].
    pub data: *const u8,
    /// What is after the first line.
    rest: *const u8,
}

impl Arrived {
    /// The announcement of a long message.
    pub fn long(&self) -> LongEnvelope {
        debug_assert_eq!(self.envelope.kind, LONG);
        check_read(self.data, size_of::<LongEnvelope>());
        // SAFETY: written by `announce`.
        unsafe { self.data.cast::<LongEnvelope>().read() }
    }

    /// What was exported with the announcement `long`.
    pub fn exported(&self, long: &LongEnvelope) -> &[u8] {
        let len = (long.exported as usize).min(CELL_BYTES);
        if len > 0 {
            check_read(self.rest, len);
        }
        // SAFETY: the cell has these bytes.
        unsafe { std::slice::from_raw_parts(self.rest, len) }
    }
}

impl RingReceiver {
    /// The end of a new ring.
    pub(super) fn new(ring: &'static Ring) -> RingReceiver {
        RingReceiver { ring, next: START }
    }

    /// The shared part.
    pub fn ring(&self) -> &'static Ring {
        self.ring
    }

    /// The next message, if there is one. It stays in its cell until [`RingReceiver::take`].
    #[inline]
    pub fn peek(&self) -> Option<Arrived> {
        let cell = self.ring.cell(self.next);
        if cell.ready.load(Ordering::Acquire) != self.next.wrapping_sub(START).wrapping_add(1) {
            return None;
        }
        check_read(cell.envelope.get().cast(), size_of::<Envelope>());
        // SAFETY: the cell is ready.
        let envelope = unsafe { cell.envelope.get().read() };
        let in_line = envelope.kind == LONG || envelope.total <= LINE_BYTES as u64;
        let rest = cell.data.get().cast::<u8>().cast_const();
        let data = if in_line { cell.line.get().cast::<u8>() } else { rest };
        Some(Arrived { envelope, data, rest })
    }

    /// Gives the cell of the peeked message back. Returns whether the sender waits for room, and must be rung for.
    pub fn take(&mut self) -> bool {
        self.next = self.next.wrapping_add(1);
        // `START` is a multiple of this too.
        if !self.next.is_multiple_of(SHOWN_EVERY) {
            return false;
        }
        self.ring.taken.0.store(self.next.wrapping_sub(START), Ordering::Release);
        fence(Ordering::SeqCst);
        let wants = self.ring.wants_room.0.load(Ordering::Relaxed) == 1;
        if wants {
            self.ring.wants_room.0.store(0, Ordering::Relaxed);
        }
        wants
    }
}
