//! Exchanges between hosts under Loom, as in `loom.rs`. Messages go through a link of this file: when one arrives is a
//! relaxed load, so Loom tries every delay, and a message orders no access to shared memory.
#![cfg(loom)]
#![allow(clippy::unwrap_used)]

mod loom_support;

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use dl_comm_core::collective::selection::HostLimits;
use dl_comm_core::collective::{
    ActiveCall, Algorithm, AlgorithmSetting, Call, Channel, ChunkPlan, ChunkSource, Lookahead, NextChunk, Op,
};
use dl_comm_core::error::Result;
use dl_comm_core::topology::Topology;
use dl_comm_core::transport::in_process::{Access, world};
use dl_comm_core::transport::sync::{AtomicU32, Ordering};
use dl_comm_core::transport::{
    ExchangeMemory, HostLink, HostMessage, MAX_EXCHANGES, NetworkModel, ShmRegion, WaitContext,
};
use dl_comm_core::wire_layout::exchange_buffer_bytes;
use loom_support::{FLOATS, Floats, SLOT, call, config, explore, run, spawn, with_wait_context};

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
    memory: ExchangeMemory,
    exchanges: Vec<Exchange>,
}

/// One exchange of a link.
struct Exchange {
    out: Arc<Wire>,
    incoming: Arc<Wire>,
    received: u32,
    pending: VecDeque<HostMessage>,
}

/// The two ends of a link with buffers of `capacity` bytes.
fn link(capacity: usize) -> [Link; 2] {
    let wires: Vec<[Arc<Wire>; 2]> = (0..MAX_EXCHANGES).map(|_| Default::default()).collect();
    [0, 1].map(|host| {
        let exchange = |wires: &[Arc<Wire>; 2]| Exchange {
            out: Arc::clone(&wires[host]),
            incoming: Arc::clone(&wires[1 - host]),
            received: 0,
            pending: VecDeque::new(),
        };
        Link { host, memory: ExchangeMemory::new(capacity), exchanges: wires.iter().map(exchange).collect() }
    })
}

impl HostLink for Link {
    fn memory(&mut self) -> &mut ExchangeMemory {
        &mut self.memory
    }

    fn start(&mut self, exchange: usize, sends: &[HostMessage], receives: &[HostMessage]) -> Result<()> {
        let send = self.memory.of(exchange).send;
        let Exchange { out, pending, .. } = &mut self.exchanges[exchange];
        for message in sends {
            out.messages.lock().unwrap().push_back(send[message.bytes.clone()].to_vec());
            out.sent.fetch_add(1, Ordering::Relaxed);
        }
        pending.extend(receives.iter().cloned());
        Ok(())
    }

    fn poll(&mut self, completed: &mut dyn FnMut(usize)) -> Result<()> {
        for (number, Exchange { incoming, received, pending, .. }) in self.exchanges.iter_mut().enumerate() {
            while !pending.is_empty() && incoming.sent.load(Ordering::Relaxed) > *received {
                let (HostMessage { host, bytes }, message) =
                    (pending.pop_front().unwrap(), incoming.messages.lock().unwrap().pop_front().unwrap());
                self.memory.of(number).recv[bytes][..message.len()].copy_from_slice(&message);
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

/// The mean of the inputs of all ranks.
fn mean(number: usize, index: usize) -> f32 {
    (0..3).map(|rank| value(number, rank, index)).sum::<f32>() / 3.0
}

/// A rank of a model.
struct Rank {
    rank: usize,
    topology: Arc<Topology>,
    region: Arc<ShmRegion>,
    channel: Channel,
    /// Those of each call.
    floats: Vec<Floats>,
}

/// Ranks 0 and 1 are on one host, rank 2 on another. Under Loom there is one shard, so ranks 0 and 2 exchange messages
/// while rank 1 waits, unless it reduces a part before. Runs `body` on each of them, with lists of floats of these lengths.
fn ranks(
    preemptions: usize,
    access: Access,
    algorithm: Algorithm,
    lengths: &'static [usize],
    body: impl Fn(&mut Rank) + Copy + Send + Sync + 'static,
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
            let floats = lengths.iter().map(|&len| Floats::new(len)).collect();
            spawn(move || {
                let (topology, region) = (Arc::new(Topology::new(rank, &HOSTS)), resources.region);
                let setting = AlgorithmSetting::Always(algorithm);
                let channel = Channel::new(Arc::clone(&topology), region.channel(0));
                let channel = channel.with_links(links, NetworkModel::UNKNOWN, setting);
                let mut rank = Rank { rank, topology, region, channel, floats };
                body(&mut rank);
                // The memory is tracked until the execution ends.
                std::mem::forget(rank.floats);
                // A host that ends early would lose its last messages.
                drop(rank.channel);
            })
        });
        ranks.collect::<Vec<_>>().into_iter().for_each(|rank| rank.join().unwrap());
    });
}

