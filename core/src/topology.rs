//! The mapping of ranks to hosts and shards. Pure.
//!
//! A host is a set of ranks that can share memory. The data of a host is cut into *shards*. The rank with local rank l
//! owns shard l: it reduces that slice and exchanges it with the owners of shard l on the other hosts. The number of
//! shards is the size of the smallest host, so every host has the same shards.

/// The ranks of a job, grouped by host, as seen by one rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Topology {
    rank: usize,
    hosts: Vec<Vec<usize>>,
    host: usize,
    local_rank: usize,
}

impl Topology {
    /// The topology as seen by `rank`. Rank r is on the host with key `keys[r]`; equal keys are one host. Hosts are
    /// ordered by their lowest rank.
    ///
    /// # Panics
    /// If `rank >= keys.len()`.
    pub fn new<K: PartialEq>(rank: usize, keys: &[K]) -> Topology {
        let mut leaders: Vec<usize> = Vec::new();
        let mut hosts: Vec<Vec<usize>> = Vec::new();
        for (other, key) in keys.iter().enumerate() {
            match leaders.iter().position(|&leader| keys[leader] == *key) {
                Some(host) => hosts[host].push(other),
                None => {
                    leaders.push(other);
                    hosts.push(vec![other]);
                }
            }
        }
        let host = leaders.iter().position(|&leader| keys[leader] == keys[rank]).unwrap_or(0);
        let local_rank = hosts[host].iter().position(|&other| other == rank).unwrap_or(0);
        Topology { rank, hosts, host, local_rank }
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Number of ranks.
    pub fn size(&self) -> usize {
        self.hosts.iter().map(Vec::len).sum()
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

    /// The host of `rank` and its local rank there.
    pub fn host_and_local_rank(&self, rank: usize) -> Option<(usize, usize)> {
        self.hosts.iter().enumerate().find_map(|(host, ranks)| {
            let local = ranks.iter().position(|&other| other == rank)?;
            Some((host, local))
        })
    }

    /// The number of shards that the data of a host is cut into.
    pub fn num_shards(&self) -> usize {
        self.hosts.iter().map(Vec::len).min().unwrap_or(1)
    }

    /// The shard that this rank owns, if any.
    pub fn shard(&self) -> Option<usize> {
        (self.local_rank < self.num_shards()).then_some(self.local_rank)
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
        assert_eq!(topology.num_shards(), 2);
        assert_eq!(topology.shard(), Some(1));
        assert_eq!(topology.host_and_local_rank(4), Some((1, 2)));
        assert_eq!(topology.host_and_local_rank(5), None);
        assert_eq!(Topology::new(4, &["b", "a", "b", "a", "a"]).shard(), None);
    }

    #[test]
    fn one_rank_is_one_host() {
        let topology = Topology::new(0, &[()]);
        assert_eq!((topology.size(), topology.hosts(), topology.num_shards(), topology.shard()), (1, 1, 1, Some(0)));
    }
}
