//! All-gathers, gathers and all-to-alls of which a rank knows only the lengths that it sends, on ranks that are threads.
#![allow(missing_docs, clippy::unwrap_used)]

mod common;

use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use common::groups;
use dl_comm_core::buffer::{Buffer, Tensor};
use dl_comm_core::collective::Op;
use dl_comm_core::dtype::DType;
use dl_comm_core::error::{Error, Result};
use dl_comm_core::group::{Allocate, CallOptions, Group, RaggedTensor, Timeout, start_ragged};
use dl_comm_core::reduce::ReduceOp;

const WORLDS: [&[usize]; 5] = [&[1], &[2], &[3], &[1, 1], &[2, 1]];

/// What a call has received: lengths, and the values of each tensor.
#[derive(Debug, Default, PartialEq)]
struct Found {
    lengths: Vec<usize>,
    values: Vec<Vec<i32>>,
}

/// A started call.
struct Started {
    found: Arc<Mutex<Found>>,
    ended: Receiver<Result<()>>,
    _sent: Vec<Vec<i32>>,
}

impl Started {
    fn wait(self) -> Result<Found> {
        self.ended.recv().unwrap()?;
        Ok(std::mem::take(&mut *self.found.lock().unwrap()))
    }
}

fn value(from: usize, to: usize, tensor: usize, index: usize) -> i32 {
    i32::try_from(1000 * from + 100 * to + 10 * tensor + index % 10).unwrap()
}

fn length(from: usize, to: usize, tensor: usize) -> usize {
    (from * 3 + to * 2 + tensor) % 5
}

/// Receivers of a block: one for all in an all-gather or gather.
fn receivers(op: Op, ranks: usize) -> usize {
    if op == Op::ALLTOALL { ranks } else { 1 }
}

fn start(group: &Arc<Group>, op: Op, ranks: usize, tensors: usize, options: CallOptions, fails: bool) -> Started {
    let me = group.rank();
    let block = |tensor, to| (0..length(me, to, tensor)).map(move |index| value(me, to, tensor, index));
    let sent: Vec<Vec<i32>> =
        (0..tensors).map(|tensor| (0..receivers(op, ranks)).flat_map(|to| block(tensor, to)).collect()).collect();
    let describe = |(tensor, sent): (usize, &Vec<i32>)| RaggedTensor {
        tensor: Tensor::new(Buffer::new(sent.as_ptr().cast(), std::ptr::null_mut(), sent.len(), DType::I32), &[]),
        sent: (0..receivers(op, ranks)).map(|to| length(me, to, tensor)).collect(),
    };
    let list = sent.iter().enumerate().map(describe).collect();
    let found = Arc::new(Mutex::new(Found::default()));
    let filled = Arc::clone(&found);
    let allocate: Allocate = Box::new(move |lengths: &[usize]| {
        if fails {
            return Err(Error::System("there is no memory".into()));
        }
        let mut found = filled.lock().unwrap();
        found.lengths = lengths.to_vec();
        found.values = lengths.chunks(ranks).map(|lengths| vec![0; lengths.iter().sum()]).collect();
        Ok(found.values.iter_mut().map(|values| values.as_mut_ptr().cast()).collect())
    });
    let (sender, ended) = channel();
    let done = Box::new(move |result: Result<()>| sender.send(result).unwrap());
    // SAFETY: the tensors and `found` live until the call has ended.
    unsafe { start_ragged(group, op, list, options, allocate, done) };
    Started { found, ended, _sent: sent }
}

fn expected(op: Op, me: usize, ranks: usize, tensors: usize) -> Found {
    let to = if op == Op::ALLTOALL { me } else { 0 };
    let lengths = (0..tensors).flat_map(|tensor| (0..ranks).map(move |from| length(from, to, tensor))).collect();
    let block = |tensor, from| (0..length(from, to, tensor)).map(move |index| value(from, to, tensor, index));
    let values = (0..tensors).map(|tensor| (0..ranks).flat_map(|from| block(tensor, from)).collect()).collect();
    Found { lengths, values }
}

