//! The memory of groups in the arenas of a host: control blocks, slots, and the directory by which the failure detector
//! finds the groups of all ranks.
//!
//! The first member on a host makes the control block; each member makes its slots. A member that frees a group may not
//! wait for the others, so memory is freed later, when all members of the host have left.
//! Thread rule: any thread.

use std::ops::Range;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::arena::HEADER_BYTES;
use super::arenas::Arenas;
use super::failure_detector::HostGroups;
use super::group_arenas::Holds;
use super::peer_memory::PeerMemory;
use super::region_control::RegionControl;
use super::region_layout::{RegionLayout, RegionMemory};
use crate::error::{Error, Result};
use crate::lock::lock;

/// How long a rank without memory waits for that of ended groups, which the other ranks free soon if they can.
const COLLECT_TIMEOUT: Duration = Duration::from_secs(1);
const COLLECT_INTERVAL: Duration = Duration::from_millis(10);

/// What a rank shows at the start of its arena.
#[repr(C)]
struct DirectoryHeader {
    /// The offset of the first block of the directory; 0 for none.
    directory: AtomicU64,
    /// The number of lost ranks of the job, in the arena of the host's first rank.
    num_lost: AtomicU32,
    lost: [AtomicU32; MAX_LOST],
}

/// The lost ranks that are kept; more fail the same groups.
const MAX_LOST: usize = 1000;
const _: () = assert!(size_of::<DirectoryHeader>() <= 4096 && 4096 < HEADER_BYTES);

/// A part of the directory of the groups whose control blocks this rank has made.
#[repr(C)]
struct Block {
    /// The offset of the next block; 0 for none.
    next: AtomicU64,
    entries: [Entry; 85],
}

/// A group in the directory.
#[repr(C)]
struct Entry {
    /// The hash of the group's key; 0 for a free entry.
    key: AtomicU64,
    /// The offset of the control block.
    control: AtomicU64,
    /// 1: the failure detector does not use the entry any more.
    done: AtomicU32,
}

/// The groups of this rank, and of the other ranks of its host.
pub struct GroupMemory {
    arenas: Arc<Arenas>,
    /// The local rank in the job, and the number of local ranks.
    me: usize,
    ranks: usize,
    /// Whether a failure detector reads the directory.
    monitored: bool,
    leaving: Mutex<Vec<Leaving>>,
}

/// The memory of a group that this rank has freed.
struct Leaving {
    control: RegionControl,
    rank_memory: Option<Memory>,
    holds: Holds,
    /// The control block and its entry, if this rank has made it.
    own: Option<ControlBlock>,
    released: bool,
}

/// Memory of this rank's arena.
struct Memory(*mut u8);

// SAFETY: addresses of an arena, which outlives them.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

/// A control block that this rank has made.
struct ControlBlock {
    memory: Memory,
    entry: Option<&'static Entry>,
}

/// A new control block, freed when it is dropped before [`GroupMemory::region`] takes it.
pub struct NewControl {
    groups: Arc<GroupMemory>,
    block: Option<ControlBlock>,
    offset: u64,
}

impl NewControl {
    /// How the other ranks of the host find the block.
    pub fn offset(&self) -> u64 {
        self.offset
    }
}

impl Drop for NewControl {
    fn drop(&mut self) {
        if let Some(block) = self.block.take() {
            self.groups.free_control(&block);
        }
    }
}

impl GroupMemory {
    /// The groups of local rank `me` of `ranks`. `monitored`: a failure detector reads the directories.
    pub fn new(arenas: Arc<Arenas>, me: usize, ranks: usize, monitored: bool) -> GroupMemory {
        GroupMemory { arenas, me, ranks, monitored, leaving: Mutex::default() }
    }

    /// The arenas.
    pub fn arenas(&self) -> &Arc<Arenas> {
        &self.arenas
    }

    fn header(&self, local_rank: usize) -> &DirectoryHeader {
        // SAFETY: the start of an arena is this header; valid when zero, and all fields are atomics.
        unsafe { &*self.arenas.header(local_rank).cast::<DirectoryHeader>() }
    }

    /// Allocates memory. If there is none, waits until the ranks of the host have freed what ended groups have left.
    fn alloc<T>(&self, alloc: impl Fn() -> Result<T>) -> Result<T> {
        let until = Instant::now() + COLLECT_TIMEOUT;
        loop {
            self.reap();
            match alloc() {
                Err(Error::System(_)) if Instant::now() < until => std::thread::sleep(COLLECT_INTERVAL),
                result => return result,
            }
        }
    }

