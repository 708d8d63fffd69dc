//! The phases of a collective and their data.

use std::ops::Range;

use smallvec::SmallVec;

use super::call::Call;
use crate::topology::Topology;

/// The phases of a collective. All ranges are bytes of the chunk; slots are those of [`crate::transport::shm_region`].
pub(crate) trait Collective: InterHostOps {
    /// Copies this rank's input for `part` of chunk `chunk` into its slot.
    ///
    /// # Safety
    /// This rank owns `slot` in this round.
    unsafe fn pack(&self, call: &Call, topology: &Topology, chunk: usize, part: Range<usize>, slot: *mut u8);

    /// Whether, on a single host, a shard owner reads its slice from its tensors and writes the result there. It then
    /// neither packs nor unpacks that slice.
    fn reads_own_tensor(&self, call: &Call) -> bool;

    /// On a single host: reduces `slice` of all slots into this shard's slot, and also into the rank's tensors if
    /// [`Collective::reads_own_tensor`].
    ///
    /// # Safety
    /// This shard owns the slice of all slots; the call owns the rank's tensors.
    unsafe fn combine(&self, call: &Call, shard: &ShardView<'_>, slice: Range<usize>);

    /// On a single host, for a call without [`Call::wire_is_acc`]: reduces the whole chunk from all slots into this
    /// rank's tensors.
    ///
    /// # Safety
    /// All slots are read-only; the call owns the rank's tensors.
    unsafe fn reduce_to_tensor(&self, call: &Call, shard: &ShardView<'_>);
}

/// The operations of a collective between hosts. All ranges are bytes of the chunk.
pub(crate) trait InterHostOps: Sync {
    /// Bytes of a host's partial sums of `piece`; additive over adjacent pieces.
    fn partial_bytes(&self, call: &Call, chunk: usize, piece: Range<usize>) -> usize;

    /// Writes this host's partial sums of `piece`; false if it has none.
    ///
    /// # Safety
    /// This shard owns the slice of all slots that contains `piece`.
    unsafe fn contribute(&self, call: &Call, shard: &ShardView<'_>, piece: Range<usize>, out: &mut [u8]) -> bool;

    /// Adds two partial sums of `piece`, in the order `low`, `high`; does nothing if both are absent.
    ///
    /// # Safety
    /// The operands are valid for their lengths, and so is `out`, which equals one of them or overlaps neither.
    unsafe fn add_partials(
        &self,
        call: &Call,
        shard: &ShardView<'_>,
        piece: Range<usize>,
        low: Partial,
        high: Partial,
        out: *mut u8,
    );

    /// Completes `piece` in this shard's slot from the last two partial sums.
    ///
    /// # Safety
    /// As for `contribute` and `add_partials`.
    unsafe fn finish_shard(&self, call: &Call, shard: &ShardView<'_>, piece: Range<usize>, low: Partial, high: Partial);
}

/// Partial sums of a piece, if the hosts have data.
pub(crate) type Partial = Option<*const u8>;

/// A list by local rank: on the stack up to 16 ranks, else on the heap.
pub(crate) type PerRank<T> = SmallVec<[T; 16]>;

/// A shard's view of a chunk.
pub(crate) struct ShardView<'a> {
    /// The topology, with this rank's position.
    pub topology: &'a Topology,
    /// The chunk.
    pub chunk: usize,
    /// All ranks' slots of the round, by local rank.
    pub slots: &'a [*mut u8],
}

impl ShardView<'_> {
    /// The slot of the shard owner.
    pub fn own(&self) -> *mut u8 {
        self.slots[self.topology.local_rank()]
    }

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
