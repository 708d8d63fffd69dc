//! The bytes of a chunk in the slots: slices of the shards, pieces of the hosts, elements. Pure.

use std::ops::Range;

use super::blocks::gathered_shard;
use super::call::Call;
use super::operation::Pattern;
use crate::topology::Topology;
use crate::wire_layout::{DtypeRun, TensorRange, WireLayout, slice};

/// The slice of a chunk that `shard` completes, in bytes of a slot; empty in an exchange.
pub(super) fn shard_range(topology: &Topology, call: &Call, chunk: usize, shard: usize) -> Range<usize> {
    match call.op.pattern() {
        Pattern::Line => slice(0..call.layout.chunk_len(chunk), shard, topology.num_shards()),
        Pattern::Gather => compartments(call, gathered_shard(topology, shard)),
        Pattern::Scatter => compartments(call, topology.shard_indices(shard)),
        Pattern::Exchange => 0..0,
    }
}

/// The number of reducers of the slice of `shard` on this host. Short slices have one, and those with accumulators that are
/// wider than elements: other reducers leave partial results in the place of elements.
pub(super) fn num_parts(topology: &Topology, call: &Call, chunk: usize, shard: usize) -> usize {
    let reducers = topology.num_reducers(shard);
    if reducers == 1 || call.op.pattern() != Pattern::Line || !call.op.collective.reduces {
        return 1;
    }
    let bytes = shard_range(topology, call, chunk, shard);
    let widens = |run: DtypeRun| call.reduction(run.dtype).widens();
    let alone = bytes.len() <= call.owner_alone() || runs(call, topology, shard, chunk, bytes).any(widens);
    if alone { 1 } else { reducers }
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
        let (from, rank) = (compartment * stride, topology.shard_order()[first + compartment - start]);
        let layout = call.block_layout(rank, rank);
        let at = move |bytes: Range<usize>| from + bytes.start..from + bytes.end;
        let runs = layout.runs(chunk, 0..layout.chunk_len(chunk));
        runs.map(move |DtypeRun { dtype, bytes }| DtypeRun { dtype, bytes: at(bytes) })
    });
    line.chain(blocks)
}

/// The parts of chunk `chunk` of a block with this layout whose elements of each tensor are `elements`. Offsets are
/// relative to the block's compartment, `first` to the tensor's memory.
pub(super) fn block_ranges(
    layout: &WireLayout,
    chunk: usize,
    elements: impl Fn(usize) -> Range<usize>,
) -> impl Iterator<Item = TensorRange> {
    block_part(layout, chunk, 0..layout.chunk_len(chunk), elements)
}

/// As [`block_ranges`], of bytes `part` of the chunk, cut as in [`WireLayout::ranges`].
pub(super) fn block_part(
    layout: &WireLayout,
    chunk: usize,
    part: Range<usize>,
    elements: impl Fn(usize) -> Range<usize>,
) -> impl Iterator<Item = TensorRange> {
    layout
        .ranges(chunk, part)
        .map(move |piece| TensorRange { first: elements(piece.tensor).start + piece.first, ..piece })
}