    /// Makes the control block of a group with `members` (`None`: all ranks of the job).
    ///
    /// # Errors
    /// [`Error::System`] when there is not enough memory.
    pub fn create_control(self: &Arc<Self>, layout: RegionLayout, members: Option<&[u32]>) -> Result<NewControl> {
        let len = layout.control_bytes(members.map_or(0, <[u32]>::len));
        let memory = self.alloc(|| self.arenas.alloc_zeroed(len))?;
        let offset = self.arenas.offset_of(memory.addr()..memory.addr() + len);
        // SAFETY: new memory of this length, freed only when no rank uses it.
        unsafe { RegionControl::create(memory, layout, members) };
        let block = ControlBlock { memory: Memory(memory), entry: None };
        let offset = offset.ok_or_else(|| Error::Internal("an arena lost its memory".into()))?;
        Ok(NewControl { groups: Arc::clone(self), block: Some(block), offset })
    }

    /// The memory of a group. `local_ranks` are its ranks of this host by their local ranks in the job; the first has
    /// made the control block, at `offset`. It passes the block as `made`; `key` is the hash of the group's key.
    ///
    /// # Errors
    /// [`Error::Internal`] when there is no such block; [`Error::System`] when there is not enough memory.
    pub fn region(
        self: &Arc<Self>,
        key: u64,
        local_ranks: Vec<usize>,
        offset: u64,
        made: Option<NewControl>,
    ) -> Result<ArenaRegion> {
        let base = local_ranks.first().and_then(|&owner| self.arenas.resolve(owner, offset, 1));
        let base = base.ok_or_else(|| Error::Internal("a control block is not in shared memory".into()))?;
        // SAFETY: the owner has initialized it, and frees it only when all ranks of the host have released it.
        let control = unsafe { RegionControl::attach(base) };
        let mut own = made.and_then(|mut made| made.block.take());
        if let Some(block) = own.as_mut().filter(|_| self.monitored) {
            block.entry = Some(self.publish(key, offset)?);
        }
        Ok(ArenaRegion {
            groups: Arc::clone(self),
            control,
            base: Memory(base),
            local_ranks,
            own,
            rank_memory: Mutex::default(),
            holds: Holds::default(),
        })
    }

    /// Adds a group to the directory of this rank.
    fn publish(&self, key: u64, control: u64) -> Result<&'static Entry> {
        let _one_at_a_time = lock(&self.leaving);
        let mut link = &self.header(self.me).directory;
        let entry = loop {
            let mut offset = link.load(Ordering::Acquire);
            if offset == 0 {
                let memory = self.arenas.alloc_zeroed(size_of::<Block>())?;
                let range = memory.addr()..memory.addr() + size_of::<Block>();
                offset = self.arenas.offset_of(range).unwrap_or(0);
                link.store(offset, Ordering::Release);
            }
            let Some(block) = self.block(self.me, offset) else {
                return Err(Error::Internal("the directory of groups is damaged".into()));
            };
            match block.entries.iter().find(|entry| entry.key.load(Ordering::Relaxed) == 0) {
                Some(entry) => break entry,
                None => link = &block.next,
            }
        };
        // Who sees one of these sees that the entry was free: `visit` has the other half.
        fence(Ordering::Release);
        entry.control.store(control, Ordering::Relaxed);
        entry.done.store(0, Ordering::Relaxed);
        entry.key.store(key, Ordering::Release);
        Ok(entry)
    }

    /// A block of a directory; the blocks are never freed.
    fn block(&self, local_rank: usize, offset: u64) -> Option<&'static Block> {
        let memory = self.arenas.resolve(local_rank, offset, size_of::<Block>())?;
        // SAFETY: a block, valid when zero, of atomics. It is used only while the arenas live, which `self` keeps.
        Some(unsafe { &*memory.cast::<Block>() })
    }

    fn free_control(&self, block: &ControlBlock) {
        if let Some(entry) = block.entry {
            entry.key.store(0, Ordering::Release);
        }
        // SAFETY: no rank uses the block any more.
        unsafe { self.arenas.free_zeroed(block.memory.0) };
    }

    /// Frees the memory of groups that all ranks of the host have left.
    pub fn reap(&self) {
        let mut leaving = lock(&self.leaving);
        leaving.retain_mut(|group| {
            if !group.released {
                if !group.control.all_left() {
                    return true;
                }
                if let Some(memory) = group.rank_memory.take() {
                    // SAFETY: no rank uses the memory of others any more.
                    unsafe { self.arenas.free_zeroed(memory.0) };
                }
                lock(&group.holds).clear();
                group.control.release();
                group.released = true;
            }
            let Some(own) = &group.own else { return false };
            let is_done = own.entry.is_none_or(|entry| entry.done.load(Ordering::Acquire) == 1);
            if !is_done || !group.control.all_released() {
                return true;
            }
            self.free_control(own);
            false
        });
    }

    /// The ranks of the job that are lost, as a failure detector has reported.
    pub fn lost_ranks(&self) -> impl Iterator<Item = usize> {
        let header = self.header(0);
        let count = (header.num_lost.load(Ordering::Acquire) as usize).min(MAX_LOST);
        header.lost[..count].iter().map(|lost| lost.load(Ordering::Relaxed) as usize)
    }

    /// The groups that this rank has freed and whose memory is not free yet.
    #[cfg(test)]
    fn num_leaving(&self) -> usize {
        lock(&self.leaving).len()
    }
}

