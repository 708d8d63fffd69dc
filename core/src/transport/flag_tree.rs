//! Whose flags a rank of a host reads. Pure.
//!
//! On a small host each rank reads the flags of all others: one step, and p (p - 1) cache lines for p ranks. On a large
//! one notices are gathered up a tree and released down it: 2 (p - 1) lines, and two steps for each level, as in MPICH's
//! release-gather collectives (Jain et al., "Framework for Scalable Intra-node Collective Operations using Shared Memory",
//! SC 2018). Only notices take the tree; data is read from the rank that has it, so the order of addition does not depend
//! on it. [`Selection`](crate::collective::Selection) says how large a host is; where ranks share processors a tree of 16
//! ranks takes 1.3 times as long as no tree, and one of 32 ranks 1.5 times.

use super::rank_flags::Scope;

/// The ranks that gather each other's notices in a level of the tree: these mostly share a cache.
pub const FAN_OUT: usize = 8;

/// The fan-out of the tree of `ranks` ranks, of which up to `flat` read each other's flags; `None`: they do.
pub fn fan_out(ranks: usize, flat: usize) -> Option<usize> {
    (ranks > flat).then_some(FAN_OUT)
}

/// A flag that a rank reads: of this rank, for these ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Source {
    pub rank: usize,
    pub scope: Scope,
}

/// The place of a rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct FlagTree {
    /// What it gathers, by rank, its own flags among them.
    pub sources: Vec<Source>,
    /// Whether notices are released down a tree; otherwise the sources are all ranks.
    pub is_tree: bool,
    /// The rank that releases what all ranks have posted; `None` for the one that gathers it.
    pub parent: Option<usize>,
}

impl FlagTree {
    /// The place of rank `me` of `ranks`. Consecutive ranks, which launchers put on neighbouring processors, are in one
    /// subtree: the parent of a rank has the last digit of its number that is not 0, in base `fan_out`, cleared. A
    /// fan-out of 1 makes a chain.
    pub fn new(me: usize, ranks: usize, fan_out: Option<usize>) -> FlagTree {
        let own = |rank| Source { rank, scope: Scope::Own };
        let Some(fan_out) = fan_out else {
            return FlagTree { sources: (0..ranks).map(own).collect(), is_tree: false, parent: None };
        };
        let has_children = |rank: usize| (rank + 1..ranks).any(|other| parent(other, fan_out) == Some(rank));
        let child = |rank: usize| match has_children(rank) {
            true => Source { rank, scope: Scope::Subtree },
            false => own(rank),
        };
        let children = (me + 1..ranks).filter(|&rank| parent(rank, fan_out) == Some(me)).map(child);
        FlagTree {
            sources: std::iter::once(own(me)).chain(children).collect(),
            is_tree: true,
            parent: parent(me, fan_out),
        }
    }
}

fn parent(rank: usize, fan_out: usize) -> Option<usize> {
    if fan_out < 2 {
        return rank.checked_sub(1);
    }
    let mut unit = 1;
    while rank > 0 && rank.is_multiple_of(unit * fan_out) {
        unit *= fan_out;
    }
    (rank > 0).then(|| rank - rank / unit % fan_out * unit)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The ranks whose notices rank `me` has gathered.
    fn gathered(me: usize, ranks: usize, fan_out: Option<usize>) -> Vec<usize> {
        let of = |source: &Source| match source.scope {
            Scope::Own => vec![source.rank],
            _ => gathered(source.rank, ranks, fan_out),
        };
        let mut all: Vec<usize> = FlagTree::new(me, ranks, fan_out).sources.iter().flat_map(of).collect();
        all.sort_unstable();
        all
    }

    #[test]
    fn the_first_rank_gathers_every_notice_once() {
        for ranks in (1..70).chain([127, 128, 129, 513]) {
            for fan_out in [None, Some(1), Some(2), Some(3), Some(8)] {
                assert_eq!(gathered(0, ranks, fan_out), (0..ranks).collect::<Vec<_>>(), "{ranks} ranks, {fan_out:?}");
            }
        }
    }

    #[test]
    fn every_rank_is_reached_from_the_first() {
        for (ranks, fan_out, levels) in [(9, 8, 1), (64, 8, 2), (74, 8, 3), (512, 8, 3), (5, 1, 4), (64, 2, 6)] {
            let depth = |rank: usize| std::iter::successors(Some(rank), |&rank| parent(rank, fan_out)).count() - 1;
            assert_eq!((0..ranks).map(depth).max(), Some(levels), "{ranks} ranks, fan-out {fan_out}");
        }
        let place = FlagTree::new(8, 20, Some(8));
        assert_eq!(place.parent, Some(0));
        assert_eq!(place.sources.iter().map(|source| source.rank).collect::<Vec<_>>(), (8..16).collect::<Vec<_>>());
        let of = |rank: usize| FlagTree::new(rank, 20, Some(8));
        let last = |rank: usize| of(rank).sources.last().copied();
        assert_eq!(last(0), Some(Source { rank: 16, scope: Scope::Subtree }));
        assert_eq!((of(19).parent, last(19)), (Some(16), Some(Source { rank: 19, scope: Scope::Own })));
    }
}
