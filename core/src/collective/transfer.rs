//! Copies between the tensors of this rank and the slots, and reductions from slots into tensors.
//!
//! Thread rule: that of [`super::Channel`], whose flags say who may access a slot when.

use std::ops::Range;
use std::ptr;

use super::call::Call;
use super::operation::Pattern;
use super::parts::{
    Part, Place, ReducedPart, for_line, for_moved, for_own_block, for_packed, for_reduced, for_taken_blocks,
};
use super::shard::{ShardView, fill_sources, new_sources};
use crate::pages;
use crate::reduce::Reduction;
use crate::stream_copy::stream_copy;
use crate::topology::Topology;
use crate::transport::sync;

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

/// Copies `part` of chunk `chunk` of the line to this rank's slot; of several towers their partial results.
///
/// # Safety
/// This rank owns the slot in this round.
pub(super) unsafe fn pack_line(call: &Call, topology: &Topology, chunk: usize, part: Range<usize>, slots: &[*mut u8]) {
    if !call.op.has_input(topology.rank()) {
        return;
    }
    if !call.wire_is_acc() {
        // SAFETY: the caller's promise; the call owns the tensors' memory.
        return for_line(call, chunk, part, topology.local_rank(), |part| unsafe { pack(call, &part, slots) });
    }
    let slot = slots[topology.local_rank()];
    sync::check_write(slot.wrapping_add(part.start), part.len());
    for piece in call.layout.ranges(chunk, part) {
        // SAFETY: the caller's memory is valid while the call runs; this rank owns the slot, which holds the chunk.
        unsafe {
            let sources: Vec<*const u8> =
                call.tower_buffers(piece.tensor).map(|buffer| buffer.read_at(piece.first)).collect();
            let reduction = call.reduction(call.tensors(0)[piece.tensor].buffer.dtype());
            let from_elements = Reduction { wire_is_acc: false, ..reduction };
            from_elements.partial(&sources, slot.add(piece.offset), piece.count);
        }
    }
}

/// Copies chunk `chunk` of this rank's blocks to `slots`.
///
/// # Safety
/// This rank owns the compartments of its blocks in this round.
pub(super) unsafe fn pack_blocks(call: &Call, topology: &Topology, chunk: usize, slots: &[*mut u8]) {
    // SAFETY: the caller's promise; the call owns the tensors' memory.
    for_packed(call, topology, chunk, |part| unsafe { pack(call, &part, slots) });
}

/// Copies a part of an input to its place in a slot.
///
/// # Safety
/// This rank owns the place in this round; the call owns the tensors.
#[inline]
pub(super) unsafe fn pack(call: &Call, part: &Part, slots: &[*mut u8]) {
    let Place::Slot(slot) = part.place else { return };
    let (from, to) = (call.tensors(0)[part.tensor].buffer.source_byte(part.at), slots[slot].wrapping_add(part.offset));
    sync::check_write(to, part.len);
    // SAFETY: the caller's promise; a slot holds a chunk.
    unsafe { ptr::copy_nonoverlapping(from, to, part.len) };
}

/// Takes chunk `chunk` of the results of a call that [`is_direct`].
///
/// # Safety
/// All ranks have packed, and all slots are read-only; the call owns the tensors.
pub(super) unsafe fn take_direct(call: &Call, shard: &ShardView<'_>) {
    let ShardView { topology, chunk, slots, .. } = *shard;
    if !call.op.collective.reduces {
        // SAFETY: the caller's promise.
        return for_moved(call, topology, chunk, |part| unsafe { store(call, &part, slots) });
    }
    let mut sources = new_sources(slots.len());
    for_reduced(call, topology, chunk, |part| {
        let reduction = call.reduction(call.tensors(0)[part.tensor].buffer.dtype());
        // SAFETY: the caller's promise.
        unsafe {
            reduce(call, &part, topology.local_rank(), slots, &mut sources, |sources, outs, count| {
                reduction.combine(sources, outs, count);
            });
        }
    });
}

