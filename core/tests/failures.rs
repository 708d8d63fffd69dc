//! Errors on ranks that are threads: misuse, mismatches, deadlines, lost ranks.
#![allow(missing_docs, clippy::unwrap_used)]

mod common;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use common::{World, tensor};
use dl_comm_core::collective::{AlgorithmSetting, Op};
use dl_comm_core::error::Error;
use dl_comm_core::transport::in_process::Access;

#[test]
fn invalid_arguments_are_refused_and_later_calls_work() {
    World::new(&[2]).run(|rank| {
        let mut data = vec![rank.rank as f32; 4];
        let mut flags = [true];
        let error = |result: Result<(), Error>| result.unwrap_err();
        assert!(matches!(error(rank.average(Vec::new())), Error::Invalid(text) if text.contains("empty")));
        assert!(matches!(error(rank.average(vec![tensor(&mut flags)])), Error::DType(text) if text.contains("bool")));
        assert!(
            matches!(error(rank.broadcast(2, vec![tensor(&mut data)])), Error::Invalid(text) if text.contains("root 2"))
        );
        let uneven = vec![vec![tensor(&mut data)], vec![tensor(&mut [0f32; 3])]];
        assert!(matches!(error(rank.call(Op::MEAN, uneven, "")), Error::Invalid(text) if text.contains("tower 1")));
        rank.average(vec![tensor(&mut data)]).unwrap();
        assert_eq!(data, [0.5; 4]);
    });
}

/// Any difference between calls is an error on all ranks. It names both calls, no data changes, and later calls work.
#[test]
fn mismatched_calls_are_named_on_every_rank() {
    let shapes = [&[2][..], &[3], &[1, 1], &[2, 2], &[2, 1], &[1, 1, 1], &[1, 1, 1, 1], &[1, 1, 1, 1, 1]];
    let choices =
        ["auto", "doubling", "halving", "pairwise", "ring"].map(|name| AlgorithmSetting::parse(name).unwrap());
    let flat = shapes.into_iter().flat_map(|hosts| choices.map(|choice| (hosts, choice, None)));
    let trees = [(&[3][..], 1), (&[5], 2), (&[3, 2], 2)].map(|(hosts, fan_out)| (hosts, choices[0], Some(fan_out)));
    for (hosts, algorithm, fan_out) in flat.chain(trees) {
        World { threads: 2, algorithm, fan_out, ..World::new(hosts) }.run(|rank| {
            let differs = rank.rank == rank.size - 1;
            for round in 0..3 {
                let mut data = vec![1f32 + rank.rank as f32; if differs { 70_001 } else { 70_000 }];
                let before = data.clone();
                let error = rank.average(vec![tensor(&mut [0f64; 2]), tensor(&mut data)]).unwrap_err();
                let Error::Mismatch(text) = &error else { panic!("{error}") };
                assert!(text.contains("float32[70000]") && text.contains("float32[70001]"), "round {round}: {text}");
                assert!(text.contains(&format!("rank {}: average", rank.size - 1)), "{text}");
                assert!(!text.contains("float64"), "{text}");
                assert_eq!(data, before);

                let op = if differs { Op::BARRIER } else { Op::broadcast(0) };
                let towers = if differs { Vec::new() } else { vec![vec![tensor(&mut data)]] };
                let text = rank.call(op, towers, "weights").unwrap_err().to_string();
                assert!(text.contains("barrier") && text.contains("broadcast 'weights' from rank 0"), "{text}");

                let name = if differs { "loss" } else { "accuracy" };
                let text = rank.call(Op::MEAN, vec![vec![tensor(&mut [0f32])]], name).unwrap_err().to_string();
                assert!(text.contains("'loss'") && text.contains("'accuracy'"), "{text}");

                let mut value = [rank.rank as f64];
                rank.average(vec![tensor(&mut value)]).unwrap();
                assert_eq!(value, [(rank.size - 1) as f64 / 2.0]);
            }
        });
    }
}

