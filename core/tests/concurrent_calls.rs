//! Calls between hosts that are under way together.
#![allow(missing_docs, clippy::unwrap_used)]

mod common;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use common::{World, tensor};
use dl_comm_core::buffer::{Buffer, Tensor};
use dl_comm_core::collective::selection::Limit;
use dl_comm_core::collective::{Algorithm, AlgorithmSetting, Op};
use dl_comm_core::dtype::DType;
use dl_comm_core::error::{Error, Result};
use dl_comm_core::reduce::ReduceOp;
use dl_comm_core::transport::in_process::Access;
use dl_comm_core::transport::{ExchangeMemory, HostLink, HostMessage, NETWORK_WINDOW};

const SUM: Op = Op::allreduce(ReduceOp::Sum);
const MAX: Op = Op::allreduce(ReduceOp::Max);
/// Neighbours of different operations are not fused.
const ALTERNATELY: [Op; 2] = [SUM, MAX];

/// The most exchanges that were in flight at once on a link.
static MOST: AtomicUsize = AtomicUsize::new(0);

/// A link that holds its messages back while `holds` says so.
struct HeldLink {
    link: Box<dyn HostLink>,
    holds: fn(&HeldLink) -> bool,
    /// When the last exchange started.
    since: Instant,
    /// Whether several exchanges have been in flight at once.
    several: bool,
    /// The number of exchanges that have started.
    started: usize,
}

impl HeldLink {
    fn boxed(link: Box<dyn HostLink>, holds: fn(&HeldLink) -> bool) -> Box<dyn HostLink> {
        Box::new(HeldLink { link, holds, since: Instant::now(), several: false, started: 0 })
    }

    /// The number of exchanges in flight.
    fn exchanges(&self) -> usize {
        (0..NETWORK_WINDOW).filter(|&exchange| self.link.in_flight(exchange) > 0).count()
    }
}

impl HostLink for HeldLink {
    fn memory(&mut self) -> &mut ExchangeMemory {
        self.link.memory()
    }

    fn start(&mut self, exchange: usize, sends: &[HostMessage], receives: &[HostMessage]) -> Result<()> {
        self.since = Instant::now();
        self.started += 1;
        self.several |= self.exchanges() > 0;
        self.link.start(exchange, sends, receives)
    }

    fn poll(&mut self, completed: &mut dyn FnMut(usize)) -> Result<()> {
        if (self.holds)(self) { Ok(()) } else { self.link.poll(completed) }
    }

    fn in_flight(&self, exchange: usize) -> usize {
        self.link.in_flight(exchange)
    }

    fn awaited(&self) -> Vec<usize> {
        self.link.awaited()
    }

    fn host_name(&self, host: usize) -> String {
        self.link.host_name(host)
    }
}

/// Until as many exchanges are in flight as can be, or for 20 ms.
fn until_all_are_in_flight(link: &HeldLink) -> bool {
    MOST.fetch_max(link.exchanges(), Ordering::Relaxed);
    link.exchanges() < NETWORK_WINDOW && link.since.elapsed() < Duration::from_millis(20)
}

/// For 50 ms, and for ever once several exchanges are in flight.
fn once_several_are_in_flight(link: &HeldLink) -> bool {
    link.several || link.since.elapsed() < Duration::from_millis(50)
}

/// For 50 ms, and for ever once the second exchange has started.
fn once_the_second_has_started(link: &HeldLink) -> bool {
    link.started > 1 || link.since.elapsed() < Duration::from_millis(50)
}

#[test]
fn a_call_begins_while_those_before_it_are_under_way() {
    let link = |link| HeldLink::boxed(link, until_all_are_in_flight);
    // Of one chunk, and of two.
    for length in [10, 600] {
        MOST.store(0, Ordering::Relaxed);
        World { link, ..World::new(&[1, 1]) }.run(|rank| {
            let mut data: Vec<Vec<f64>> = (0..60).map(|call| vec![(call * rank.rank) as f64; length + call]).collect();
            let start = |(op, data): (&Op, &mut Vec<f64>)| rank.start(*op, vec![vec![tensor(data)]], "");
            let calls: Vec<_> = ALTERNATELY.iter().cycle().zip(&mut data).map(start).collect();
            calls.into_iter().for_each(|call| call.recv().unwrap().unwrap());
            for (call, data) in data.iter().enumerate() {
                assert!(data.iter().all(|&value| value == call as f64));
            }
        });
        assert_eq!(MOST.load(Ordering::Relaxed), NETWORK_WINDOW, "{length} elements");
    }
}

