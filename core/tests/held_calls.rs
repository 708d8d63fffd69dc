//! Small calls that are started, on ranks that are threads: whoever waits completes them, else the group's thread.
#![allow(missing_docs, clippy::unwrap_used)]

mod common;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::thread::sleep;
use std::time::{Duration, Instant};

use common::{Rank, World, groups, tensor};
use dl_comm_core::buffer::{Buffer, View};
use dl_comm_core::cases::cases;
use dl_comm_core::collective::Op;
use dl_comm_core::dtype::DType;
use dl_comm_core::error::{Error, Result};
use dl_comm_core::group::{CallHandle, CallOptions, Group, SmallCallInput, Timeout, wait_for_result};
use proptest::prelude::*;
use serde_json::Value;

/// Starts an allreduce in place, by the fast path if there is a call like it.
fn start(group: &Group, data: &mut [f32]) -> CallHandle {
    let view = View { buffer: Buffer::in_place(data.as_mut_ptr().cast(), data.len(), DType::F32), shape: &[] };
    let views = [view];
    let input = || Some(SmallCallInput { op: Op::MEAN, name: "", by_name: false, views: &views });
    // SAFETY: the caller keeps the data until it has waited.
    let held = unsafe { group.try_start_small(None, input, Timeout::GroupDefault, &mut None) };
    held.unwrap_or_else(|| {
        let (handle, done) = CallHandle::new(None);
        // SAFETY: as above.
        unsafe { group.submit(Op::MEAN, vec![vec![tensor(data)]], CallOptions::default(), done) };
        group.led(handle)
    })
}

fn run(group: &Group, data: &mut [f32]) -> Result<()> {
    let options = CallOptions { caller_blocks: true, ..CallOptions::default() };
    // SAFETY: it waits.
    wait_for_result(|| {}, |done| unsafe { group.submit(Op::MEAN, vec![vec![tensor(data)]], options, done) })
}

/// Has the calls of `len` elements and one element more cached.
fn warm_up(rank: &Rank, len: usize) -> &Group {
    let group = rank.team.group();
    for len in [len, len + 1] {
        run(group, &mut vec![0.0; len]).unwrap();
    }
    group
}

/// What a rank does with a call.
#[derive(Debug, Clone, Copy)]
enum Use {
    Run,
    Wait,
    Test,
    WaitWithLimit,
    Drop,
    /// Waits for it after the next call.
    Later,
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases(48)))]
    /// Every mixture of uses on the ranks gives the means, in the order of the calls.
    #[test]
    fn every_mixture_of_uses_gives_the_means(
        uses in prop::collection::vec(prop::collection::vec(prop::sample::select(vec![
            Use::Run, Use::Wait, Use::Test, Use::WaitWithLimit, Use::Drop, Use::Later,
        ]), 12), 3),
        ranks in 1..=3usize,
    ) {
        World::new(&[ranks]).run(|rank| {
            let group = warm_up(rank, 5);
            let mut data: Vec<Vec<f32>> = (0..12).map(|call| vec![(rank.rank * 12 + call) as f32; 5 + call % 2]).collect();
            let mut later = Vec::new();
            for (data, &how) in data.iter_mut().zip(&uses[rank.rank]) {
                if let Use::Run = how {
                    run(group, data).unwrap();
                    continue;
                }
                let handle = start(group, data);
                match how {
                    Use::Run => {}
                    Use::Wait => handle.complete().unwrap_or_else(|| handle.wait(None, || {})).unwrap(),
                    Use::Test => while handle.test().is_none() { sleep(Duration::from_micros(50)) },
                    Use::WaitWithLimit => handle.wait(Some(Duration::from_secs(50)), || {}).unwrap(),
                    Use::Drop => drop(handle),
                    Use::Later => later.push(handle),
                }
            }
            later.into_iter().rev().for_each(|handle| handle.wait(None, || {}).unwrap());
            // The dropped ones have ended before this.
            run(group, &mut [0.0]).unwrap();
            for (call, data) in data.iter().enumerate() {
                let mean = (0..ranks).map(|rank| (rank * 12 + call) as f32).sum::<f32>() / ranks as f32;
                assert!(data.iter().all(|&value| value == mean), "call {call}: {data:?}, not {mean}");
            }
        });
    }
}

#[test]
fn a_rank_that_never_waits_holds_up_nobody() {
    World::new(&[2]).run(|rank| {
        let group = warm_up(rank, 4);
        let mut data = [rank.rank as f32; 4];
        let handle = start(group, &mut data);
        if rank.rank == 1 {
            handle.wait(None, || {}).unwrap();
            assert_eq!(data, [0.5; 4]);
            return;
        }
        // Longer than the other rank would wait.
        sleep(Duration::from_millis(300));
        handle.wait(None, || {}).unwrap();
        assert_eq!(data, [0.5; 4]);
    });
}

