//! What goes wrong and how it is said, on ranks that are threads: misuse, mismatches, deadlines.
#![allow(missing_docs, clippy::unwrap_used)]

mod common;

use std::time::Duration;

use common::{World, tensor};
use dl_comm_core::collective::{AlgorithmSetting, Op};
use dl_comm_core::error::Error;

#[test]
fn bad_arguments_are_refused_and_the_team_goes_on() {
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
        assert!(
            matches!(error(rank.call(Op::Allreduce, uneven, "")), Error::Invalid(text) if text.contains("tower 1"))
        );
        rank.average(vec![tensor(&mut data)]).unwrap();
        assert_eq!(data, [0.5; 4]);
    });
}

/// Every way to differ is an error on all ranks that names both sides, moves nothing, and leaves the team usable.
#[test]
fn calls_that_differ_are_named_on_every_rank() {
    let shapes = [&[2][..], &[3], &[1, 1], &[2, 2], &[2, 1], &[1, 1, 1], &[1, 1, 1, 1], &[1, 1, 1, 1, 1]];
    let choices =
        ["auto", "doubling", "halving", "pairwise", "ring"].map(|name| AlgorithmSetting::parse(name).unwrap());
    for (hosts, algorithm) in shapes.into_iter().flat_map(|hosts| choices.map(|choice| (hosts, choice))) {
        World { threads: 2, algorithm, ..World::new(hosts) }.run(|rank| {
            let odd = rank.rank == rank.size - 1;
            for round in 0..3 {
                let mut data = vec![1f32 + rank.rank as f32; if odd { 70_001 } else { 70_000 }];
                let before = data.clone();
                let error = rank.average(vec![tensor(&mut [0f64; 2]), tensor(&mut data)]).unwrap_err();
                let Error::Mismatch(text) = &error else { panic!("{error}") };
                assert!(text.contains("float32[70000]") && text.contains("float32[70001]"), "round {round}: {text}");
                assert!(text.contains(&format!("rank {}: average", rank.size - 1)), "{text}");
                assert!(!text.contains("float64"), "{text}");
                assert_eq!(data, before);

                let op = if odd { Op::Barrier } else { Op::Broadcast { root: 0 } };
                let towers = if odd { Vec::new() } else { vec![vec![tensor(&mut data)]] };
                let text = rank.call(op, towers, "weights").unwrap_err().to_string();
                assert!(text.contains("barrier") && text.contains("broadcast 'weights' from rank 0"), "{text}");

                let name = if odd { "loss" } else { "accuracy" };
                let text = rank.call(Op::Allreduce, vec![vec![tensor(&mut [0f32])]], name).unwrap_err().to_string();
                assert!(text.contains("'loss'") && text.contains("'accuracy'"), "{text}");

                let mut value = [rank.rank as f64];
                rank.average(vec![tensor(&mut value)]).unwrap();
                assert_eq!(value, [(rank.size - 1) as f64 / 2.0]);
            }
        });
    }
}

/// Ranks that wait for each other in different teams learn of it, all of them, on one host and on several; both teams then
/// go on.
#[test]
fn ranks_that_wait_for_each_other_in_different_teams_are_a_mismatch() {
    for hosts in [&[2][..], &[3], &[5]] {
        World::new(hosts).run_teams(2, |teams| {
            let odd = teams[0].rank == teams[0].size - 1;
            for round in 1..4 {
                for team in teams {
                    team.average(vec![tensor(&mut [1f32; 40_000])]).unwrap();
                }
                let mut data = [teams[0].rank as f32; 3];
                let (team, name) = if odd { (&teams[1], "loss") } else { (&teams[0], "gradients") };
                let error = team.call(Op::Allreduce, vec![vec![tensor(&mut data)]], name).unwrap_err();
                let Error::Mismatch(text) = &error else { panic!("{error}") };
                let words = [
                    "average 'gradients' on team 0".to_owned(),
                    "average 'loss' on team 1".to_owned(),
                    format!("has made {round} call{} on team {}", if round == 1 { "" } else { "s" }, i32::from(odd)),
                ];
                assert!(words.iter().all(|words| text.contains(words)), "{text}");
                assert_eq!(data, [teams[0].rank as f32; 3]);
            }
        });
    }
}

