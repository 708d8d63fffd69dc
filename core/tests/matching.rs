//! Ranks that submit equal calls in any order, and ranks that submit different calls: correct bits or the correct
//! error, and no endless wait.
#![allow(missing_docs, clippy::unwrap_used)]

mod common;

use std::sync::mpsc::Receiver;
use std::time::Duration;

use common::{Rank, World, tensor};
use dl_comm_core::cases::cases;
use dl_comm_core::collective::Op;
use dl_comm_core::error::{Error, Result};
use proptest::prelude::*;

/// The parts of a call that its signature depends on.
#[derive(Debug, Clone, PartialEq)]
struct Call {
    name: String,
    length: usize,
    root: Option<usize>,
}

fn call(ranks: usize) -> impl Strategy<Value = Call> {
    let names = prop::sample::select(vec!["", "a", "b", "c", "d"]);
    let lengths = prop::sample::select(vec![1usize, 3, 700, 3000]);
    (names, lengths, prop::option::of(0..ranks)).prop_map(|(name, length, root)| {
        // One name always stands for the same tensors, as in a program.
        let name = if name.is_empty() { String::new() } else { format!("{name}{length}{root:?}") };
        Call { name, length, root }
    })
}

/// The input of `rank`: small integers, so that sums are exact in any order.
fn value(call: &Call, rank: usize, element: usize) -> f32 {
    ((call.length + rank * 7 + element) % 50) as f32
}

fn expected(call: &Call, ranks: usize, element: usize) -> f32 {
    match call.root {
        Some(root) => value(call, root, element),
        None => (0..ranks).map(|rank| value(call, rank, element)).sum::<f32>() / ranks as f32,
    }
}

/// Submits `calls` in order without waiting in between, checks the values, and returns the outcomes.
fn submit(rank: &Rank, calls: &[Call], pauses: &[u8]) -> Vec<Result<()>> {
    let mut data: Vec<Vec<f32>> =
        calls.iter().map(|call| (0..call.length).map(|element| value(call, rank.rank, element)).collect()).collect();
    let started: Vec<Receiver<Result<()>>> = calls
        .iter()
        .zip(&mut data)
        .enumerate()
        .map(|(index, (call, data))| {
            match pauses[(index + rank.rank) % pauses.len()] {
                0 => std::thread::yield_now(),
                1 => std::thread::sleep(Duration::from_micros(300)),
                _ => {}
            }
            let op = call.root.map_or(Op::MEAN, Op::broadcast);
            rank.start(op, vec![vec![tensor(data)]], &call.name)
        })
        .collect();
    let outcomes: Vec<Result<()>> = started.into_iter().map(|outcome| outcome.recv().unwrap()).collect();
    for ((call, data), outcome) in calls.iter().zip(&data).zip(&outcomes) {
        for (element, &found) in data.iter().enumerate() {
            let expected_value = match outcome {
                Ok(()) => expected(call, rank.size, element),
                // No data was written.
                Err(Error::Mismatch(_)) => value(call, rank.rank, element),
                Err(_) => found,
            };
            assert_eq!(found.to_bits(), expected_value.to_bits(), "{call:?} {outcome:?} element {element}");
        }
    }
    outcomes
}

fn shapes() -> impl Strategy<Value = Vec<usize>> {
    prop::sample::select(vec![
        vec![2],
        vec![3],
        vec![4],
        vec![5],
        vec![1, 1],
        vec![2, 1],
        vec![2, 2],
        vec![1, 1, 1],
        vec![1, 1, 1, 1, 1],
    ])
}

/// Whether notices take a tree.
fn fan_outs() -> impl Strategy<Value = Option<usize>> {
    prop::sample::select(vec![None, Some(1), Some(2)])
}

/// A world, its calls, and each rank's order of the calls.
fn same_calls() -> impl Strategy<Value = (Vec<usize>, Vec<Vec<Call>>, Vec<u8>)> {
    let orders = |(hosts, calls): (Vec<usize>, Vec<Call>)| {
        let ranks = hosts.iter().sum::<usize>();
        let orders: Vec<_> = (0..ranks).map(|_| Just(calls.clone()).prop_shuffle()).collect();
        (Just(hosts), orders, prop::collection::vec(0u8..8, 8))
    };
    let calls = |hosts: Vec<usize>| {
        let ranks = hosts.iter().sum();
        (Just(hosts), prop::collection::vec(call(ranks), 1..8))
    };
    shapes().prop_flat_map(calls).prop_flat_map(orders)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases(1500)))]

    #[test]
    fn any_order_gives_the_same_bits((hosts, orders, pauses) in same_calls(), fan_out in fan_outs()) {
        // Long enough that no call expires on a slow machine.
        let world = World { match_timeout: Duration::from_secs(60), threads: 2, fan_out, ..World::new(&hosts) };
        world.run(|rank| {
            let outcomes = submit(rank, &orders[rank.rank], &pauses);
            assert!(outcomes.iter().all(Result::is_ok), "{outcomes:?}");
        });
    }
}

