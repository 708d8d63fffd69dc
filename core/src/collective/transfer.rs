//! Copies between the tensors of this rank and the slots, and reductions from slots into tensors.
//!
//! Thread rule: that of [`super::Channel`], whose flags say who may access a slot when.

use std::ops::Range;
use std::ptr;

use super::blocks::{gathered, received, scattered};
use super::call::Call;
use super::operation::Pattern;
use super::shard::{PerRank, ShardView};
use super::wire::block_ranges;
use crate::buffer::Buffer;
use crate::pages;
use crate::reduce::Reduction;
use crate::stream_copy::stream_copy;
use crate::topology::Topology;
use crate::transport::sync;
use crate::wire_layout::TensorRange;

/// Results of longer calls are stored non-temporally: they are in no cache, or leave little room for anything else.
const STREAM_COPY_MIN_BYTES: usize = 1 << 20;
/// Shorter pieces are not worth the check of their pages.
const STREAM_COPY_MIN_PIECE: usize = 16 << 10;

/// Whether the ranks of a single host take the results from the contributions, without shards that reduce first.
pub(super) fn is_direct(call: &Call) -> bool {
    !(call.op.collective.reduces && call.op.pattern() == Pattern::Line)
}

/// Whether, on a single host, a shard owner reads its slice from its tensors and writes the result there. It then
/// neither packs nor unpacks that slice.
pub(super) fn reads_own_tensor(call: &Call, topology: &Topology) -> bool {
    topology.hosts() == 1
        && call.op.collective.reduces
        && call.op.has_output(topology.rank())
        && call.op.pattern() == Pattern::Line
        && !call.wire_is_acc()
}

/// Copies `part` of chunk `chunk` of the line to `slot`; of several towers their partial results.
///
/// # Safety
/// This rank owns `slot` in this round.
pub(super) unsafe fn pack_line(call: &Call, topology: &Topology, chunk: usize, part: Range<usize>, slot: *mut u8) {
    if !call.op.has_input(topology.rank()) {
        return;
    }
    sync::check_write(slot.wrapping_add(part.start), part.len());
    for piece in call.layout.ranges(chunk, part) {
        // SAFETY: the caller's memory is valid while the call runs; this rank owns the slot, which holds the chunk.
        unsafe {
            if call.wire_is_acc() {
                let sources: Vec<*const u8> =
                    call.tower_buffers(piece.tensor).map(|buffer| buffer.read_at(piece.first)).collect();
                let reduction = call.reduction(call.tensors(0)[piece.tensor].buffer.dtype());
                let from_elements = Reduction { wire_is_acc: false, ..reduction };
                from_elements.partial(&sources, slot.add(piece.offset), piece.count);
            } else {
                let bytes = call.tensors(0)[piece.tensor].buffer.bytes(piece.first, piece.count);
                ptr::copy_nonoverlapping(bytes.as_ptr(), slot.add(piece.offset), bytes.len());
            }
        }
    }
}

/// Copies chunk `chunk` of this rank's blocks to `slots`.
///
/// # Safety
/// This rank owns the compartments of its blocks in this round.
pub(super) unsafe fn pack_blocks(call: &Call, topology: &Topology, chunk: usize, slots: &[*mut u8]) {
    let me = topology.rank();
    if !call.op.has_input(me) {
        return;
    }
    // Between hosts the shards also read this rank's own block, unless it only moves.
    let keeps_own = topology.hosts() == 1 || !call.op.collective.reduces;
    let pack = |peer: usize, (slot, compartment): (usize, usize)| {
        let to = slots[slot].wrapping_add(compartment * call.compartment());
        for piece in block_ranges(call, chunk, |tensor| call.sent(tensor, me, peer)) {
            let buffer = &call.tensors(0)[piece.tensor].buffer;
            let len = piece.count * buffer.dtype().size();
            sync::check_write(to.wrapping_add(piece.offset), len);
            // SAFETY: the caller's promise; the call owns the tensor's memory.
            unsafe { ptr::copy_nonoverlapping(buffer.source_at(piece.first), to.add(piece.offset), len) };
        }
    };
    match call.op.pattern() {
        Pattern::Line => {}
        Pattern::Gather => pack(me, gathered(topology, me)),
        Pattern::Scatter | Pattern::Exchange => (0..topology.size())
            .filter(|&peer| peer != me || !keeps_own)
            .for_each(|peer| pack(peer, (topology.local_rank(), scattered(topology, peer)))),
    }
}