/// For 10 ms after an exchange has started.
fn for_a_while(link: &HeldLink) -> bool {
    link.since.elapsed() < Duration::from_millis(10)
}

#[test]
fn short_allreduces_travel_together() {
    let messages = |fused: usize| {
        let link = |link| HeldLink::boxed(link, for_a_while);
        let world = World { link, ..World::new(&[1, 1]) };
        let world = World { selection: world.selection.with(Limit::HostsFused, fused), ..world };
        let of_ranks = world.run(|rank| {
            let mut data: Vec<Vec<f64>> = (0..101).map(|call| vec![(call * rank.rank) as f64; 1 + call % 7]).collect();
            let calls: Vec<_> = data.iter_mut().map(|data| rank.start(SUM, vec![vec![tensor(data)]], "")).collect();
            calls.into_iter().for_each(|call| call.recv().unwrap().unwrap());
            assert!(data.iter().enumerate().all(|(call, data)| data.iter().all(|&value| value == call as f64)));
            let stats = rank.team.group().stats();
            assert_eq!(stats["calls"], 101);
            stats["messages"].as_u64().unwrap()
        });
        of_ranks[0]
    };
    assert!(messages(64 << 10) < 15);
    // Two lines fit.
    assert!((30..60).contains(&messages(128)));
    assert!(messages(0) >= 101);
}

/// Arbitrary numbers.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % limit
    }
}

/// Of calls that are under way together or alone, fused or not, of one chunk and of several, of several operations and
/// types, with and without tensors that share memory, copied and in place.
#[test]
fn calls_under_way_together_change_no_bits() {
    const OPERATIONS: [Op; 4] = [SUM, SUM, Op::MEAN, MAX];
    let ring = AlgorithmSetting::Always(Algorithm::Ring);
    for (hosts, algorithm) in [
        (&[1, 1][..], AlgorithmSetting::Auto),
        (&[2, 1], AlgorithmSetting::Auto),
        (&[1, 1, 1], AlgorithmSetting::Auto),
        (&[1, 1, 1], ring),
        (&[1, 2, 1, 1, 1], AlgorithmSetting::Auto),
    ] {
        let (slots, peer) = (Access::Slots, Access::Peer);
        let worlds = [(0, slots), (0, peer), (1024, slots), (64 << 10, slots), (usize::MAX, peer)];
        let bits = worlds.map(|(fused, access)| {
            let threads = if fused == 0 { 1 } else { 2 };
            let waits = fused == 0 && access == slots;
            let world = World { algorithm, threads, access, slot: 64 << 10, ..World::new(hosts) };
            World { selection: world.selection.with(Limit::HostsFused, fused), ..world }.run(|rank| {
                // The same calls on all ranks, at other times.
                let (mut calls, mut mine) = (Random(7), Random(rank.rank as u64 + 100));
                let mut memory: Vec<(DType, Vec<u32>)> = Vec::new();
                let mut results = Vec::new();
                for call in 0..120 {
                    let op = OPERATIONS[calls.below(OPERATIONS.len())];
                    let tensors = 1 + calls.below(3);
                    let mut list = Vec::new();
                    for _ in 0..tensors {
                        let len = [0, 1, 30, 200, 3000, 40_000][calls.below(101) / 20];
                        let dtype = [DType::F32, DType::BF16, DType::I32][calls.below(3)];
                        let values = |random: &mut Random| random.below(1 << 20) as f32 / 1e5 - 5.0;
                        let value = |random: &mut Random| match dtype {
                            // Two of them.
                            DType::BF16 => (values(random).to_bits() & 0xffff_0000) | values(random).to_bits() >> 16,
                            _ => values(random).to_bits(),
                        };
                        let count = if dtype == DType::BF16 { 2 * len } else { len };
                        // Some tensors are those of an earlier call.
                        let earlier = memory.iter().position(|(other, words)| *other == dtype && words.len() == len);
                        let index = earlier.filter(|_| calls.below(4) == 0).unwrap_or_else(|| {
                            memory.push((dtype, (0..len).map(|_| value(&mut mine)).collect()));
                            memory.len() - 1
                        });
                        let words = &mut memory[index].1;
                        let buffer = Buffer::in_place(words.as_mut_ptr().cast(), count, dtype);
                        if !list.iter().any(|tensor: &Tensor| tensor.buffer.dst() == buffer.dst() && len > 0) {
                            list.push(Tensor::new(buffer, &[]));
                        }
                    }
                    if list.is_empty() {
                        continue;
                    }
                    if mine.below(10) == 0 {
                        std::thread::sleep(Duration::from_micros(200));
                    }
                    results.push(rank.start(op, vec![list], ""));
                    if waits || call % 50 == 49 {
                        results.drain(..).for_each(|call| call.recv().unwrap().unwrap());
                    }
                }
                results.into_iter().for_each(|call| call.recv().unwrap().unwrap());
                memory
            })
        });
        assert!(bits.iter().all(|others| *others == bits[0]), "{hosts:?} {algorithm:?}");
        assert!(bits[0].iter().all(|memory| memory.len() > 60));
    }
}

