//! Ranks as threads of one process, on hosts of any shape: the transport of the tests. Shared memory is the heap, messages
//! go through channels; everything above runs unchanged.

use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use super::arena::Shared;
use super::memory::Aligned;
use super::node::{Geometry, Memory, Node, Peer, Watch};
use super::{Endpoint, Link, Out, Patience};
use crate::error::{Error, Result};
use crate::plan::message_bytes;
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
        Ok(Endpoint { topology: Arc::new(topology), node: Arc::new(node), links })
    };
    (0..keys.len()).map(endpoint).collect()
}

/// The links of every rank and channel.
fn mesh(topology: &Topology, channels: usize, slot: usize) -> Vec<Vec<Option<Box<dyn Link>>>> {
    let mut links: Vec<Vec<Option<Box<dyn Link>>>> = (0..topology.size()).map(|_| Vec::new()).collect();
    let capacity = message_bytes(slot, topology.lanes(), topology.hosts());
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
    let messages = || (0..hosts).map(|_| Aligned::new(capacity)).collect();
    let mut links: Vec<ThreadLink> = (0..hosts)
        .map(|host| ThreadLink {
            host,
            outbox: Vec::new(),
            inbox: Vec::new(),
            each: messages(),
            same: Aligned::new(capacity),
            received: messages(),
        })
        .collect();
    for from in 0..hosts {
        for to in 0..hosts {
            let (sender, receiver) = channel();
            links[from].outbox.push(sender);
            links[to].inbox.push(receiver);
        }
    }
    links
}

struct ThreadLink {
    host: usize,
    outbox: Vec<Sender<Vec<u8>>>,
    inbox: Vec<Receiver<Vec<u8>>>,
    each: Vec<Aligned>,
    same: Aligned,
    received: Vec<Aligned>,
}

impl Link for ThreadLink {
    fn message_to(&mut self, host: usize) -> &mut [u8] {
        self.each[host].as_mut_slice()
    }

    fn message_to_all(&mut self) -> &mut [u8] {
        self.same.as_mut_slice()
    }

    fn exchange(&mut self, out: Out<'_>, patience: &Patience<'_>) -> Result<()> {
        let others = || (0..self.inbox.len()).filter(|&host| host != self.host);
        for host in others() {
            let message = match out {
                Out::Each(lens) => &self.each[host].as_slice()[..lens[host]],
                Out::Same(len) => &self.same.as_slice()[..len],
            };
            // A peer that is gone is noticed below, where it is waited for.
            self.outbox[host].send(message.to_vec()).ok();
        }
        for host in others() {
            let from = Instant::now();
            let message = loop {
                match self.inbox[host].recv_timeout(Duration::from_millis(20)) {
                    Ok(message) => break message,
                    Err(RecvTimeoutError::Timeout) => patience.check(Duration::ZERO, &|| format!("host {host}"))?,
                    Err(RecvTimeoutError::Disconnected) => {
                        return Err(Error::PeerLost(format!("a rank of host {host} has ended")));
                    }
                }
            };
            patience.log().waited_for(Late::Host(host), from, Instant::now());
            self.received[host].as_mut_slice()[..message.len()].copy_from_slice(&message);
        }
        Ok(())
    }

    fn message_from(&self, host: usize) -> &[u8] {
        self.received[host].as_slice()
    }
}
