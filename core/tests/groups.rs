//! Groups of some ranks: at work at once, in any order, with threads that come and go.
#![allow(clippy::unwrap_used)]

mod common;

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

use common::{IDLE, groups, tensor};
use dl_comm_core::cases::cases;
use dl_comm_core::collective::Op;
use dl_comm_core::error::{Error, Result};
use dl_comm_core::group::{CallOptions, Group};
use dl_comm_core::reduce::ReduceOp;
use proptest::prelude::*;

/// Sums `values` over the ranks of `group`.
fn sum(group: &Group, values: &mut [f32]) -> Result<()> {
    let (sender, receiver) = channel();
    let options = CallOptions { caller_blocks: true, ..CallOptions::default() };
    let done = Box::new(move |result| sender.send(result).unwrap());
    // SAFETY: the values stay borrowed until the call has ended.
    unsafe { group.submit(Op::allreduce(ReduceOp::Sum), vec![vec![tensor(values)]], options, done) };
    receiver.recv().unwrap()
}

/// Members of up to 5 groups of 7 ranks; group by group, whether a rank is a member.
fn member_lists() -> impl Strategy<Value = Vec<Vec<usize>>> {
    let list = (1u32..128, 0usize..7).prop_map(|(set, turn)| {
        let mut members: Vec<usize> = (0..7).filter(|rank| set >> rank & 1 == 1).collect();
        let turn = turn % members.len();
        members.rotate_left(turn);
        members
    });
    prop::collection::vec(list, 1..6)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases(12)))]

    /// Overlapping groups are called by different threads of a rank, in an order of their own on each rank.
    #[test]
    fn overlapping_groups_work_at_once(
        members in member_lists(), hosts in prop::sample::select(vec![[0; 7], [0, 0, 0, 0, 1, 1, 1], [2, 0, 1, 0, 1, 1, 2]]),
        len in prop::sample::select(vec![1usize, 100, 5000]),
    ) {
        let all = groups(&hosts, &members, Duration::from_secs(60));
        thread::scope(|scope| {
            for (rank, groups) in all.iter().enumerate() {
                for turn in 0..groups.len() {
                    let index = (turn + rank) % groups.len();
                    let Some(group) = &groups[index] else { continue };
                    let members = &members[index];
                    scope.spawn(move || {
                        for call in 0..4 {
                            if call == 2 {
                                thread::sleep(2 * IDLE); // the threads end meanwhile
                            }
                            let value = |rank: usize, at: usize| (rank * 7 + at % 100 + call) as f32;
                            let mut data: Vec<f32> = (0..len).map(|at| value(rank, at)).collect();
                            sum(group, &mut data).unwrap();
                            let expected = |at: usize| members.iter().map(|&member| value(member, at)).sum::<f32>();
                            assert!(data.iter().enumerate().all(|(at, &value)| value == expected(at)));
                        }
                    });
                }
            }
        });
    }
}

#[test]
fn a_failure_ends_one_group_only() {
    let all = groups(&[0, 0, 1], &[vec![0, 1, 2], vec![1, 0], vec![2, 1]], Duration::from_millis(500));
    thread::scope(|scope| {
        for groups in &all[..2] {
            let first = groups[0].as_ref().unwrap();
            // Rank 2 makes no such call.
            scope.spawn(move || {
                assert!(matches!(sum(first, &mut [1.0; 8]), Err(Error::Timeout(_) | Error::PeerLost(_))));
                assert!(sum(first, &mut [1.0; 8]).is_err());
            });
        }
    });
    thread::scope(|scope| {
        for (rank, index) in [(0, 1), (1, 1), (1, 2), (2, 2)] {
            let group = all[rank][index].as_ref().unwrap();
            scope.spawn(move || {
                let mut data = [1.0; 2000];
                sum(group, &mut data).unwrap();
                assert_eq!(data, [2.0; 2000]);
            });
        }
    });
}

