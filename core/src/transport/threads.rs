//! Ranks as threads of one process, on hosts of any shape: the transport of the tests. Shared memory is the heap, messages
//! go through channels; everything above runs unchanged.

use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use super::arena::Shared;
use super::memory::Aligned;
use super::node::{Geometry, Memory, Node, Peer, Watch};
use super::{Endpoint, Link, Mail, Message, Network, Patience, TURNS};
use crate::error::{Error, Result};
use crate::plan::mail_bytes;
use crate::topology::Topology;
use crate::trace::Late;

impl Memory for Arc<Aligned> {
    fn base(&self) -> *mut u8 {
        self.as_ptr()
    }
    fn len(&self) -> usize {
        Aligned::len(self)
    }
}

struct NoWatch;

impl Watch for NoWatch {
    fn lost(&self, _local_rank: usize) -> Option<String> {
        None
    }
}

/// All memory: the ranks are in one process.
struct Everything;

impl Shared for Everything {
    fn locate(&self, range: Range<usize>) -> Option<u64> {
        Some(range.start as u64)
    }
    fn at(&self, _local_rank: usize, place: u64, _len: usize) -> Option<*mut u8> {
        usize::try_from(place).ok().map(std::ptr::with_exposed_provenance_mut)
    }
}

/// The endpoints of a job with `sizes[h]` ranks on host h, by rank. `slot` is in bytes. With `shares` the ranks of a host see
/// each other's tensors.
///
/// # Errors
/// Those of [`Node::new`].
pub fn world(sizes: &[usize], channels: usize, slot: usize, shares: bool) -> Result<Vec<Endpoint>> {
    let keys: Vec<usize> = sizes.iter().enumerate().flat_map(|(host, &size)| vec![host; size]).collect();
    let memories: Vec<(Geometry, Arc<Aligned>)> = sizes
        .iter()
        .map(|&ranks| {
            let geometry = Geometry { ranks, channels, slot };
            (geometry, Arc::new(Aligned::new(geometry.bytes())))
        })
        .collect();
    let mut links = mesh(&Topology::new(0, &keys), channels, slot);
    let endpoint = |rank: usize| {
        let topology = Topology::new(rank, &keys);
        let (geometry, memory) = &memories[topology.host()];
        let peers = topology.local_ranks().iter().map(|&rank| Peer { rank, name: format!("rank {rank}") }).collect();
        let node =
            Node::new(Box::new(Arc::clone(memory)), *geometry, topology.local_rank(), peers, Box::new(NoWatch), 100)?;
        let node = node.sharing(shares.then(|| Arc::new(Everything) as Arc<dyn Shared>));
        let links = std::mem::take(&mut links[rank]);
        Ok(Endpoint {
            names: (0..keys.len()).map(|rank| format!("rank {rank}")).collect(),
            topology: Arc::new(topology),
            node: Arc::new(node),
            links,
            network: Network::UNKNOWN,
            crowded: false,
        })
    };
    (0..keys.len()).map(endpoint).collect()
}

/// The links of every rank and channel.
fn mesh(topology: &Topology, channels: usize, slot: usize) -> Vec<Vec<Option<Box<dyn Link>>>> {
    let mut links: Vec<Vec<Option<Box<dyn Link>>>> = (0..topology.size()).map(|_| Vec::new()).collect();
    let capacity = mail_bytes(slot, topology.lanes(), topology.hosts());
    let lanes = if topology.hosts() > 1 { topology.lanes() } else { 0 };
    for lane in 0..lanes {
        for _channel in 0..channels {
            for (host, link) in joined(topology.hosts(), capacity).into_iter().enumerate() {
                links[topology.ranks_of(host)[lane]].push(Some(Box::new(link)));
            }
        }
    }
    for links in &mut links {
        links.resize_with(channels, || None);
    }
    links
}

/// The links of one lane and channel, by host.
fn joined(hosts: usize, capacity: usize) -> Vec<ThreadLink> {
    let memory = || Aligned::new(capacity);
    let turn = |_| Turn { out: memory(), inbox: memory(), outbox: vec![], arrives: vec![], awaited: vec![] };
    let link = |_| ThreadLink { turns: [0; TURNS].map(turn) };
    let mut links: Vec<ThreadLink> = (0..hosts).map(link).collect();
    for turn in 0..TURNS {
        for from in 0..hosts {
            for to in 0..hosts {
                let (sender, receiver) = channel();
                links[from].turns[turn].outbox.push(sender);
                links[to].turns[turn].arrives.push(receiver);
            }
        }
    }
    links
}

struct ThreadLink {
    turns: [Turn; TURNS],
}

struct Turn {
    out: Aligned,
    inbox: Aligned,
    /// By host.
    outbox: Vec<Sender<Vec<u8>>>,
    arrives: Vec<Receiver<Vec<u8>>>,
    awaited: Vec<Message>,
}

impl Link for ThreadLink {
    fn mail(&mut self, turn: usize) -> Mail<'_> {
        let Turn { out, inbox, .. } = &mut self.turns[turn];
        Mail { out: out.as_mut_slice(), inbox: inbox.as_mut_slice() }
    }

    fn start(&mut self, turn: usize, sends: &[Message], receives: &[Message]) -> Result<()> {
        let Turn { out, outbox, awaited, .. } = &mut self.turns[turn];
        for Message { host, bytes } in sends {
            // A peer that is gone is noticed where it is waited for.
            outbox[*host].send(out.as_slice()[bytes.clone()].to_vec()).ok();
        }
        awaited.extend_from_slice(receives);
        Ok(())
    }

    fn finish(&mut self, turn: usize, patience: &Patience<'_>) -> Result<()> {
        let Turn { inbox, arrives, awaited, .. } = &mut self.turns[turn];
        for Message { host, bytes } in awaited.drain(..) {
            let from = Instant::now();
            let message = loop {
                match arrives[host].recv_timeout(Duration::from_millis(20)) {
                    Ok(message) => break message,
                    Err(RecvTimeoutError::Timeout) => patience.check(Duration::ZERO, &|| format!("host {host}"))?,
                    Err(RecvTimeoutError::Disconnected) => {
                        return Err(Error::PeerLost(format!("a rank of host {host} has ended")));
                    }
                }
            };
            patience.log().waited_for(Late::Host(host), from, Instant::now());
            inbox.as_mut_slice()[bytes][..message.len()].copy_from_slice(&message);
        }
        Ok(())
    }
}