/// Reduces a part of all ranks' inputs into the output by `combine`, an equivalent of [`Reduction::combine`]. `sources` is
/// scratch memory.
///
/// # Safety
/// As for [`take_direct`].
#[inline]
pub(super) unsafe fn reduce(
    call: &Call,
    part: &ReducedPart,
    local_rank: usize,
    slots: &[*mut u8],
    sources: &mut [*const u8],
    combine: impl FnOnce(&[*const u8], &[*mut u8], usize),
) {
    let buffer = &call.tensors(0)[part.tensor].buffer;
    fill_sources(slots, part.offset, (local_rank, buffer.source_at(part.read)), sources);
    let len = part.count * buffer.dtype().size();
    let others = sources.iter().enumerate().filter(|&(local, _)| local != local_rank);
    others.for_each(|(_, &source)| sync::check_read(source, len));
    combine(sources, &[buffer.destination_at(part.written)], part.count);
}

/// Copies `slice` of the line from the slot of local rank `slot` to the tensors of every tower.
///
/// # Safety
/// The slot is read-only; the call owns the tensors.
pub(super) unsafe fn take_line(call: &Call, chunk: usize, slice: Range<usize>, slot: usize, slots: &[*mut u8]) {
    if !call.wire_is_acc() {
        // SAFETY: the caller's promise.
        return for_line(call, chunk, slice, slot, |part| unsafe { store(call, &part, slots) });
    }
    let slot = slots[slot].cast_const();
    sync::check_read(slot.wrapping_add(slice.start), slice.len());
    for piece in call.layout.ranges(chunk, slice) {
        for buffer in call.tower_buffers(piece.tensor) {
            let (from, to) = (slot.wrapping_add(piece.offset), buffer.destination_at(piece.first));
            // SAFETY: the caller's promise.
            unsafe { call.reduction(buffer.dtype()).narrow(from, to, piece.count) };
        }
    }
}

/// Takes chunk `chunk` of this rank's blocks.
///
/// # Safety
/// All blocks are in the slots, which are read-only; the call owns the tensors.
pub(super) unsafe fn take_blocks(call: &Call, topology: &Topology, chunk: usize, slots: &[*mut u8]) {
    // SAFETY: the caller's promise.
    for_taken_blocks(call, topology, chunk, |part| unsafe { store(call, &part, slots) });
}

/// Copies chunk `chunk` of this rank's own block from its input to its output.
///
/// # Safety
/// The call owns the tensors.
pub(super) unsafe fn copy_own_block(call: &Call, topology: &Topology, chunk: usize) {
    // SAFETY: the caller's promise; the parts are in no slot.
    for_own_block(call, topology, chunk, |part| unsafe { store(call, &part, &[]) });
}

/// Copies a part of an output of every tower from its place.
///
/// # Safety
/// The slots are read-only; the call owns the tensors.
#[inline]
pub(super) unsafe fn store(call: &Call, part: &Part, slots: &[*mut u8]) {
    let from = match part.place {
        Place::Slot(slot) => slots[slot].wrapping_add(part.offset).cast_const(),
        Place::Input => call.tensors(0)[part.tensor].buffer.source_byte(part.offset),
    };
    sync::check_read(from, part.len);
    for buffer in call.tower_buffers(part.tensor) {
        let to = buffer.destination_byte(part.at);
        if !ptr::eq(from, to) {
            let was_read = call.op.collective.reduces && buffer.is_in_place();
            // SAFETY: the caller's promise; `Call::new` has checked that input and output do not overlap.
            unsafe { copy_result(call, was_read, from, to, part.len) };
        }
    }
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
        let mut sources = new_sources(shard.slots.len());
        for piece in call.layout.ranges(shard.chunk, slice) {
            let buffer = &call.tensors(0)[piece.tensor].buffer;
            // SAFETY: this shard owns the range in all slots; the call owns the tensor's memory.
            unsafe {
                let own = buffer.read_at(piece.first);
                let outs = [shard.result.add(piece.offset), buffer.written_at(piece.first)];
                fill_sources(shard.slots, piece.offset, (shard.topology.local_rank(), own), &mut sources);
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