/// More pending calls than fit in a slot, or in a message between hosts with many ranks.
#[test]
fn many_calls_in_opposite_order() {
    for (hosts, count, fan_out) in
        [(&[3][..], 200, None), (&[2, 1], 200, None), (&[8, 8, 8], 30, Some(3)), (&[12], 30, Some(8))]
    {
        let world = World { match_timeout: Duration::from_secs(60), fan_out, ..World::new(hosts) };
        let calls: Vec<Call> =
            (0..count).map(|number| Call { name: number.to_string(), length: 3, root: None }).collect();
        world.run(|rank| {
            let mut calls = calls.clone();
            if rank.rank % 2 == 1 {
                calls.reverse();
            }
            let outcomes = submit(rank, &calls, &[9]);
            assert!(outcomes.iter().all(Result::is_ok), "{hosts:?}: {outcomes:?}");
        });
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases(500)))]

    /// One rank lacks a call, has an additional one, or a different one. Matched calls have correct results, failed
    /// calls have the correct error, and calls that the other ranks do not match fail too.
    #[test]
    fn different_calls_give_correct_bits_or_errors(
        (hosts, mut orders, pauses) in same_calls(),
        (odd_rank, position, change) in (0usize..5, 0usize..8, 0u8..3),
        fan_out in fan_outs(),
    ) {
        let odd_rank = odd_rank % orders.len();
        let position = position % orders[odd_rank].len();
        let extra = Call { name: "extra".into(), length: 5, root: None };
        match change {
            0 => drop(orders[odd_rank].remove(position)),
            1 => orders[odd_rank].insert(position, extra),
            _ => orders[odd_rank][position] = Call { length: 7, ..orders[odd_rank][position].clone() },
        }
        let world = World {
            match_timeout: Duration::from_millis(30), timeout: Duration::from_secs(20), fan_out, ..World::new(&hosts)
        };
        let outcomes = world.run(|rank| submit(rank, &orders[rank.rank], &pauses));
        for (rank, outcomes) in outcomes.iter().enumerate() {
            for (call, outcome) in orders[rank].iter().zip(outcomes) {
                match outcome {
                    Ok(()) => {}
                    Err(Error::Mismatch(text)) => {
                        // Both sides are in the message, including this rank's call.
                        assert!(text.lines().filter(|line| line.contains("rank")).count() >= 2, "{text}");
                        assert!(text.contains(&call.name), "{call:?}: {text}");
                    }
                    // The other ranks have departed, so the call cannot match any more.
                    Err(Error::PeerLost(text)) => assert!(text.contains("finalize") || text.contains("ended"), "{text}"),
                    Err(error) => panic!("{call:?}: {error}"),
                }
            }
        }
        let failed = outcomes.iter().flatten().filter(|outcome| outcome.is_err()).count();
        prop_assert!(failed > 0 || (change == 0 && orders[odd_rank].is_empty()), "nobody was told");
    }
}

/// Two threads per rank block on their calls, in opposite order on the ranks.
#[test]
fn threads_that_block_in_opposite_order_are_matched() {
    for hosts in [&[2][..], &[3], &[1, 1]] {
        World { match_timeout: Duration::from_secs(30), ..World::new(hosts) }.run(|rank| {
            let run = |name: &'static str, length: usize, rounds: usize| {
                for round in 0..rounds {
                    let mut data = vec![(rank.rank + round) as f32; length];
                    rank.call(Op::MEAN, vec![vec![tensor(&mut data)]], name).unwrap();
                    let mean = (rank.size - 1) as f32 / 2.0 + round as f32;
                    assert!(data.iter().all(|&value| value == mean), "{name} {round}");
                }
            };
            std::thread::scope(|scope| {
                let first = if rank.rank == 0 { "generator" } else { "critic" };
                let other = if rank.rank == 0 { "critic" } else { "generator" };
                for name in [first, other] {
                    let run = &run;
                    scope.spawn(move || run(name, if name == "critic" { 3 } else { 4000 }, 200));
                }
            });
        });
    }
}

