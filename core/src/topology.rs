//! The mapping of ranks to hosts and shards. Pure.
//!
//! A host is a set of ranks that can share memory. The data of a host is cut into *shards*, the same on every host. The
//! owner of shard s is local rank s mod p, where p is the number of ranks on the host: it reduces that slice and exchanges
//! it with the owners of shard s on the other hosts. A rank of a small host may own several shards, so that the larger
//! hosts use all of their ranks. On a host with more ranks than shards, local ranks s, s + shards, s + 2 shards and so on
//! are the *reducers* of shard s, each of a part of its slices. Data that belongs to one rank is in the shard l mod shards of its local rank l.

use std::collections::HashMap;
use std::hash::Hash;
use std::iter::StepBy;
use std::ops::Range;

/// The most shards between hosts: with more, messages become short and many.
const MAX_NETWORK_SHARDS: usize = if cfg!(loom) { 1 } else { 16 };

/// The ranks of a job, grouped by host, as seen by one rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Topology {
    rank: usize,
    hosts: Vec<Vec<usize>>,
    host: usize,
    local_rank: usize,
    /// By rank.
    positions: Vec<Position>,
    /// The ranks of all shards: shard by shard, in each by host, then by local rank.
    shard_order: Vec<usize>,
    /// The first index of each shard in `shard_order`, and its length.
    shard_starts: Vec<usize>,
}

/// Ranks of this host, as local ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LocalRanks {
    first: usize,
    end: usize,
    step: usize,
}

impl LocalRanks {
    /// The ranks, ascending.
    pub fn iter(self) -> StepBy<Range<usize>> {
        (self.first..self.end).step_by(self.step)
    }

    /// Their number, if they are the first ones.
    pub fn count_of_first(self) -> Option<usize> {
        (self.first == 0 && self.step == 1).then_some(self.end)
    }
}

/// The first so many ranks.
impl From<usize> for LocalRanks {
    fn from(count: usize) -> LocalRanks {
        LocalRanks { first: 0, end: count, step: 1 }
    }
}

/// The position of a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Position {
    /// Its host.
    pub host: usize,
    /// Its index among the ranks of the host.
    pub local_rank: usize,
    /// The shard of its data.
    pub shard: usize,
    /// Its index among the ranks of all shards, which are ordered by shard, host and local rank.
    pub index: usize,
}

