//! Calls between hosts that are under way together.
#![allow(missing_docs, clippy::unwrap_used)]

mod common;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use common::{World, tensor};
use dl_comm_core::buffer::{Buffer, Tensor};
use dl_comm_core::collective::Op;
use dl_comm_core::dtype::DType;
use dl_comm_core::error::{Error, Result};
use dl_comm_core::reduce::ReduceOp;
use dl_comm_core::transport::{ExchangeBuffers, HostLink, HostMessage, NETWORK_WINDOW};

const SUM: Op = Op::allreduce(ReduceOp::Sum);
const MAX: Op = Op::allreduce(ReduceOp::Max);

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
}

impl HeldLink {
    fn boxed(link: Box<dyn HostLink>, holds: fn(&HeldLink) -> bool) -> Box<dyn HostLink> {
        Box::new(HeldLink { link, holds, since: Instant::now(), several: false })
    }

    /// The number of exchanges in flight.
    fn exchanges(&self) -> usize {
        (0..NETWORK_WINDOW).filter(|&exchange| self.link.in_flight(exchange) > 0).count()
    }
}

impl HostLink for HeldLink {
    fn buffers(&mut self, exchange: usize) -> ExchangeBuffers<'_> {
        self.link.buffers(exchange)
    }

    fn start(&mut self, exchange: usize, sends: &[HostMessage], receives: &[HostMessage]) -> Result<()> {
        self.since = Instant::now();
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

#[test]
fn a_call_begins_while_those_before_it_are_under_way() {
    let link = |link| HeldLink::boxed(link, until_all_are_in_flight);
    World { link, ..World::new(&[1, 1]) }.run(|rank| {
        let mut data: Vec<Vec<f64>> = (0..60).map(|call| vec![(call * rank.rank) as f64; 10 + call]).collect();
        let calls: Vec<_> = data.iter_mut().map(|data| rank.start(SUM, vec![vec![tensor(data)]], "")).collect();
        calls.into_iter().for_each(|call| call.recv().unwrap().unwrap());
        for (call, data) in data.iter().enumerate() {
            assert!(data.iter().all(|&value| value == call as f64));
        }
    });
    assert_eq!(MOST.load(Ordering::Relaxed), NETWORK_WINDOW);
}

/// The last call has a shorter deadline than the others.
#[test]
fn the_deadline_of_a_call_holds_while_those_before_it_are_under_way() {
    let link = |link| HeldLink::boxed(link, once_several_are_in_flight);
    World { link, timeout: Duration::from_secs(10), ..World::new(&[1, 1]) }.run(|rank| {
        let mut data = vec![vec![1f64; 10]; 6];
        let start = |(index, data): (usize, &mut Vec<f64>)| match index {
            1 => {
                // The first call is under way alone, so all others are queued when the second one begins.
                std::thread::sleep(Duration::from_millis(10));
                rank.start(Op::MEAN, vec![vec![tensor(data)]], "")
            }
            5 => rank.start_within(1.0, vec![vec![tensor(data)]], ""),
            _ => rank.start(Op::MEAN, vec![vec![tensor(data)]], ""),
        };
        let calls: Vec<_> = data.iter_mut().enumerate().map(start).collect();
        let outcomes: Vec<_> =
            calls.into_iter().map(|call| call.recv_timeout(Duration::from_secs(30)).unwrap()).collect();
        let Err(Error::Timeout(text)) = &outcomes[5] else { panic!("{outcomes:?}") };
        assert!(text.contains("the timeout of this call"), "{text}");
    });
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

/// Long calls and lists of many tensors run alone. Ranks submit at different times.
#[test]
fn other_calls_run_alone() {
    const LENGTHS: [usize; 5] = [1, 70, 500, 3000, 20_000];
    for hosts in [&[1, 1][..], &[2, 1], &[1, 3, 2], &[1, 1, 1, 1, 1]] {
        World { threads: 2, ..World::new(hosts) }.run(|rank| {
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