/// A rank that computes for a while between its calls is no mismatch, whatever the others wait for.
#[test]
fn a_slow_rank_is_no_mismatch() {
    let world = World { match_within: Duration::from_millis(60), ..World::new(&[3]) };
    world.run_teams(2, |teams| {
        for _ in 0..3 {
            // Rank 0 waits in team 0 and rank 1 in team 1, for another thread of rank 0; rank 2 is late in both.
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
            // Rank 1 waits for rank 2 in team 1, and only then comes to team 0.
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

/// A call that nobody waits for, a rank that waits for another one in the next team, and that one, which comes late: when it
/// does, nothing is given up in the moment before the ranks meet.
#[test]
fn a_rank_that_comes_late_finds_what_has_waited_for_it() {
    let world = World { match_within: Duration::from_secs(6), ..World::new(&[2]) };
    world.run_teams(2, |teams| {
        for delay in (0..40).map(|step| 190 + 8 * step) {
            let mut data = [teams[0].rank as f32; 3];
            if teams[0].rank == 0 {
                let forgotten = teams[0].start(Op::Allreduce, vec![vec![tensor(&mut data)]], "forgotten");
                std::thread::sleep(Duration::from_millis(delay));
                teams[1].average(vec![tensor(&mut [1f32])]).unwrap();
                forgotten.recv().unwrap().unwrap();
            } else {
                teams[1].average(vec![tensor(&mut [1f32])]).unwrap();
                teams[0].call(Op::Allreduce, vec![vec![tensor(&mut data)]], "forgotten").unwrap();
            }
            assert_eq!(data, [0.5; 3]);
        }
    });
}

/// The same for calls of one chunk that are not short, of tensors that the ranks see in each other: nobody writes to them, so
/// nobody waits for that.
#[test]
fn calls_that_differ_are_named_where_tensors_are_shared() {
    let world = World { threads: 5, slot: 256 << 10, shares: true, ..World::new(&[5]) };
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
fn a_rank_that_does_not_come_is_named_at_the_deadline() {
    for hosts in [&[3][..], &[2, 1]] {
        let world = World { timeout: Duration::from_millis(300), ..World::new(hosts) };
        world.run(|rank| {
            let mut data = [1f32];
            if rank.rank < 2 {
                let error = rank.call(Op::Allreduce, vec![vec![tensor(&mut data)]], "late").unwrap_err();
                let text = error.to_string();
                assert!(matches!(error, Error::Timeout(_)), "{text}");
                assert!(text.contains("average 'late'") && text.contains("DL_COMM_TIMEOUT_S"), "{text}");
                assert!(text.contains("rank 2") || text.contains("host 1") || text.contains("rank 0"), "{text}");
                // The team is out of step now: it says so again at once.
                assert_eq!(rank.average(vec![tensor(&mut data)]).unwrap_err(), error);
            } else {
                std::thread::sleep(Duration::from_millis(600));
            }
        });
    }
}

#[test]
fn a_failed_team_ends_the_waits_of_the_others() {
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

/// A single tensor that differs, deep in a long list on many ranks with small slots, is found and named on every rank, with
/// the same words.
#[test]
fn the_one_tensor_that_differs_is_found() {
    for (hosts, odd) in [(&[2][..], 1), (&[4, 4], 7), (&[3, 1, 2], 3), (&[1, 1, 1, 1, 1], 2)] {
        let texts = World::new(hosts).run(|rank| {
            let mut list: Vec<Vec<f32>> = (0..1000).map(|i| vec![0.0; i % 5 + 1]).collect();
            if rank.rank == odd {
                list[777].push(0.0);
            }
            rank.average(list.iter_mut().map(|data| tensor(data)).collect()).unwrap_err().to_string()
        });
        assert!(texts.iter().all(|text| *text == texts[0]), "{texts:?}");
        let text = &texts[0];
        assert!(text.contains("tensor 777: float32[3]") && text.contains("tensor 777: float32[4]"), "{text}");
        assert!(text.contains(&format!("rank {odd}: ")) && !text.contains("tensor 776"), "{text}");
    }
}

#[test]
fn memory_that_is_passed_twice_is_refused() {
    World { threads: 3, ..World::new(&[2]) }.run(|rank| {
        let mut data = vec![rank.rank as f32; 100_000];
        let (twice, part) = (tensor(&mut data), tensor(&mut data[10..20]));
        let error = rank.average(vec![twice.clone(), twice.clone()]).unwrap_err();
        assert!(matches!(&error, Error::Invalid(text) if text.contains("0 and 1 share memory")), "{error}");
        assert!(matches!(rank.average(vec![twice.clone(), part]), Err(Error::Invalid(_))));
        assert!(matches!(
            rank.call(Op::Allreduce, vec![vec![twice.clone()], vec![twice.clone()]], ""),
            Err(Error::Invalid(_))
        ));
        // What a broadcast writes twice is the same.
        rank.broadcast(1, vec![twice.clone(), twice]).unwrap();
        assert!(data.iter().all(|&value| value == 1.0));
    });
}

#[test]
fn a_rank_that_has_left_is_named_at_once() {
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