/// Runs `body` on every rank, which gets its group and the number of ranks.
fn run(hosts: &[usize], body: impl Fn(&Arc<Group>, usize) + Sync) {
    let ranks = hosts.iter().sum::<usize>();
    let all = groups(&host_of(hosts), &[(0..ranks).collect()], Duration::from_secs(20));
    thread::scope(|scope| {
        let body = &body;
        let threads: Vec<_> = all
            .into_iter()
            .map(|mut groups| scope.spawn(move || body(&Arc::new(groups.remove(0).unwrap()), ranks)))
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
}

/// The host of every rank.
fn host_of(hosts: &[usize]) -> Vec<usize> {
    hosts.iter().enumerate().flat_map(|(host, &ranks)| std::iter::repeat_n(host, ranks)).collect()
}

fn named(name: &str, by_name: bool) -> CallOptions {
    CallOptions { name: name.into(), by_name, ..CallOptions::default() }
}

#[test]
fn every_rank_gets_the_blocks_and_their_lengths() {
    for hosts in WORLDS {
        run(hosts, |group, ranks| {
            for op in [Op::ALLGATHER, Op::gather(0), Op::gather(ranks - 1), Op::ALLTOALL] {
                for tensors in [1, 3] {
                    for name in ["", "x"] {
                        let call = start(group, op, ranks, tensors, named(name, false), false);
                        let mut wanted = expected(op, group.rank(), ranks, tensors);
                        if !op.has_output(group.rank()) {
                            wanted.values.iter_mut().for_each(|values| values.fill(0));
                        }
                        assert_eq!(call.wait().unwrap(), wanted);
                    }
                }
            }
        });
    }
}

/// Calls of one name and of others are in flight, among allreduces, and the ranks wait for them in another order.
#[test]
fn many_are_in_flight_in_any_order() {
    for hosts in WORLDS {
        run(hosts, |group, ranks| {
            for by_name in [false, true] {
                let gathers: Vec<Started> = (0..12)
                    .map(|call| {
                        let name = format!("call {}", call % 5);
                        start(group, Op::ALLGATHER, ranks, 1 + call % 2, named(&name, by_name), false)
                    })
                    .collect();
                let exchange = start(group, Op::ALLTOALL, ranks, 2, named("exchange", by_name), false);
                let mut sum = [1i32; 7];
                let buffer = Buffer::in_place(sum.as_mut_ptr().cast(), 7, DType::I32);
                let (sender, ended) = channel();
                let done = Box::new(move |result: Result<()>| sender.send(result).unwrap());
                let sums = vec![vec![Tensor::new(buffer, &[])]];
                // SAFETY: `sum` lives until the call has ended.
                unsafe { group.submit(Op::allreduce(ReduceOp::Sum), sums, named("sum", by_name), done) };
                let check = |(call, started): (usize, Started)| {
                    assert_eq!(started.wait().unwrap(), expected(Op::ALLGATHER, group.rank(), ranks, 1 + call % 2));
                };
                if group.rank() % 2 == 0 {
                    ended.recv().unwrap().unwrap();
                    gathers.into_iter().enumerate().for_each(check);
                    assert_eq!(exchange.wait().unwrap(), expected(Op::ALLTOALL, group.rank(), ranks, 2));
                } else {
                    assert_eq!(exchange.wait().unwrap(), expected(Op::ALLTOALL, group.rank(), ranks, 2));
                    gathers.into_iter().enumerate().rev().for_each(check);
                    ended.recv().unwrap().unwrap();
                }
                assert_eq!(sum, [i32::try_from(ranks).unwrap(); 7]);
            }
        });
    }
}

#[test]
fn a_rank_without_memory_fails_the_call_on_every_rank() {
    for hosts in [&[2][..], &[3], &[1, 1]] {
        run(hosts, |group, ranks| {
            for by_name in [false, true] {
                for tensors in [1, 2] {
                    let fails = group.rank() == ranks - 1;
                    let error =
                        start(group, Op::ALLGATHER, ranks, tensors, named("x", by_name), fails).wait().unwrap_err();
                    if fails {
                        assert!(matches!(error, Error::System(_)), "{error}");
                    } else {
                        assert!(matches!(error, Error::Mismatch(_)), "{error:?}");
                    }
                    let next = start(group, Op::ALLGATHER, ranks, tensors, named("x", by_name), false);
                    assert_eq!(next.wait().unwrap(), expected(Op::ALLGATHER, group.rank(), ranks, tensors));
                }
            }
        });
    }
}

/// A rank has made one call more than the others: the next calls of the name match.
#[test]
fn a_call_that_not_all_ranks_have_made_fails_alone() {
    for hosts in [&[2][..], &[1, 1]] {
        run(hosts, |group, ranks| {
            for alone in 0..ranks {
                if group.rank() == alone {
                    let timeout = Timeout::Override(Some(Duration::from_millis(300)));
                    let options = CallOptions { timeout, ..named("x", true) };
                    let error = start(group, Op::ALLGATHER, ranks, 1, options, false).wait().unwrap_err();
                    assert!(matches!(error, Error::Mismatch(_) | Error::Timeout(_)), "{error:?}");
                } else {
                    thread::sleep(Duration::from_millis(600));
                }
                let next = start(group, Op::ALLGATHER, ranks, 2, named("x", true), false);
                assert_eq!(next.wait().unwrap(), expected(Op::ALLGATHER, group.rank(), ranks, 2));
            }
        });
    }
}

#[test]
fn lists_that_differ_fail_on_every_rank() {
    run(&[2], |group, ranks| {
        let tensors = 1 + group.rank();
        let error = start(group, Op::ALLGATHER, ranks, tensors, named("x", false), false).wait().unwrap_err();
        assert!(matches!(error, Error::Mismatch(_)), "{error:?}");
        let error = start(group, Op::gather(group.rank()), ranks, 1, named("x", false), false).wait().unwrap_err();
        assert!(matches!(error, Error::Mismatch(_)), "{error:?}");
        let error = start(group, Op::BARRIER, ranks, 1, named("x", false), false).wait().unwrap_err();
        assert!(matches!(error, Error::Invalid(_)), "{error:?}");
        let error = start(group, Op::ALLGATHER, ranks, 1, named("", true), false).wait().unwrap_err();
        assert!(error.to_string().contains("needs a name"), "{error}");
    });
}