/// The last call has a shorter deadline than the others, with which it is fused or not.
#[test]
fn the_deadline_of_a_call_holds_while_those_before_it_are_under_way() {
    type Link = fn(Box<dyn HostLink>) -> Box<dyn HostLink>;
    let fused: (_, Link) = ([Op::MEAN; 2], |link| HeldLink::boxed(link, once_the_second_has_started));
    let alone: (_, Link) = ([Op::MEAN, MAX], |link| HeldLink::boxed(link, once_several_are_in_flight));
    // The last is long: helpers have parts of it.
    for ((ops, link), length, threads) in [(fused, 10, 1), (alone, 10, 1), (alone, 3000, 2)] {
        World { link, threads, timeout: Duration::from_secs(10), ..World::new(&[1, 1]) }.run(|rank| {
            let mut data = vec![vec![1f64; 10]; 6];
            data[5] = vec![1f64; length];
            let start = |(index, data): (usize, &mut Vec<f64>)| {
                if index == 1 {
                    // The first call is under way alone, so all others are queued when the second one begins.
                    std::thread::sleep(Duration::from_millis(10));
                }
                let (op, tensors) = (ops[(index + 1) % 2], vec![vec![tensor(data)]]);
                if index == 5 { rank.start_within(1.0, tensors, "late") } else { rank.start(op, tensors, "") }
            };
            let calls: Vec<_> = data.iter_mut().enumerate().map(start).collect();
            let outcomes: Vec<_> =
                calls.into_iter().map(|call| call.recv_timeout(Duration::from_secs(30)).unwrap()).collect();
            assert_eq!(outcomes[0], Ok(()));
            let Err(Error::Timeout(text)) = &outcomes[5] else { panic!("{outcomes:?}") };
            assert!(text.contains("the timeout of this call"), "{text}");
            assert_eq!(text.matches("late").count(), 1, "{text}");
        });
    }
}

