//! A shard's view of a chunk.

use smallvec::SmallVec;

use crate::topology::Topology;

/// A list by local rank: on the stack up to 16 ranks, else on the heap.
pub(crate) type PerRank<T> = SmallVec<[T; 16]>;

/// A shard's view of a chunk.
pub(crate) struct ShardView<'a> {
    /// The topology, with this rank's position.
    pub topology: &'a Topology,
    /// The number of the shard.
    pub shard: usize,
    /// The chunk.
    pub chunk: usize,
    /// All ranks' slots of the round, by local rank.
    pub slots: &'a [*mut u8],
    /// Where the shard's owner completes its slice: an address for the offset 0 of a slot.
    pub result: *mut u8,
    /// In so many parts reducers of the shard have reduced its slice for the host; 1: nobody has.
    pub parts: usize,
}

impl ShardView<'_> {
    /// All slots at offset `at`, by local rank.
    pub fn sources(&self, at: usize) -> PerRank<*const u8> {
        self.slots.iter().map(|slot| slot.wrapping_add(at).cast_const()).collect()
    }
}

/// A list for [`fill_sources`].
pub(crate) fn new_sources(ranks: usize) -> PerRank<*const u8> {
    PerRank::from_elem(std::ptr::null(), ranks)
}

/// Sets `list` to the addresses `at` bytes into all slots, by local rank, but `own.1` for that of rank `own.0`.
#[inline(always)]
pub(crate) fn fill_sources(slots: &[*mut u8], at: usize, own: (usize, *const u8), list: &mut [*const u8]) {
    for (source, slot) in list.iter_mut().zip(slots) {
        *source = slot.wrapping_add(at);
    }
    list[own.0] = own.1;
}