/// A rank that skips a call gets the mismatch, and later calls work.
#[test]
fn a_missing_call_is_reported_and_later_calls_work() {
    World::new(&[3]).run(|rank| {
        if rank.rank != 1 {
            let error = rank.call(Op::MEAN, vec![vec![tensor(&mut [1f32])]], "skipped").unwrap_err().to_string();
            assert!(error.contains("'skipped'") && error.contains("ranks 0, 2") && error.contains("'next'"), "{error}");
        }
        let mut data = [rank.rank as f32];
        let result = rank.call(Op::MEAN, vec![vec![tensor(&mut data)]], "next");
        if rank.rank == 1 {
            assert!(matches!(result, Err(Error::Mismatch(_))), "{result:?}");
            rank.call(Op::MEAN, vec![vec![tensor(&mut data)]], "next").unwrap();
        } else {
            result.unwrap();
        }
        assert_eq!(data, [1.0]);
    });
}

/// The timeout of a call holds even while it is queued behind another call.
#[test]
fn a_call_timeout_holds_behind_another_call() {
    World { timeout: Duration::from_secs(60), ..World::new(&[2]) }.run(|rank| {
        if rank.rank == 0 {
            let (mut first, mut second) = ([1f32], [1f32]);
            let first = rank.start(Op::MEAN, vec![vec![tensor(&mut first)]], "patient");
            let second = rank.start_within(0.3, vec![vec![tensor(&mut second)]], "hurried");
            let error = second.recv().unwrap().unwrap_err().to_string();
            assert!(error.contains("'hurried'") && error.contains("behind average 'patient'"), "{error}");
            assert!(matches!(first.recv().unwrap(), Err(Error::Timeout(_))));
        } else {
            std::thread::sleep(Duration::from_millis(800));
        }
    });
}

/// What a rank does after it has refused a call.
#[derive(Debug, Clone, Copy, PartialEq)]
enum After {
    /// It makes the call, properly.
    Again,
    /// It makes the next call.
    Next,
    /// As `Next`, while a call is in flight that it has started before.
    NextInFlight,
}

/// The calls of the others in the place of a refused one fail with its error, and the next ones match; or nothing fails, if
/// the rank makes the call again.
#[test]
fn a_refused_call_shifts_no_later_call() {
    for hosts in [&[2][..], &[3], &[1, 1], &[2, 1]] {
        for after in [After::Again, After::Next, After::NextInFlight] {
            let world = World::new(hosts);
            let (timeout, match_timeout) = (Duration::from_secs(60), Duration::from_secs(6));
            World { timeout, match_timeout, ..world }.run(|rank| {
                for round in 0..3 {
                    let mut before = [rank.rank as f32; 7];
                    let in_flight = (after == After::NextInFlight)
                        .then(|| rank.start(Op::MEAN, vec![vec![tensor(&mut before)]], ""));
                    let mut data = [rank.rank as f32; 5];
                    let has_refused = rank.rank == (round + 1) % rank.size;
                    if has_refused {
                        let refused = rank.call(Op::MEAN, vec![vec![tensor(&mut [true; 5])]], "");
                        assert!(matches!(refused, Err(Error::DType(_))), "{refused:?}");
                    }
                    let outcome = match has_refused && after != After::Again {
                        true => None,
                        false => Some(rank.call(Op::MEAN, vec![vec![tensor(&mut data)]], "")),
                    };
                    match outcome {
                        None => {}
                        Some(Ok(())) => assert_eq!(after, After::Again),
                        Some(Err(Error::Mismatch(text))) => {
                            assert!(after != After::Again && text.contains("has refused its call: "), "{text}");
                            assert!(text.contains("bool"), "{text}");
                        }
                        Some(Err(error)) => panic!("{error}"),
                    }
                    let mut next = [rank.rank as f32; 3];
                    rank.call(Op::MEAN, vec![vec![tensor(&mut next)]], "").unwrap();
                    assert_eq!(next, [(rank.size - 1) as f32 / 2.0; 3]);
                    in_flight.into_iter().for_each(|call| call.recv().unwrap().unwrap());
                }
            });
        }
    }
}

/// Nothing is left of a refused call once later ones have matched: a rank may be the only one to try it.
#[test]
fn a_call_that_only_one_rank_has_tried_is_forgotten() {
    World { timeout: Duration::from_secs(60), ..World::new(&[2]) }.run(|rank| {
        if rank.rank == 1 {
            rank.call(Op::MEAN, vec![vec![tensor(&mut [true; 5])]], "").unwrap_err();
        }
        rank.call(Op::MEAN, vec![vec![tensor(&mut [1f32; 5])]], "").unwrap();
        let different = rank.call(Op::MEAN, vec![vec![tensor(&mut vec![1f32; 5 + rank.rank])]], "");
        assert!(matches!(&different, Err(Error::Mismatch(text)) if !text.contains("refused")), "{different:?}");
    });
}
