//! Where the blocks of a call lie in the slots. Pure.
//!
//! In a [`Pattern::Line`] call every slot has the same bytes of the wire. In the others a slot is cut into compartments
//! of equal size, and a compartment holds one chunk of one block:
//! - gather: the slot of an owner of shards holds the blocks of their ranks, shard by shard;
//! - scatter: every slot holds a block for each rank;
//! - exchange: every slot holds a block for each rank; between hosts the slot of an owner of shards also holds the blocks
//!   that their ranks on other hosts send to the ranks of this host.
//!
//! So between hosts the blocks of a shard that go to or come from one host are adjacent.

use std::ops::Range;

use super::operation::Pattern;
use crate::topology::{Position, Topology};
use crate::wire_layout::ALIGN;

/// The numbers of compartments in a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Compartments {
    gather: usize,
    scatter: usize,
    exchange: usize,
}

impl Compartments {
    /// The numbers for a group; the same on every rank.
    pub fn new(topology: &Topology) -> Compartments {
        let (hosts, ranks) = (0..topology.hosts(), topology.size());
        let owners = hosts.flat_map(|host| (0..topology.ranks_of(host).len()).map(move |local| (host, local)));
        // Blocks of the ranks of an owner's shards; those that it receives for its host; and those that a shard sends.
        let blocks = |(host, local): (usize, usize)| -> usize {
            topology.shards_of(local, host).map(|shard| topology.shard_indices(shard).len()).sum()
        };
        let received = |(host, local): (usize, usize)| -> usize {
            topology.shards_of(local, host).map(|shard| num_received(topology, shard, host)).sum()
        };
        let sent = |(host, local): (usize, usize)| {
            let receivers = ranks - topology.ranks_of(host).len();
            let sent = |shard: usize| topology.shard_indices_of(shard, host).len() * receivers;
            topology.shards_of(local, host).map(sent).max().unwrap_or(0)
        };
        let exchanged = |owner: (usize, usize)| sent(owner).max(ranks + received(owner));
        Compartments {
            gather: owners.clone().map(blocks).max().unwrap_or(1),
            scatter: ranks,
            exchange: owners.map(exchanged).max().unwrap_or(1),
        }
    }

    /// Size of a compartment in a slot of `slot` bytes: a multiple of [`ALIGN`], 0 if the slot is too small.
    pub fn size(self, pattern: Pattern, slot: usize) -> usize {
        let number = match pattern {
            Pattern::Line => return slot,
            Pattern::Gather => self.gather,
            Pattern::Scatter => self.scatter,
            Pattern::Exchange => self.exchange,
        };
        slot / number / ALIGN * ALIGN
    }
}

/// The number of blocks that the ranks of shard `shard` on other hosts send to the ranks of `host`.
fn num_received(topology: &Topology, shard: usize, host: usize) -> usize {
    let senders = topology.shard_indices(shard).len() - topology.shard_indices_of(shard, host).len();
    senders * topology.ranks_of(host).len()
}

/// The shards before `shard` that have the same owner on this host.
fn shards_before(topology: &Topology, shard: usize) -> impl Iterator<Item = usize> + use<> {
    topology.shards_of(shard % topology.local_size(), topology.host()).take_while(move |&other| other < shard)
}

/// The compartments of the blocks of shard `shard` in the slot of its owner on this host, in a gather.
pub(super) fn gathered_shard(topology: &Topology, shard: usize) -> Range<usize> {
    let start: usize = shards_before(topology, shard).map(|shard| topology.shard_indices(shard).len()).sum();
    start..start + topology.shard_indices(shard).len()
}

/// The slot (as a local rank) and the compartment with the block of `rank` in a gather.
pub(super) fn gathered(topology: &Topology, rank: usize) -> (usize, usize) {
    let Some(Position { shard, index, local_rank, .. }) = topology.position(rank) else { return (0, 0) };
    // Each rank then has a shard of its own.
    if topology.hosts() == 1 {
        return (local_rank, 0);
    }
    let in_shard = index - topology.shard_indices(shard).start;
    (shard % topology.local_size(), gathered_shard(topology, shard).start + in_shard)
}

/// The compartment with the block for `rank` in a scatter or an exchange.
pub(super) fn scattered(topology: &Topology, rank: usize) -> usize {
    topology.position(rank).map_or(0, |position| position.index)
}

/// The slot and the compartment with the block that `rank`, on another host, sends to local rank `to` in an exchange.
pub(super) fn received(topology: &Topology, rank: usize, to: usize) -> (usize, usize) {
    let Some(Position { shard, index, .. }) = topology.position(rank) else { return (0, 0) };
    let own = topology.shard_indices_of(shard, topology.host());
    let before = index - topology.shard_indices(shard).start;
    let sender = if index < own.start { before } else { before - own.len() };
    let shards: usize =
        shards_before(topology, shard).map(|shard| num_received(topology, shard, topology.host())).sum();
    (shard % topology.local_size(), topology.size() + shards + sender * topology.local_size() + to)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// No two blocks share a compartment of a slot, and all are inside.
        #[test]
        fn blocks_do_not_overlap(keys in prop::collection::vec(0usize..4, 1..12)) {
            for rank in 0..keys.len() {
                let topology = Topology::new(rank, &keys);
                let Compartments { gather, scatter, exchange } = Compartments::new(&topology);
                let mut places = BTreeSet::new();
                for other in 0..keys.len() {
                    let (slot, compartment) = gathered(&topology, other);
                    prop_assert!(slot < topology.num_owners() && compartment < gather);
                    prop_assert!(places.insert((slot, compartment)));
                }
                let outgoing: BTreeSet<usize> = (0..keys.len()).map(|other| scattered(&topology, other)).collect();
                prop_assert_eq!(outgoing.len(), scatter);
                prop_assert!(outgoing.last() < Some(&scatter));
                let mut incoming = BTreeSet::new();
                for other in (0..keys.len()).filter(|&other| keys[other] != keys[rank]) {
                    for to in 0..topology.local_size() {
                        let (slot, compartment) = received(&topology, other, to);
                        prop_assert!(slot < topology.num_owners() && (scatter..exchange).contains(&compartment));
                        prop_assert!(incoming.insert((slot, compartment)));
                    }
                }
            }
        }
    }
}
