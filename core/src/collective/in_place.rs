//! Allreduce between hosts of tensors in peer memory: a shard owner reads its slice in the tensors of all ranks of its
//! host, and writes the results to them. The slots hold addresses ([`super::zero_copy`]). The order of addition is that of
//! any other allreduce: same bits.
//!
//! Messages go through the memory of the links, never through tensors: a transfer may outlive a failed call.
//! Thread rule: that of [`super::Channel`].

use std::ops::Range;

use super::partials::{InterHostOps, Partial, Piece, Reducing, reduce_host};
use super::shard::PerRank;
use super::zero_copy::{self, Side};
use crate::error::Result;
use crate::reduce::Reduction;
use crate::transport::peer_memory::PeerMemory;
use crate::transport::sync;

/// As [`Reducing`], in place.
pub(super) struct ReducingInPlace<'a>(pub &'a dyn PeerMemory);

/// A part of a tensor in a piece.
struct TensorPart {
    reduction: Reduction,
    count: usize,
    /// Offset of the elements in a message with results of the piece.
    result: usize,
    /// Offset of their accumulators in the partial results.
    at: usize,
}

impl TensorPart {
    /// The bytes of the elements.
    fn len(&self) -> usize {
        self.count * self.reduction.wire_size()
    }

    /// Their place in a message with results.
    fn message(&self) -> Range<usize> {
        self.result..self.result + self.len()
    }
}

impl ReducingInPlace<'_> {
    /// Calls `work` with each part of a tensor in `piece` and its addresses, by local rank.
    fn for_tensors(
        &self,
        piece: &Piece<'_>,
        side: Side,
        mut work: impl FnMut(&PerRank<*mut u8>, &TensorPart),
    ) -> Result<()> {
        let mut result = 0;
        for part in piece.parts() {
            let wire_size = part.reduction.wire_size();
            let run = part.wire..part.wire + part.count * wire_size;
            for range in piece.call.layout.ranges(piece.shard.chunk, run) {
                // SAFETY: all slots hold addresses in a round of this kind.
                let tensors = unsafe { zero_copy::addresses(piece.call, piece.shard.slots, &range, side, self.0) }?;
                let at = part.at + (range.offset - part.wire) / wire_size * part.reduction.acc_size();
                let part = TensorPart { reduction: part.reduction, count: range.count, result, at };
                result += part.len();
                work(&tensors, &part);
            }
        }
        Ok(())
    }

    /// Copies what the first rank of the host has in `piece` to a message.
    ///
    /// # Safety
    /// Nobody writes there.
    unsafe fn read(&self, piece: &Piece<'_>, side: Side, message: &mut [u8]) -> Result<()> {
        self.for_tensors(piece, side, |tensors, part| {
            let (tensor, body) = (tensors[0], &mut message[part.message()]);
            sync::check_read(tensor, body.len());
            // SAFETY: the caller's promise.
            unsafe { tensor.copy_to_nonoverlapping(body.as_mut_ptr(), body.len()) };
        })
    }
}

fn sources(tensors: &[*mut u8]) -> PerRank<*const u8> {
    tensors.iter().map(|tensor| tensor.cast_const()).collect()
}

impl InterHostOps for ReducingInPlace<'_> {
    fn partial_bytes(&self, piece: &Piece<'_>) -> usize {
        Reducing.partial_bytes(piece)
    }

    unsafe fn contribute(&self, piece: &Piece<'_>, mut out: &mut [u8]) -> Result<bool> {
        for (reducer, piece) in piece.by_reducer() {
            let side = if reducer.is_some() { Side::Destination } else { Side::Source };
            self.for_tensors(&piece, side, |tensors, part| {
                let acc = out[part.at..part.at + part.count * part.reduction.acc_size()].as_mut_ptr();
                // SAFETY: this shard owns the piece of all tensors; slicing checks that the accumulators fit.
                unsafe { reduce_host(part.reduction, part.count, &sources(tensors), reducer, acc) };
            })?;
            out = &mut out[self.partial_bytes(&piece)..];
        }
        Ok(true)
    }

    unsafe fn reduce_part(&self, piece: &Piece<'_>) -> Result<()> {
        let (me, mut results) = (piece.shard.topology.local_rank(), Vec::new());
        self.for_tensors(piece, Side::Destination, |tensors, _| results.push(tensors[me]))?;
        let mut results = results.into_iter();
        self.for_tensors(piece, Side::Source, |tensors, part| {
            let Some(acc) = results.next() else { return };
            sync::check_write(acc, part.len());
            // SAFETY: this rank owns the piece of all tensors.
            unsafe { reduce_host(part.reduction, part.count, &sources(tensors), None, acc) };
        })
    }

    fn has_elements(&self) -> bool {
        true
    }

    unsafe fn read_elements(&self, piece: &Piece<'_>, message: &mut [u8]) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.read(piece, Side::Source, message) }
    }

    unsafe fn add_partials(&self, piece: &Piece<'_>, low: Partial, high: Partial, out: *mut u8) {
        // SAFETY: the caller's promise.
        unsafe { Reducing.add_partials(piece, low, high, out) };
    }

    unsafe fn finish_shard(&self, piece: &Piece<'_>, low: Partial, high: Partial) -> Result<()> {
        let accs: PerRank<*const u8> = [low, high].into_iter().flatten().collect();
        self.for_tensors(piece, Side::Destination, |tensors, part| {
            let accs: PerRank<*const u8> = accs.iter().map(|acc| acc.wrapping_add(part.at)).collect();
            tensors.iter().for_each(|&tensor| sync::check_write(tensor, part.len()));
            // SAFETY: the caller's promise; this shard has read its part of this piece in all tensors.
            unsafe { part.reduction.finish(&accs, tensors, part.count) };
        })
    }

    unsafe fn read_result(&self, piece: &Piece<'_>, message: &mut [u8]) -> Result<()> {
        // SAFETY: the caller's promise. All tensors have the same.
        unsafe { self.read(piece, Side::Destination, message) }
    }

    unsafe fn write_result(&self, piece: &Piece<'_>, message: &[u8]) -> Result<()> {
        self.for_tensors(piece, Side::Destination, |tensors, part| {
            let body = &message[part.message()];
            for &tensor in tensors {
                sync::check_write(tensor, body.len());
                // SAFETY: the caller's promise; a message is in no tensor.
                unsafe { body.as_ptr().copy_to_nonoverlapping(tensor, body.len()) };
            }
        })
    }
}
