//! Allreduce (mean) over all ranks and towers.

use std::ops::Range;
use std::ptr;

use super::call::Call;
use super::phases::{Collective, InterHostOps, Partial, PerRank, ShardView};
use crate::reduce::Reduction;
use crate::topology::Topology;
use crate::wire_layout::ALIGN;

pub(super) struct Allreduce;

impl Collective for Allreduce {
    unsafe fn pack(&self, call: &Call, _topology: &Topology, chunk: usize, part: Range<usize>, slot: *mut u8) {
        for piece in call.layout.ranges(chunk, part) {
            let buffers = call.tower_buffers(piece.tensor);
            // SAFETY: the caller's memory is valid while the call runs; this rank owns the slot, which holds the chunk.
            unsafe {
                if call.wire_is_acc() {
                    let sources: Vec<*const u8> =
                        buffers.map(|buffer| buffer.bytes(piece.first, piece.count).as_ptr()).collect();
                    let reduction = call.reduction(call.tensors(0)[piece.tensor].buffer.dtype());
                    let from_elements = Reduction { wire_is_acc: false, ..reduction };
                    from_elements.sum(&sources, slot.add(piece.offset), piece.count);
                } else {
                    for buffer in buffers {
                        let bytes = buffer.bytes(piece.first, piece.count);
                        ptr::copy_nonoverlapping(bytes.as_ptr(), slot.add(piece.offset), bytes.len());
                    }
                }
            }
        }
    }

    fn reads_own_tensor(&self, call: &Call) -> bool {
        !call.wire_is_acc()
    }

    unsafe fn combine(&self, call: &Call, shard: &ShardView<'_>, slice: Range<usize>) {
        if self.reads_own_tensor(call) {
            let mut sources = PerRank::new();
            for piece in call.layout.ranges(shard.chunk, slice) {
                let buffer = &call.tensors(0)[piece.tensor].buffer;
                // SAFETY: this shard owns the range in all slots; the call owns the tensor's memory.
                unsafe {
                    let own = buffer.read_at(piece.first);
                    let outs = [shard.own().add(piece.offset), buffer.written_at(piece.first)];
                    shard.sources_with(piece.offset, own, &mut sources);
                    call.reduction(buffer.dtype()).mean(&sources, &outs, piece.count, call.divisor());
                }
            }
            return;
        }
        for run in call.layout.runs(shard.chunk, slice) {
            let reduction = call.reduction(run.dtype);
            let count = run.bytes.len() / reduction.wire_size();
            // SAFETY: the run has whole elements of the slice, which this shard owns in all slots.
            unsafe {
                let out = shard.own().add(run.bytes.start);
                reduction.mean(&shard.sources(run.bytes.start), &[out], count, call.divisor());
            }
        }
    }

    unsafe fn reduce_to_tensor(&self, call: &Call, shard: &ShardView<'_>) {
        let mut sources = PerRank::new();
        for piece in call.layout.ranges(shard.chunk, 0..call.layout.chunk_len(shard.chunk)) {
            let buffer = &call.tensors(0)[piece.tensor].buffer;
            // SAFETY: the slots are read-only; the call owns the tensor's memory.
            unsafe {
                shard.sources_with(piece.offset, buffer.read_at(piece.first), &mut sources);
                let out = [buffer.written_at(piece.first)];
                call.reduction(buffer.dtype()).mean(&sources, &out, piece.count, call.divisor());
            }
        }
    }
}

impl InterHostOps for Allreduce {
    fn partial_bytes(&self, call: &Call, chunk: usize, piece: Range<usize>) -> usize {
        parts(call, chunk, piece).last().map_or(0, |part| part.end())
    }

    unsafe fn contribute(&self, call: &Call, shard: &ShardView<'_>, piece: Range<usize>, out: &mut [u8]) -> bool {
        for part in parts(call, shard.chunk, piece) {
            // SAFETY: as in `combine`; slicing checks that the accumulators fit.
            unsafe { part.reduction.sum(&shard.sources(part.wire), out[part.at..part.end()].as_mut_ptr(), part.count) };
        }
        true
    }

    unsafe fn add_partials(
        &self,
        call: &Call,
        shard: &ShardView<'_>,
        piece: Range<usize>,
        low: Partial,
        high: Partial,
        out: *mut u8,
    ) {
        let (Some(low), Some(high)) = (low, high) else { return };
        for part in parts(call, shard.chunk, piece) {
            // The operands are accumulators.
            let reduction = Reduction { wire_is_acc: true, ..part.reduction };
            // SAFETY: the caller's promise; both operands are partial sums of this piece.
            unsafe { reduction.sum(&[low.add(part.at), high.add(part.at)], out.add(part.at), part.count) };
        }
    }

    unsafe fn finish_shard(
        &self,
        call: &Call,
        shard: &ShardView<'_>,
        piece: Range<usize>,
        low: Partial,
        high: Partial,
    ) {
        let accs: PerRank<*const u8> = [low, high].into_iter().flatten().collect();
        for part in parts(call, shard.chunk, piece) {
            let accs: PerRank<*const u8> = accs.iter().map(|acc| acc.wrapping_add(part.at)).collect();
            // SAFETY: as in `add_partials`; this shard owns the piece of its slot.
            unsafe { part.reduction.finish(&accs, &[shard.own().add(part.wire)], part.count, call.divisor()) };
        }
    }
}

/// Elements of one type in a host's partial sums.
pub(super) struct PartialRange {
    pub reduction: Reduction,
    pub count: usize,
    /// Offset of the elements in the chunk.
    pub wire: usize,
    /// Offset of their accumulators in the partial sums.
    pub at: usize,
}

impl PartialRange {
    /// Offset of the next accumulators.
    pub fn end(&self) -> usize {
        self.at + (self.count * self.reduction.acc_size()).next_multiple_of(ALIGN)
    }
}

/// The contents of a host's partial sums of `piece`.
pub(super) fn parts(call: &Call, chunk: usize, piece: Range<usize>) -> impl Iterator<Item = PartialRange> {
    let mut at = 0;
    call.layout.runs(chunk, piece).map(move |run| {
        let reduction = call.reduction(run.dtype);
        let elements =
            PartialRange { reduction, count: run.bytes.len() / reduction.wire_size(), wire: run.bytes.start, at };
        at = elements.end();
        elements
    })
}