/// The ranks average one list after the other. Each rank's first call has its name of `names`.
fn averages(
    preemptions: usize,
    access: Access,
    algorithm: Algorithm,
    lengths: &'static [usize],
    names: [&'static str; 3],
) {
    averages_with(preemptions, access, algorithm, lengths, names, HostLimits::NONE.owner_alone);
}

/// As [`averages`]; the owner of the shard reduces up to `owner_alone` bytes alone.
fn averages_with(
    preemptions: usize,
    access: Access,
    algorithm: Algorithm,
    lengths: &'static [usize],
    names: [&'static str; 3],
    owner_alone: usize,
) {
    ranks(preemptions, access, algorithm, lengths, move |rank| {
        let &mut Rank { rank, ref topology, ref region, ref mut channel, ref mut floats } = rank;
        for (number, floats) in floats.iter_mut().enumerate() {
            let name = if number == 0 { names[rank] } else { "" };
            floats.fill(|index| value(number, rank, index));
            let mut config = config(topology, 0);
            config.limits.owner_alone = owner_alone;
            let call = call(Op::MEAN, floats.in_place(), name, config);
            let matches = number > 0 || names == [names[0]; 3];
            assert_eq!(run(channel, &call, region), matches);
            floats.expect(|index| if matches { mean(number, index) } else { value(number, rank, index) });
            floats.fill(|_| 0.0);
        }
    });
}

/// The calls from number `ended` on, as those in the queue of a rank.
struct ConcurrentCalls<'a> {
    calls: &'a [Call],
    /// Those of each call.
    floats: &'a mut [Floats],
    wait_ctx: WaitContext<'a>,
    ended: usize,
    /// The next chunk.
    call: usize,
    chunk: usize,
    /// The chunks of the oldest call that have ended.
    ended_chunks: usize,
    /// The first call, and those that all ranks are known to have, may begin.
    known: usize,
    /// The calls before this one are known to match.
    matched: usize,
    /// Whether their chunks are in place, once that is known.
    in_place: Vec<Option<bool>>,
    /// The number of calls that this rank announces.
    queued: usize,
}

impl ChunkSource for ConcurrentCalls<'_> {
    fn next(&self) -> Option<NextChunk> {
        let &ConcurrentCalls { call, chunk, .. } = self;
        let may_begin = chunk == 0 || (call < self.matched && self.in_place[call].is_some());
        let (is_first, compares) = (chunk == 0, chunk == 0 && call >= self.matched);
        (call < self.known && may_begin).then_some(NextChunk { call, chunk, is_first, compares })
    }

    fn begin(&mut self) -> Lookahead {
        let behind = self.calls[self.call + 1..self.queued.max(self.call + 1)].iter();
        let is_last = self.chunk + 1 == self.calls[self.call].layout.chunks();
        (self.call, self.chunk) = if is_last { (self.call + 1, 0) } else { (self.call, self.chunk + 1) };
        Lookahead::new(behind.map(|call| call.signature))
    }

    fn set_in_place(&mut self, number: usize, in_place: bool) {
        self.in_place[number] = Some(in_place);
    }

    fn call(&self, number: usize) -> ActiveCall<'_> {
        let call = &self.calls[number];
        let plan = ChunkPlan::between_hosts(call, self.in_place[number].unwrap_or(false));
        ActiveCall::new(call, plan, self.wait_ctx)
    }

    /// The caller of a call that has ended reads the results, and uses the memory again.
    fn ended(&mut self, number: usize, ahead: usize) {
        assert_eq!(number, self.ended);
        self.known = self.known.max(number + 1 + ahead);
        self.matched = self.known;
        self.ended_chunks += 1;
        if self.ended_chunks == self.calls[number].layout.chunks() {
            self.floats[number].expect(|index| mean(number, index));
            self.floats[number].fill(|_| 0.0);
            (self.ended, self.ended_chunks) = (self.ended + 1, 0);
        }
    }
}

const DOUBLING: (Access, Algorithm) = (Access::Slots, Algorithm::Doubling);

