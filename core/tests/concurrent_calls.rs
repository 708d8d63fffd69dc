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
use dl_comm_core::transport::{ExchangeBuffers, HostLink, Message, NETWORK_WINDOW};

const SUM: Op = Op::allreduce(ReduceOp::Sum);
const MAX: Op = Op::allreduce(ReduceOp::Max);

/// The most exchanges that were in flight at once on a link.
static MOST: AtomicUsize = AtomicUsize::new(0);

/// A link that holds messages back until as many exchanges are in flight as can be, or for 20 ms.
struct SlowLink {
    link: Box<dyn HostLink>,
    since: Instant,
}

impl HostLink for SlowLink {
    fn buffers(&mut self, exchange: usize) -> ExchangeBuffers<'_> {
        self.link.buffers(exchange)
    }

    fn start(&mut self, exchange: usize, sends: &[Message], receives: &[Message]) -> Result<()> {
        self.since = Instant::now();
        self.link.start(exchange, sends, receives)
    }

    fn poll(&mut self, completed: &mut dyn FnMut(usize)) -> Result<()> {
        let in_flight = (0..NETWORK_WINDOW).filter(|&exchange| self.link.in_flight(exchange) > 0).count();
        MOST.fetch_max(in_flight, Ordering::Relaxed);
        if in_flight == NETWORK_WINDOW || self.since.elapsed() > Duration::from_millis(20) {
            return self.link.poll(completed);
        }
        Ok(())
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

#[test]
fn a_call_begins_while_those_before_it_are_under_way() {
    let link = |link| Box::new(SlowLink { link, since: Instant::now() }) as Box<dyn HostLink>;
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

/// A link that holds the messages of the first two calls back for 20 ms, and loses all later ones.
struct LossyLink {
    link: Box<dyn HostLink>,
    since: Instant,
    started: usize,
}

impl HostLink for LossyLink {
    fn buffers(&mut self, exchange: usize) -> ExchangeBuffers<'_> {
        self.link.buffers(exchange)
    }

    fn start(&mut self, exchange: usize, sends: &[Message], receives: &[Message]) -> Result<()> {
        (self.since, self.started) = (Instant::now(), self.started + 1);
        self.link.start(exchange, sends, receives)
    }

    fn poll(&mut self, completed: &mut dyn FnMut(usize)) -> Result<()> {
        if self.started <= 2 && self.since.elapsed() > Duration::from_millis(20) {
            return self.link.poll(completed);
        }
        Ok(())
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

/// The third call has no deadline, the fourth has one.
#[test]
fn the_deadline_of_a_call_holds_while_those_before_it_are_under_way() {
    let link = |link| Box::new(LossyLink { link, since: Instant::now(), started: 0 }) as Box<dyn HostLink>;
    World { link, ..World::new(&[1, 1]) }.run(|rank| {
        let mut data = vec![vec![1f64; 10]; 4];
        let starts = data.iter_mut().zip([0.0, 0.0, 0.0, 1.0]);
        let calls: Vec<_> =
            starts.map(|(data, seconds)| rank.start_within(seconds, vec![vec![tensor(data)]], "")).collect();
        let outcomes: Vec<_> =
            calls.into_iter().map(|call| call.recv_timeout(Duration::from_secs(20)).unwrap()).collect();
        assert!(outcomes[..2].iter().all(Result::is_ok), "{outcomes:?}");
        assert!(outcomes[2..].iter().all(|outcome| matches!(outcome, Err(Error::Timeout(_)))), "{outcomes:?}");
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
            let outcomes = |calls: Vec<std::sync::mpsc::Receiver<Result<()>>>| -> Vec<Result<()>> {
                calls.into_iter().map(|call| call.recv_timeout(Duration::from_secs(30)).unwrap()).collect()
            };
            if last {
                assert!(outcomes(calls).iter().all(Result::is_ok));
                rank.team.group().fail(&Error::PeerLost("a failure".into()));
            } else {
                // In a job the failure detector does this.
                std::thread::sleep(Duration::from_millis(200));
                rank.team.group().fail(&Error::PeerLost("the last rank has failed".into()));
                let outcomes = outcomes(calls);
                let succeeded = outcomes.iter().take_while(|outcome| outcome.is_ok()).count();
                assert!(succeeded == 5, "{outcomes:?}");
                assert!(outcomes[succeeded..].iter().all(|outcome| matches!(outcome, Err(Error::PeerLost(_)))));
            }
        });
    }
}
