//! Where the parts of tensors are: which rank owns which elements, and where they lie in the memory of that rank. Pure.
//!
//! Every rank of the group owns a shard of every tensor: as many elements as the others, up to one. Its memory has the
//! locks of all blocks first, then the shards, each in its storage type. The places are the same in the memory of all
//! ranks: each has room for the longest shard.

use std::ops::Range;

use super::block_lock::BlockLock;
use crate::dtype::DType;
use crate::error::{Error, Result};

/// Bytes of a block, which a lock protects: small enough for the nearest caches, so that an update waits only shortly for
/// another one; a lock costs less than a hundredth of the time for it.
pub const BLOCK_BYTES: usize = if cfg!(test) { 64 } else { 64 << 10 };

/// What the parameter server has of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stored {
    /// Elements.
    pub len: usize,
    /// Their type in the caller's tensors.
    pub dtype: DType,
    /// The first lock, by number, and the first byte of the shard.
    lock: usize,
    start: usize,
}

impl Stored {
    /// The type in the memory of the server: float32 for the half types, so that small updates are not rounded away.
    pub fn storage(&self) -> DType {
        match self.dtype {
            DType::F16 | DType::BF16 => DType::F32,
            other => other,
        }
    }

    /// Elements of a block.
    pub fn block_len(&self) -> usize {
        BLOCK_BYTES / self.storage().size()
    }

    /// The elements of the shard of `rank`, one of `ranks`.
    pub fn shard(&self, rank: usize, ranks: usize) -> Range<usize> {
        let (each, more) = (self.len / ranks, self.len % ranks);
        let start = |rank: usize| each * rank + more.min(rank);
        start(rank)..start(rank + 1)
    }
}

/// A block, or a part of one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// Byte of the memory where its lock is.
    pub lock: usize,
    /// The first byte of its elements.
    pub data: usize,
    /// Elements.
    pub len: usize,
}

/// The layout of a list of tensors.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    tensors: Vec<Stored>,
    ranks: usize,
    bytes: usize,
}

impl Layout {
    /// For these tensors (elements and types) on `ranks` ranks.
    ///
    /// # Errors
    /// [`Error::Invalid`] for no tensors, a tensor with fewer elements than ranks, or more bytes than memory can have.
    pub fn new(tensors: &[(usize, DType)], ranks: usize) -> Result<Layout> {
        let too_large = || Error::Invalid("the tensors of the parameter server are longer than memory can be".into());
        if tensors.is_empty() {
            return Err(Error::Invalid("a parameter server has at least one tensor".into()));
        }
        let (mut stored, mut locks, mut bytes) = (Vec::with_capacity(tensors.len()), 0, 0usize);
        for (index, &(len, dtype)) in tensors.iter().enumerate() {
            if len < ranks {
                return Err(Error::Invalid(format!(
                    "tensor {index} of the parameter server has {len} elements; it needs one for each of the {ranks} ranks"
                )));
            }
            let tensor = Stored { len, dtype, lock: locks, start: bytes };
            let longest = len.div_ceil(ranks);
            locks += longest.div_ceil(tensor.block_len());
            let shard =
                longest.checked_mul(tensor.storage().size()).and_then(|bytes| bytes.checked_next_multiple_of(64));
            bytes = shard.and_then(|shard| bytes.checked_add(shard)).ok_or_else(too_large)?;
            stored.push(tensor);
        }
        let data = locks * size_of::<BlockLock>();
        stored.iter_mut().for_each(|tensor| tensor.start += data);
        let bytes = bytes.checked_add(data).filter(|&bytes| bytes <= isize::MAX as usize).ok_or_else(too_large)?;
        Ok(Layout { tensors: stored, ranks, bytes })
    }

    /// The tensors.
    pub fn tensors(&self) -> &[Stored] {
        &self.tensors
    }

    /// The ranks.
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// Bytes of the memory of a rank.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The blocks of the elements `range` of a shard of tensor `tensor`, in order; the first and the last may be parts.
    pub fn blocks(&self, tensor: usize, range: Range<usize>) -> impl Iterator<Item = Place> + use<> {
        let stored = self.tensors[tensor];
        let (block, size) = (stored.block_len(), stored.storage().size());
        let mut at = range.start;
        std::iter::from_fn(move || {
            let number = at / block;
            let end = range.end.min((number + 1) * block);
            let place = Place {
                lock: (stored.lock + number) * size_of::<BlockLock>(),
                data: stored.start + at * size,
                len: end.saturating_sub(at),
            };
            at = end;
            (place.len > 0).then_some(place)
        })
    }

    /// For messages and for comparisons between ranks: `float32[100], float16[7]`.
    pub fn describe(&self) -> String {
        let names: Vec<String> =
            self.tensors.iter().map(|tensor| format!("{}[{}]", tensor.dtype.name(), tensor.len)).collect();
        names.join(", ")
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Every element of every tensor has one owner and one place, whose bytes belong to nothing else.
        #[test]
        fn places_are_disjoint_and_complete(lens in prop::collection::vec((4usize..200, 0usize..DType::ALL.len()), 1..5), ranks in 1usize..5) {
            let tensors: Vec<_> = lens.iter().map(|&(len, dtype)| (len, DType::ALL[dtype])).collect();
            let layout = Layout::new(&tensors, ranks).unwrap();
            let mut used = vec![false; layout.bytes()];
            let mut locks = Vec::new();
            for (index, stored) in layout.tensors().iter().enumerate() {
                let shards: Vec<_> = (0..ranks).map(|rank| stored.shard(rank, ranks)).collect();
                prop_assert!(shards[0].start == 0 && shards[ranks - 1].end == stored.len);
                prop_assert!(shards.windows(2).all(|pair| pair[0].end == pair[1].start));
                prop_assert!(shards.iter().all(|shard| !shard.is_empty()));
                let size = stored.storage().size();
                let blocks: Vec<_> = layout.blocks(index, 0..shards[0].len()).collect();
                prop_assert_eq!(blocks.iter().map(|place| place.len).sum::<usize>(), shards[0].len());
                for place in blocks {
                    prop_assert!(place.data % size == 0 && place.len <= stored.block_len());
                    let bytes = place.data..place.data + place.len * size;
                    prop_assert!(used[bytes.clone()].iter().all(|used| !used));
                    used[bytes].fill(true);
                    locks.push(place.lock);
                }
                let middle: Vec<_> = layout.blocks(index, 1..shards[0].len()).collect();
                prop_assert_eq!(middle.iter().map(|place| place.len).sum::<usize>(), shards[0].len() - 1);
            }
            let count = locks.len();
            locks.dedup();
            prop_assert_eq!(locks.len(), count, "one lock for each block");
            prop_assert!(locks.iter().all(|&lock| lock % 64 == 0 && !used[lock..lock + 64].contains(&true)));
        }
    }

    #[test]
    fn tensors_without_an_element_for_each_rank_are_refused() {
        assert!(matches!(Layout::new(&[], 2), Err(Error::Invalid(_))));
        let error = Layout::new(&[(3, DType::F32), (2, DType::F32)], 3).unwrap_err().to_string();
        assert!(error.contains("tensor 1") && error.contains("2 elements") && error.contains("3 ranks"), "{error}");
        assert!(Layout::new(&[(usize::MAX / 2, DType::F64)], 1).is_err());
        assert_eq!(Layout::new(&[(3, DType::F32), (9, DType::BF16)], 2).unwrap().describe(), "float32[3], bfloat16[9]");
    }
}
