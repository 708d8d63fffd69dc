//! How the tensors of one call are fused and cut: the wire layout. Pure.
//!
//! Tensors are laid out one behind the other, those of one element type together, each group from a multiple of
//! [`ALIGN`] bytes; that line of bytes is cut into chunks of equal size. A chunk is thus a few *runs* of one element type
//! (what a reduction works on) and many *pieces* of tensors (what is copied in and out). Elements never straddle a chunk
//! or an [`ALIGN`] boundary, so any cut at multiples of it keeps elements whole.

use std::ops::Range;

use crate::dtype::DType;

/// Every cut of the wire layout is at a multiple of this many bytes: a cache line, and no element is larger.
pub const ALIGN: usize = 64;

/// The bytes at the start of every message between hosts that say what it is.
pub const HEADER: usize = ALIGN;

/// Accumulators are at most that many times as wide as the elements on the wire.
const MAX_ACC_RATIO: usize = 4;

/// The most bytes that `wire` bytes of elements take as accumulators, the runs of each element type aligned.
pub fn max_acc_bytes(wire: usize) -> usize {
    wire.next_multiple_of(ALIGN) * MAX_ACC_RATIO
}

/// The bytes that the messages of one exchange between hosts take at most, for slots of `slot` bytes: one shard's slice as
/// accumulators, in a piece and with a header for each host.
pub fn exchange_buffer_bytes(slot: usize, shards: usize, hosts: usize) -> usize {
    let slice_lines = slot.div_ceil(ALIGN).div_ceil(shards) + 1;
    hosts * HEADER + max_acc_bytes((slice_lines + hosts) * ALIGN)
}

/// Part of one tensor that lies in a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TensorRange {
    /// The tensor's position in the caller's list.
    pub tensor: usize,
    /// Its place among the tensors of the wire layout, which are those that have elements, by element type.
    pub layout_index: usize,
    /// Its first element in this chunk.
    pub first: usize,
    /// How many elements.
    pub count: usize,
    /// Where they lie in the chunk, in bytes.
    pub offset: usize,
}

/// Bytes of a chunk that hold elements of one type.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DtypeRun {
    /// The element type.
    pub dtype: DType,
    /// The bytes in the chunk; the start is a multiple of [`ALIGN`], the length one of the element's size on the wire.
    pub bytes: Range<usize>,
}

/// The wire layout of one call.
#[derive(Debug, Clone)]
pub struct WireLayout {
    tensors: Vec<LayoutEntry>,
    groups: Vec<DtypeRun>,
    total: usize,
    chunk: usize,
}

#[derive(Debug, Clone, Copy)]
struct LayoutEntry {
    tensor: usize,
    start: usize,
    end: usize,
    element: usize,
}

impl WireLayout {
    /// Lays out tensors given by element type and length. `wire_size` tells how many bytes an element takes on the wire (a
    /// power of two up to [`ALIGN`]); `chunk` is a positive multiple of [`ALIGN`].
    pub fn new(tensors: &[(DType, usize)], wire_size: impl Fn(DType) -> usize, chunk: usize) -> WireLayout {
        debug_assert!(chunk > 0 && chunk.is_multiple_of(ALIGN));
        let mut placed = Vec::with_capacity(tensors.len());
        let mut groups = Vec::new();
        let mut at = 0;
        for dtype in DType::ALL {
            let element = wire_size(dtype);
            let start = at;
            for (tensor, &(_, len)) in tensors.iter().enumerate().filter(|(_, (other, _))| *other == dtype) {
                if len > 0 {
                    placed.push(LayoutEntry { tensor, start: at, end: at + len * element, element });
                    at += len * element;
                }
            }
            if at > start {
                groups.push(DtypeRun { dtype, bytes: start..at });
                at = at.next_multiple_of(ALIGN);
            }
        }
        let total = groups.last().map_or(0, |group| group.bytes.end);
        WireLayout { tensors: placed, groups, total, chunk }
    }

    /// The same layout in chunks of `chunk` bytes, a positive multiple of [`ALIGN`].
    pub fn with_chunk_size(self, chunk: usize) -> WireLayout {
        debug_assert!(chunk > 0 && chunk.is_multiple_of(ALIGN));
        WireLayout { chunk, ..self }
    }

    /// A plan of nothing.
    pub fn empty(&self) -> WireLayout {
        WireLayout { tensors: Vec::new(), groups: Vec::new(), total: 0, chunk: self.chunk }
    }

    /// The bytes of all chunks together.
    pub fn total(&self) -> usize {
        self.total
    }

    /// The number of chunks; a call without data still has one, which is empty.
    pub fn chunks(&self) -> usize {
        self.total.div_ceil(self.chunk).max(1)
    }

    /// The bytes of chunk `index`.
    pub fn chunk_len(&self, index: usize) -> usize {
        self.range(index).len()
    }

    fn range(&self, index: usize) -> Range<usize> {
        let start = (index * self.chunk).min(self.total);
        start..(start + self.chunk).min(self.total)
    }

