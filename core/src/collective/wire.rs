//! The bytes of a chunk in the slots: slices of the shards, pieces of the hosts, elements. Pure.

use std::ops::Range;

use super::blocks::{Counts, gathered_shard};
use super::call::Call;
use super::operation::Pattern;
use crate::topology::Topology;
use crate::wire_layout::{DtypeRun, TensorRange, slice};

/// The slice of a chunk that `shard` completes, in bytes of a slot; empty in an exchange.
pub(super) fn shard_range(topology: &Topology, call: &Call, chunk: usize, shard: usize) -> Range<usize> {
    match call.op.pattern() {
        Pattern::Line => slice(0..call.layout.chunk_len(chunk), shard, topology.num_shards()),
        Pattern::Gather => compartments(call, gathered_shard(topology, shard)),
        Pattern::Scatter => compartments(call, topology.shard_indices(shard)),
        Pattern::Exchange => 0..0,
    }
}

/// The piece of a shard's slice `bytes` that belongs to `host`: an equal part of the line, or the blocks of its ranks.
pub(super) fn host_piece(
    topology: &Topology,
    call: &Call,
    bytes: &Range<usize>,
    shard: usize,
    host: usize,
) -> Range<usize> {
    let indices = topology.shard_indices_of(shard, host);
    match call.op.pattern() {
        Pattern::Line => slice(bytes.clone(), host, topology.hosts()),
        Pattern::Gather => {
            let (blocks, first) = (gathered_shard(topology, shard).start, topology.shard_indices(shard).start);
            compartments(call, blocks + indices.start - first..blocks + indices.end - first)
        }
        Pattern::Scatter => compartments(call, indices),
        Pattern::Exchange => 0..0,
    }
}

fn compartments(call: &Call, range: Range<usize>) -> Range<usize> {
    range.start * call.compartment()..range.end * call.compartment()
}

/// The elements in bytes `range` of the slice of `shard`, by ascending offset. `range` is cut at compartments, or in a line at
/// multiples of [`crate::wire_layout::ALIGN`].
pub(super) fn runs<'a>(
    call: &'a Call,
    topology: &'a Topology,
    shard: usize,
    chunk: usize,
    range: Range<usize>,
) -> impl Iterator<Item = DtypeRun> + 'a {
    let is_line = call.op.pattern() == Pattern::Line;
    let line = is_line.then(|| call.layout.runs(chunk, range.clone())).into_iter().flatten();
    // The ranks of the blocks: in a scatter all, in a gather those of the shard.
    let (first, start) = match call.op.pattern() {
        Pattern::Gather => (topology.shard_indices(shard).start, gathered_shard(topology, shard).start),
        _ => (0, 0),
    };
    let stride = call.compartment();
    let blocks = if is_line { 0..0 } else { range.start / stride..range.end / stride };
    let blocks = blocks.flat_map(move |compartment| {
        let (from, valid) =
            (compartment * stride, block_len(call, topology.shard_order()[first + compartment - start], chunk));
        call.layout.runs(chunk, 0..call.layout.chunk_len(chunk)).filter_map(move |run| {
            let end = run.bytes.end.min(valid);
            let bytes = from + run.bytes.start..from + end;
            (run.bytes.start < end).then_some(DtypeRun { dtype: run.dtype, bytes })
        })
    });
    line.chain(blocks)
}

/// Bytes of chunk `chunk` of the block of `rank` in a gather or scatter.
fn block_len(call: &Call, rank: usize, chunk: usize) -> usize {
    match call.counts() {
        Counts::Even => call.layout.chunk_len(chunk),
        _ => {
            let elements = match call.op.pattern() {
                Pattern::Gather => call.received(0, rank, rank),
                _ => call.sent(0, rank, rank),
            };
            let bytes = elements.len() * call.tensors(0)[0].buffer.dtype().size();
            bytes.saturating_sub(chunk * call.layout.chunk_size()).min(call.layout.chunk_size())
        }
    }
}

/// The parts of chunk `chunk` of a block whose elements of each tensor are `elements`. Offsets are relative to the
/// block's compartment, `first` to the tensor's memory.
pub(super) fn block_ranges(
    call: &Call,
    chunk: usize,
    elements: impl Fn(usize) -> Range<usize>,
) -> impl Iterator<Item = TensorRange> {
    block_part(call, chunk, 0..call.layout.chunk_len(chunk), elements)
}

/// As [`block_ranges`], of bytes `part` of the chunk, cut as in [`crate::wire_layout::WireLayout::ranges`].
pub(super) fn block_part(
    call: &Call,
    chunk: usize,
    part: Range<usize>,
    elements: impl Fn(usize) -> Range<usize>,
) -> impl Iterator<Item = TensorRange> {
    call.layout.ranges(chunk, part).filter_map(move |piece| {
        let block = elements(piece.tensor);
        let count = (piece.first + piece.count).min(block.len()).saturating_sub(piece.first);
        (count > 0).then_some(TensorRange { first: block.start + piece.first, count, ..piece })
    })
}