/// Takes chunk `chunk` of the results of a call that [`is_direct`].
///
/// # Safety
/// All ranks have packed, and all slots are read-only; the call owns the tensors.
pub(super) unsafe fn take_direct(call: &Call, shard: &ShardView<'_>) {
    let ShardView { topology, chunk, slots, .. } = *shard;
    // SAFETY: the caller's promise.
    unsafe {
        match (call.op.pattern(), call.op.collective.reduces) {
            (Pattern::Line, true) => reduce_line(call, shard),
            (Pattern::Line, false) if call.op.is_barrier() => {}
            (Pattern::Line, false) => {
                let root = topology.local_rank_of(call.op.root).unwrap_or(0);
                if root != topology.local_rank() || call.towers() > 1 || !call.is_in_place() {
                    take_line(call, chunk, 0..call.layout.chunk_len(chunk), slots[root]);
                }
            }
            (Pattern::Scatter, true) => reduce_block(call, shard),
            _ => take_blocks(call, topology, chunk, slots),
        }
    }
}

/// Copies `slice` of the line from `slot` to the tensors of every tower.
///
/// # Safety
/// The slot is read-only; the call owns the tensors.
pub(super) unsafe fn take_line(call: &Call, chunk: usize, slice: Range<usize>, slot: *const u8) {
    sync::check_read(slot.wrapping_add(slice.start), slice.len());
    for piece in call.layout.ranges(chunk, slice) {
        for buffer in call.tower_buffers(piece.tensor) {
            // SAFETY: the caller's promise.
            unsafe {
                let from = slot.add(piece.offset);
                if call.wire_is_acc() {
                    call.reduction(buffer.dtype()).narrow(from, buffer.written_at(piece.first), piece.count);
                } else {
                    store(call, buffer, piece, from);
                }
            }
        }
    }
}

/// Takes chunk `chunk` of this rank's blocks: from the slots of local ranks, or from those of the shards of other
/// hosts' ranks, and its own block from its tensor.
///
/// # Safety
/// All blocks are in the slots, which are read-only; the call owns the tensors.
pub(super) unsafe fn take_blocks(call: &Call, topology: &Topology, chunk: usize, slots: &[*mut u8]) {
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
            // SAFETY: the caller's promise.
            unsafe { copy_own_block(call, topology, chunk) };
            continue;
        }
        let (slot, compartment) = match call.op.pattern() {
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
        let from = slots[slot].wrapping_add(compartment * call.compartment());
        for piece in block_ranges(call, chunk, |tensor| call.received(tensor, me, peer)) {
            let buffer = &call.tensors(0)[piece.tensor].buffer;
            sync::check_read(from.wrapping_add(piece.offset), piece.count * buffer.dtype().size());
            // SAFETY: the caller's promise.
            unsafe { store(call, buffer, piece, from.add(piece.offset)) };
        }
    }
}

/// Copies chunk `chunk` of this rank's own block from its input to its output.
///
/// # Safety
/// The call owns the tensors.
pub(super) unsafe fn copy_own_block(call: &Call, topology: &Topology, chunk: usize) {
    let me = topology.rank();
    for piece in block_ranges(call, chunk, |tensor| call.received(tensor, me, me)) {
        let buffer = &call.tensors(0)[piece.tensor].buffer;
        let skipped = piece.first - call.received(piece.tensor, me, me).start;
        let from = buffer.source_at(call.sent(piece.tensor, me, me).start + skipped);
        if !ptr::eq(from, buffer.destination_at(piece.first)) {
            // SAFETY: the caller's promise; `Call::new` has checked that they do not overlap.
            unsafe { store(call, buffer, piece, from) };
        }
    }
}

/// Copies to elements `piece` of the output.
///
/// # Safety
/// `from` has the elements; the call owns the tensor.
unsafe fn store(call: &Call, buffer: &Buffer, piece: TensorRange, from: *const u8) {
    let (to, len) = (buffer.destination_at(piece.first), piece.count * buffer.dtype().size());
    // SAFETY: the caller's promise.
    unsafe { copy_result(call, call.op.collective.reduces && buffer.is_in_place(), from, to, len) };
}