/// Ranks that wait for each other in different teams all get a mismatch, on one host and on several. Both teams work
/// afterwards.
#[test]
fn waits_for_each_other_in_different_teams_are_a_mismatch() {
    for (hosts, fan_out) in [(&[2][..], None), (&[3], None), (&[5], None), (&[5], Some(2))] {
        World { fan_out, ..World::new(hosts) }.run_teams(2, |teams| {
            let differs = teams[0].rank == teams[0].size - 1;
            for round in 1..4 {
                for team in teams {
                    team.average(vec![tensor(&mut [1f32; 40_000])]).unwrap();
                }
                let mut data = [teams[0].rank as f32; 3];
                let (team, name) = if differs { (&teams[1], "loss") } else { (&teams[0], "gradients") };
                let error = team.call(Op::MEAN, vec![vec![tensor(&mut data)]], name).unwrap_err();
                let Error::Mismatch(text) = &error else { panic!("{error}") };
                let expected = [
                    "average 'gradients' on team 0".to_owned(),
                    "average 'loss' on team 1".to_owned(),
                    format!(
                        "has made {round} call{} on team {}",
                        if round == 1 { "" } else { "s" },
                        i32::from(differs)
                    ),
                ];
                assert!(expected.iter().all(|expected| text.contains(expected)), "{text}");
                assert_eq!(data, [teams[0].rank as f32; 3]);
            }
        });
    }
}

/// A rank that computes between its calls is no mismatch, whatever the others wait for.
#[test]
fn a_slow_rank_is_not_a_mismatch() {
    let world = World { match_timeout: Duration::from_millis(60), ..World::new(&[3]) };
    world.run_teams(2, |teams| {
        for _ in 0..3 {
            // Rank 0 waits in team 0, and rank 1 in team 1 for another thread of rank 0; rank 2 is late in both.
            std::thread::scope(|scope| {
                let calls = teams.iter().map(|team| {
                    let late = if team.rank == 2 { 400 } else { 0 };
                    scope.spawn(move || {
                        std::thread::sleep(Duration::from_millis(late));
                        team.average(vec![tensor(&mut [1f32])]).unwrap();
                    })
                });
                calls.collect::<Vec<_>>().into_iter().for_each(|call| call.join().unwrap());
            });
            // Rank 1 waits for rank 2 in team 1 before it calls in team 0.
            let order = if teams[0].rank == 0 { [0] } else { [1] };
            let early = teams[0].rank == 0;
            if early {
                std::thread::scope(|scope| {
                    scope.spawn(|| teams[order[0]].average(vec![tensor(&mut [1f32])]).unwrap());
                    std::thread::sleep(Duration::from_millis(300));
                    teams[1].average(vec![tensor(&mut [1f32])]).unwrap();
                });
            } else {
                std::thread::sleep(Duration::from_millis(if teams[0].rank == 2 { 500 } else { 0 }));
                teams[1].average(vec![tensor(&mut [1f32])]).unwrap();
                std::thread::sleep(Duration::from_millis(200));
                teams[0].average(vec![tensor(&mut [1f32])]).unwrap();
            }
        }
    });
}

/// Rank 0 starts a call without waiting, then waits in the next team for rank 1, which is late. When rank 1 arrives
/// just in time, no call fails.
#[test]
fn calls_match_when_a_late_rank_arrives() {
    let world = World { match_timeout: Duration::from_secs(6), ..World::new(&[2]) };
    world.run_teams(2, |teams| {
        for delay in (0..40).map(|step| 190 + 8 * step) {
            let mut data = [teams[0].rank as f32; 3];
            if teams[0].rank == 0 {
                let pending = teams[0].start(Op::MEAN, vec![vec![tensor(&mut data)]], "forgotten");
                std::thread::sleep(Duration::from_millis(delay));
                teams[1].average(vec![tensor(&mut [1f32])]).unwrap();
                pending.recv().unwrap().unwrap();
            } else {
                teams[1].average(vec![tensor(&mut [1f32])]).unwrap();
                teams[0].call(Op::MEAN, vec![vec![tensor(&mut data)]], "forgotten").unwrap();
            }
            assert_eq!(data, [0.5; 3]);
        }
    });
}

/// Calls of one chunk above the small-message limit, on shared tensors: no rank writes to them, so no rank waits.
#[test]
fn mismatched_calls_on_shared_tensors_are_an_error() {
    let world = World { threads: 5, slot: 256 << 10, access: Access::Peer, ..World::new(&[5]) };
    world.run(|rank| {
        for _ in 0..2 {
            let mut data = vec![rank.rank as f32; if rank.rank == 4 { 15_001 } else { 15_000 }];
            let error = rank.average(vec![tensor(&mut data)]).unwrap_err();
            assert!(matches!(error, Error::Mismatch(_)), "{error}");
            assert!(data.iter().all(|&value| value == rank.rank as f32));
            data.resize(15_000, rank.rank as f32);
            rank.average(vec![tensor(&mut data)]).unwrap();
            assert!(data.iter().all(|&value| value == 2.0));
        }
    });
}

