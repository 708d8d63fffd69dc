//! Broadcast of the root's values to all ranks and towers.
//!
//! Between hosts it is an allreduce in which only the root's host contributes data. With pieces or halves this is a
//! scatter and an all-gather (van de Geijn's algorithm for long vectors, Barnett et al., 1994).

use std::ops::Range;
use std::ptr;

use super::call::{Call, Op};
use super::phases::{Collective, InterHostOps, Partial, ShardView};
use crate::topology::Topology;

pub(super) struct Broadcast;

/// The root's host, and its local rank there.
fn root_location(call: &Call, topology: &Topology) -> (usize, usize) {
    let Op::Broadcast { root } = call.op else { return (0, 0) };
    topology.host_and_local_rank(root).unwrap_or((0, 0))
}

impl Collective for Broadcast {
    unsafe fn pack(&self, call: &Call, topology: &Topology, chunk: usize, part: Range<usize>, slot: *mut u8) {
        if (topology.host(), topology.local_rank()) != root_location(call, topology) {
            return;
        }
        for piece in call.layout.ranges(chunk, part) {
            // SAFETY: the caller's memory is valid while the call runs; this rank owns the slot, which holds the chunk.
            unsafe {
                let bytes = call.tensors(0)[piece.tensor].buffer.bytes(piece.first, piece.count);
                ptr::copy_nonoverlapping(bytes.as_ptr(), slot.add(piece.offset), bytes.len());
            }
        }
    }

    fn reads_own_tensor(&self, _call: &Call) -> bool {
        false
    }

    unsafe fn combine(&self, call: &Call, shard: &ShardView<'_>, slice: Range<usize>) {
        let (_, root) = root_location(call, shard.topology);
        // SAFETY: this shard owns the slice in all slots.
        unsafe { copy_slice(shard.slots[root], shard.own(), slice) };
    }

    unsafe fn reduce_to_tensor(&self, call: &Call, shard: &ShardView<'_>) {
        let (_, root) = root_location(call, shard.topology);
        for piece in call.layout.ranges(shard.chunk, 0..call.layout.chunk_len(shard.chunk)) {
            for buffer in call.tower_buffers(piece.tensor) {
                // SAFETY: the slots are read-only; the call owns the tensors' memory.
                unsafe {
                    let to = buffer.bytes_mut(piece.first, piece.count);
                    ptr::copy_nonoverlapping(shard.slots[root].add(piece.offset), to.as_mut_ptr(), to.len());
                }
            }
        }
    }
}

impl InterHostOps for Broadcast {
    fn partial_bytes(&self, _call: &Call, _chunk: usize, piece: Range<usize>) -> usize {
        piece.len()
    }

    unsafe fn contribute(&self, call: &Call, shard: &ShardView<'_>, piece: Range<usize>, out: &mut [u8]) -> bool {
        let (host, root) = root_location(call, shard.topology);
        if host != shard.topology.host() {
            return false;
        }
        let out = &mut out[..piece.len()];
        // SAFETY: this shard owns the piece in all slots.
        unsafe { ptr::copy_nonoverlapping(shard.slots[root].add(piece.start), out.as_mut_ptr(), piece.len()) };
        true
    }

    unsafe fn add_partials(
        &self,
        _call: &Call,
        _shard: &ShardView<'_>,
        piece: Range<usize>,
        low: Partial,
        high: Partial,
        out: *mut u8,
    ) {
        if let Some(part) = low.or(high).filter(|&part| !ptr::eq(part, out)) {
            // SAFETY: the caller promises that they do not overlap.
            unsafe { ptr::copy_nonoverlapping(part, out, piece.len()) };
        }
    }

    unsafe fn finish_shard(
        &self,
        _call: &Call,
        shard: &ShardView<'_>,
        piece: Range<usize>,
        low: Partial,
        high: Partial,
    ) {
        if let Some(part) = low.or(high) {
            // SAFETY: this shard owns the piece of its slot.
            unsafe { ptr::copy_nonoverlapping(part, shard.own().add(piece.start), piece.len()) };
        }
    }
}

/// Copies `slice` between slots; does nothing if they are the same slot.
///
/// # Safety
/// Both slots contain the slice, and the caller owns it in both.
unsafe fn copy_slice(from: *mut u8, to: *mut u8, slice: Range<usize>) {
    if !ptr::eq(from, to) {
        // SAFETY: the caller's promise; different slots do not overlap.
        unsafe { ptr::copy_nonoverlapping(from.add(slice.start), to.add(slice.start), slice.len()) };
    }
}