impl HostGroups for GroupMemory {
    fn visit(&self, visit: &mut dyn FnMut(u64, &RegionControl) -> bool) {
        for local_rank in 0..self.ranks {
            let mut offset = self.header(local_rank).directory.load(Ordering::Acquire);
            while let Some(block) = (offset != 0).then(|| self.block(local_rank, offset)).flatten() {
                for entry in &block.entries {
                    let key = entry.key.load(Ordering::Acquire);
                    if key == 0 || entry.done.load(Ordering::Relaxed) == 1 {
                        continue;
                    }
                    let control = entry.control.load(Ordering::Relaxed);
                    // Its owner may have freed and published it again meanwhile: the next visit finds the new group. Until
                    // `done` is set it does not.
                    fence(Ordering::Acquire);
                    if entry.key.load(Ordering::Relaxed) != key {
                        continue;
                    }
                    let control = self.arenas.resolve(local_rank, control, 1);
                    // SAFETY: a control block that its owner keeps until `done` is set.
                    let is_done = control.is_none_or(|base| visit(key, &unsafe { RegionControl::attach(base) }));
                    if is_done {
                        entry.done.store(1, Ordering::Release);
                    }
                }
                offset = block.next.load(Ordering::Acquire);
            }
        }
    }

    fn add_lost(&self, rank: usize) {
        let header = self.header(0);
        let count = header.num_lost.load(Ordering::Relaxed) as usize;
        if let Some(entry) = header.lost.get(count) {
            entry.store(u32::try_from(rank).unwrap_or(u32::MAX), Ordering::Relaxed);
            header.num_lost.fetch_add(1, Ordering::Release);
        }
    }
}

/// The memory of a group in the arenas of a host.
pub struct ArenaRegion {
    groups: Arc<GroupMemory>,
    control: RegionControl,
    base: Memory,
    /// By local rank in the group: the local rank in the job.
    local_ranks: Vec<usize>,
    own: Option<ControlBlock>,
    rank_memory: Mutex<Option<Memory>>,
    holds: Holds,
}

impl ArenaRegion {
    /// What is kept until all ranks of the group have left.
    pub fn holds(&self) -> Holds {
        Arc::clone(&self.holds)
    }
}

/// What else to do about too little memory.
fn with_hint(error: Error) -> Error {
    match error {
        Error::System(text) => Error::System(format!("{text}; or set DL_COMM_CHUNK_KB or the number of threads lower")),
        other => other,
    }
}

impl RegionMemory for ArenaRegion {
    fn control(&self) -> *mut u8 {
        self.base.0
    }

    fn make(&self, _me: usize, len: usize) -> Result<u64> {
        let arenas = &self.groups.arenas;
        let memory = self.groups.alloc(|| arenas.alloc_addresses(len)).map_err(with_hint)?;
        *lock(&self.rank_memory) = Some(Memory(memory));
        let offset = arenas.offset_of(memory.addr()..memory.addr() + len);
        offset.ok_or_else(|| Error::Internal("an arena lost its memory".into()))
    }

    fn reserve(&self, part: Range<usize>) -> Result<()> {
        let memory = lock(&self.rank_memory).as_ref().map(|memory| memory.0);
        let memory = memory.ok_or_else(|| Error::Internal("the memory of the rank is not made".into()))?;
        let reserved = self.groups.alloc(|| self.groups.arenas.reserve_part(memory, &part));
        reserved.map_err(with_hint)
    }

    fn collect(&self) {
        self.groups.reap();
    }

    fn of_rank(&self, rank: usize, place: u64, len: usize) -> Option<*mut u8> {
        self.groups.arenas.resolve(self.local_ranks[rank], place, len)
    }
}