/// Calls whose memory conflicts wait for each other: a sum of sums, results that another call reads, and a tensor that
/// is written after another call has read it.
#[test]
fn a_call_sees_the_results_of_those_before_it() {
    for hosts in [&[2][..], &[1, 1], &[2, 1], &[1, 2, 1]] {
        World::new(hosts).run(|rank| {
            let mut total = vec![1f64; 50];
            let mut copies = vec![vec![0f64; 50]; 30];
            let mut others = vec![vec![rank.rank as u64; 20]; 30];
            let mut calls = Vec::new();
            for (copy, other) in copies.iter_mut().zip(&mut others) {
                calls.push(rank.start(SUM, vec![vec![tensor(&mut total)]], "total"));
                let copied = Buffer::new(total.as_ptr().cast(), copy.as_mut_ptr().cast(), 50, DType::F64);
                calls.push(rank.start(MAX, vec![vec![Tensor::new(copied, &[])]], "copy"));
                calls.push(rank.start(SUM, vec![vec![tensor(other)]], "other"));
            }
            calls.into_iter().for_each(|call| call.recv().unwrap().unwrap());
            let (size, mut expected) = (rank.size as u64, 1f64);
            for (copy, other) in copies.iter().zip(&others) {
                expected *= size as f64;
                assert!(copy.iter().all(|&value| value == expected), "{hosts:?}: {copy:?}");
                assert!(other.iter().all(|&value| value == size * (size - 1) / 2), "{hosts:?}: {other:?}");
            }
        });
    }
}

/// Short and long calls, and lists of many tensors. Ranks submit at different times.
#[test]
fn calls_of_all_lengths() {
    const LENGTHS: [usize; 5] = [1, 70, 500, 3000, 8000];
    for hosts in [&[1, 1][..], &[2, 1], &[1, 3, 2], &[1, 1, 1, 1, 1]] {
        let access = if hosts.len() == 3 { Access::Peer } else { Access::Slots };
        // The thread sanitizer takes two minutes.
        let timeout = Duration::from_secs(400);
        World { threads: hosts[0], access, timeout, ..World::new(hosts) }.run(|rank| {
            let lists = |call: usize| if call % 11 == 3 { 20 } else { 1 };
            let value = |call: usize, rank: usize| (call * 3 + rank) as f64;
            let mut data: Vec<Vec<Vec<f64>>> = (0..150)
                .map(|call| vec![vec![value(call, rank.rank); LENGTHS[call * call % LENGTHS.len()]]; lists(call)])
                .collect();
            let mut calls = Vec::new();
            for (call, data) in data.iter_mut().enumerate() {
                if (call * 7 + rank.rank * 5) % 13 == 0 {
                    std::thread::sleep(Duration::from_micros(300));
                }
                let op = if call % 4 == 1 { Op::broadcast(call % rank.size) } else { SUM };
                calls.push(rank.start(op, vec![data.iter_mut().map(|data| tensor(data)).collect()], ""));
            }
            calls.push(rank.start(Op::BARRIER, Vec::new(), ""));
            calls.into_iter().for_each(|call| call.recv().unwrap().unwrap());
            for (call, data) in data.iter().enumerate() {
                let sum = (0..rank.size).map(|rank| value(call, rank)).sum();
                let expected = if call % 4 == 1 { value(call, call % rank.size) } else { sum };
                assert!(data.iter().flatten().all(|&value| value == expected), "{hosts:?}: call {call}");
            }
        });
    }
}

#[test]
fn a_failure_ends_all_calls_under_way() {
    for hosts in [&[1, 1][..], &[2, 1]] {
        World::new(hosts).run(|rank| {
            let (mut data, last) = (vec![vec![1f64; 100]; 30], rank.rank + 1 == rank.size);
            let submitted = if last { 5 } else { data.len() };
            let calls: Vec<_> =
                data[..submitted].iter_mut().map(|data| rank.start(SUM, vec![vec![tensor(data)]], "")).collect();
            let outcomes = calls.iter().enumerate().map(|(index, call)| {
                if index == 5 && rank.rank == 0 {
                    rank.team.group().fail(&Error::PeerLost("a rank has failed".into()));
                }
                call.recv_timeout(Duration::from_secs(30)).unwrap()
            });
            let outcomes: Vec<Result<()>> = outcomes.collect();
            let succeeded = outcomes.iter().take_while(|outcome| outcome.is_ok()).count();
            // Rank 0 may fail before others of its host have taken the last result.
            assert!(succeeded == 5 || (succeeded < 5 && rank.rank == 1), "{outcomes:?}");
            assert!(outcomes[succeeded..].iter().all(|outcome| matches!(outcome, Err(Error::PeerLost(_)))));
        });
    }
}