/// The ranks average one list per call, concurrently. Each rank's first call has its name of `names`, and at first it
/// announces its number of calls of `queued`. `ended` is the number of calls that end in each run. If it is 0, the first
/// call differs, and the next run begins with the second one.
fn concurrent_calls(
    preemptions: usize,
    (access, algorithm): (Access, Algorithm),
    lengths: &'static [usize],
    names: [&'static str; 3],
    queued: [usize; 3],
    ended: &'static [usize],
) {
    ranks(preemptions, access, algorithm, lengths, move |rank| {
        let &mut Rank { rank, ref topology, ref region, ref mut channel, ref mut floats } = rank;
        let new = |(number, floats): (usize, &mut Floats)| {
            floats.fill(|index| value(number, rank, index));
            let name = if number == 0 { names[rank].to_owned() } else { number.to_string() };
            call(Op::MEAN, floats.in_place(), &name, config(topology, 0))
        };
        let calls: Vec<Call> = floats.iter_mut().enumerate().map(new).collect();
        let (mut from, mut queued) = (0, queued[rank]);
        for &expected in ended {
            let matches = expected > 0;
            with_wait_context(region, |&wait_ctx| {
                let mut concurrent = ConcurrentCalls {
                    calls: &calls,
                    floats,
                    wait_ctx,
                    ended: from,
                    call: from,
                    chunk: 0,
                    ended_chunks: 0,
                    known: from + 1,
                    matched: from,
                    in_place: vec![None; calls.len()],
                    queued,
                };
                assert_eq!(channel.run_concurrent(&mut concurrent).unwrap(), matches);
                assert_eq!(concurrent.ended - from, expected);
            });
            if !matches {
                floats[from].expect(|index| value(from, rank, index));
            }
            (from, queued) = (from + expected.max(1), calls.len());
        }
        assert_eq!(from, calls.len());
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

/// Rank 1 reduces a part of each slice for rank 0: in the slots, and in the second chunk in place.
#[test]
fn a_rank_without_a_shard_reduces_a_part() {
    averages_with(1, Access::Slots, Algorithm::Doubling, &[FLOATS; 2], [""; 3], 0);
    averages_with(1, Access::Slots, Algorithm::Pairwise, &[FLOATS], ["a", "b", "a"], 0);
    averages_with(1, Access::Peer, Algorithm::Doubling, &[2 * FLOATS], [""; 3], 0);
    averages_with(0, Access::Slots, Algorithm::Doubling, &[5 * FLOATS], [""; 3], 0);
}

/// A difference within a host, and between hosts. The next call works.
#[test]
fn all_hosts_detect_different_calls() {
    averages(1, Access::Slots, Algorithm::Doubling, &[FLOATS; 2], ["a", "b", "a"]);
    averages(1, Access::Slots, Algorithm::Doubling, &[FLOATS; 2], ["a", "a", "b"]);
}

/// A call begins while those before it are under way.
#[test]
fn all_ranks_announce_all_calls() {
    concurrent_calls(1, DOUBLING, &[FLOATS; 4], ["0"; 3], [4; 3], &[4]);
}

/// More calls than the window has rounds.
#[test]
fn the_window_wraps_in_concurrent_calls() {
    concurrent_calls(0, DOUBLING, &[FLOATS; 6], ["0"; 3], [6; 3], &[6]);
}

/// A rank announces fewer calls than the others, on the first host and then on the second. All continue in another
/// run.
#[test]
fn a_rank_has_a_shorter_queue() {
    concurrent_calls(1, DOUBLING, &[FLOATS; 4], ["0"; 3], [4, 3, 4], &[3, 1]);
    concurrent_calls(1, DOUBLING, &[FLOATS; 3], ["0"; 3], [3, 3, 2], &[2, 1]);
}

/// A difference within a host, and between hosts. The next run works.
#[test]
fn the_first_of_concurrent_calls_differs() {
    concurrent_calls(1, DOUBLING, &[FLOATS; 3], ["a", "b", "a"], [3; 3], &[0, 2]);
    concurrent_calls(1, DOUBLING, &[FLOATS; 3], ["a", "a", "b"], [3; 3], &[0, 2]);
}

/// Calls of several chunks. The ranks find out with later chunks that all of them have the next call.
#[test]
fn long_calls_are_concurrent() {
    concurrent_calls(1, DOUBLING, &[2 * FLOATS, FLOATS], ["0"; 3], [2; 3], &[2]);
    let pairwise = (Access::Slots, Algorithm::Pairwise);
    concurrent_calls(0, pairwise, &[2 * FLOATS, 2 * FLOATS], ["0"; 3], [2; 3], &[2]);
    concurrent_calls(0, pairwise, &[2 * FLOATS, FLOATS], ["0"; 3], [2, 1, 2], &[1, 1]);
}

/// The chunks after the first of a call on the first host, and all on the second, where a rank is alone.
#[test]
fn concurrent_calls_in_place() {
    let in_place = (Access::Peer, Algorithm::Doubling);
    concurrent_calls(1, in_place, &[2 * FLOATS, FLOATS], ["0"; 3], [2; 3], &[2]);
    concurrent_calls(1, in_place, &[2 * FLOATS, FLOATS], ["a", "a", "b"], [2; 3], &[0, 1]);
}