#[test]
fn what_nobody_waits_for_is_completed_when_the_group_stops() {
    let mut data = vec![[0f32, 0.0], [1.0, 1.0]];
    let places: Vec<usize> = data.iter_mut().map(|data| data.as_mut_ptr().addr()).collect();
    World::new(&[2]).run(|rank| {
        let group = warm_up(rank, 2);
        let pointer = std::ptr::with_exposed_provenance_mut::<f32>(places[rank.rank]);
        // SAFETY: each rank has its own, and the group stops before they go.
        let handle = start(group, unsafe { std::slice::from_raw_parts_mut(pointer, 2) });
        group.stop();
        assert_eq!(handle.test(), Some(Ok(())));
    });
    assert_eq!(data, [[0.5; 2]; 2]);
}

#[test]
fn calls_that_differ_are_named_and_later_calls_work() {
    for waits in [true, false] {
        World::new(&[3]).run(|rank| {
            let group = warm_up(rank, 4);
            let mut data = vec![rank.rank as f32; if rank.rank == 2 { 5 } else { 4 }];
            let handle = start(group, &mut data);
            let limit = (!waits).then_some(Duration::from_secs(30));
            let Err(Error::Mismatch(text)) = handle.wait(limit, || {}) else { panic!("no mismatch") };
            assert!(text.contains("float32[4]") && text.contains("float32[5]"), "{text}");
            assert!(data.iter().all(|&value| value == rank.rank as f32));
            let mut next = [rank.rank as f32; 4];
            start(group, &mut next).wait(None, || {}).unwrap();
            assert_eq!(next, [1.0; 4]);
        });
    }
}

/// Rank 0 is in a call of another group, which rank 1 makes only after the one that matches none has ended. Only that one
/// fails.
#[test]
fn a_rank_in_another_group_takes_part_in_the_decision() {
    let groups = groups(&[0, 0], &[vec![0, 1], vec![0, 1]], Duration::from_secs(30));
    std::thread::scope(|scope| {
        for (rank, groups) in groups.iter().enumerate() {
            scope.spawn(move || {
                let [first, second] = [0, 1].map(|index| groups[index].as_ref().unwrap());
                for group in [first, second] {
                    run(group, &mut [0.0; 4]).unwrap();
                    run(group, &mut [0.0; 5]).unwrap();
                }
                let mut data = vec![1.0; 4 + rank];
                let since = Instant::now();
                let failed = if rank == 0 {
                    let handle = start(first, &mut data);
                    run(second, &mut [0.0; 4]).unwrap();
                    handle.wait(None, || {})
                } else {
                    let failed = run(first, &mut data);
                    run(second, &mut [0.0; 4]).unwrap();
                    failed
                };
                assert!(matches!(failed, Err(Error::Mismatch(_))), "{failed:?}");
                assert!(since.elapsed() < Duration::from_secs(20), "the deadline ended it");
            });
        }
    });
}

#[test]
fn hundreds_of_kinds_are_cached_and_replaced() {
    World::new(&[2]).run(|rank| {
        let group = rank.team.group();
        for round in 0..3 {
            for len in (1..=300).chain((1..=40).rev()) {
                let mut data = vec![(rank.rank + round) as f32; len];
                if (len + round) % 2 == 0 {
                    start(group, &mut data).wait(None, || {}).unwrap();
                } else {
                    run(group, &mut data).unwrap();
                }
                assert!(data.iter().all(|&value| value == 0.5 + round as f32), "{len}: {data:?}");
            }
        }
    });
}

/// Two threads of each rank start and run calls of the same group: neither runs one before a held one is completed.
#[test]
fn threads_of_a_rank_do_not_overtake_a_held_call() {
    World::new(&[2]).run(|rank| {
        let group = warm_up(rank, 4);
        std::thread::scope(|scope| {
            for thread in 0..2 {
                scope.spawn(move || {
                    for round in 0..3000 {
                        let mut data = vec![(rank.rank * 2 + round) as f32; 4 + thread];
                        if (round + thread) % 3 == 0 {
                            run(group, &mut data).unwrap();
                        } else {
                            start(group, &mut data).wait(None, || {}).unwrap();
                        }
                        assert!(data.iter().all(|&value| value == (round + 1) as f32), "{round}: {data:?}");
                    }
                });
            }
        });
    });
}

/// The group's thread is in the callback of a call, which ends once this test has waited for later calls.
#[test]
fn who_waits_runs_the_calls_up_to_its_own() {
    for blocks in [true, false] {
        World::new(&[2]).run(|rank| {
            let group = rank.team.group();
            let (entered, has_entered) = channel();
            let (ends, end) = channel::<()>();
            let then = move |_: Result<()>| {
                entered.send(()).unwrap();
                end.recv_timeout(Duration::from_secs(20)).unwrap();
            };
            let (first, done) = CallHandle::new(Some(Box::new(then)));
            let mut data = vec![vec![rank.rank as f32; 100_000]; 3];
            // SAFETY: the data outlives the waits below.
            unsafe { group.submit(Op::MEAN, vec![vec![tensor(&mut data[0])]], CallOptions::default(), done) };
            has_entered.recv().unwrap();
            let second = start(group, &mut data[1]);
            if blocks {
                run(group, &mut data[2]).unwrap();
            } else {
                start(group, &mut data[2]).wait(None, || {}).unwrap();
            }
            assert_eq!(second.test(), Some(Ok(())), "it is before the third");
            assert_eq!(first.test(), None);
            ends.send(()).unwrap();
            first.wait(None, || {}).unwrap();
            assert!(data.iter().flatten().all(|&value| value == 0.5));
        });
    }
}

