//! How a rank learns that others have something for it: a set of *notices*, one per rank of the host, and a bell.
//!
//! A rank that has changed anything in memory shared with another one gives it a notice. A receiver looks only at the
//! ranks whose notices are set. It clears them before it sleeps, and then looks at all once more. While a notice is
//! set, giving it again costs a fence and a load.
//! Zeroed memory is valid.

use std::time::Duration;

use super::line::Line;
use crate::error::{Error, Result};
use crate::transport::sync::{AtomicU32, AtomicU64, FutexWord, Ordering, fence};
use rustix::io::Errno;

/// Most ranks of a host.
pub const MAX_RANKS: usize = if cfg!(loom) { 4 } else { 2048 };
const WORDS: usize = MAX_RANKS.div_ceil(64);

/// What a rank shows to the ranks of its host.
#[repr(C)]
pub struct MailboxHeader {
    bell: Line<Bell>,
    notices: Line<[AtomicU64; WORDS]>,
    /// The offsets of the rings to each rank in the memory of this rank; 0 if there is none.
    pub(super) rings: Line<[AtomicU64; MAX_RANKS]>,
    /// Set when the rank sends no more messages.
    pub(super) departed: Line<AtomicU32>,
    /// The process: its number, and the address and value of its word; see [`super::process_memory`].
    process: Line<[AtomicU64; 3]>,
}

#[derive(Default)]
struct Bell {
    count: FutexWord,
    sleepers: AtomicU32,
}

impl MailboxHeader {
    /// Makes zeroed memory a header under Loom, whose atomics are invalid when zero.
    ///
    /// # Safety
    /// The memory is large enough, aligned, and not used yet.
    #[cfg(loom)]
    pub unsafe fn create(memory: *mut u8) {
        let (bell, departed, process) = Default::default();
        let notices = Line(std::array::from_fn(|_| AtomicU64::new(0)));
        let rings = Line(std::array::from_fn(|_| AtomicU64::new(0)));
        // SAFETY: guaranteed by the caller.
        unsafe { memory.cast::<MailboxHeader>().write(MailboxHeader { bell, notices, rings, departed, process }) };
    }

    /// Shows the process of this header's rank.
    pub(super) fn show_process(&self, pid: u32, address: u64, word: u64) {
        let [number, place, value] = &self.process.0;
        place.store(address, Ordering::Relaxed);
        value.store(word, Ordering::Relaxed);
        number.store(u64::from(pid), Ordering::Release);
    }

    /// The process of this header's rank, if it has shown it.
    pub(super) fn shown_process(&self) -> Option<(u64, u64, u64)> {
        let [number, place, value] = &self.process.0;
        let pid = number.load(Ordering::Acquire);
        (pid != 0).then(|| (pid, place.load(Ordering::Relaxed), value.load(Ordering::Relaxed)))
    }

    /// Tells this header's rank that rank `from` has changed something. The change is ordered before.
    #[inline]
    pub fn give_notice(&self, from: usize) {
        let (word, bit) = (&self.notices.0[from / 64], 1 << (from % 64));
        // Either this load sees the notice cleared, or the receiver's look after clearing it sees the change.
        fence(Ordering::SeqCst);
        if word.load(Ordering::Relaxed) & bit == 0 {
            word.fetch_or(bit, Ordering::AcqRel);
            self.ring_bell();
        }
    }

    /// Wakes this header's rank.
    pub fn ring_bell(&self) {
        self.bell.0.count.fetch_add(1, Ordering::AcqRel);
        // Either this load sees the sleeper, or its futex call sees the count.
        fence(Ordering::SeqCst);
        if self.bell.0.sleepers.load(Ordering::Relaxed) > 0 {
            self.bell.0.count.wake();
        }
    }

    /// The notices of ranks `64 * word` and following, a bit for each. For this header's rank.
    #[inline]
    pub fn notices(&self, word: usize) -> u64 {
        self.notices.0[word].load(Ordering::Relaxed)
    }

    /// Sets a notice again that this header's rank wants to keep.
    pub fn keep_notice(&self, from: usize) {
        self.notices.0[from / 64].fetch_or(1 << (from % 64), Ordering::Relaxed);
    }

    /// Clears all notices of the first `ranks` ranks, before a sleep. The caller must then look at the ranks that it
    /// returns, and only then [`MailboxHeader::sleep`] with the bell's value.
    pub fn before_sleep(&self, ranks: usize) -> (u32, Vec<usize>) {
        self.bell.0.sleepers.fetch_add(1, Ordering::Relaxed);
        let bell = self.bell.0.count.load(Ordering::Acquire);
        let mut cleared = Vec::new();
        for (index, word) in self.notices.0[..ranks.div_ceil(64)].iter().enumerate() {
            let bits = word.swap(0, Ordering::AcqRel);
            cleared.extend((0..64).filter(|bit| bits >> bit & 1 == 1).map(|bit| index * 64 + bit));
        }
        fence(Ordering::SeqCst);
        (bell, cleared)
    }

    /// Sleeps until the bell rings, for at most 50 ms.
    ///
    /// # Errors
    /// [`Error::System`] of the futex call.
    pub fn sleep(&self, bell: u32) -> Result<()> {
        ended(self.bell.0.count.futex_wait(bell))
    }

    /// Sleeps until the bell rings, for at most `nap`, which is less than a second.
    ///
    /// # Errors
    /// As for [`MailboxHeader::sleep`].
    pub fn nap(&self, bell: u32, nap: Duration) -> Result<()> {
        ended(self.bell.0.count.futex_nap(bell, nap.subsec_nanos()))
    }

    /// Ends what [`MailboxHeader::before_sleep`] has begun.
    pub fn after_sleep(&self) {
        self.bell.0.sleepers.fetch_sub(1, Ordering::Relaxed);
    }
}

fn ended(wait: std::result::Result<(), Errno>) -> Result<()> {
    match wait {
        Ok(()) | Err(Errno::AGAIN | Errno::INTR | Errno::TIMEDOUT) => Ok(()),
        Err(error) => Err(Error::system("futex wait", error)),
    }
}
