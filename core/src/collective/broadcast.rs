//! The root's values to all ranks and towers. Between hosts: scatter of the pieces from the root's host, then all-gather
//! (van de Geijn's broadcast for long vectors, Barnett et al., 1994).

use std::ops::Range;
use std::ptr;

use super::{Collective, Job, Lane, Op};
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

    unsafe fn scatter(&self, job: &Job, lane: &Lane<'_>, piece: Range<usize>, out: &mut [u8]) -> usize {
        let (host, root) = root_place(job, lane.topology);
        if host != lane.topology.host() {
            return 0;
        }
        let len = piece.len();
        // SAFETY: the piece is this lane's in all slots; the slicing checks that it fits.
        unsafe { ptr::copy_nonoverlapping(lane.slots[root].add(piece.start), out[..len].as_mut_ptr(), len) };
        len
    }

    unsafe fn complete(&self, job: &Job, lane: &Lane<'_>, piece: Range<usize>, parts: &[*const u8]) {
        let (host, _) = root_place(job, lane.topology);
        // SAFETY: the root's host scattered as many bytes; the piece of the own slot is this lane's.
        unsafe { ptr::copy_nonoverlapping(parts[host], lane.own().add(piece.start), piece.len()) };
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
