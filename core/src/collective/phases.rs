//! The phases that every collective has, and the data that they work on.

use std::ops::Range;

use smallvec::SmallVec;

use super::call::Call;
use crate::topology::Topology;

/// What tells the collectives apart. All ranges are bytes of the chunk; slots are as in [`crate::transport::region`].
pub(crate) trait Collective: InterHostOps {
    /// Copies what this rank brings to `part` of chunk `chunk` into its slot.
    ///
    /// # Safety
    /// `slot` is this rank's slot of the step, its to write.
    unsafe fn pack(&self, call: &Call, topology: &Topology, chunk: usize, part: Range<usize>, slot: *mut u8);

    /// On one host, whether a shard's driver takes its own part of its shard's slice from its tensors, and puts the result
    /// there: then it need not pack or unpack that slice.
    fn reads_own_tensor(&self, call: &Call) -> bool;

    /// On one host: completes `slice` from all slots into this shard's slot, and, where that slice of the rank's own
    /// tensors [stays](Collective::stays), into these.
    ///
    /// # Safety
    /// The slice of all slots is this shard's, and the rank's tensors are the call's.
    unsafe fn combine(&self, call: &Call, shard: &ShardView<'_>, slice: Range<usize>);

    /// On one host, for a call that is not [wide](Job::is_wide): the results of the whole chunk from all slots into this
    /// rank's tensors.
    ///
    /// # Safety
    /// All slots are read-only, and the rank's tensors are the call's.
    unsafe fn reduce_to_tensor(&self, call: &Call, shard: &ShardView<'_>);
}

/// What the shards of a host do with other hosts: what [`inter_host`] needs of a collective. All ranges are bytes of the chunk.
pub(crate) trait InterHostOps: Sync {
    /// The bytes that a host's part of `piece` takes; that of two pieces side by side is as long as theirs.
    fn partial_bytes(&self, call: &Call, chunk: usize, piece: Range<usize>) -> usize;

    /// Writes this host's part of `piece`; false when it has none.
    ///
    /// # Safety
    /// The slice of all slots that `piece` is in is this shard's.
    unsafe fn contribute(&self, call: &Call, shard: &ShardView<'_>, piece: Range<usize>, out: &mut [u8]) -> bool;

    /// Makes one part of two of the same `piece`, `low` being that of the hosts that come first; nothing when
    /// neither is there.
    ///
    /// # Safety
    /// The parts are valid for what they carry, as is `out`, which is one of them or overlaps neither.
    unsafe fn add_partials(
        &self,
        call: &Call,
        shard: &ShardView<'_>,
        piece: Range<usize>,
        low: Partial,
        high: Partial,
        out: *mut u8,
    );

    /// Completes `piece` into this shard's slot from the last two parts.
    ///
    /// # Safety
    /// As for `contribute` and `merge`.
    unsafe fn finish_shard(&self, call: &Call, shard: &ShardView<'_>, piece: Range<usize>, low: Partial, high: Partial);
}

/// What hosts bring to a piece, if they have anything.
pub(crate) type Partial = Option<*const u8>;

/// The ranks of a host, for lists on the stack; longer lists go to the heap.
pub(crate) type PerRank<T> = SmallVec<[T; 16]>;

/// A shard at work on a chunk.
pub(crate) struct ShardView<'a> {
    /// Where the rank is.
    pub topology: &'a Topology,
    /// The chunk.
    pub chunk: usize,
    /// All ranks' slots of the step, by local rank.
    pub slots: &'a [*mut u8],
}

impl ShardView<'_> {
    /// The slot of this shard's driver.
    pub fn own(&self) -> *mut u8 {
        self.slots[self.topology.local_rank()]
    }

    /// The slots from byte `at`, by local rank.
    pub fn sources(&self, at: usize) -> PerRank<*const u8> {
        self.slots.iter().map(|slot| slot.wrapping_add(at).cast_const()).collect()
    }

    /// The same with `own` in place of this rank's slot, put into `list`, where they stay: a short call would notice if they
    /// were moved.
    pub fn sources_with(&self, at: usize, own: *const u8, list: &mut PerRank<*const u8>) {
        list.clear();
        list.extend(self.slots.iter().map(|slot| slot.wrapping_add(at).cast_const()));
        list[self.topology.local_rank()] = own;
    }
}
