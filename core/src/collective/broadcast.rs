//! The root's values to all ranks and towers. Between hosts the root's host alone brings something to what is otherwise an
//! average; in pieces or halves that is a scatter and an all-gather (van de Geijn's broadcast for long vectors, Barnett et
//! al., 1994).

use std::ops::Range;
use std::ptr;

use super::{Between, Collective, Job, Lane, Op, Part};
use crate::topology::Topology;

pub(super) struct Broadcast;

/// The root's host and its local rank there.
fn root_place(job: &Job, topology: &Topology) -> (usize, usize) {
    let Op::Broadcast { root } = job.op else { return (0, 0) };
    topology.place(root).unwrap_or((0, 0))
}

impl Collective for Broadcast {
    unsafe fn pack(&self, job: &Job, topology: &Topology, chunk: usize, part: Range<usize>, slot: *mut u8) {
        if (topology.host(), topology.local_rank()) != root_place(job, topology) {
            return;
        }
        for piece in job.plan.pieces(chunk, part) {
            // SAFETY: the caller's memory is valid while the call runs; the slot is this rank's, and holds the chunk.
            unsafe {
                let bytes = job.tensors(0)[piece.tensor].buffer.bytes(piece.first, piece.count);
                ptr::copy_nonoverlapping(bytes.as_ptr(), slot.add(piece.offset), bytes.len());
            }
        }
    }

    fn stays(&self, _job: &Job) -> bool {
        false
    }

    unsafe fn combine(&self, job: &Job, lane: &Lane<'_>, slice: Range<usize>) {
        let (_, root) = root_place(job, lane.topology);
        // SAFETY: the slice is this lane's in all slots.
        unsafe { copy_slice(lane.slots[root], lane.own(), slice) };
    }

    unsafe fn take(&self, job: &Job, lane: &Lane<'_>) {
        let (_, root) = root_place(job, lane.topology);
        for piece in job.plan.pieces(lane.chunk, 0..job.plan.chunk_len(lane.chunk)) {
            for buffer in job.replicas(piece.tensor) {
                // SAFETY: the slots are read-only, and the tensors' memory is the call's.
                unsafe {
                    let to = buffer.bytes_mut(piece.first, piece.count);
                    ptr::copy_nonoverlapping(lane.slots[root].add(piece.offset), to.as_mut_ptr(), to.len());
                }
            }
        }
    }
}

impl Between for Broadcast {
    fn carried(&self, _job: &Job, _chunk: usize, piece: Range<usize>) -> usize {
        piece.len()
    }

    unsafe fn contribute(&self, job: &Job, lane: &Lane<'_>, piece: Range<usize>, out: &mut [u8]) -> bool {
        let (host, root) = root_place(job, lane.topology);
        if host != lane.topology.host() {
            return false;
        }
        let out = &mut out[..piece.len()];
        // SAFETY: the piece is this lane's in all slots.
        unsafe { ptr::copy_nonoverlapping(lane.slots[root].add(piece.start), out.as_mut_ptr(), piece.len()) };
        true
    }

    unsafe fn merge(&self, _job: &Job, _lane: &Lane<'_>, piece: Range<usize>, low: Part, high: Part, out: *mut u8) {
        if let Some(part) = low.or(high).filter(|&part| !ptr::eq(part, out)) {
            // SAFETY: the caller's promise: they do not overlap.
            unsafe { ptr::copy_nonoverlapping(part, out, piece.len()) };
        }
    }

    unsafe fn complete(&self, _job: &Job, lane: &Lane<'_>, piece: Range<usize>, low: Part, high: Part) {
        if let Some(part) = low.or(high) {
            // SAFETY: the piece of the own slot is this lane's.
            unsafe { ptr::copy_nonoverlapping(part, lane.own().add(piece.start), piece.len()) };
        }
    }
}

/// Copies `slice` from one slot to another; nothing when they are one.
///
/// # Safety
/// The slice is in both slots, and the caller's.
unsafe fn copy_slice(from: *mut u8, to: *mut u8, slice: Range<usize>) {
    if !ptr::eq(from, to) {
        // SAFETY: the caller's promise; different slots do not overlap.
        unsafe { ptr::copy_nonoverlapping(from.add(slice.start), to.add(slice.start), slice.len()) };
    }
}
