//! Zero-copy allreduce of tensors in peer memory ([`crate::transport::arena`]).
//!
//! In a zero-copy round a rank's slot holds the addresses of its tensors instead of their contents. Each shard reads
//! its slices in all ranks' tensors and writes the mean to all of them. The order of addition is that of any other
//! allreduce: same bits. Chunks need not wait for each other, so a channel runs all of its chunks in one round.
//! If only some ranks use peer memory, all ranks see that in the flags and repeat the round with copies.

use std::ops::Range;

use super::call::Call;
use super::channel::{Channel, out_of_sync};
use super::shard::{PerRank, ShardView};
use super::wire::shard_range;
use crate::error::{Error, Result};
use crate::timings::{Activity, PhaseTimer};
use crate::transport::arena::PeerMemory;
use crate::transport::{Phase, WaitContext};

impl Channel {
    /// Peer memory of the ranks, if all of them are on this host.
    pub(super) fn peer_memory(&self) -> Option<&dyn PeerMemory> {
        if self.topology.hosts() == 1 { self.shm.region().peer_memory() } else { None }
    }

    /// As `run_chunks` with zero copies: all chunks in one round.
    pub(super) fn run_chunks_zero_copy(
        &mut self,
        call: &Call,
        chunks: impl Iterator<Item = usize>,
        wait_ctx: &WaitContext<'_>,
    ) -> Result<()> {
        let mut chunks = chunks.peekable();
        if let Some(&first) = chunks.peek() {
            let step = self.pack(call, first, wait_ctx)?;
            self.shm.wait(Phase::Packed, step.seq, self.topology.local_size(), wait_ctx)?;
            if !self.shm.same_signatures(step.seq) {
                return Err(out_of_sync(call, first));
            }
            self.combine_zero_copy(call, step.seq, chunks, wait_ctx)?;
        }
        self.wait_reduced(wait_ctx)
    }

    /// Waits until the other ranks have written this rank's tensors.
    pub(super) fn wait_reduced(&mut self, wait_ctx: &WaitContext<'_>) -> Result<()> {
        self.shm.wait(Phase::Reduced, self.seq, self.topology.num_shards(), wait_ctx)
    }

    /// Reduces this shard's slice of these chunks in peer memory; ends the round.
    pub(super) fn combine_zero_copy(
        &mut self,
        call: &Call,
        seq: u32,
        chunks: impl IntoIterator<Item = usize>,
        wait_ctx: &WaitContext<'_>,
    ) -> Result<()> {
        if let (Some(shared), Some(shard_index)) = (self.peer_memory(), self.topology.shard()) {
            for chunk in chunks {
                let mut timer = PhaseTimer::start(wait_ctx.log(), call.layout.chunk_len(chunk));
                let shard = ShardView { topology: &self.topology, chunk, slots: self.shm.slots(seq) };
                // SAFETY: all slots hold addresses, so this shard owns its slice of all ranks' tensors.
                unsafe { combine(call, &shard, shard_range(&self.topology, call, chunk, shard_index), shared) }?;
                timer.end(Activity::Reduce);
            }
        }
        self.shm.raise(Phase::Reduced, seq);
        self.finish_round(seq);
        Ok(())
    }
}

/// Whether the other ranks can access the tensors of `call`, and a slot can hold all addresses.
pub(super) fn is_possible(call: &Call, shared: &dyn PeerMemory) -> bool {
    let visible = |bytes: Range<usize>| bytes.is_empty() || shared.offset_of(bytes).is_some();
    call.op.is_allreduce()
        && !call.wire_is_acc()
        && call.layout.tensors().len() * size_of::<u64>() <= call.slot()
        && call.tensors(0).iter().all(|tensor| {
            let (read, written) = tensor.buffer.byte_ranges();
            read == written && visible(written)
        })
}

/// Writes the addresses of all tensors to `slot`.
///
/// # Errors
/// [`Error::Internal`] for a tensor for which [`is_possible`] does not hold.
///
/// # Safety
/// This rank owns `slot` in this round.
pub(super) unsafe fn post_addresses(call: &Call, slot: *mut u8, shared: &dyn PeerMemory) -> Result<()> {
    for (index, tensor) in call.layout.tensors().enumerate() {
        let address = shared.offset_of(call.tensors(0)[tensor].buffer.byte_ranges().1).ok_or_else(cannot_map)?;
        // SAFETY: `is_possible` has checked that the addresses fit the slot.
        unsafe { slot.cast::<u64>().add(index).write(address) };
    }
    Ok(())
}

/// Completes `slice` of the shard's chunk in all ranks' tensors.
///
/// # Errors
/// [`Error::Internal`] if this rank cannot access an address.
///
/// # Safety
/// All slots hold addresses, and this shard owns the slice of all ranks' tensors.
pub(super) unsafe fn combine(
    call: &Call,
    shard: &ShardView<'_>,
    slice: Range<usize>,
    shared: &dyn PeerMemory,
) -> Result<()> {
    for piece in call.layout.ranges(shard.chunk, slice) {
        let dtype = call.tensors(0)[piece.tensor].buffer.dtype();
        let (skip, len) = (piece.first * dtype.size(), piece.count * dtype.size());
        let tensor = |(rank, slot): (usize, &*mut u8)| {
            // SAFETY: `post_addresses` wrote it for the same tensors.
            let address = unsafe { slot.cast::<u64>().add(piece.layout_index).read() };
            shared.resolve(rank, address.wrapping_add(skip as u64), len).ok_or_else(cannot_map)
        };
        let tensors: PerRank<*mut u8> = shard.slots.iter().enumerate().map(tensor).collect::<Result<_>>()?;
        let sources: PerRank<*const u8> = tensors.iter().map(|tensor| tensor.cast_const()).collect();
        // SAFETY: the caller's promise; equal signatures mean equal tensors.
        unsafe { call.reduction(dtype).combine(&sources, &tensors, piece.count) };
    }
    Ok(())
}

fn cannot_map() -> Error {
    Error::Internal("a tensor is not in memory that the local ranks map".into())
}
