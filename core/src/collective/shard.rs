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
}

impl ShardView<'_> {
    /// All slots at offset `at`, by local rank.
    pub fn sources(&self, at: usize) -> PerRank<*const u8> {
        self.slots.iter().map(|slot| slot.wrapping_add(at).cast_const()).collect()
    }

    /// As `sources`, with `own` for this rank's slot, built in place in `list`: moving them slows small messages.
    pub fn sources_with(&self, at: usize, own: *const u8, list: &mut PerRank<*const u8>) {
        list.clear();
        list.extend(self.slots.iter().map(|slot| slot.wrapping_add(at).cast_const()));
        list[self.topology.local_rank()] = own;
    }
}
