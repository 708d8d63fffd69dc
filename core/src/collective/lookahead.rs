//! The calls that are queued behind the one that starts. Pure.
//!
//! Between hosts the ranks compare a call as long as a message takes. So they also compare the calls behind it, by hashes
//! of their signatures: those that all ranks have in the same order can begin before this one has ended.

use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::transport::{LOOKAHEAD_WORDS, common_words};

/// The numbers of calls that are compared together.
const LENGTHS: [usize; LOOKAHEAD_WORDS - 1] = [1, 4, 16, 64];

/// A hash of the next calls for each of [`LENGTHS`], and one of all that the rank has, at most [`Lookahead::MAX`], with
/// their number in its lowest byte; 0 if there are fewer, or if the ranks differ.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Lookahead(pub [u64; LOOKAHEAD_WORDS]);

impl Lookahead {
    /// The most calls that are compared.
    pub const MAX: usize = 128;

    /// The hashes of the calls with these signatures, in the order of the queue.
    pub fn new(signatures: impl IntoIterator<Item = u64>) -> Lookahead {
        let mut hashes = Lookahead::default();
        let mut hash = 0;
        for (before, signature) in signatures.into_iter().take(Lookahead::MAX).enumerate() {
            hash = xxh3_64_with_seed(&signature.to_le_bytes(), hash);
            let count = before + 1;
            if let Some(place) = LENGTHS.iter().position(|&length| length == count) {
                hashes.0[place] = hash.max(1);
            }
            hashes.0[LOOKAHEAD_WORDS - 1] = hash & !0xff | count as u64;
        }
        hashes
    }

    /// What two ranks, or groups of ranks, have in common.
    pub fn common(self, other: Lookahead) -> Lookahead {
        Lookahead(common_words(self.0, other.0))
    }

    /// The number of calls that all ranks have.
    pub fn calls(self) -> usize {
        let [lengths @ .., all] = self.0;
        let longest = lengths.iter().zip(LENGTHS).rev().find(|(hash, _)| **hash != 0).map_or(0, |(_, length)| length);
        longest.max((all & 0xff) as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_longest_common_length_counts() {
        let ahead = |count: u64| Lookahead::new(0..count);
        assert_eq!([0, 1, 2, 3, 15, 100, 128, 1000].map(|count| ahead(count).calls()), [0, 1, 2, 3, 15, 100, 128, 128]);
        let common = |count: u64| ahead(200).common(ahead(count)).calls();
        assert_eq!([0, 1, 3, 4, 15, 16, 100, 128].map(common), [0, 1, 1, 4, 4, 16, 64, 128]);
        let differs = |at: u64| Lookahead::new((0..100).map(|index| if index == at { 1000 } else { index }));
        let common = |at: u64| ahead(100).common(differs(at)).calls();
        assert_eq!([0, 1, 5, 16, 63, 64, 99].map(common), [0, 1, 4, 16, 16, 64, 64]);
    }

    proptest! {
        #[test]
        fn any_order_of_the_ranks_gives_the_same(
            queues in prop::collection::vec(prop::collection::vec(0u64..2, 0..20), 1..6),
            seed in 0usize..100,
        ) {
            let of = |queue: &Vec<u64>| Lookahead::new(queue.iter().copied());
            let fold = |all: &[Lookahead]| all.iter().copied().reduce(Lookahead::common);
            let forward: Vec<Lookahead> = queues.iter().map(of).collect();
            let mut turned = forward.clone();
            turned.rotate_left(seed % forward.len());
            turned.push(forward[0]);
            prop_assert_eq!(fold(&forward), fold(&turned), "and a rank may be counted twice");
            let common = fold(&forward).map_or(0, Lookahead::calls);
            prop_assert!(queues.iter().all(|queue| queue.len() >= common && queue[..common] == queues[0][..common]));
        }
    }
}
