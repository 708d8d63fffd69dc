//! The mean of every tensor over all ranks and towers.

use std::ops::Range;
use std::ptr;

use super::{Collective, Job, Lane};
use crate::topology::Topology;

pub(super) struct Average;

impl Collective for Average {
    unsafe fn pack(&self, job: &Job, _topology: &Topology, chunk: usize, part: Range<usize>, slot: *mut u8) {
        for piece in job.plan.pieces(chunk, part) {
            let buffers = job.replicas(piece.tensor);
            // SAFETY: the caller's memory is valid while the call runs; the slot is this rank's, and holds the chunk.
            unsafe {
                if job.is_wide() {
                    let sources: Vec<*const u8> =
                        buffers.map(|buffer| buffer.bytes(piece.first, piece.count).as_ptr()).collect();
                    let reduction = job.reduction(job.tensors(0)[piece.tensor].buffer.dtype());
                    let native = crate::reduce::Reduction { wide: false, ..reduction };
                    native.sum(&sources, slot.add(piece.offset), piece.count);
                } else {
                    for buffer in buffers {
                        let bytes = buffer.bytes(piece.first, piece.count);
                        ptr::copy_nonoverlapping(bytes.as_ptr(), slot.add(piece.offset), bytes.len());
                    }
                }
            }
        }
    }

    fn stays(&self, job: &Job) -> bool {
        !job.is_wide()
    }

    unsafe fn combine(&self, job: &Job, lane: &Lane<'_>, slice: Range<usize>) {
        if self.stays(job) {
            for piece in job.plan.pieces(lane.chunk, slice) {
                let buffer = &job.tensors(0)[piece.tensor].buffer;
                // SAFETY: the piece is this lane's in all slots, and the tensor's memory is the call's.
                unsafe {
                    let own = buffer.read_at(piece.first);
                    let outs = [lane.own().add(piece.offset), buffer.written_at(piece.first)];
                    let sources = lane.sources_with(piece.offset, own);
                    job.reduction(buffer.dtype()).mean(&sources, &outs, piece.count, job.divisor());
                }
            }
            return;
        }
        for run in job.plan.runs(lane.chunk, slice) {
            let reduction = job.reduction(run.dtype);
            let count = run.bytes.len() / reduction.wire_size();
            // SAFETY: the run is whole elements of the slice, which is this lane's in all slots.
            unsafe {
                let out = lane.own().add(run.bytes.start);
                reduction.mean(&lane.sources(run.bytes.start), &[out], count, job.divisor());
            }
        }
    }

    unsafe fn take(&self, job: &Job, lane: &Lane<'_>) {
        for piece in job.plan.pieces(lane.chunk, 0..job.plan.chunk_len(lane.chunk)) {
            let buffer = &job.tensors(0)[piece.tensor].buffer;
            // SAFETY: the slots are read-only, and the tensor's memory is the call's.
            unsafe {
                let sources = lane.sources_with(piece.offset, buffer.read_at(piece.first));
                let out = [buffer.written_at(piece.first)];
                job.reduction(buffer.dtype()).mean(&sources, &out, piece.count, job.divisor());
            }
        }
    }

    unsafe fn scatter(&self, job: &Job, lane: &Lane<'_>, piece: Range<usize>, out: &mut [u8]) -> usize {
        let mut written = 0;
        for run in job.plan.runs(lane.chunk, piece) {
            let reduction = job.reduction(run.dtype);
            let count = run.bytes.len() / reduction.wire_size();
            let end = written + count * reduction.acc_size();
            // SAFETY: as in `combine`; the slicing below checks that the accumulators fit.
            unsafe { reduction.sum(&lane.sources(run.bytes.start), out[written..end].as_mut_ptr(), count) };
            written = end.next_multiple_of(crate::plan::ALIGN);
        }
        written
    }

    unsafe fn complete(&self, job: &Job, lane: &Lane<'_>, piece: Range<usize>, parts: &[*const u8]) {
        let mut read = 0;
        for run in job.plan.runs(lane.chunk, piece) {
            let reduction = job.reduction(run.dtype);
            let count = run.bytes.len() / reduction.wire_size();
            let accs: Vec<*const u8> = parts.iter().map(|part| part.wrapping_add(read)).collect();
            // SAFETY: every part was written by `scatter` for the same runs; the slot's piece is this lane's.
            unsafe { reduction.finish(&accs, &[lane.own().add(run.bytes.start)], count, job.divisor()) };
            read = (read + count * reduction.acc_size()).next_multiple_of(crate::plan::ALIGN);
        }
    }
}