impl Drop for ArenaRegion {
    fn drop(&mut self) {
        self.control.leave();
        let rank_memory = lock(&self.rank_memory).take();
        let (holds, own) = (Arc::clone(&self.holds), self.own.take());
        let leaving = Leaving { control: self.control, rank_memory, holds, own, released: false };
        lock(&self.groups.leaving).push(leaving);
        self.groups.reap();
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::transport::shm;

    const LAYOUT: RegionLayout = RegionLayout { ranks: 2, channels: 2, slot: 4096, window: 2, fan_out: None };

    /// The groups of two ranks of a host, as each of them sees them.
    fn two_ranks() -> [Arc<GroupMemory>; 2] {
        let files: Vec<_> = (0..2).map(|_| shm::create("/dev/shm", 2).unwrap()).collect();
        [0, 1].map(|me| {
            let opened = files.iter().map(|(_, name, _)| shm::open(name.path()).unwrap()).collect();
            let arenas = Arenas::new(opened, me, files[me].2).unwrap();
            Arc::new(GroupMemory::new(Arc::new(arenas), me, 2, true))
        })
    }

    /// A group of both ranks, made by rank 1 as the first member.
    fn make(ranks: &[Arc<GroupMemory>; 2], key: u64) -> [ArenaRegion; 2] {
        let made = ranks[1].create_control(LAYOUT, Some(&[1, 0])).unwrap();
        let offset = made.offset();
        let first = ranks[1].region(key, vec![1, 0], offset, Some(made)).unwrap();
        [first, ranks[0].region(key, vec![1, 0], offset, None).unwrap()]
    }

    fn keys(groups: &GroupMemory) -> Vec<u64> {
        let mut keys = Vec::new();
        groups.visit(&mut |key, control| {
            keys.push(key);
            assert!(control.contains(0) && control.contains(1) && !control.contains(2));
            false
        });
        keys
    }

    #[test]
    fn the_memory_of_a_rank_is_seen_by_the_other() {
        let ranks = two_ranks();
        let group = make(&ranks, 7);
        let len = LAYOUT.rank_bytes();
        for (me, other) in [(0, 1), (1, 0)] {
            let place = group[me].make(me, len).unwrap();
            let (mine, theirs) =
                (group[me].of_rank(me, place, len).unwrap(), group[other].of_rank(me, place, len).unwrap());
            assert_ne!(mine, theirs, "two maps of one file");
            // SAFETY: `len` bytes of both maps.
            unsafe {
                mine.add(len - 1).write_volatile(me as u8 + 1);
                assert_eq!(theirs.add(len - 1).read_volatile(), me as u8 + 1);
            }
        }
        assert_eq!(keys(&ranks[0]), [7], "the failure detector of rank 0 finds a group that rank 1 has made");
    }

    #[test]
    fn memory_is_freed_when_all_ranks_have_left_in_any_order() {
        let ranks = two_ranks();
        let used = |rank: usize| ranks[rank].arenas.used_bytes();
        let group = make(&ranks, 1);
        drop(group);
        ranks[0].visit(&mut |_, _| true);
        ranks[0].reap();
        ranks[1].reap();
        let before = [used(0), used(1)];
        for key in 1..500 {
            let [first, second] = make(&ranks, key);
            first.make(0, LAYOUT.rank_bytes()).unwrap();
            second.make(1, LAYOUT.rank_bytes()).unwrap();
            if key % 2 == 0 {
                drop(first);
                drop(second);
            } else {
                drop(second);
                drop(first);
            }
            // The failure detector reports the departures.
            ranks[0].visit(&mut |_, _| true);
            ranks[0].reap();
            ranks[1].reap();
            ranks[0].reap();
            ranks[1].reap();
            assert_eq!([ranks[0].num_leaving(), ranks[1].num_leaving()], [0, 0]);
        }
        assert_eq!([used(0), used(1)], before);
        assert!(keys(&ranks[0]).is_empty());
    }

    #[test]
    fn a_directory_has_no_limit() {
        let ranks = two_ranks();
        let groups: Vec<_> = (1..=300).map(|key| make(&ranks, key)).collect();
        assert_eq!(keys(&ranks[0]), (1..=300).collect::<Vec<_>>());
        drop(groups);
    }

    #[test]
    fn a_control_block_of_a_failed_creation_is_freed() {
        let ranks = two_ranks();
        let before = ranks[0].arenas.used_bytes();
        drop(ranks[0].create_control(LAYOUT, None).unwrap());
        drop(ranks[0].create_control(LAYOUT, None).unwrap());
        assert!(ranks[0].arenas.used_bytes() <= before + 16 * 4096, "at most a slab is kept");
    }

    #[test]
    fn lost_ranks_are_known_to_all_ranks_of_the_host() {
        let ranks = two_ranks();
        assert_eq!(ranks[1].lost_ranks().count(), 0);
        ranks[0].add_lost(7);
        ranks[0].add_lost(9);
        assert_eq!(ranks[1].lost_ranks().collect::<Vec<_>>(), [7, 9]);
    }
}