impl Topology {
    /// The topology as seen by `rank`. Rank r is on the host with key `keys[r]`; equal keys are one host. Hosts are
    /// ordered by their lowest rank.
    ///
    /// # Panics
    /// If `rank >= keys.len()`.
    pub fn new<K: Eq + Hash>(rank: usize, keys: &[K]) -> Topology {
        let mut host_of: HashMap<&K, usize> = HashMap::new();
        let mut hosts: Vec<Vec<usize>> = Vec::new();
        for (other, key) in keys.iter().enumerate() {
            let host = *host_of.entry(key).or_insert(hosts.len());
            if host == hosts.len() {
                hosts.push(Vec::new());
            }
            hosts[host].push(other);
        }
        let largest = hosts.iter().map(Vec::len).max().unwrap_or(1);
        let num_shards = if hosts.len() > 1 { largest.min(MAX_NETWORK_SHARDS) } else { largest };
        let mut positions = vec![Position::default(); keys.len()];
        let (mut shard_order, mut shard_starts) = (Vec::with_capacity(keys.len()), vec![0]);
        for shard in 0..num_shards {
            for (host, ranks) in hosts.iter().enumerate() {
                for (local_rank, &rank) in ranks.iter().enumerate().skip(shard).step_by(num_shards) {
                    positions[rank] = Position { host, local_rank, shard, index: shard_order.len() };
                    shard_order.push(rank);
                }
            }
            shard_starts.push(shard_order.len());
        }
        let Position { host, local_rank, .. } = positions[rank];
        Topology { rank, hosts, host, local_rank, positions, shard_order, shard_starts }
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Number of ranks.
    pub fn size(&self) -> usize {
        self.positions.len()
    }

    /// Number of hosts.
    pub fn hosts(&self) -> usize {
        self.hosts.len()
    }

    /// The index of this rank's host.
    pub fn host(&self) -> usize {
        self.host
    }

    /// This rank's index among the ranks of its host.
    pub fn local_rank(&self) -> usize {
        self.local_rank
    }

    /// The number of ranks on this host.
    pub fn local_size(&self) -> usize {
        self.hosts[self.host].len()
    }

    /// The ranks of host `host`, ascending.
    pub fn ranks_of(&self, host: usize) -> &[usize] {
        &self.hosts[host]
    }

    /// The ranks of this host, ascending.
    pub fn local_ranks(&self) -> &[usize] {
        &self.hosts[self.host]
    }

    /// The position of `rank`, if it is one.
    pub fn position(&self, rank: usize) -> Option<Position> {
        self.positions.get(rank).copied()
    }

    /// The local rank of `rank`, if it is on this host.
    pub fn local_rank_of(&self, rank: usize) -> Option<usize> {
        self.position(rank).filter(|position| position.host == self.host).map(|position| position.local_rank)
    }

    /// The ranks of all shards, by [`Position::index`].
    pub fn shard_order(&self) -> &[usize] {
        &self.shard_order
    }

    /// The indices of shard `shard` in [`Topology::shard_order`].
    pub fn shard_indices(&self, shard: usize) -> Range<usize> {
        self.shard_starts[shard]..self.shard_starts[shard + 1]
    }

    /// The indices of the ranks of `host` in shard `shard`.
    pub fn shard_indices_of(&self, shard: usize, host: usize) -> Range<usize> {
        let all = self.shard_indices(shard);
        let ranks = &self.shard_order[all.clone()];
        let before = ranks.partition_point(|&rank| self.positions[rank].host < host);
        let end = ranks.partition_point(|&rank| self.positions[rank].host <= host);
        all.start + before..all.start + end
    }

    /// The number of shards that the data of a host is cut into.
    pub fn num_shards(&self) -> usize {
        self.shard_starts.len() - 1
    }

    /// The rank of `host` that owns shard `shard`.
    pub fn shard_owner(&self, shard: usize, host: usize) -> usize {
        let ranks = &self.hosts[host];
        ranks[shard % ranks.len()]
    }

    /// The shards that local rank `local` of `host` owns, ascending.
    pub fn shards_of(&self, local: usize, host: usize) -> impl Iterator<Item = usize> + use<> {
        (local..self.num_shards()).step_by(self.hosts[host].len())
    }

    /// The shards that this rank owns, ascending.
    pub fn own_shards(&self) -> impl Iterator<Item = usize> + use<> {
        self.shards_of(self.local_rank, self.host)
    }

    /// The number of ranks of this host that own shards: the first ones.
    pub fn num_owners(&self) -> usize {
        self.num_shards().min(self.local_size())
    }

    /// The number of ranks of this host that reduce parts of the slices of `shard`: its owner first. Others have the shard
    /// as theirs, but own none.
    pub fn num_reducers(&self, shard: usize) -> usize {
        1 + self.other_reducers(shard).iter().len()
    }

    /// Reducer `index` of `shard`, as a local rank.
    pub fn reducer(&self, shard: usize, index: usize) -> usize {
        shard + index * self.num_shards()
    }

    /// The reducers of `shard` but its owner.
    pub fn other_reducers(&self, shard: usize) -> LocalRanks {
        LocalRanks { first: self.reducer(shard, 1), end: self.local_size(), step: self.num_shards() }
    }

    /// The shard of which this rank reduces a part, if it has several reducers, and its index among them.
    pub fn own_part(&self) -> (usize, usize) {
        (self.local_rank % self.num_shards(), self.local_rank / self.num_shards())
    }

    /// Whether this rank owns shards.
    pub fn owns_shards(&self) -> bool {
        self.local_rank < self.num_owners()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_are_ordered_by_their_first_rank() {
        let topology = Topology::new(3, &["b", "a", "b", "a", "a"]);
        assert_eq!(topology.hosts(), 2);
        assert_eq!(topology.local_ranks(), [1, 3, 4]);
        assert_eq!((topology.host(), topology.local_rank(), topology.local_size()), (1, 1, 3));
        assert_eq!((topology.num_shards(), topology.num_owners()), (3, 3));
        assert_eq!(topology.own_shards().collect::<Vec<_>>(), [1]);
        assert_eq!(topology.shards_of(0, 0).collect::<Vec<_>>(), [0, 2]);
        assert_eq!((topology.shard_owner(2, 0), topology.shard_owner(2, 1)), (0, 4));
        assert_eq!(topology.position(4), Some(Position { host: 1, local_rank: 2, shard: 2, index: 4 }));
        assert_eq!(topology.position(5), None);
        assert_eq!((topology.local_rank_of(4), topology.local_rank_of(2)), (Some(2), None));
        assert_eq!(topology.shard_order(), [0, 1, 2, 3, 4]);
        assert_eq!((topology.shard_indices(1), topology.shard_indices_of(1, 1)), (2..4, 3..4));
        assert_eq!((topology.shard_indices_of(2, 0).len(), topology.shard_indices_of(2, 1)), (0, 4..5));
    }

    #[test]
    fn ranks_beyond_the_shards_own_none() {
        let hosts: Vec<usize> = (0..2 * 20).map(|rank| rank / 20).collect();
        let topology = Topology::new(17, &hosts);
        assert_eq!((topology.num_shards(), topology.num_owners(), topology.owns_shards()), (16, 16, false));
        assert_eq!((topology.own_shards().count(), topology.position(17).map(|position| position.shard)), (0, Some(1)));
        assert_eq!(Topology::new(0, &[0; 20]).num_shards(), 20);
        assert_eq!([0, 3, 4, 15].map(|shard| topology.num_reducers(shard)), [2, 2, 1, 1]);
        assert_eq!((topology.own_part(), topology.reducer(1, 1)), ((1, 1), 17));
        assert_eq!(topology.other_reducers(1).iter().collect::<Vec<_>>(), [17]);
        assert_eq!(topology.other_reducers(4).iter().count(), 0);
        let many = Topology::new(0, &(0..70).map(|rank| rank / 64).collect::<Vec<_>>());
        assert_eq!(many.other_reducers(2).iter().collect::<Vec<_>>(), [18, 34, 50]);
        assert_eq!((many.num_reducers(15), many.other_reducers(15).count_of_first()), (4, None));
        // A rank with several shards reduces each alone.
        let small = Topology::new(64, &(0..70).map(|rank| rank / 64).collect::<Vec<_>>());
        assert!((0..16).all(|shard| small.num_reducers(shard) == 1));
    }

    #[test]
    fn one_rank_is_one_host() {
        let topology = Topology::new(0, &[()]);
        assert_eq!((topology.size(), topology.hosts(), topology.num_shards(), topology.num_owners()), (1, 1, 1, 1));
    }
}
