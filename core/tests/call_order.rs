//! Calls take effect in the order in which they were started, whatever memory they share.
#![allow(missing_docs, clippy::unwrap_used)]

mod common;

use std::time::Duration;

use common::{Rank, World, tensor};
use dl_comm_core::buffer::{Buffer, Tensor};
use dl_comm_core::collective::Op;
use dl_comm_core::dtype::DType;
use dl_comm_core::error::Error;
use dl_comm_core::reduce::ReduceOp;
use dl_comm_core::transport::in_process::Access;

const SUM: Op = Op::allreduce(ReduceOp::Sum);
const MAX: Op = Op::allreduce(ReduceOp::Max);
/// Some of these lengths make many chunks, which two threads run.
const LENGTHS: [usize; 2] = [1 << 13, 1 << 16];

fn in_place(x: &mut [f64]) -> Vec<Vec<Tensor>> {
    vec![vec![tensor(x)]]
}

fn each_world(run: impl Fn(&Rank, usize) + Sync) {
    for hosts in [&[1][..], &[2], &[3], &[1, 1], &[2, 1]] {
        for len in LENGTHS {
            for access in [Access::Slots, Access::Peer, Access::EvenPeerOddPrivate] {
                World { threads: 2, access, ..World::new(hosts) }.run(|rank| run(rank, len));
            }
        }
    }
}

/// A short call on the end of the memory of a long one, which the thread of a chunk writes last.
#[test]
fn a_short_call_follows_a_long_one() {
    each_world(|rank, len| {
        let mut x = vec![1f64; len];
        for round in 0..5 {
            x.fill(1.0);
            let (long, mut calls) = (rank.start(SUM, in_place(&mut x), "long"), Vec::new());
            let mut expected = rank.size as f64;
            for tail in [8, 4] {
                calls.push(rank.start(SUM, in_place(&mut x[len - tail..]), "short"));
                expected *= rank.size as f64;
            }
            calls.into_iter().chain([long]).for_each(|call| call.recv().unwrap().unwrap());
            let last = &x[len - 8..];
            assert!(last[..4].iter().all(|&value| value == (rank.size * rank.size) as f64), "{round}: {last:?}");
            assert!(last[4..].iter().all(|&value| value == expected), "{round}: {last:?}");
        }
    });
}

/// As above, with a second call whose caller waits: it runs on the caller's thread.
#[test]
fn a_blocking_call_follows_a_started_one() {
    each_world(|rank, len| {
        let mut x = vec![1f64; len];
        for _ in 0..5 {
            x.fill(1.0);
            let long = rank.start(SUM, in_place(&mut x), "long");
            rank.call(SUM, in_place(&mut x[len - 8..]), "").unwrap();
            assert!(x[len - 8..].iter().all(|&value| value == (rank.size * rank.size) as f64));
            long.recv().unwrap().unwrap();
        }
    });
}

/// Results that the next call reads, inputs that the next call writes.
#[test]
fn long_calls_follow_each_other() {
    each_world(|rank, len| {
        let (mut x, mut y) = (vec![1f64; len], vec![0f64; len]);
        let mut calls = Vec::new();
        let mut expected = 1f64;
        for _ in 0..5 {
            calls.push(rank.start(SUM, in_place(&mut x), "sum"));
            let copied = Buffer::new(x.as_ptr().cast(), y.as_mut_ptr().cast(), len, DType::F64);
            calls.push(rank.start(MAX, vec![vec![Tensor::new(copied, &[])]], "copy"));
            let back = Buffer::new(y.as_ptr().cast(), x.as_mut_ptr().cast(), len, DType::F64);
            calls.push(rank.start(SUM, vec![vec![Tensor::new(back, &[])]], "back"));
            expected *= (rank.size * rank.size) as f64;
        }
        calls.into_iter().for_each(|call| call.recv().unwrap().unwrap());
        assert!(x.iter().all(|&value| value == expected));
        assert!(y.iter().all(|&value| value == expected / rank.size as f64));
    });
}

/// A rank that starts calls on other memory starts them in another order.
#[test]
fn other_ranks_keep_the_order_of_a_rank_whose_calls_share_memory() {
    for hosts in [&[2][..], &[3], &[1, 1]] {
        World { threads: 2, ..World::new(hosts) }.run(|rank| {
            for _ in 0..5 {
                let (mut x, mut y) = (vec![1f64; 100_000], vec![2f64; 100_000]);
                let calls = if rank.rank == 1 {
                    [rank.start(SUM, in_place(&mut x), "a"), rank.start(MAX, in_place(&mut x), "b")]
                } else {
                    let second = rank.start(MAX, in_place(&mut y), "b");
                    [rank.start(SUM, in_place(&mut x), "a"), second]
                };
                calls.into_iter().for_each(|call| call.recv().unwrap().unwrap());
                let size = rank.size as f64;
                assert!(x.iter().all(|&value| value == if rank.rank == 1 { size.max(2.0) } else { size }));
                assert!(rank.rank == 1 || y.iter().all(|&value| value == size.max(2.0)));
            }
        });
    }
}

#[test]
fn contrary_orders_on_shared_memory_are_a_mismatch() {
    let world = World { timeout: Duration::from_secs(20), ..World::new(&[2]) };
    world.run(|rank| {
        let mut x = vec![1f64; 1000];
        let names = if rank.rank == 0 { ["a", "b"] } else { ["b", "a"] };
        let calls = names.map(|name| rank.start(SUM, in_place(&mut x), name));
        // One of them fails on both ranks, and the other one can run.
        for (name, call) in names.into_iter().zip(calls) {
            match call.recv().unwrap() {
                Err(Error::Mismatch(text)) if name == "a" => {
                    assert!(
                        text.contains("ranks 0, 1: allreduce (sum) 'a'") && text.contains("contrary orders"),
                        "{text}"
                    );
                }
                result => assert_eq!((name, result), ("b", Ok(()))),
            }
        }
        assert!(x.iter().all(|&value| value == 2.0));
        let mut y = vec![1f64; 10];
        rank.call(SUM, vec![vec![tensor(&mut y)]], "").unwrap();
        assert_eq!(y, [2.0; 10]);
    });
}
