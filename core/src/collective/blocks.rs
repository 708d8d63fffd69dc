//! Where the blocks of a call lie in the slots, and in the tensors. Pure.
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
use std::sync::Arc;

use super::operation::{Op, Pattern};
use crate::error::{Error, Result};
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

/// Consecutive blocks of different lengths.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bounds(Arc<[usize]>);

impl Bounds {
    /// Blocks with these lengths; `None` if they are longer than memory can be.
    pub fn new(lengths: &[usize]) -> Option<Bounds> {
        let mut bounds = vec![0; lengths.len() + 1];
        for (index, length) in lengths.iter().enumerate() {
            bounds[index + 1] = length.checked_add(bounds[index])?;
        }
        Some(Bounds(bounds.into()))
    }

    /// The number of blocks.
    pub fn blocks(&self) -> usize {
        self.0.len() - 1
    }

    /// The elements of block `index`.
    pub(super) fn block(&self, index: usize) -> Range<usize> {
        self.0[index]..self.0[index + 1]
    }

    fn longest(&self) -> usize {
        (0..self.blocks()).map(|index| self.block(index).len()).max().unwrap_or(0)
    }

    /// The ends of the blocks, for signatures.
    pub(super) fn ends(&self) -> &[usize] {
        &self.0[1..]
    }
}

/// The number of elements of each rank's block.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Counts {
    /// All blocks of a tensor are equally long.
    #[default]
    Even,
    /// Block r belongs to rank r; the same on all ranks.
    Ranks(Bounds),
    /// This rank's blocks for, and from, each rank.
    Pairs {
        /// By receiver.
        send: Bounds,
        /// By sender.
        receive: Bounds,
    },
}

impl Counts {
    /// The lengths that a caller gives for `op`, an entry for each rank: `send` of the blocks that this rank sends, or of
    /// all ranks' blocks; `receive` of those that it receives from each rank.
    ///
    /// # Errors
    /// [`Error::Invalid`] for lengths that `op` does not take.
    pub fn from_lists(op: Op, send: Option<&[usize]>, receive: Option<&[usize]>) -> Result<Counts> {
        let bounds = |lengths: &[usize], name: &str| {
            Bounds::new(lengths).ok_or_else(|| Error::Invalid(format!("{name} are longer than memory can be")))
        };
        match (op.pattern(), send, receive) {
            (_, None, None) => Ok(Counts::Even),
            (Pattern::Exchange, send, receive) => {
                let given = |lengths: Option<&[usize]>, name: &str| match lengths {
                    Some(lengths) => bounds(lengths, name),
                    None => Err(Error::Invalid(format!("{} takes send_counts and receive_counts", op.title()))),
                };
                Ok(Counts::Pairs { send: given(send, "send_counts")?, receive: given(receive, "receive_counts")? })
            }
            (_, None, Some(_)) => Err(Error::Invalid(format!("{} takes its counts as send_counts", op.title()))),
            (_, Some(send), _) => Ok(Counts::Ranks(bounds(send, "send_counts")?)),
        }
    }

    /// The elements of the block for `peer` in an input of rank `me`. `len` is the length of an even block.
    pub(super) fn sent(&self, pattern: Pattern, me: usize, peer: usize, len: usize) -> Range<usize> {
        match self {
            Counts::Pairs { send, .. } => send.block(peer),
            _ => self.block(matches!(pattern, Pattern::Scatter | Pattern::Exchange), me, peer, len),
        }
    }

    /// The elements of the block from `peer` in an output of rank `me`.
    pub(super) fn received(&self, pattern: Pattern, me: usize, peer: usize, len: usize) -> Range<usize> {
        match self {
            Counts::Pairs { receive, .. } => receive.block(peer),
            _ => self.block(matches!(pattern, Pattern::Gather | Pattern::Exchange), me, peer, len),
        }
    }

    /// The block of `peer` in a tensor with a block for each rank (`split`), or the only block, that of `me`.
    #[inline]
    fn block(&self, split: bool, me: usize, peer: usize, len: usize) -> Range<usize> {
        match self {
            Counts::Ranks(bounds) if split => bounds.block(peer),
            Counts::Ranks(bounds) => 0..bounds.block(me).len(),
            _ if split => peer * len..(peer + 1) * len,
            _ => 0..len,
        }
    }

    /// The length of the longest block that this rank sends or receives.
    pub(super) fn longest(&self, len: usize) -> usize {
        match self {
            Counts::Even => len,
            Counts::Ranks(bounds) => bounds.longest(),
            Counts::Pairs { send, receive } => send.longest().max(receive.longest()),
        }
    }
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
