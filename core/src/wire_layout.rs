//! The wire layout: tensors of a call, fused and cut into chunks. Pure.
//!
//! Tensors are laid out contiguously, grouped by element type; each type starts at a multiple of [`ALIGN`] bytes. The
//! layout is cut into chunks of equal size. A chunk has a few *runs* of one element type (units of a reduction) and
//! many *ranges* of tensors (units of copies). No element crosses a chunk or [`ALIGN`] boundary, so cuts at multiples
//! of [`ALIGN`] keep elements whole.

use std::ops::Range;

use crate::dtype::DType;
use crate::topology::Topology;

/// Alignment of every cut in the wire layout, in bytes: a cache line; no element is larger.
pub const ALIGN: usize = 64;

/// Size of the header of each message between hosts, in bytes.
pub const HEADER: usize = ALIGN;

/// Maximum ratio of accumulator size to element size on the wire.
const MAX_ACC_RATIO: usize = 4;

/// Upper limit of the accumulator bytes for `wire` bytes of elements, with the run of each element type aligned.
pub fn max_acc_bytes(wire: usize) -> usize {
    wire.next_multiple_of(ALIGN) * MAX_ACC_RATIO
}

/// Upper limit of the message bytes in one exchange between hosts, for slots of `slot` bytes: a part for each host with
/// a header, of a whole slot, or of the accumulators of a shard's slice.
pub fn exchange_buffer_bytes(slot: usize, topology: &Topology) -> usize {
    let (hosts, shards) = (topology.hosts(), topology.num_shards());
    let line = slot.div_ceil(ALIGN).div_ceil(shards) + 1;
    // In a reduce-scatter a slot has a block for each rank: a shard sends the blocks of its ranks, and receives those of
    // its ranks on one host from all others.
    let indices = |shard: usize| {
        let most = (0..hosts).map(|host| topology.shard_indices_of(shard, host).len()).max().unwrap_or(0);
        topology.shard_indices(shard).len().max(most * (hosts - 1))
    };
    let blocks = (0..shards).map(indices).max().unwrap_or(0);
    let block = slot / topology.size() / ALIGN;
    let accumulators = max_acc_bytes((line.max(blocks * block) + hosts) * ALIGN);
    hosts * (HEADER + ALIGN) + accumulators.max(slot)
}

/// The part of a tensor in a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TensorRange {
    /// The tensor's index in the caller's list.
    pub tensor: usize,
    /// The tensor's index in the layout: nonempty tensors, ordered by element type.
    pub layout_index: usize,
    /// The first element of the tensor in this range.
    pub first: usize,
    /// The number of elements.
    pub count: usize,
    /// The byte offset in the chunk.
    pub offset: usize,
}

/// Consecutive bytes of a chunk with one element type.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DtypeRun {
    /// Element type.
    pub dtype: DType,
    /// The bytes in the chunk. The start is a multiple of [`ALIGN`], the length a multiple of the element's wire size.
    pub bytes: Range<usize>,
}

/// The wire layout of a call.
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
    /// The logarithm of the wire size of an element: a division takes longer than the copy of a small tensor.
    shift: u32,
}

impl WireLayout {
    /// Lays out tensors given by element type and length. `wire_size` is the wire size of an element in bytes (a power
    /// of two up to [`ALIGN`]); `chunk` is a positive multiple of [`ALIGN`].
    pub fn new(tensors: &[(DType, usize)], wire_size: impl Fn(DType) -> usize, chunk: usize) -> WireLayout {
        debug_assert!(chunk > 0 && chunk.is_multiple_of(ALIGN));
        let mut entries = Vec::with_capacity(tensors.len());
        let mut groups = Vec::new();
        let mut position = 0;
        for dtype in DType::ALL {
            let element = wire_size(dtype);
            let start = position;
            for (tensor, &(_, len)) in tensors.iter().enumerate().filter(|(_, (other, _))| *other == dtype) {
                if len > 0 {
                    entries.push(LayoutEntry {
                        tensor,
                        start: position,
                        end: position + len * element,
                        shift: element.ilog2(),
                    });
                    position += len * element;
                }
            }
            if position > start {
                groups.push(DtypeRun { dtype, bytes: start..position });
                position = position.next_multiple_of(ALIGN);
            }
        }
        let total = groups.last().map_or(0, |group| group.bytes.end);
        WireLayout { tensors: entries, groups, total, chunk }
    }

    /// The same layout in chunks of `chunk` bytes, a positive multiple of [`ALIGN`].
    pub fn with_chunk_size(self, chunk: usize) -> WireLayout {
        debug_assert!(chunk > 0 && chunk.is_multiple_of(ALIGN));
        WireLayout { chunk, ..self }
    }

