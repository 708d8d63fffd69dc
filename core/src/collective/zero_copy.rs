//! Zero-copy allreduce of tensors in peer memory ([`crate::transport::arena`]).
//!
//! In a zero-copy round a rank's slot holds the addresses of its tensors instead of their contents. Each shard reads
//! its slices in all ranks' tensors and writes the mean to all of them. The order of addition is that of any other
//! allreduce: same bits. Chunks need not wait for each other, so a channel runs all of its chunks in one round.
//! If only some ranks use peer memory, all ranks see that in the flags and repeat the round with copies.

use std::ops::Range;

use super::call::Call;
use super::shard::{PerRank, ShardView};
use crate::error::{Error, Result};
use crate::transport::arena::PeerMemory;
use crate::wire_layout::TensorRange;

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
        // SAFETY: the caller's promise.
        let tensors = unsafe { addresses(call, shard, &piece, shared) }?;
        let sources: PerRank<*const u8> = tensors.iter().map(|tensor| tensor.cast_const()).collect();
        let dtype = call.tensors(0)[piece.tensor].buffer.dtype();
        // SAFETY: the caller's promise; equal signatures mean equal tensors.
        unsafe { call.reduction(dtype).combine(&sources, &tensors, piece.count) };
    }
    Ok(())
}

/// The addresses of `piece` in the tensors of all ranks, by local rank.
///
/// # Errors
/// [`Error::Internal`] if this rank cannot access an address.
///
/// # Safety
/// All slots hold addresses.
pub(super) unsafe fn addresses(
    call: &Call,
    shard: &ShardView<'_>,
    piece: &TensorRange,
    shared: &dyn PeerMemory,
) -> Result<PerRank<*mut u8>> {
    let size = call.tensors(0)[piece.tensor].buffer.dtype().size();
    let (skip, len) = (piece.first * size, piece.count * size);
    let tensor = |(rank, slot): (usize, &*mut u8)| {
        // SAFETY: `post_addresses` wrote it for the same tensors.
        let address = unsafe { slot.cast::<u64>().add(piece.layout_index).read() };
        shared.resolve(rank, address.wrapping_add(skip as u64), len).ok_or_else(cannot_map)
    };
    shard.slots.iter().enumerate().map(tensor).collect()
}

fn cannot_map() -> Error {
    Error::Internal("a tensor is not in memory that the local ranks map".into())
}
