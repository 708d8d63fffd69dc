//! Averages of tensors that the ranks of a host see in each other ([`crate::transport::arena`]): nothing is copied.
//!
//! In such a step a rank's slot holds the places of its tensors instead of their content. Every shard reads its slices in all
//! ranks' tensors and writes the mean to all of them, by the additions of any other average: same bits. Nothing is to be
//! waited for between chunks, so a channel takes all of its chunks in one step.
//! Ranks whose memory is of both kinds see that in each other's notes, and take the step again with copies.

use std::ops::Range;

use super::call::{Call, Op};
use super::phases::{PerRank, ShardView};
use crate::error::{Error, Result};
use crate::transport::arena::PeerMemory;

/// Whether the other ranks can read and write the tensors of `call`, and the places of all fit a slot.
pub(super) fn is_possible(call: &Call, shared: &dyn PeerMemory) -> bool {
    let visible = |bytes: Range<usize>| bytes.is_empty() || shared.offset_of(bytes).is_some();
    call.op == Op::Allreduce
        && !call.wire_is_acc()
        && call.layout.tensors().len() * size_of::<u64>() <= call.slot()
        && call.tensors(0).iter().all(|tensor| {
            let (read, written) = tensor.buffer.byte_ranges();
            read == written && visible(written)
        })
}

/// Writes the places of all tensors to `slot`.
///
/// # Errors
/// [`Error::Internal`] for a tensor for which [`is_possible`] does not hold.
///
/// # Safety
/// `slot` is this rank's slot of the step, its to write.
pub(super) unsafe fn post_addresses(call: &Call, slot: *mut u8, shared: &dyn PeerMemory) -> Result<()> {
    for (index, tensor) in call.layout.tensors().enumerate() {
        let place = shared.offset_of(call.tensors(0)[tensor].buffer.byte_ranges().1).ok_or_else(cannot_map)?;
        // SAFETY: the places fit the slot, which `is_possible` has checked.
        unsafe { slot.cast::<u64>().add(index).write(place) };
    }
    Ok(())
}

/// Completes `slice` of the shard's chunk in all ranks' tensors.
///
/// # Errors
/// [`Error::Internal`] when a place is none that this rank sees.
///
/// # Safety
/// All slots hold places, and the slice of all ranks' tensors is this shard's.
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
            // SAFETY: written by `tell` for the same tensors.
            let place = unsafe { slot.cast::<u64>().add(piece.layout_index).read() };
            shared.resolve(rank, place.wrapping_add(skip as u64), len).ok_or_else(cannot_map)
        };
        let tensors: PerRank<*mut u8> = shard.slots.iter().enumerate().map(tensor).collect::<Result<_>>()?;
        let sources: PerRank<*const u8> = tensors.iter().map(|tensor| tensor.cast_const()).collect();
        // SAFETY: the caller's promise; the ranks' tensors are alike, as their signatures are.
        unsafe { call.reduction(dtype).mean(&sources, &tensors, piece.count, call.divisor()) };
    }
    Ok(())
}

fn cannot_map() -> Error {
    Error::Internal("a tensor is not in memory that the local ranks map".into())
}
