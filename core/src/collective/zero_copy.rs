//! Averages of tensors that the ranks of a host see in each other ([`crate::transport::arena`]): nothing is copied.
//!
//! In such a step a rank's slot holds the places of its tensors instead of their content. Every lane reads its slices in all
//! ranks' tensors and writes the mean to all of them, by the additions of any other average: same bits. Nothing is to be
//! waited for between chunks, so a channel takes all of its chunks in one step.
//! Ranks whose memory is of both kinds see that in each other's notes, and take the step again with copies.

use std::ops::Range;

use super::{Call, Op, PerRank, ShardView};
use crate::error::{Error, Result};
use crate::transport::arena::PeerMemory;

/// Whether the other ranks can read and write the tensors of `job`, and the places of all fit a slot.
pub(super) fn is_possible(job: &Call, shared: &dyn PeerMemory) -> bool {
    let visible = |bytes: Range<usize>| bytes.is_empty() || shared.offset_of(bytes).is_some();
    job.op == Op::Allreduce
        && !job.wire_is_acc()
        && job.layout.tensors().len() * size_of::<u64>() <= job.slot()
        && job.tensors(0).iter().all(|tensor| {
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
pub(super) unsafe fn post_addresses(job: &Call, slot: *mut u8, shared: &dyn PeerMemory) -> Result<()> {
    for (index, tensor) in job.layout.tensors().enumerate() {
        let place = shared.offset_of(job.tensors(0)[tensor].buffer.byte_ranges().1).ok_or_else(cannot_map)?;
        // SAFETY: the places fit the slot, which `is_possible` has checked.
        unsafe { slot.cast::<u64>().add(index).write(place) };
    }
    Ok(())
}

/// Completes `slice` of the lane's chunk in all ranks' tensors.
///
/// # Errors
/// [`Error::Internal`] when a place is none that this rank sees.
///
/// # Safety
/// All slots hold places, and the slice of all ranks' tensors is this lane's.
pub(super) unsafe fn combine(
    job: &Call,
    lane: &ShardView<'_>,
    slice: Range<usize>,
    shared: &dyn PeerMemory,
) -> Result<()> {
    for piece in job.layout.ranges(lane.chunk, slice) {
        let dtype = job.tensors(0)[piece.tensor].buffer.dtype();
        let (skip, len) = (piece.first * dtype.size(), piece.count * dtype.size());
        let tensor = |(rank, slot): (usize, &*mut u8)| {
            // SAFETY: written by `tell` for the same tensors.
            let place = unsafe { slot.cast::<u64>().add(piece.layout_index).read() };
            shared.resolve(rank, place.wrapping_add(skip as u64), len).ok_or_else(cannot_map)
        };
        let tensors: PerRank<*mut u8> = lane.slots.iter().enumerate().map(tensor).collect::<Result<_>>()?;
        let sources: PerRank<*const u8> = tensors.iter().map(|tensor| tensor.cast_const()).collect();
        // SAFETY: the caller's promise; the ranks' tensors are alike, as their signatures are.
        unsafe { job.reduction(dtype).mean(&sources, &tensors, piece.count, job.divisor()) };
    }
    Ok(())
}

fn cannot_map() -> Error {
    Error::Internal("a tensor is not where the ranks of the host see it".into())
}
