//! Averages of tensors that the ranks of a host see in each other ([`crate::transport::arena`]): nothing is copied.
//!
//! In such a step a rank's slot holds the places of its tensors instead of their content. Every lane reads its slice of the
//! chunk in all ranks' tensors and writes the mean to all of them, by the additions of any other average: same bits.
//! Ranks whose memory is of both kinds see that in each other's notes, and take the step again with copies.

use std::ops::Range;

use super::{Job, Lane, Op, PerRank};
use crate::error::{Error, Result};
use crate::plan::ALIGN;
use crate::transport::arena::Shared;

/// The bytes of a tensor from which on its place is sure to be shorter than its content.
const LONG: usize = 16;

/// Whether the other ranks can read and write the tensors of `job`, and every chunk's places fit a slot.
pub(super) fn is_possible(job: &Job, shared: &dyn Shared) -> bool {
    let mut all_long = true;
    let mut visible = |bytes: Range<usize>| {
        all_long &= bytes.is_empty() || bytes.len() >= LONG;
        bytes.is_empty() || shared.locate(bytes).is_some()
    };
    job.op == Op::Average
        && !job.is_wide()
        && job.tensors(0).iter().all(|tensor| {
            let (read, written) = tensor.buffer.spans();
            read == written && visible(written)
        })
        && (all_long || (0..job.plan.chunks()).all(|chunk| places_fit(job, chunk)))
}

/// Whether the places of a chunk's tensors take no more of a slot than their content, which ends at a multiple of [`ALIGN`].
/// A bias or two among weights do; a list of nothing but tiny tensors does not, and is short.
fn places_fit(job: &Job, chunk: usize) -> bool {
    let len = job.plan.chunk_len(chunk);
    job.plan.pieces(chunk, 0..len).count() * size_of::<u64>() <= len.next_multiple_of(ALIGN)
}

/// Writes the places of the tensors of `chunk` to `slot`.
///
/// # Errors
/// [`Error::Internal`] for a tensor for which [`is_possible`] does not hold.
///
/// # Safety
/// `slot` is this rank's slot of the step, its to write.
pub(super) unsafe fn tell(job: &Job, chunk: usize, slot: *mut u8, shared: &dyn Shared) -> Result<()> {
    for (index, piece) in job.plan.pieces(chunk, 0..job.plan.chunk_len(chunk)).enumerate() {
        let place = shared.locate(job.tensors(0)[piece.tensor].buffer.spans().1).ok_or_else(unseen)?;
        // SAFETY: the places fit the slot: `is_possible` has counted them, or all but the first and the last are LONG.
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
    let whole = 0..job.plan.chunk_len(lane.chunk);
    let Some(first) = job.plan.pieces(lane.chunk, whole).next().map(|piece| piece.place) else { return Ok(()) };
    for piece in job.plan.pieces(lane.chunk, slice) {
        let dtype = job.tensors(0)[piece.tensor].buffer.dtype();
        let (skip, len) = (piece.first * dtype.size(), piece.count * dtype.size());
        let tensor = |(rank, slot): (usize, &*mut u8)| {
            // SAFETY: written by `tell` for the same pieces.
            let place = unsafe { slot.cast::<u64>().add(piece.place - first).read() };
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
