//! What shard owners send each other: partial results of a reduction, or the bytes of the root.
//!
//! All ranges are bytes of a slot: of the wire's chunk, or of the compartments.

use std::ops::Range;
use std::ptr;

use super::call::Call;
use super::shard::{PerRank, ShardView};
use super::wire::{runs, shard_range};
use crate::error::{Error, Result};
use crate::reduce::Reduction;
use crate::transport::sync;
use crate::wire_layout::{ALIGN, DtypeRun, slice};

/// Partial results of a piece, if the hosts have data.
pub(crate) type Partial = Option<*const u8>;

/// A piece of a shard's slice.
pub(crate) struct Piece<'a> {
    /// The call.
    pub call: &'a Call,
    /// The shard, on this host.
    pub shard: &'a ShardView<'a>,
    /// The piece, in bytes of a slot.
    pub bytes: Range<usize>,
}

impl Piece<'_> {
    fn runs(&self) -> impl Iterator<Item = DtypeRun> + '_ {
        runs(self.call, self.shard.topology, self.shard.shard, self.shard.chunk, self.bytes.clone())
    }

    pub(super) fn parts(&self) -> impl Iterator<Item = PartialRange> + '_ {
        parts(self.call, self.shard, self.bytes.clone())
    }

    /// The piece, cut where reducers have reduced the slice for the host: each as a local rank, if there are any.
    pub(super) fn by_reducer(&self) -> impl Iterator<Item = (Option<usize>, Piece<'_>)> {
        let &Piece { call, shard, ref bytes } = self;
        let &ShardView { topology, shard: number, chunk, parts, .. } = shard;
        let whole = if parts == 1 { bytes.clone() } else { shard_range(topology, call, chunk, number) };
        (0..parts).filter_map(move |index| {
            let part = slice(whole.clone(), index, parts);
            let bytes = part.start.max(bytes.start)..part.end.min(bytes.end);
            let reducer = (parts > 1).then(|| topology.reducer(number, index));
            (!bytes.is_empty()).then_some((reducer, Piece { call, shard, bytes }))
        })
    }
}

