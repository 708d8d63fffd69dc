//! The parts of tensors that a rank copies or reduces in a call: where they are in the tensors and in the slots. Pure.

use std::ops::Range;

use super::blocks::{gathered, received, scattered};
use super::call::Call;
use super::operation::Pattern;
use super::wire::block_ranges;
use crate::topology::Topology;
use crate::wire_layout::TensorRange;

/// Bytes of a tensor, and their other place: where an input goes, or where an output comes from.
#[derive(Debug, Clone, Copy)]
pub(super) struct Part {
    /// The tensor's index in the caller's list.
    pub tensor: usize,
    /// The first byte in the tensor.
    pub at: usize,
    /// The number of bytes.
    pub len: usize,
    /// The other place.
    pub place: Place,
    /// The first byte there.
    pub offset: usize,
}

/// A place of bytes outside the tensor itself.
#[derive(Debug, Clone, Copy)]
pub(super) enum Place {
    /// The slot of a local rank.
    Slot(usize),
    /// The input of this rank.
    Input,
}

/// Elements of a tensor that this rank reduces: from all slots, and from its own input instead of its own slot.
#[derive(Debug, Clone, Copy)]
pub(super) struct ReducedPart {
    /// The tensor's index in the caller's list.
    pub tensor: usize,
    /// The first element in the input.
    pub read: usize,
    /// The first element in the output.
    pub written: usize,
    /// The number of elements.
    pub count: usize,
    /// The first byte in every slot.
    pub offset: usize,
}

impl Part {
    fn new(call: &Call, piece: TensorRange, place: Place, offset: usize) -> Part {
        let size = call.tensors(0)[piece.tensor].buffer.dtype().size();
        Part { tensor: piece.tensor, at: piece.first * size, len: piece.count * size, place, offset }
    }
}

/// Calls `work` with the parts of bytes `range` of the line in chunk `chunk`, whose other place is the slot of local rank
/// `slot`.
pub(super) fn for_line(call: &Call, chunk: usize, range: Range<usize>, slot: usize, mut work: impl FnMut(Part)) {
    call.layout.ranges(chunk, range).for_each(|piece| work(Part::new(call, piece, Place::Slot(slot), piece.offset)));
}

/// Calls `work` with the parts in chunk `chunk` of the block that `sender` sends to `receiver`, whose elements of each tensor
/// are `elements`; its other place is compartment `compartment` of the slot of local rank `slot`.
fn for_block(
    call: &Call,
    chunk: usize,
    (sender, receiver): (usize, usize),
    elements: impl Fn(usize) -> Range<usize>,
    (slot, compartment): (usize, usize),
    mut work: impl FnMut(Part),
) {
    let start = compartment * call.compartment();
    block_ranges(call.block_layout(sender, receiver), chunk, elements)
        .for_each(|piece| work(Part::new(call, piece, Place::Slot(slot), start + piece.offset)));
}

/// Calls `work` with the parts of this rank's inputs that it packs in chunk `chunk`: the line, or its blocks.
pub(super) fn for_packed(call: &Call, topology: &Topology, chunk: usize, mut work: impl FnMut(Part)) {
    let (me, own) = (topology.rank(), topology.local_rank());
    if !call.op.has_input(me) {
        return;
    }
    // Between hosts the shards also read this rank's own block, unless it only moves.
    let keeps_own = topology.hosts() == 1 || !call.op.collective.reduces;
    let mut block = |peer: usize, place: (usize, usize)| {
        for_block(call, chunk, (me, peer), |tensor| call.sent(tensor, me, peer), place, &mut work);
    };
    match call.op.pattern() {
        Pattern::Line => for_line(call, chunk, 0..call.layout.chunk_len(chunk), own, work),
        Pattern::Gather => block(me, gathered(topology, me)),
        Pattern::Scatter | Pattern::Exchange => (0..topology.size())
            .filter(|&peer| peer != me || !keeps_own)
            .for_each(|peer| block(peer, (own, scattered(topology, peer)))),
    }
}

