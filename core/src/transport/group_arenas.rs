//! The memory of a group's ranks on a host outside of the group's own region: their arenas, and their private memory if
//! the system lets the processes copy out of it.
//!
//! Thread rule: any thread.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use super::arenas::{Arenas, Hold};
use super::mailbox::memory::arena_header;
use super::mailbox::process_memory;
use super::peer_memory::{DirectCopies, PeerMemory};
use crate::error::Result;
use crate::lock::lock;

/// The memory that the ranks of a group on a host share outside of its region: the arenas, by local rank in the group.
pub struct GroupArenas {
    arenas: Arc<Arenas>,
    local_ranks: Vec<usize>,
    /// The processes of the ranks, if all of them can access each other's private memory.
    processes: Option<Vec<i32>>,
    /// Whether the only rank of the group on this host shares all of its memory, with itself: calls between hosts then read
    /// and write its tensors wherever they are.
    is_alone: bool,
    has_failed: AtomicBool,
    holds: Holds,
}

/// Memory that ranks of a failed group may still access, until all of them have left.
pub type Holds = Arc<Mutex<Vec<Hold>>>;

impl GroupArenas {
    /// The arenas of the group's ranks on this host, which have the local ranks `local_ranks` in the job. `processes`:
    /// the result of [`readable_processes`], if every rank of the group has one. After a failure, what the others may still
    /// access is added to `holds`.
    pub fn new(arenas: Arc<Arenas>, local_ranks: Vec<usize>, processes: Option<Vec<i32>>, holds: Holds) -> GroupArenas {
        GroupArenas { arenas, local_ranks, processes, is_alone: false, has_failed: AtomicBool::new(false), holds }
    }

    /// Of a group on several hosts.
    pub fn between_hosts(self) -> GroupArenas {
        GroupArenas { is_alone: self.local_ranks.len() == 1, ..self }
    }

    fn process(&self, local_rank: usize) -> Option<i32> {
        self.processes.as_ref()?.get(local_rank).copied()
    }
}

/// The processes of the ranks with the local ranks `local_ranks` in the job, if this process can access their memory and
/// there are several.
pub fn readable_processes(arenas: &Arenas, local_ranks: &[usize]) -> Option<Vec<i32>> {
    let process = |&rank: &usize| process_memory::readable(arena_header(arenas, rank));
    local_ranks.iter().map(process).collect::<Option<_>>().filter(|_| local_ranks.len() > 1)
}

impl PeerMemory for GroupArenas {
    fn offset_of(&self, range: Range<usize>) -> Option<u64> {
        if self.is_alone { Some(range.start as u64) } else { self.arenas.offset_of(range) }
    }

    fn resolve(&self, local_rank: usize, offset: u64, len: usize) -> Option<*mut u8> {
        if self.is_alone {
            return usize::try_from(offset).ok().map(std::ptr::with_exposed_provenance_mut);
        }
        self.arenas.resolve(*self.local_ranks.get(local_rank)?, offset, len)
    }

    fn direct_copies(&self) -> DirectCopies {
        DirectCopies { possible: true, always: false, private: self.processes.is_some() }
    }

    unsafe fn read_private(&self, local_rank: usize, address: u64, to: *mut u8, len: usize) -> bool {
        // SAFETY: guaranteed by the caller.
        self.process(local_rank).is_some_and(|pid| unsafe { process_memory::read(pid, address, to, len) }.is_ok())
    }

    fn quarantine(&self) {
        self.has_failed.store(true, Ordering::Release);
    }

    fn hold(&self, range: Range<usize>) {
        lock(&self.holds).extend(self.arenas.hold(&range));
    }

    fn alloc_zeroed(&self, len: usize) -> Result<*mut u8> {
        self.arenas.alloc_zeroed(len)
    }

    unsafe fn free_zeroed(&self, memory: *mut u8) {
        if self.has_failed.load(Ordering::Acquire) {
            self.hold(memory.addr()..memory.addr());
        }
        // SAFETY: the caller's promise.
        unsafe { self.arenas.free_zeroed(memory) };
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::transport::shm;

    #[test]
    fn a_rank_that_is_alone_on_its_host_shares_all_of_its_memory_with_itself() {
        let files: Vec<_> = (0..2).map(|_| shm::create("/dev/shm", 2).unwrap()).collect();
        let opened = files.iter().map(|(_, name, _)| shm::open(name.path()).unwrap()).collect();
        let arenas = Arc::new(Arenas::new(opened, 0, files[0].2).unwrap());
        let of = |local_ranks: Vec<usize>| GroupArenas::new(Arc::clone(&arenas), local_ranks, None, Holds::default());
        let private = [7u8; 100];
        let range = private.as_ptr().addr()..private.as_ptr().addr() + 100;
        private.as_ptr().expose_provenance();
        for group in [of(vec![0]), of(vec![0, 1]), of(vec![0, 1]).between_hosts()] {
            assert_eq!(group.offset_of(range.clone()), None, "other ranks, or no other host");
        }
        let alone = of(vec![0]).between_hosts();
        let offset = alone.offset_of(range).unwrap();
        let found = alone.resolve(0, offset + 10, 90).unwrap();
        assert_eq!(found.addr(), private[10..].as_ptr().addr());
        // SAFETY: these bytes of the array.
        assert_eq!(unsafe { found.read() }, 7);
    }
}