/// Two ranks wait for each other in different groups, by the first calls of these groups.
#[test]
fn a_deadlock_across_groups_is_a_mismatch() {
    let all = groups(&[0, 0], &[vec![0, 1], vec![1, 0]], Duration::from_secs(60));
    thread::scope(|scope| {
        for (rank, groups) in all.iter().enumerate() {
            scope.spawn(move || {
                let result = sum(groups[rank].as_ref().unwrap(), &mut [1.0; 8]);
                assert!(matches!(&result, Err(Error::Mismatch(_))), "{result:?}");
                let mut data = [1.0; 8];
                sum(groups[0].as_ref().unwrap(), &mut data).unwrap();
                assert_eq!(data, [2.0; 8], "both groups go on");
            });
        }
    });
}

#[test]
fn a_member_that_has_freed_its_group_is_named() {
    for calls in 0..2 {
        let mut all = groups(&[0, 0], &[vec![0, 1]], Duration::from_secs(60));
        let (second, first) = (all.remove(1).remove(0).unwrap(), all.remove(0).remove(0).unwrap());
        for _ in 0..calls {
            thread::scope(|scope| {
                scope.spawn(|| sum(&first, &mut [1.0]).unwrap());
                sum(&second, &mut [1.0]).unwrap();
            });
        }
        drop(first);
        assert_eq!(sum(&second, &mut [1.0]), Err(Error::PeerLost("rank 0 has freed the group".into())));
    }
}

/// The number of threads of this process with the name of a group's thread.
fn group_threads() -> usize {
    let names = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    names
        .filter(|task| std::fs::read_to_string(task.path().join("comm")).is_ok_and(|name| name.starts_with("dlcomm-g")))
        .count()
}

#[test]
fn an_idle_group_has_no_threads() {
    // Other tests of this program have threads with such names: run in a process of its own.
    if std::env::var_os("DL_COMM_TEST_ALONE").is_none() {
        let this = std::env::current_exe().unwrap();
        let mut alone = std::process::Command::new(this);
        let status = alone.args(["--exact", "an_idle_group_has_no_threads"]).env("DL_COMM_TEST_ALONE", "1").status();
        assert!(status.unwrap().success());
        return;
    }
    let members: Vec<Vec<usize>> = (0..100).map(|_| vec![0, 1]).collect();
    let all = groups(&[0, 0], &members, Duration::from_secs(60));
    assert_eq!(group_threads(), 0, "a new group has none");
    thread::scope(|scope| {
        for groups in &all {
            scope.spawn(|| {
                let (sender, receiver) = channel();
                let mut data = vec![[1f32; 4]; groups.len()];
                for (group, data) in groups.iter().zip(&mut data) {
                    let sender = sender.clone();
                    let done = Box::new(move |result: Result<()>| sender.send(result).unwrap());
                    let tensors = vec![vec![tensor(data)]];
                    // SAFETY: the data lives until all calls have ended.
                    unsafe { group.as_ref().unwrap().submit(Op::MEAN, tensors, CallOptions::default(), done) };
                }
                drop(sender);
                assert!(receiver.iter().all(|result| result.is_ok()));
            });
        }
    });
    let until = Instant::now() + Duration::from_secs(20);
    while group_threads() > 0 {
        assert!(Instant::now() < until, "{} threads stay", group_threads());
        thread::sleep(IDLE);
    }
}

/// The last handle of a group is dropped on the group's own thread.
#[test]
fn a_callback_may_free_its_group() {
    let mut all = groups(&[0, 0], &[vec![0, 1]], Duration::from_secs(60));
    let (sender, receiver) = channel();
    let mut data = [[1f32; 4]; 2];
    for (groups, data) in all.iter_mut().zip(&mut data) {
        let group = Arc::new(groups[0].take().unwrap());
        let (held, sender) = (Arc::clone(&group), sender.clone());
        let done = Box::new(move |result: Result<()>| {
            thread::sleep(Duration::from_millis(5));
            drop(held);
            sender.send(result).unwrap();
        });
        // SAFETY: the data lives until both calls have ended.
        unsafe { group.submit(Op::MEAN, vec![vec![tensor(data)]], CallOptions::default(), done) };
    }
    drop(sender);
    assert_eq!(receiver.iter().collect::<Vec<_>>(), [Ok(()), Ok(())]);
}
