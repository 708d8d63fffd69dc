//! The root's values to all ranks and towers. Between hosts the root's host alone brings something to what is otherwise an
//! average; in pieces or halves that is a scatter and an all-gather (van de Geijn's broadcast for long vectors, Barnett et
//! al., 1994).

use std::ops::Range;
use std::ptr;

use super::call::{Call, Op};
use super::phases::{Collective, InterHostOps, Partial, ShardView};
use crate::topology::Topology;

pub(super) struct Broadcast;

/// The root's host and its local rank there.
fn root_place(call: &Call, topology: &Topology) -> (usize, usize) {
    let Op::Broadcast { root } = call.op else { return (0, 0) };
    topology.host_and_local_rank(root).unwrap_or((0, 0))
}

impl Collective for Broadcast {
    unsafe fn pack(&self, call: &Call, topology: &Topology, chunk: usize, part: Range<usize>, slot: *mut u8) {
        if (topology.host(), topology.local_rank()) != root_place(call, topology) {
            return;
        }
        for piece in call.layout.ranges(chunk, part) {
            // SAFETY: the caller's memory is valid while the call runs; the slot is this rank's, and holds the chunk.
            unsafe {
                let bytes = call.tensors(0)[piece.tensor].buffer.bytes(piece.first, piece.count);
                ptr::copy_nonoverlapping(bytes.as_ptr(), slot.add(piece.offset), bytes.len());
            }
        }
    }

    fn reads_own_tensor(&self, _job: &Call) -> bool {
        false
    }

    unsafe fn combine(&self, call: &Call, shard: &ShardView<'_>, slice: Range<usize>) {
        let (_, root) = root_place(call, shard.topology);
        // SAFETY: the slice is this shard's in all slots.
        unsafe { copy_slice(shard.slots[root], shard.own(), slice) };
    }

    unsafe fn reduce_to_tensor(&self, call: &Call, shard: &ShardView<'_>) {
        let (_, root) = root_place(call, shard.topology);
        for piece in call.layout.ranges(shard.chunk, 0..call.layout.chunk_len(shard.chunk)) {
            for buffer in call.tower_buffers(piece.tensor) {
                // SAFETY: the slots are read-only, and the tensors' memory is the call's.
                unsafe {
                    let to = buffer.bytes_mut(piece.first, piece.count);
                    ptr::copy_nonoverlapping(shard.slots[root].add(piece.offset), to.as_mut_ptr(), to.len());
                }
            }
        }
    }
}

impl InterHostOps for Broadcast {
    fn partial_bytes(&self, _job: &Call, _chunk: usize, piece: Range<usize>) -> usize {
        piece.len()
    }

    unsafe fn contribute(&self, call: &Call, shard: &ShardView<'_>, piece: Range<usize>, out: &mut [u8]) -> bool {
        let (host, root) = root_place(call, shard.topology);
        if host != shard.topology.host() {
            return false;
        }
        let out = &mut out[..piece.len()];
        // SAFETY: the piece is this shard's in all slots.
        unsafe { ptr::copy_nonoverlapping(shard.slots[root].add(piece.start), out.as_mut_ptr(), piece.len()) };
        true
    }

    unsafe fn add_partials(
        &self,
        _job: &Call,
        _lane: &ShardView<'_>,
        piece: Range<usize>,
        low: Partial,
        high: Partial,
        out: *mut u8,
    ) {
        if let Some(part) = low.or(high).filter(|&part| !ptr::eq(part, out)) {
            // SAFETY: the caller's promise: they do not overlap.
            unsafe { ptr::copy_nonoverlapping(part, out, piece.len()) };
        }
    }

    unsafe fn finish_shard(
        &self,
        _job: &Call,
        shard: &ShardView<'_>,
        piece: Range<usize>,
        low: Partial,
        high: Partial,
    ) {
        if let Some(part) = low.or(high) {
            // SAFETY: the piece of the own slot is this shard's.
            unsafe { ptr::copy_nonoverlapping(part, shard.own().add(piece.start), piece.len()) };
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