/// A call that nobody waits for is in the dump.
#[test]
fn a_held_call_is_in_the_dump() {
    World::new(&[2]).run(|rank| {
        let group = warm_up(rank, 4);
        let mut data = [rank.rank as f32; 4];
        if rank.rank == 0 {
            let handle = start(group, &mut data);
            let dump = group.dump();
            let last = dump["calls"].as_array().unwrap().last().unwrap();
            assert_eq!((&last["ended_s"], last["tensors"][0].as_str()), (&Value::Null, Some("tensor 0: float32[4]")));
            run(group, &mut [0.0; 5]).unwrap();
            assert_eq!(handle.test(), Some(Ok(())), "{last}");
        } else {
            // So that rank 0 holds its call.
            sleep(Duration::from_millis(100));
            start(group, &mut data).wait(None, || {}).unwrap();
            run(group, &mut [0.0; 5]).unwrap();
        }
        assert_eq!(data, [0.5; 4]);
    });
}

/// A thread of rank 0 is in a call that rank 1 makes only after rank 0's other thread has tested a handle.
#[test]
fn a_test_does_not_wait_for_a_call_of_another_thread() {
    let tested = AtomicBool::new(false);
    World::new(&[2]).run(|rank| {
        let group = warm_up(rank, 4);
        let mut data = [rank.rank as f32; 4];
        if rank.rank == 1 {
            // So that rank 0 holds its call.
            sleep(Duration::from_millis(50));
        }
        let handle = start(group, &mut data);
        std::thread::scope(|scope| {
            let other = scope.spawn(|| {
                let since = Instant::now();
                while rank.rank == 1 && !tested.load(Ordering::Acquire) {
                    assert!(since.elapsed() < Duration::from_secs(20), "the test waits for this call");
                    sleep(Duration::from_millis(1));
                }
                run(group, &mut [0.0; 5]).unwrap();
            });
            if rank.rank == 0 {
                sleep(Duration::from_millis(100));
                handle.test();
                tested.store(true, Ordering::Release);
            }
            handle.wait(None, || {}).unwrap();
            other.join().unwrap();
        });
        assert_eq!(data, [0.5; 4]);
    });
}

/// Rank 0 starts `x` by its name and does something that depends on rank 1, which starts `y` before `x` and waits for `x`.
/// For that both ranks must decide that `x` comes first.
#[test]
fn a_call_by_name_is_not_held() {
    let has_x = AtomicBool::new(false);
    World::new(&[2]).run(|rank| {
        let group = warm_up(rank, 4);
        let start = |data: &mut [f32], name: &str| {
            let views =
                [View { buffer: Buffer::in_place(data.as_mut_ptr().cast(), data.len(), DType::F32), shape: &[] }];
            let input = || Some(SmallCallInput { op: Op::MEAN, name, by_name: true, views: &views });
            // SAFETY: the data outlives the waits below.
            let held = unsafe { group.try_start_small(None, input, Timeout::GroupDefault, &mut None) };
            held.unwrap_or_else(|| {
                let (handle, done) = CallHandle::new(None);
                let options = CallOptions { name: name.into(), by_name: true, ..CallOptions::default() };
                // SAFETY: as above.
                unsafe { group.submit(Op::MEAN, vec![vec![tensor(data)]], options, done) };
                handle
            })
        };
        for round in 0..4 {
            let (mut x, mut y) = ([rank.rank as f32; 4], [rank.rank as f32; 5]);
            if rank.rank == 0 {
                let of_x = start(&mut x, "x");
                let since = Instant::now();
                while round == 3 && !has_x.load(Ordering::Acquire) {
                    assert!(since.elapsed() < Duration::from_secs(20), "rank 1 waits for this rank");
                    sleep(Duration::from_millis(1));
                }
                start(&mut y, "y").wait(None, || {}).unwrap();
                of_x.wait(None, || {}).unwrap();
            } else {
                // So that rank 0 would hold its call.
                sleep(Duration::from_millis(30));
                let of_y = start(&mut y, "y");
                start(&mut x, "x").wait(None, || {}).unwrap();
                has_x.store(round == 3, Ordering::Release);
                of_y.wait(None, || {}).unwrap();
            }
            assert_eq!((x, y), ([0.5; 4], [0.5; 5]));
        }
    });
}