/// The operations of a collective between hosts.
pub(crate) trait InterHostOps: Sync {
    /// Bytes of a host's partial results of `piece`; additive over adjacent pieces.
    fn partial_bytes(&self, piece: &Piece<'_>) -> usize;

    /// Writes this host's partial results of `piece`; false if it has none.
    ///
    /// # Errors
    /// [`crate::error::Error::Internal`] if this rank cannot access a tensor.
    ///
    /// # Safety
    /// This shard owns the slice of all slots that contains `piece`.
    unsafe fn contribute(&self, piece: &Piece<'_>, out: &mut [u8]) -> Result<bool>;

    /// Reduces `piece` of all ranks of this host, and leaves the partial results where this rank's elements were, or will
    /// have its result: there `contribute` finds them.
    ///
    /// # Errors
    /// As for `contribute`; [`Error::Internal`] for operations without parts.
    ///
    /// # Safety
    /// This rank owns `piece` of all slots, which is of its part of the slice; accumulators are no wider than elements.
    unsafe fn reduce_part(&self, piece: &Piece<'_>) -> Result<()> {
        Err(Error::Internal(format!("only the owner of a shard reduces {}", piece.call.full_name())))
    }

    /// Whether `read_elements` has what `contribute` adds up. The same on all hosts.
    fn has_elements(&self) -> bool {
        false
    }

    /// Copies the elements of this host's only rank in `piece` to a message, of the bytes of a result. They have the place of
    /// the result, unless they are read elsewhere.
    ///
    /// # Errors
    /// As for `contribute`.
    ///
    /// # Safety
    /// As for `contribute`; [`InterHostOps::has_elements`].
    unsafe fn read_elements(&self, piece: &Piece<'_>, message: &mut [u8]) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.read_result(piece, message) }
    }

    /// The partial results of a host whose only rank has these elements in `piece`.
    ///
    /// # Safety
    /// `message` has the bytes of a result of `piece`; `out` has room for the partial results and does not overlap it.
    unsafe fn partial_of_elements(&self, piece: &Piece<'_>, message: *const u8, out: *mut u8) {
        let mut from = 0;
        for part in piece.parts() {
            // SAFETY: the caller's promise.
            unsafe { part.reduction.partial(&[message.add(from)], out.add(part.at), part.count) };
            from += part.count * part.reduction.wire_size();
        }
    }

    /// Adds two partial results of `piece`, in the order `low`, `high`; does nothing if both are absent.
    ///
    /// # Safety
    /// The operands are valid for their lengths, and so is `out`, which equals one of them or overlaps neither.
    unsafe fn add_partials(&self, piece: &Piece<'_>, low: Partial, high: Partial, out: *mut u8);

    /// Completes `piece` from the last two partial results, where the ranks of this host have or take it.
    ///
    /// # Errors
    /// As for `contribute`.
    ///
    /// # Safety
    /// As for `contribute` and `add_partials`.
    unsafe fn finish_shard(&self, piece: &Piece<'_>, low: Partial, high: Partial) -> Result<()>;

    /// Copies the completed `piece` to a message.
    ///
    /// # Errors
    /// As for `contribute`.
    ///
    /// # Safety
    /// This shard has completed `piece`.
    unsafe fn read_result(&self, piece: &Piece<'_>, message: &mut [u8]) -> Result<()> {
        let mut at = 0;
        for run in piece.runs() {
            let body = &mut message[at..at + run.bytes.len()];
            let from = piece.shard.result.wrapping_add(run.bytes.start);
            sync::check_read(from, body.len());
            // SAFETY: the caller's promise.
            unsafe { ptr::copy_nonoverlapping(from, body.as_mut_ptr(), body.len()) };
            at += body.len();
        }
        Ok(())
    }

    /// Takes the completed `piece` from a message.
    ///
    /// # Errors
    /// As for `contribute`.
    ///
    /// # Safety
    /// As for `contribute`.
    unsafe fn write_result(&self, piece: &Piece<'_>, message: &[u8]) -> Result<()> {
        let mut at = 0;
        for run in piece.runs() {
            let body = &message[at..at + run.bytes.len()];
            let to = piece.shard.result.wrapping_add(run.bytes.start);
            sync::check_write(to, body.len());
            // SAFETY: the caller's promise.
            unsafe { ptr::copy_nonoverlapping(body.as_ptr(), to, body.len()) };
            at += body.len();
        }
        Ok(())
    }
}

/// The operations of `call` on tensors in host memory.
pub(super) fn inter_host_ops(call: &Call) -> &'static dyn InterHostOps {
    if call.op.collective.reduces { &Reducing } else { &Moving }
}

/// Elements of one type in a host's partial results.
pub(super) struct PartialRange {
    pub reduction: Reduction,
    pub count: usize,
    /// Offset of the elements in the slot.
    pub wire: usize,
    /// Offset of their accumulators in the partial results.
    pub at: usize,
}

impl PartialRange {
    /// Offset of the next accumulators.
    pub fn end(&self) -> usize {
        self.at + (self.count * self.reduction.acc_size()).next_multiple_of(ALIGN)
    }
}

/// The contents of a host's partial results of `piece`.
pub(super) fn parts<'a>(
    call: &'a Call,
    shard: &ShardView<'a>,
    piece: Range<usize>,
) -> impl Iterator<Item = PartialRange> + use<'a> {
    let mut at = 0;
    runs(call, shard.topology, shard.shard, shard.chunk, piece).map(move |run| {
        let reduction = call.reduction(run.dtype);
        let elements =
            PartialRange { reduction, count: run.bytes.len() / reduction.wire_size(), wire: run.bytes.start, at };
        at = elements.end();
        elements
    })
}

/// Writes the partial results of `count` elements at `sources`, by local rank, to `acc`. If `reducer` has reduced them, they
/// are at its source.
///
/// # Safety
/// As for [`Reduction::partial`]; with a reducer, `acc` is no source, and accumulators are no wider than elements.
pub(super) unsafe fn reduce_host(
    reduction: Reduction,
    count: usize,
    sources: &[*const u8],
    reducer: Option<usize>,
    acc: *mut u8,
) {
    let (all, len) = (0..sources.len(), count * reduction.wire_size());
    let read = &sources[reducer.map_or(all, |rank| rank..rank + 1)];
    read.iter().for_each(|&source| sync::check_read(source, len));
    // SAFETY: the caller's promise.
    unsafe {
        match reducer {
            Some(_) => read[0].copy_to_nonoverlapping(acc, len),
            None => reduction.partial(read, acc, count),
        }
    }
}

/// Reduces the ranks of a host, then the hosts.
pub(super) struct Reducing;

impl InterHostOps for Reducing {
    fn partial_bytes(&self, piece: &Piece<'_>) -> usize {
        piece.parts().last().map_or(0, |part| part.end())
    }