/// Calls `work` with the parts of the results that this rank copies in chunk `chunk` of a call that only moves data on a
/// single host.
pub(super) fn for_moved(call: &Call, topology: &Topology, chunk: usize, mut work: impl FnMut(Part)) {
    let root = || topology.local_rank_of(call.op.root).unwrap_or(0);
    match call.op.pattern() {
        Pattern::Line if call.op.is_barrier() => {}
        Pattern::Line if root() == topology.local_rank() => {
            let from_input = |part: Part| Part { place: Place::Input, offset: part.at, ..part };
            for_line(call, chunk, 0..call.layout.chunk_len(chunk), root(), |part| work(from_input(part)));
        }
        Pattern::Line => for_line(call, chunk, 0..call.layout.chunk_len(chunk), root(), work),
        _ => for_taken_blocks(call, topology, chunk, work),
    }
}

/// Calls `work` with the parts of the blocks that this rank takes in chunk `chunk`: from the slots of local ranks, or from
/// those of the shards of other hosts' ranks, and its own block from its input.
pub(super) fn for_taken_blocks(call: &Call, topology: &Topology, chunk: usize, mut work: impl FnMut(Part)) {
    let me = topology.rank();
    if !call.op.has_output(me) {
        return;
    }
    // In a scatter one rank has the block: the root, or this rank's shard owner once the block is reduced.
    let peers = match call.op.pattern() {
        Pattern::Scatter if call.op.collective.reduces => me..me + 1,
        Pattern::Scatter => call.op.root..call.op.root + 1,
        _ => 0..topology.size(),
    };
    for peer in peers {
        if peer == me && !call.op.collective.reduces {
            for_own_block(call, topology, chunk, &mut work);
            continue;
        }
        let place = match call.op.pattern() {
            Pattern::Line => continue,
            Pattern::Gather => gathered(topology, peer),
            // Between hosts the shard owner has this rank's block.
            Pattern::Scatter if topology.hosts() > 1 => {
                (topology.position(me).map_or(0, |own| own.shard % topology.local_size()), scattered(topology, me))
            }
            Pattern::Scatter => (topology.local_rank_of(peer).unwrap_or(0), scattered(topology, me)),
            Pattern::Exchange => match topology.local_rank_of(peer) {
                Some(local) => (local, scattered(topology, me)),
                None => received(topology, peer, topology.local_rank()),
            },
        };
        for_block(call, chunk, (peer, me), |tensor| call.received(tensor, me, peer), place, &mut work);
    }
}

/// Calls `work` with the parts of this rank's own block in chunk `chunk`, which goes from its input to its output.
pub(super) fn for_own_block(call: &Call, topology: &Topology, chunk: usize, mut work: impl FnMut(Part)) {
    let me = topology.rank();
    for piece in block_ranges(call.block_layout(me, me), chunk, |tensor| call.received(tensor, me, me)) {
        let skipped = piece.first - call.received(piece.tensor, me, me).start;
        let read = call.sent(piece.tensor, me, me).start + skipped;
        let size = call.tensors(0)[piece.tensor].buffer.dtype().size();
        work(Part::new(call, piece, Place::Input, read * size));
    }
}

/// Calls `work` with what this rank reduces in chunk `chunk` of a call on a single host: of the line all, else its block.
pub(super) fn for_reduced(call: &Call, topology: &Topology, chunk: usize, mut work: impl FnMut(ReducedPart)) {
    let me = topology.rank();
    if !call.op.has_output(me) {
        return;
    }
    let from = match call.op.pattern() {
        Pattern::Line => 0,
        _ => scattered(topology, me) * call.compartment(),
    };
    let own = |tensor| call.received(tensor, me, me);
    for TensorRange { tensor, first, count, offset, .. } in block_ranges(call.block_layout(me, me), chunk, own) {
        let read = call.sent(tensor, me, me).start + first;
        work(ReducedPart { tensor, read, written: first, count, offset: from + offset });
    }
}