/// Copies `len` bytes to an output. `was_read`: the call has just read this memory, so it may be cached.
///
/// # Safety
/// As for [`ptr::copy_nonoverlapping`].
pub(super) unsafe fn copy_result(call: &Call, was_read: bool, from: *const u8, to: *mut u8, len: usize) {
    // The system has just brought a new page to the cache.
    let streams = !was_read
        && call.volume() >= STREAM_COPY_MIN_BYTES
        && len >= STREAM_COPY_MIN_PIECE
        && pages::is_resident(to.wrapping_add(len - 1));
    // SAFETY: the caller's promise.
    unsafe { if streams { stream_copy(from, to, len) } else { ptr::copy_nonoverlapping(from, to, len) } };
}

/// Reduces `slice` of the line in all slots into the shard's result, and also into the rank's tensors if it
/// [`reads_own_tensor`].
///
/// # Safety
/// This shard owns the slice of all slots; the call owns the tensors.
pub(super) unsafe fn reduce_slice(call: &Call, shard: &ShardView<'_>, slice: Range<usize>) {
    shard.slots.iter().for_each(|&slot| sync::check_read(slot.wrapping_add(slice.start), slice.len()));
    sync::check_write(shard.result.wrapping_add(slice.start), slice.len());
    if reads_own_tensor(call, shard.topology) {
        let mut sources = PerRank::new();
        for piece in call.layout.ranges(shard.chunk, slice) {
            let buffer = &call.tensors(0)[piece.tensor].buffer;
            // SAFETY: this shard owns the range in all slots; the call owns the tensor's memory.
            unsafe {
                let own = buffer.read_at(piece.first);
                let outs = [shard.result.add(piece.offset), buffer.written_at(piece.first)];
                shard.sources_with(piece.offset, own, &mut sources);
                call.reduction(buffer.dtype()).combine(&sources, &outs, piece.count);
            }
        }
        return;
    }
    for run in call.layout.runs(shard.chunk, slice) {
        let reduction = call.reduction(run.dtype);
        let count = run.bytes.len() / reduction.wire_size();
        // SAFETY: the run has whole elements of the slice, which this shard owns in all slots.
        unsafe {
            let out = shard.result.add(run.bytes.start);
            reduction.combine(&shard.sources(run.bytes.start), &[out], count);
        }
    }
}

/// Reduces a chunk of the line in all slots into this rank's tensors.
///
/// # Safety
/// All slots are read-only; the call owns the tensors.
unsafe fn reduce_line(call: &Call, shard: &ShardView<'_>) {
    if !call.op.has_output(shard.topology.rank()) {
        return;
    }
    let len = call.layout.chunk_len(shard.chunk);
    shard.slots.iter().for_each(|&slot| sync::check_read(slot, len));
    let mut sources = PerRank::new();
    for piece in call.layout.ranges(shard.chunk, 0..len) {
        let buffer = &call.tensors(0)[piece.tensor].buffer;
        // SAFETY: the caller's promise.
        unsafe {
            shard.sources_with(piece.offset, buffer.read_at(piece.first), &mut sources);
            call.reduction(buffer.dtype()).combine(&sources, &[buffer.written_at(piece.first)], piece.count);
        }
    }
}

/// Reduces this rank's block of a chunk in all slots into its tensors.
///
/// # Safety
/// As for [`reduce_line`].
unsafe fn reduce_block(call: &Call, shard: &ShardView<'_>) {
    let me = shard.topology.rank();
    let from = scattered(shard.topology, me) * call.compartment();
    let mut sources = PerRank::new();
    for piece in block_ranges(call, shard.chunk, |tensor| call.received(tensor, me, me)) {
        let buffer = &call.tensors(0)[piece.tensor].buffer;
        let own = buffer.source_at(call.sent(piece.tensor, me, me).start + piece.first);
        let outs = [buffer.destination_at(piece.first)];
        let len = piece.count * buffer.dtype().size();
        let others = (0..shard.slots.len()).filter(|&local| local != shard.topology.local_rank());
        others.for_each(|local| sync::check_read(shard.slots[local].wrapping_add(from + piece.offset), len));
        shard.sources_with(from + piece.offset, own, &mut sources);
        // SAFETY: the caller's promise.
        unsafe { call.reduction(buffer.dtype()).combine(&sources, &outs, piece.count) };
    }
}