    fn has_elements(&self) -> bool {
        true
    }

    unsafe fn contribute(&self, piece: &Piece<'_>, mut out: &mut [u8]) -> Result<bool> {
        for (reducer, piece) in piece.by_reducer() {
            for part in piece.parts() {
                let acc = out[part.at..part.end()].as_mut_ptr();
                // SAFETY: this shard owns the piece of all slots; slicing checks that the accumulators fit.
                unsafe { reduce_host(part.reduction, part.count, &piece.shard.sources(part.wire), reducer, acc) };
            }
            out = &mut out[self.partial_bytes(&piece)..];
        }
        Ok(true)
    }

    unsafe fn reduce_part(&self, piece: &Piece<'_>) -> Result<()> {
        let me = piece.shard.topology.local_rank();
        for part in piece.parts() {
            let (sources, acc) = (piece.shard.sources(part.wire), piece.shard.slots[me].wrapping_add(part.wire));
            sync::check_write(acc, part.count * part.reduction.wire_size());
            // SAFETY: this rank owns the piece of all slots.
            unsafe { reduce_host(part.reduction, part.count, &sources, None, acc) };
        }
        Ok(())
    }

    unsafe fn add_partials(&self, piece: &Piece<'_>, low: Partial, high: Partial, out: *mut u8) {
        let (Some(low), Some(high)) = (low, high) else { return };
        for part in piece.parts() {
            // The operands are accumulators.
            let reduction = Reduction { wire_is_acc: true, ..part.reduction };
            // SAFETY: the caller's promise; both operands are partial results of this piece.
            unsafe { reduction.partial(&[low.add(part.at), high.add(part.at)], out.add(part.at), part.count) };
        }
    }

    unsafe fn finish_shard(&self, piece: &Piece<'_>, low: Partial, high: Partial) -> Result<()> {
        let accs: PerRank<*const u8> = [low, high].into_iter().flatten().collect();
        for part in piece.parts() {
            let accs: PerRank<*const u8> = accs.iter().map(|acc| acc.wrapping_add(part.at)).collect();
            let out = piece.shard.result.wrapping_add(part.wire);
            sync::check_write(out, part.count * part.reduction.wire_size());
            // SAFETY: as in `add_partials`; this shard owns the piece of its slot.
            unsafe { part.reduction.finish(&accs, &[out], part.count) };
        }
        Ok(())
    }
}

/// Sends the bytes of the root.
struct Moving;

impl InterHostOps for Moving {
    fn partial_bytes(&self, piece: &Piece<'_>) -> usize {
        piece.runs().map(|run| run.bytes.len()).sum()
    }

    unsafe fn contribute(&self, piece: &Piece<'_>, out: &mut [u8]) -> Result<bool> {
        let op = piece.call.op;
        let Some(root) = piece.shard.topology.local_rank_of(op.root).filter(|_| !op.is_barrier()) else {
            return Ok(false);
        };
        let mut at = 0;
        for run in piece.runs() {
            let len = run.bytes.len();
            // SAFETY: this shard owns the piece of all slots; slicing checks that it fits.
            unsafe {
                let from = piece.shard.slots[root].add(run.bytes.start);
                ptr::copy_nonoverlapping(from, out[at..at + len].as_mut_ptr(), len);
            }
            at += len;
        }
        Ok(true)
    }

    unsafe fn add_partials(&self, piece: &Piece<'_>, low: Partial, high: Partial, out: *mut u8) {
        if let Some(part) = low.or(high).filter(|&part| !ptr::eq(part, out)) {
            // SAFETY: the caller promises that they do not overlap.
            unsafe { ptr::copy_nonoverlapping(part, out, self.partial_bytes(piece)) };
        }
    }

    unsafe fn finish_shard(&self, piece: &Piece<'_>, low: Partial, high: Partial) -> Result<()> {
        let Some(part) = low.or(high) else { return Ok(()) };
        // SAFETY: the partial results are the bytes of the root; this shard owns the piece of its slot.
        unsafe { self.write_result(piece, std::slice::from_raw_parts(part, self.partial_bytes(piece))) }
    }
}
