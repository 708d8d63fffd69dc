//! Barrier: moves no data; the flags of the round and the headers between hosts synchronize the ranks.

use std::ops::Range;

use super::call::Call;
use super::phases::{Collective, InterHostOps, Partial, ShardView};
use crate::topology::Topology;

pub(super) struct Barrier;

impl Collective for Barrier {
    unsafe fn pack(&self, _call: &Call, _topology: &Topology, _chunk: usize, _part: Range<usize>, _slot: *mut u8) {}

    fn reads_own_tensor(&self, _call: &Call) -> bool {
        false
    }

    unsafe fn reduce_to_tensor(&self, _call: &Call, _shard: &ShardView<'_>) {}

    unsafe fn combine(&self, _call: &Call, _shard: &ShardView<'_>, _slice: Range<usize>) {}
}

impl InterHostOps for Barrier {
    fn partial_bytes(&self, _call: &Call, _chunk: usize, _piece: Range<usize>) -> usize {
        0
    }

    unsafe fn contribute(&self, _call: &Call, _shard: &ShardView<'_>, _piece: Range<usize>, _out: &mut [u8]) -> bool {
        false
    }

    unsafe fn add_partials(
        &self,
        _call: &Call,
        _shard: &ShardView<'_>,
        _piece: Range<usize>,
        _low: Partial,
        _high: Partial,
        _out: *mut u8,
    ) {
    }

    unsafe fn finish_shard(
        &self,
        _call: &Call,
        _shard: &ShardView<'_>,
        _piece: Range<usize>,
        _low: Partial,
        _high: Partial,
    ) {
    }
}