#[test]
fn a_missing_rank_is_named_at_the_deadline() {
    for hosts in [&[3][..], &[2, 1]] {
        let world = World { timeout: Duration::from_millis(300), ..World::new(hosts) };
        let (num_told, started) = (AtomicUsize::new(0), Instant::now());
        world.run(|rank| {
            let mut data = [1f32];
            if rank.rank < 2 {
                let error = rank.call(Op::MEAN, vec![vec![tensor(&mut data)]], "late").unwrap_err();
                let text = error.to_string();
                assert!(matches!(error, Error::Timeout(_)), "{text}");
                assert!(text.contains("average 'late'") && text.contains("DL_COMM_TIMEOUT_S"), "{text}");
                assert!(text.contains("rank 2") || text.contains("host 1") || text.contains("rank 0"), "{text}");
                // The team is out of sync now: later calls fail at once with the same error.
                assert_eq!(rank.average(vec![tensor(&mut data)]).unwrap_err(), error);
                num_told.fetch_add(1, Ordering::Relaxed);
            }
            // One that has ended is named as such.
            while num_told.load(Ordering::Relaxed) < 2 && started.elapsed() < Duration::from_secs(60) {
                std::thread::sleep(Duration::from_millis(10));
            }
        });
    }
}

#[test]
fn a_failed_group_aborts_the_waits_of_other_ranks() {
    World::new(&[3]).run(|rank| {
        if rank.rank == 0 {
            std::thread::sleep(Duration::from_millis(50));
            rank.team.group().fail(&Error::PeerLost("rank 0 gave up".into()));
        } else {
            let error = rank.average(vec![tensor(&mut [1f32])]).unwrap_err();
            assert_eq!(error, Error::PeerLost("rank 0 gave up".into()));
        }
    });
}

/// One different tensor in a long list, on many ranks with small slots, is named on every rank with the same message.
#[test]
fn a_single_different_tensor_is_named() {
    for (hosts, odd_rank) in [(&[2][..], 1), (&[4, 4], 7), (&[3, 1, 2], 3), (&[1, 1, 1, 1, 1], 2)] {
        let texts = World::new(hosts).run(|rank| {
            let mut list: Vec<Vec<f32>> = (0..1000).map(|i| vec![0.0; i % 5 + 1]).collect();
            if rank.rank == odd_rank {
                list[777].push(0.0);
            }
            rank.average(list.iter_mut().map(|data| tensor(data)).collect()).unwrap_err().to_string()
        });
        assert!(texts.iter().all(|text| *text == texts[0]), "{texts:?}");
        let text = &texts[0];
        assert!(text.contains("tensor 777: float32[3]") && text.contains("tensor 777: float32[4]"), "{text}");
        assert!(text.contains(&format!("rank {odd_rank}: ")) && !text.contains("tensor 776"), "{text}");
    }
}

#[test]
fn overlapping_memory_is_refused() {
    World { threads: 3, ..World::new(&[2]) }.run(|rank| {
        let mut data = vec![rank.rank as f32; 100_000];
        let (twice, part) = (tensor(&mut data), tensor(&mut data[10..20]));
        let error = rank.average(vec![twice.clone(), twice.clone()]).unwrap_err();
        assert!(matches!(&error, Error::Invalid(text) if text.contains("0 and 1 share memory")), "{error}");
        assert!(matches!(rank.average(vec![twice.clone(), part]), Err(Error::Invalid(_))));
        assert!(matches!(rank.call(Op::MEAN, vec![vec![twice.clone()], vec![twice]], ""), Err(Error::Invalid(_))));
    });
}

/// The bytes are equal. The thread sanitizer reports it nevertheless, so `tests/heavy.sh` skips this test.
#[test]
fn a_broadcast_may_write_the_same_memory_twice() {
    World { threads: 3, ..World::new(&[2]) }.run(|rank| {
        let mut data = vec![rank.rank as f32; 100_000];
        let twice = tensor(&mut data);
        rank.broadcast(1, vec![twice.clone(), twice]).unwrap();
        assert!(data.iter().all(|&value| value == 1.0));
    });
}

#[test]
fn a_departed_rank_is_named_at_once() {
    World::new(&[2]).run(|rank| {
        rank.average(vec![tensor(&mut [1f32])]).unwrap();
        if rank.rank == 0 {
            rank.team.group().stop();
        } else {
            let error = rank.average(vec![tensor(&mut [1f32])]).unwrap_err();
            assert_eq!(error, Error::PeerLost("rank 0 has called finalize".into()));
        }
    });
}
