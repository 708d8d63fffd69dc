//! Ranks with less data than others contribute zeros until all have joined.
#![allow(clippy::unwrap_used)]

mod common;

use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

use common::{groups, tensor};
use dl_comm_core::cases::cases;
use dl_comm_core::collective::Op;
use dl_comm_core::error::{Error, Result};
use dl_comm_core::group::{CallOptions, Group, Timeout};
use dl_comm_core::reduce::ReduceOp;
use proptest::prelude::*;

const SECONDS: Duration = Duration::from_secs(60);
const NEVER: Timeout = Timeout::Override(None);

/// Starts `op` on lists of tensors, all at once, and waits for all.
fn call(group: &Group, op: Op, lists: &mut [(Vec<f32>, Vec<i64>)], blocks: bool) -> Vec<Result<()>> {
    let (sender, receiver) = channel();
    let count = lists.len();
    for (index, (floats, integers)) in lists.iter_mut().enumerate() {
        let sender = sender.clone();
        // A barrier with a name precedes something that all ranks do.
        let name = if op.is_barrier() { String::new() } else { format!("call {index}") };
        let options = CallOptions { name, caller_blocks: blocks, ..CallOptions::default() };
        let done = Box::new(move |result| sender.send((index, result)).unwrap());
        let tensors = if op.is_barrier() { Vec::new() } else { vec![vec![tensor(floats), tensor(integers)]] };
        // SAFETY: the lists stay borrowed until the calls have ended.
        unsafe { group.submit(op, tensors, options, done) };
    }
    let mut results: Vec<(usize, Result<()>)> = receiver.iter().take(count).collect();
    results.sort_by_key(|(index, _)| *index);
    results.into_iter().map(|(_, result)| result).collect()
}

fn join(group: &Group) -> Result<usize> {
    let join = group.start_join(NEVER)?;
    join.handle.wait(None, || {})?;
    Ok(join.last())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases(24)))]

    #[test]
    fn ranks_without_data_contribute_zeros(
        hosts in prop::sample::select(vec![vec![0], vec![0, 0], vec![0, 0, 0], vec![0, 1], vec![0, 0, 1], vec![0, 1, 2, 0]]),
        steps in prop::collection::vec(0usize..4, 4),
        len in prop::sample::select(vec![0usize, 1, 100, 60_000]),
        at_once in 1usize..4,
        (mean, late_rank) in (any::<bool>(), 0usize..4),
    ) {
        let size = hosts.len();
        let all = groups(&hosts, &[(0..size).collect()], SECONDS);
        let value = |rank: usize, step: usize, index: usize| ((rank + 1) * (step + 2) * (index + 1)) as f32;
        let op = if mean { Op::MEAN } else { Op::allreduce(ReduceOp::Sum) };
        let most = *steps[..size].iter().max().unwrap();
        // Of those with most steps, one that joins last in time.
        let late: Vec<usize> = (0..size).filter(|&rank| steps[rank] == most).collect();
        let last = late[late_rank % late.len()];
        thread::scope(|scope| {
            for (rank, groups) in all.iter().enumerate() {
                let (steps, group) = (&steps, groups[0].as_ref().unwrap());
                scope.spawn(move || {
                    for epoch in 0..2 {
                        for step in 0..steps[rank] {
                            let list = |index| (vec![value(rank, step, index); len], vec![(rank + index) as i64; len]);
                            let mut lists: Vec<_> = (0..at_once).map(list).collect();
                            for result in call(group, op, &mut lists, epoch == 1 && at_once == 1) {
                                result.unwrap();
                            }
                            let ranks = || (0..size).filter(|&other| steps[other] > step);
                            for (index, (floats, integers)) in lists.iter().enumerate() {
                                let mut sum: f32 = ranks().map(|other| value(other, step, index)).sum();
                                let mut whole: i64 = ranks().map(|other| (other + index) as i64).sum();
                                if mean {
                                    sum /= size as f32;
                                    whole /= size as i64;
                                }
                                assert!(floats.iter().all(|&float| (float - sum).abs() <= sum * 1e-6), "{floats:?} {sum}");
                                assert!(integers.iter().all(|&integer| integer == whole));
                            }
                        }
                        if rank == last {
                            thread::sleep(Duration::from_millis(100));
                        }
                        assert_eq!(join(group).unwrap(), last);
                    }
                });
            }
        });
    }
}

#[test]
fn a_barrier_takes_part_and_a_maximum_does_not() {
    let all = groups(&[0, 0, 1], &[vec![0, 1, 2]], SECONDS);
    thread::scope(|scope| {
        for (rank, groups) in all.iter().enumerate() {
            let group = groups[0].as_ref().unwrap();
            scope.spawn(move || {
                if rank > 0 {
                    call(group, Op::BARRIER, &mut [(Vec::new(), Vec::new())], true)[0].clone().unwrap();
                    let failed = call(group, Op::allreduce(ReduceOp::Max), &mut [(vec![1.0], vec![1])], true);
                    let Err(Error::Mismatch(text)) = &failed[0] else { panic!("{failed:?}") };
                    assert!(text.contains("has joined") && text.contains("'call 0'"), "{text}");
                    let mut lists = [(vec![2.0], vec![3])];
                    call(group, Op::allreduce(ReduceOp::Sum), &mut lists, true)[0].clone().unwrap();
                    assert_eq!(lists, [(vec![4.0], vec![6])]);
                }
                if rank == 1 {
                    thread::sleep(Duration::from_millis(20));
                }
                assert_eq!(join(group).unwrap(), 1, "no call ran since rank 2 joined");
            });
        }
    });
}

#[test]
fn a_rank_that_ends_without_joining_ends_the_wait() {
    let mut all = groups(&[0, 0], &[vec![0, 1]], SECONDS);
    let (one, other) = (all.remove(0).remove(0).unwrap(), all.remove(0).remove(0).unwrap());
    thread::scope(|scope| {
        scope.spawn(move || {
            thread::sleep(Duration::from_millis(100));
            drop(one);
        });
        let error = join(&other).unwrap_err();
        assert!(matches!(error, Error::Mismatch(_) | Error::PeerLost(_)), "{error:?}");
    });
}
