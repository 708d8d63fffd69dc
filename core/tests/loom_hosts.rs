//! Exchanges between hosts under Loom, as in `loom.rs`. Messages go through a link of this file: when one arrives is a
//! relaxed load, so Loom tries every delay, and a message orders no access to shared memory.
#![cfg(loom)]
#![allow(clippy::unwrap_used)]

mod loom_support;

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use dl_comm_core::collective::{Algorithm, AlgorithmSetting, Channel, Op};
use dl_comm_core::error::Result;
use dl_comm_core::topology::Topology;
use dl_comm_core::transport::in_process::{Access, world};
use dl_comm_core::transport::memory::Aligned;
use dl_comm_core::transport::sync::{AtomicU32, Ordering};
use dl_comm_core::transport::{ExchangeBuffers, HostLink, MAX_EXCHANGES, Message, NetworkModel};
use dl_comm_core::wire_layout::exchange_buffer_bytes;
use loom_support::{FLOATS, Floats, SLOT, call, config, explore, run, spawn};

/// The messages of one exchange from one host to another.
#[derive(Default)]
struct Wire {
    messages: Mutex<VecDeque<Vec<u8>>>,
    /// The number of messages sent so far.
    sent: AtomicU32,
}

/// The end of one of two hosts.
struct Link {
    host: usize,
    exchanges: Vec<Exchange>,
}

/// One exchange of a link.
struct Exchange {
    buffers: [Aligned; 2],
    out: Arc<Wire>,
    incoming: Arc<Wire>,
    received: u32,
    pending: VecDeque<Message>,
}

/// The two ends of a link with buffers of `capacity` bytes.
fn link(capacity: usize) -> [Link; 2] {
    let wires: Vec<[Arc<Wire>; 2]> = (0..MAX_EXCHANGES).map(|_| Default::default()).collect();
    [0, 1].map(|host| {
        let exchange = |wires: &[Arc<Wire>; 2]| Exchange {
            buffers: [(); 2].map(|()| Aligned::new(capacity)),
            out: Arc::clone(&wires[host]),
            incoming: Arc::clone(&wires[1 - host]),
            received: 0,
            pending: VecDeque::new(),
        };
        Link { host, exchanges: wires.iter().map(exchange).collect() }
    })
}

impl HostLink for Link {
    fn buffers(&mut self, exchange: usize) -> ExchangeBuffers<'_> {
        let [send, recv] = &mut self.exchanges[exchange].buffers;
        ExchangeBuffers { send: send.as_mut_slice(), recv: recv.as_mut_slice() }
    }

    fn start(&mut self, exchange: usize, sends: &[Message], receives: &[Message]) -> Result<()> {
        let Exchange { buffers: [send, _], out, pending, .. } = &mut self.exchanges[exchange];
        for message in sends {
            out.messages.lock().unwrap().push_back(send.as_slice()[message.bytes.clone()].to_vec());
            out.sent.fetch_add(1, Ordering::Relaxed);
        }
        pending.extend(receives.iter().cloned());
        Ok(())
    }

    fn poll(&mut self, completed: &mut dyn FnMut(usize)) -> Result<()> {
        for Exchange { buffers: [_, recv], incoming, received, pending, .. } in &mut self.exchanges {
            while !pending.is_empty() && incoming.sent.load(Ordering::Relaxed) > *received {
                let (Message { host, bytes }, message) =
                    (pending.pop_front().unwrap(), incoming.messages.lock().unwrap().pop_front().unwrap());
                recv.as_mut_slice()[bytes][..message.len()].copy_from_slice(&message);
                *received += 1;
                completed(host);
            }
        }
        Ok(())
    }

    fn in_flight(&self, exchange: usize) -> usize {
        self.exchanges[exchange].pending.len()
    }

    fn awaited(&self) -> Vec<usize> {
        vec![1 - self.host]
    }

    fn host_name(&self, host: usize) -> String {
        format!("host {host}")
    }
}

/// The value of element `index` of the input of `rank` in call `number`.
fn value(number: usize, rank: usize, index: usize) -> f32 {
    (100 * number + 10 * rank + index / 16) as f32
}

/// Ranks 0 and 1 are on one host, rank 2 on another. Under Loom there is one shard, so ranks 0 and 2 exchange messages
/// while rank 1 waits. They average lists of floats of these lengths. Each rank's first call has its name of `names`.
fn averages(
    preemptions: usize,
    access: Access,
    algorithm: Algorithm,
    lengths: &'static [usize],
    names: [&'static str; 3],
) {
    const HOSTS: [usize; 3] = [0, 0, 1];
    explore(Some(preemptions), move || {
        let topology = Topology::new(0, &HOSTS);
        let mut links: [Vec<Box<dyn HostLink>>; 3] = Default::default();
        for shard in 0..topology.num_shards() {
            for (host, end) in link(exchange_buffer_bytes(SLOT, &topology)).into_iter().enumerate() {
                links[topology.shard_owner(shard, host)].push(Box::new(end));
            }
        }
        let resources = world(&[2, 1], 1, SLOT, access).unwrap();
        resources.iter().for_each(|resources| resources.region.open().unwrap());
        let ranks = resources.into_iter().zip(links).enumerate().map(|(rank, (resources, links))| {
            let mut own: Vec<Floats> = lengths.iter().map(|&len| Floats::new(len)).collect();
            spawn(move || {
                let topology = Arc::new(Topology::new(rank, &HOSTS));
                let region = resources.region;
                let setting = AlgorithmSetting::Always(algorithm);
                let mut channel = Channel::new(Arc::clone(&topology), region.channel(0)).with_links(
                    links,
                    NetworkModel::UNKNOWN,
                    setting,
                );
                for (number, floats) in own.iter_mut().enumerate() {
                    let name = if number == 0 { names[rank] } else { "" };
                    floats.fill(|index| value(number, rank, index));
                    let call = call(Op::MEAN, floats.in_place(), name, config(&topology, 0));
                    let matches = number > 0 || names == [names[0]; 3];
                    assert_eq!(run(&mut channel, &call, &region), matches);
                    let mean = |index| (0..3).map(|rank| value(number, rank, index)).sum::<f32>() / 3.0;
                    floats.expect(|index| if matches { mean(index) } else { value(number, rank, index) });
                    floats.fill(|_| 0.0);
                }
                // The memory is tracked until the execution ends.
                std::mem::forget(own);
                // A host that ends early would lose its last messages.
                drop(channel);
            })
        });
        ranks.collect::<Vec<_>>().into_iter().for_each(|rank| rank.join().unwrap());
    });
}

#[test]
fn one_chunk_by_doubling() {
    averages(2, Access::Slots, Algorithm::Doubling, &[FLOATS], [""; 3]);
}

#[test]
fn two_chunks_pairwise() {
    averages(1, Access::Slots, Algorithm::Pairwise, &[2 * FLOATS], [""; 3]);
}

/// More rounds than the window has.
#[test]
fn the_window_wraps() {
    averages(0, Access::Slots, Algorithm::Doubling, &[5 * FLOATS], [""; 3]);
}

/// The first chunk is copied, the second is reduced in place.
#[test]
fn tensors_in_peer_memory() {
    averages(1, Access::Peer, Algorithm::Doubling, &[2 * FLOATS, FLOATS], [""; 3]);
}

/// A difference within a host, and between hosts. The next call works.
#[test]
fn all_hosts_detect_different_calls() {
    averages(1, Access::Slots, Algorithm::Doubling, &[FLOATS; 2], ["a", "b", "a"]);
    averages(1, Access::Slots, Algorithm::Doubling, &[FLOATS; 2], ["a", "a", "b"]);
}