    /// The tensors that have elements, in the order in which they are laid out.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = usize> {
        self.tensors.iter().map(|placed| placed.tensor)
    }

    /// The parts of tensors in chunk `index` within `part` of its bytes (cut at multiples of [`ALIGN`], or at the chunk's
    /// end), by ascending offset. Offsets count from the chunk's start.
    pub fn ranges(&self, index: usize, part: Range<usize>) -> impl Iterator<Item = TensorRange> {
        let origin = self.range(index).start;
        self.ranges_from(origin, origin + part.start..origin + part.end)
    }

    /// The parts of tensors in `range` of all bytes (cut as for [`WireLayout::pieces`]), whatever the chunks. Offsets count from the
    /// start of the first chunk.
    pub fn all_ranges(&self, range: Range<usize>) -> impl Iterator<Item = TensorRange> {
        self.ranges_from(0, range)
    }

    fn ranges_from(&self, origin: usize, range: Range<usize>) -> impl Iterator<Item = TensorRange> {
        let first = self.tensors.partition_point(|placed| placed.end <= range.start);
        let within = self.tensors[first..].iter().take_while({
            let (end, range) = (range.end, range.clone());
            move |placed| placed.start < end && !range.is_empty()
        });
        within.zip(first..).map(move |(placed, place)| {
            let start = placed.start.max(range.start);
            let end = placed.end.min(range.end);
            TensorRange {
                tensor: placed.tensor,
                layout_index: place,
                first: (start - placed.start) / placed.element,
                count: (end - start) / placed.element,
                offset: start - origin,
            }
        })
    }

    /// The runs of chunk `index` within `part` of its bytes (cut at multiples of [`ALIGN`], or at the chunk's end), by
    /// ascending offset. Offsets count from the chunk's start.
    pub fn runs(&self, index: usize, part: Range<usize>) -> impl Iterator<Item = DtypeRun> {
        let origin = self.range(index).start;
        let (from, to) = (origin + part.start, origin + part.end);
        self.groups.iter().filter_map(move |group| {
            let start = group.bytes.start.max(from);
            let end = group.bytes.end.min(to);
            (start < end).then(|| DtypeRun { dtype: group.dtype, bytes: start - origin..end - origin })
        })
    }
}

/// Part `index` of `parts` of `range`, all cut at multiples of [`ALIGN`] from the range's start, as equal as that allows.
pub fn slice(range: Range<usize>, index: usize, parts: usize) -> Range<usize> {
    let lines = range.len().div_ceil(ALIGN);
    let cut = |i: usize| (range.start + (lines * i / parts) * ALIGN).min(range.end);
    cut(index)..cut(index + 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn dtype() -> impl Strategy<Value = DType> {
        prop::sample::select(DType::ALL.to_vec())
    }

    proptest! {
        #[test]
        fn every_element_is_in_one_piece_and_one_run(
            tensors in prop::collection::vec((dtype(), 0usize..300), 1..40),
            lines in 1usize..20,
            widen in prop::bool::ANY,
        ) {
            let wire = |dtype: DType| dtype.size() * if widen { 2 } else { 1 };
            let plan = WireLayout::new(&tensors, wire, lines * ALIGN);
            let mut seen: Vec<Vec<u32>> = tensors.iter().map(|(_, len)| vec![0; *len]).collect();
            for chunk in 0..plan.chunks() {
                let len = plan.chunk_len(chunk);
                prop_assert!(len <= lines * ALIGN);
                let runs: Vec<DtypeRun> = plan.runs(chunk, 0..len).collect();
                for piece in plan.ranges(chunk, 0..len / 2 / ALIGN * ALIGN).chain(plan.ranges(chunk, len / 2 / ALIGN * ALIGN..len)) {
                    let dtype = tensors[piece.tensor].0;
                    let end = piece.offset + piece.count * wire(dtype);
                    prop_assert!(piece.count > 0);
                    prop_assert!(runs.iter().any(|run| run.dtype == dtype && run.bytes.start <= piece.offset && end <= run.bytes.end));
                    for element in &mut seen[piece.tensor][piece.first..piece.first + piece.count] {
                        *element += 1;
                    }
                }
                for run in &runs {
                    prop_assert_eq!(run.bytes.start % ALIGN, 0);
                    prop_assert_eq!(run.bytes.len() % wire(run.dtype), 0);
                }
            }
            prop_assert!(seen.iter().flatten().all(|&times| times == 1));
        }

        #[test]
        fn slices_cover_a_range_in_order(start in 0usize..4, len in 0usize..5000, parts in 1usize..9) {
            let range = start * ALIGN..start * ALIGN + len;
            let mut at = range.start;
            for index in 0..parts {
                let part = slice(range.clone(), index, parts);
                prop_assert_eq!(part.start, at);
                prop_assert_eq!(part.start.is_multiple_of(ALIGN) || part.is_empty(), true);
                at = part.end;
            }
            prop_assert_eq!(at, range.end);
        }
    }

    #[test]
    fn no_tensors_make_one_empty_chunk() {
        let plan = WireLayout::new(&[(DType::F32, 0)], DType::size, 64);
        assert_eq!((plan.chunks(), plan.chunk_len(0), plan.ranges(0, 0..0).count(), plan.total()), (1, 0, 0, 0));
    }
}
