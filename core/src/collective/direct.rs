//! Averages of tensors that the ranks of a host see in each other ([`crate::transport::arena`]): nothing is copied.
//!
//! In such a step a rank's slot holds the places of its tensors instead of their content. Every lane reads its slices in all
//! ranks' tensors and writes the mean to all of them, by the additions of any other average: same bits. Nothing is to be
//! waited for between chunks, so a channel takes all of its chunks in one step.
//! Ranks whose memory is of both kinds see that in each other's notes, and take the step again with copies.

use std::ops::Range;

use super::{Job, Lane, Op, PerRank};
use crate::error::{Error, Result};
use crate::transport::arena::Shared;

/// Whether the other ranks can read and write the tensors of `job`, and the places of all fit a slot.
pub(super) fn is_possible(job: &Job, shared: &dyn Shared) -> bool {
    let visible = |bytes: Range<usize>| bytes.is_empty() || shared.locate(bytes).is_some();
    job.op == Op::Average
        && !job.is_wide()
        && job.plan.tensors().len() * size_of::<u64>() <= job.slot()
        && job.tensors(0).iter().all(|tensor| {
            let (read, written) = tensor.buffer.spans();
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
pub(super) unsafe fn tell(job: &Job, slot: *mut u8, shared: &dyn Shared) -> Result<()> {
    for (index, tensor) in job.plan.tensors().enumerate() {
        let place = shared.locate(job.tensors(0)[tensor].buffer.spans().1).ok_or_else(unseen)?;
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
pub(super) unsafe fn combine(job: &Job, lane: &Lane<'_>, slice: Range<usize>, shared: &dyn Shared) -> Result<()> {
    for piece in job.plan.pieces(lane.chunk, slice) {
        let dtype = job.tensors(0)[piece.tensor].buffer.dtype();
        let (skip, len) = (piece.first * dtype.size(), piece.count * dtype.size());
        let tensor = |(rank, slot): (usize, &*mut u8)| {
            // SAFETY: written by `tell` for the same tensors.
            let place = unsafe { slot.cast::<u64>().add(piece.place).read() };
            shared.at(rank, place.wrapping_add(skip as u64), len).ok_or_else(unseen)
        };
        let tensors: PerRank<*mut u8> = lane.slots.iter().enumerate().map(tensor).collect::<Result<_>>()?;
        let sources: PerRank<*const u8> = tensors.iter().map(|tensor| tensor.cast_const()).collect();
        // SAFETY: the caller's promise; the ranks' tensors are alike, as their signatures are.
        unsafe { job.reduction(dtype).mean(&sources, &tensors, piece.count, job.divisor()) };
    }
    Ok(())
}

fn unseen() -> Error {
    Error::Internal("a tensor is not where the ranks of the host see it".into())
}