    /// A layout without tensors.
    pub fn empty(&self) -> WireLayout {
        WireLayout { tensors: Vec::new(), groups: Vec::new(), total: 0, chunk: self.chunk }
    }

    /// The total bytes of all chunks.
    pub fn total(&self) -> usize {
        self.total
    }

    /// The number of chunks; a call without data has one empty chunk.
    pub fn chunks(&self) -> usize {
        self.total.div_ceil(self.chunk).max(1)
    }

    /// The size of a full chunk in bytes.
    pub fn chunk_size(&self) -> usize {
        self.chunk
    }

    /// The size of chunk `index` in bytes.
    pub fn chunk_len(&self, index: usize) -> usize {
        self.range(index).len()
    }

    fn range(&self, index: usize) -> Range<usize> {
        let start = (index * self.chunk).min(self.total);
        start..(start + self.chunk).min(self.total)
    }

    /// The nonempty tensors in layout order.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = usize> {
        self.tensors.iter().map(|entry| entry.tensor)
    }

    /// The tensor ranges in bytes `part` of chunk `index`, by ascending offset. `part` is cut at multiples of [`ALIGN`]
    /// or at the chunk's end. Offsets are relative to the chunk.
    pub fn ranges(&self, index: usize, part: Range<usize>) -> impl Iterator<Item = TensorRange> {
        let origin = self.range(index).start;
        self.ranges_from(origin, origin + part.start..origin + part.end)
    }

    /// The tensor ranges in `range` of the whole layout, cut as in [`WireLayout::ranges`]. Offsets are relative to the
    /// first chunk.
    pub fn all_ranges(&self, range: Range<usize>) -> impl Iterator<Item = TensorRange> {
        self.ranges_from(0, range)
    }

    fn ranges_from(&self, origin: usize, range: Range<usize>) -> impl Iterator<Item = TensorRange> {
        let first = self.tensors.partition_point(|entry| entry.end <= range.start);
        let within = self.tensors[first..].iter().take_while({
            let (end, range) = (range.end, range.clone());
            move |entry| entry.start < end && !range.is_empty()
        });
        within.zip(first..).map(move |(entry, layout_index)| {
            let start = entry.start.max(range.start);
            let end = entry.end.min(range.end);
            TensorRange {
                tensor: entry.tensor,
                layout_index,
                first: (start - entry.start) >> entry.shift,
                count: (end - start) >> entry.shift,
                offset: start - origin,
            }
        })
    }

    /// The runs in bytes `part` of chunk `index`, by ascending offset. `part` is cut at multiples of [`ALIGN`] or at
    /// the chunk's end. Offsets are relative to the chunk.
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

/// Part `index` of `parts` nearly equal parts of `range`, cut at multiples of [`ALIGN`] from its start.
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
        fn every_element_is_in_one_range_and_one_run(
            tensors in prop::collection::vec((dtype(), 0usize..300), 1..40),
            lines in 1usize..20,
            widen in prop::bool::ANY,
        ) {
            let wire = |dtype: DType| dtype.size() * if widen { 2 } else { 1 };
            let layout = WireLayout::new(&tensors, wire, lines * ALIGN);
            let mut seen: Vec<Vec<u32>> = tensors.iter().map(|(_, len)| vec![0; *len]).collect();
            for chunk in 0..layout.chunks() {
                let len = layout.chunk_len(chunk);
                prop_assert!(len <= lines * ALIGN);
                let runs: Vec<DtypeRun> = layout.runs(chunk, 0..len).collect();
                for range in layout.ranges(chunk, 0..len / 2 / ALIGN * ALIGN).chain(layout.ranges(chunk, len / 2 / ALIGN * ALIGN..len)) {
                    let dtype = tensors[range.tensor].0;
                    let end = range.offset + range.count * wire(dtype);
                    prop_assert!(range.count > 0);
                    prop_assert!(runs.iter().any(|run| run.dtype == dtype && run.bytes.start <= range.offset && end <= run.bytes.end));
                    for element in &mut seen[range.tensor][range.first..range.first + range.count] {
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
            let mut position = range.start;
            for index in 0..parts {
                let part = slice(range.clone(), index, parts);
                prop_assert_eq!(part.start, position);
                prop_assert_eq!(part.start.is_multiple_of(ALIGN) || part.is_empty(), true);
                position = part.end;
            }
            prop_assert_eq!(position, range.end);
        }
    }

    #[test]
    fn no_tensors_give_one_empty_chunk() {
        let layout = WireLayout::new(&[(DType::F32, 0)], DType::size, 64);
        assert_eq!(
            (layout.chunks(), layout.chunk_len(0), layout.ranges(0, 0..0).count(), layout.total()),
            (1, 0, 0, 0)
        );
    }
}
