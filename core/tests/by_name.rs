//! Calls that match by their names, wherever the ranks make them.
#![allow(missing_docs, clippy::unwrap_used)]

mod common;

use std::collections::VecDeque;
use std::sync::mpsc::Receiver;
use std::thread;
use std::time::{Duration, Instant};

use common::{Rank, World, tensor};
use dl_comm_core::buffer::{Buffer, Tensor};
use dl_comm_core::cases::cases;
use dl_comm_core::collective::{Bounds, Counts, Op};
use dl_comm_core::dtype::DType;
use dl_comm_core::error::{Error, Result};
use dl_comm_core::group::{CallOptions, Timeout};
use dl_comm_core::reduce::ReduceOp;
use dl_comm_core::transport::in_process::Access;
use proptest::prelude::*;

const SUM: Op = Op::allreduce(ReduceOp::Sum);
const WORLDS: [&[usize]; 6] = [&[1], &[2], &[3], &[1, 1], &[2, 1], &[1, 1, 1]];

fn in_place(x: &mut [f32]) -> Vec<Vec<Tensor>> {
    vec![vec![tensor(x)]]
}

/// A world whose calls do not expire, unless a rank says so.
fn patient(hosts: &[usize]) -> World {
    let (match_timeout, timeout) = (Duration::from_secs(60), Duration::from_secs(30));
    World { match_timeout, timeout, threads: 2, ..World::new(hosts) }
}

/// The sum over the ranks of `rank + number`.
fn sum_of(rank: &Rank, number: usize) -> f32 {
    (0..rank.size).map(|other| (other + number) as f32).sum()
}

/// Starts the sums numbered `order`, at most `window` at once, and checks the results.
fn run_window(rank: &Rank, order: impl Iterator<Item = usize>, len: usize, window: usize) {
    let mut in_flight: VecDeque<(usize, Vec<f32>, Receiver<Result<()>>)> = VecDeque::new();
    let end = |call: Option<(usize, Vec<f32>, Receiver<Result<()>>)>| {
        let Some((number, data, ended)) = call else { return };
        ended.recv().unwrap().unwrap();
        assert!(data.iter().all(|&value| value == sum_of(rank, number)), "{number}: {:?}", &data[..1]);
    };
    for number in order {
        if in_flight.len() == window {
            end(in_flight.pop_front());
        }
        let mut data = vec![(rank.rank + number) as f32; len];
        let ended = rank.start_by_name(SUM, in_place(&mut data), &format!("call {number}"));
        in_flight.push_back((number, data, ended));
    }
    while !in_flight.is_empty() {
        end(in_flight.pop_front());
    }
}

/// One rank waits for its second call first, the other has that one first.
#[test]
fn a_rank_may_wait_for_any_of_its_calls() {
    for hosts in WORLDS {
        for len in [1, 3000] {
            patient(hosts).run(|rank| {
                for _ in 0..10 {
                    let (mut a, mut b) = (vec![1f32; len], vec![2f32; len]);
                    if rank.rank == 0 {
                        let first = rank.start_by_name(SUM, in_place(&mut a), "a");
                        rank.call_by_name(SUM, in_place(&mut b), "b").unwrap();
                        first.recv().unwrap().unwrap();
                    } else {
                        rank.call_by_name(SUM, in_place(&mut b), "b").unwrap();
                        rank.call_by_name(SUM, in_place(&mut a), "a").unwrap();
                    }
                    assert!(a.iter().all(|&value| value == rank.size as f32));
                    assert!(b.iter().all(|&value| value == 2.0 * rank.size as f32));
                }
            });
        }
    }
}

#[test]
fn many_calls_in_flight_meet_few() {
    for (hosts, number) in [(&[2][..], 2000), (&[3], 500), (&[1, 1], 500), (&[2, 1], 500)] {
        // In some worlds, more pending calls than a message has room for.
        let world = World { slot: if number == 2000 { 1 << 16 } else { 4096 }, ..patient(hosts) };
        world.run(|rank| match rank.rank {
            0 => run_window(rank, 0..number, 8, number),
            _ => run_window(rank, (0..number).rev(), 8, 50),
        });
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases(200)))]

    /// Calls by name and calls in order, of which some share memory with the one before it, short and long.
    #[test]
    fn any_order_gives_the_same_results(
        hosts in prop::sample::select(WORLDS.to_vec()),
        orders in prop::collection::vec(Just((0usize..24).collect::<Vec<_>>()).prop_shuffle(), 3),
        (in_order, shared) in (prop::collection::vec(any::<bool>(), 24), 0usize..3),
        window in 1usize..30,
        peer in any::<bool>(),
    ) {
        let access = if peer { Access::Peer } else { Access::Slots };
        World { access, ..patient(hosts) }.run(|rank| {
            // Calls in order are made by all ranks in one order, and all other calls before or after one of them.
            let mut order = orders[rank.rank].clone();
            let mut places: Vec<usize> = (0..24).filter(|&place| in_order[order[place]]).collect();
            let mut fixed: Vec<usize> = (0..24).filter(|&call| in_order[call]).collect();
            fixed.truncate(places.len());
            places.iter_mut().zip(fixed).for_each(|(place, call)| order[*place] = call);
            // The others have all calls in flight, so that it finds its own.
            let is_narrow = rank.rank == 1 && !in_order.contains(&true);
            let window = if is_narrow { window } else { usize::MAX };
            let mut data: Vec<Vec<f32>> =
                (0..24).map(|call| vec![(rank.rank + call) as f32; [1, 100, 5000][call % 3]]).collect();
            let mut in_flight: VecDeque<Receiver<Result<()>>> = VecDeque::new();
            for (place, &call) in order.iter().enumerate() {
                if in_flight.len() >= window {
                    in_flight.pop_front().unwrap().recv().unwrap().unwrap();
                }
                // On one rank, a copy of the result follows on the same memory.
                let towers = in_place(&mut data[call]);
                let again = in_place(&mut data[call]);
                let name = format!("call {call}");
                in_flight.push_back(match in_order[call] {
                    true => rank.start(SUM, towers, &name),
                    false => rank.start_by_name(SUM, towers, &name),
                });
                if !in_order[call] && call % 3 == shared {
                    in_flight.push_back(rank.start_by_name(Op::allreduce(ReduceOp::Max), again, &format!("max {call}")));
                }
                if place % 5 == rank.rank {
                    thread::yield_now();
                }
            }
            in_flight.into_iter().for_each(|call| call.recv().unwrap().unwrap());
            for (call, data) in data.iter().enumerate() {
                assert!(data.iter().all(|&value| value == sum_of(rank, call)), "{call}: {:?}", &data[..1]);
            }
        });
    }
}

/// Another length, type, operator, root or collective fails this name on every rank, and nothing else.
#[test]
fn a_conflict_fails_one_name_amid_a_hundred_calls() {
    let odd = |conflict: usize, data: &mut Vec<f32>, rank: usize| match conflict {
        0 => (SUM, vec![vec![tensor(&mut data[..10 + rank])]]),
        1 => (if rank == 0 { SUM } else { Op::allreduce(ReduceOp::Max) }, in_place(data)),
        2 => (Op::broadcast(rank.min(1)), in_place(data)),
        _ => (if rank == 0 { SUM } else { Op::broadcast(0) }, in_place(data)),
    };
    for hosts in &WORLDS[1..] {
        for conflict in 0..4 {
            patient(hosts).run(|rank| {
                for round in 0..2 {
                    let mut data: Vec<Vec<f32>> =
                        (0..100).map(|number| vec![(rank.rank + number) as f32; 20]).collect();
                    let mut in_conflict = vec![7f32; 20];
                    let since = Instant::now();
                    let (mut calls, mut failed) = (Vec::new(), None);
                    let order: Vec<usize> = if rank.rank == 1 { (0..100).rev().collect() } else { (0..100).collect() };
                    for number in order {
                        if number == 30 {
                            let (op, towers) = odd(conflict, &mut in_conflict, rank.rank);
                            failed = Some(rank.start_by_name(op, towers, "odd"));
                        }
                        calls.push(rank.start_by_name(SUM, in_place(&mut data[number]), &format!("call {number}")));
                    }
                    let Err(Error::Mismatch(text)) = failed.unwrap().recv().unwrap() else { panic!("no mismatch") };
                    assert!(text.contains("'odd' by name") && text.contains("rank 0"), "{text}");
                    assert!(since.elapsed() < Duration::from_secs(2), "{round}: {:?}", since.elapsed());
                    calls.into_iter().for_each(|call| call.recv().unwrap().unwrap());
                    for (number, data) in data.iter().enumerate() {
                        assert!(data.iter().all(|&value| value == sum_of(rank, number)), "{number}");
                    }
                    assert_eq!(in_conflict, [7.0; 20], "nothing was written");
                }
            });
        }
    }
}

/// A call by name that only some ranks have made does not hold up the decision on others that differ.
#[test]
fn a_call_without_its_counterpart_delays_no_other_decision() {
    for hosts in &WORLDS[1..] {
        patient(hosts).run(|rank| {
            let mut x = [1f32; 4];
            let held = (rank.rank == 0).then(|| rank.start_by_name(SUM, in_place(&mut x), "x"));
            let since = Instant::now();
            let mut data = vec![1f32; 4 + rank.rank];
            let different = rank.call(SUM, in_place(&mut data), "");
            assert!(matches!(different, Err(Error::Mismatch(_))), "{different:?}");
            assert!(since.elapsed() < Duration::from_secs(20), "the deadline has ended it");
            match held {
                Some(held) => held.recv().unwrap().unwrap(),
                None => rank.call_by_name(SUM, in_place(&mut x), "x").unwrap(),
            }
            assert_eq!(x, [rank.size as f32; 4]);
        });
    }
}

#[test]
fn contrary_orders_on_shared_memory_are_refused() {
    for hosts in &WORLDS[1..] {
        patient(hosts).run(|rank| {
            let (mut x, mut y) = ([1f32; 100], [1f32; 100]);
            let names = if rank.rank == 0 { ["a", "b"] } else { ["b", "a"] };
            let other = rank.start_by_name(SUM, in_place(&mut y), "other");
            let calls = names.map(|name| (name, rank.start_by_name(SUM, in_place(&mut x), name)));
            let results = calls.map(|(name, call)| (name, call.recv().unwrap()));
            let [(_, a)] = results.iter().filter(|(name, _)| *name == "a").collect::<Vec<_>>()[..] else { panic!() };
            let Err(Error::Mismatch(text)) = a else { panic!("{a:?}") };
            assert!(text.contains("'a' by name") && text.contains("contrary orders"), "{text}");
            assert!(results.iter().all(|(name, result)| *name == "a" || result.is_ok()), "{results:?}");
            other.recv().unwrap().unwrap();
            assert!(x.iter().chain(&y).all(|&value| value == rank.size as f32), "b and the other have run");
        });
    }
}

/// A rank waits for the second of two calls on the same memory, of which the other rank makes the second only.
#[test]
fn a_call_behind_one_that_never_comes_is_refused() {
    for hosts in &WORLDS[1..4] {
        World { match_timeout: Duration::from_secs(3), ..World::new(hosts) }.run(|rank| {
            let mut x = [1f32; 100];
            let since = Instant::now();
            if rank.rank == 0 {
                let first = rank.start_by_name(SUM, in_place(&mut x), "a");
                // The caller waits for it, so that no call can come.
                let second = rank.call_by_name(SUM, in_place(&mut x), "b");
                let first = first.recv().unwrap();
                assert!(first.is_err() || second.is_err(), "{first:?} {second:?}");
            } else {
                // With `a` given up, `b` is free.
                let _either = rank.call_by_name(SUM, in_place(&mut x), "b");
            }
            assert!(since.elapsed() < Duration::from_secs(20));
            rank.call_by_name(SUM, in_place(&mut [1f32]), "later").unwrap();
        });
    }
}

/// Of a call that only one rank makes: it ends at its own deadline, and all others go on.
#[test]
fn a_call_without_counterpart_ends_at_its_deadline() {
    for hosts in &WORLDS[1..] {
        for busy in [false, true] {
            patient(hosts).run(|rank| {
                let mut lonely = [1f32; 100];
                let (since, mut failed) = (Instant::now(), None);
                let (first, last) = (rank.size - 1, Duration::from_millis(1200));
                let call = |number: usize| {
                    let mut data = vec![(rank.rank + number) as f32; 100];
                    rank.call_by_name(SUM, in_place(&mut data), &format!("call {}", number % 3)).unwrap();
                    assert!(data.iter().all(|&value| value == sum_of(rank, number)));
                };
                if rank.rank == first {
                    let (name, timeout) = ("lonely".to_owned(), Timeout::from_seconds(0.5));
                    let options = CallOptions { name, timeout, by_name: true, ..CallOptions::default() };
                    failed = Some(rank.start_with(SUM, in_place(&mut lonely), options));
                }
                call(1);
                call(2);
                if busy {
                    (0..12).for_each(|number| {
                        call(number);
                        thread::sleep(last / 12);
                    });
                } else {
                    thread::sleep(last);
                }
                if let Some(failed) = failed {
                    // It has ended long before the others come.
                    let Err(Error::Mismatch(text)) = failed.try_recv().unwrap() else { panic!("no mismatch") };
                    assert!(text.contains("'lonely' by name") && text.contains("the timeout of this call"), "{text}");
                    let others = if first == 1 { "rank 0 had not" } else { "ranks 0, 1 had not" };
                    assert!(text.contains(others), "{text}");
                    assert!(since.elapsed() < Duration::from_secs(10));
                }
                (0..10).for_each(call);
            });
        }
    }
}

/// One rank names a length for each pair of ranks, the others one length.
#[test]
fn two_forms_of_an_all_to_all_match() {
    for hosts in &WORLDS[1..] {
        patient(hosts).run(|rank| {
            let (size, mut sum) = (rank.size, [1f32; 10]);
            let (input, mut output) = (vec![rank.rank as f32; 14 * size], vec![9f32; 14 * size]);
            let bounds = || vec![Bounds::new(&vec![7; size]).unwrap(); 2];
            let (len, counts) = match rank.rank {
                0 => (0, Counts::Pairs { send: bounds(), receive: bounds() }),
                _ => (7, Counts::Even),
            };
            let list = input.chunks(7 * size).zip(output.chunks_mut(7 * size)).map(|(src, dst)| {
                Tensor::new(Buffer::new(src.as_ptr().cast(), dst.as_mut_ptr().cast(), len, DType::F32), &[])
            });
            let list = list.collect();
            let options = CallOptions { name: "all".into(), by_name: true, counts, ..CallOptions::default() };
            let exchange = || rank.start_with(Op::ALLTOALL, vec![list], options);
            let reduce = |sum: &mut [f32]| rank.start_by_name(SUM, in_place(sum), "sum");
            let calls = match rank.rank {
                0 => [exchange(), reduce(&mut sum)],
                _ => [reduce(&mut sum), exchange()],
            };
            calls.into_iter().for_each(|call| call.recv().unwrap().unwrap());
            assert!(output.iter().enumerate().all(|(index, &value)| value == (index / 7 % size) as f32), "{output:?}");
            assert_eq!(sum, [size as f32; 10]);
        });
    }
}

/// Of a call that only one rank makes, while no other rank makes any. The caller may wait in it.
#[test]
fn a_timeout_of_a_call_ends_only_this_call() {
    for hosts in WORLDS {
        patient(hosts).run(|rank| {
            for round in 0..3 {
                let (name, timeout) = ("lonely".to_owned(), Timeout::from_seconds(0.3));
                let caller_blocks = round == 1;
                let options = CallOptions { name, timeout, by_name: true, caller_blocks, ..CallOptions::default() };
                let mut data = [1f32; 100];
                if rank.rank == 0 || round == 2 {
                    let result = rank.start_with(SUM, in_place(&mut data), options).recv().unwrap();
                    assert_eq!(result.is_ok(), rank.size == 1 || round == 2, "{result:?}");
                } else {
                    thread::sleep(Duration::from_millis(700));
                }
                assert_eq!(data[0], if round == 2 { rank.size as f32 } else { 1.0 });
                for _ in 0..3 {
                    rank.call(SUM, in_place(&mut [1f32]), "").unwrap();
                    rank.call_by_name(SUM, in_place(&mut [1f32]), "all").unwrap();
                }
            }
        });
    }
}

/// A name with a counterpart that comes late, and calls in between.
#[test]
fn a_late_counterpart_is_found() {
    for hosts in &WORLDS[1..] {
        patient(hosts).run(|rank| {
            let mut early = [1f32; 3000];
            let mut started = None;
            if rank.rank == 0 {
                started = Some(rank.start_by_name(SUM, in_place(&mut early), "early"));
            }
            for number in 0..20 {
                let mut data = vec![(rank.rank + number) as f32; 1 + 100 * number];
                match number % 2 {
                    0 => rank.call(SUM, in_place(&mut data), "in order").unwrap(),
                    _ => rank.call_by_name(SUM, in_place(&mut data), "by name").unwrap(),
                }
                assert!(data.iter().all(|&value| value == sum_of(rank, number)));
                if number == 10 && rank.rank > 0 {
                    thread::sleep(Duration::from_millis(100));
                }
            }
            let started = started.unwrap_or_else(|| rank.start_by_name(SUM, in_place(&mut early), "early"));
            started.recv().unwrap().unwrap();
            assert_eq!(early, [rank.size as f32; 3000]);
        });
    }
}

#[test]
fn ranks_that_wait_for_each_other_in_two_groups_get_an_error() {
    World { match_timeout: Duration::from_secs(3), ..World::new(&[2]) }.run_teams(2, |teams| {
        let since = Instant::now();
        let mine = &teams[teams[0].rank];
        let error = mine.call_by_name(SUM, in_place(&mut [1f32]), "mine").unwrap_err().to_string();
        assert!(error.contains("'mine' by name"), "{error}");
        assert!(since.elapsed() < Duration::from_secs(20), "{:?}", since.elapsed());
        // The other one ends a little later.
        thread::sleep(Duration::from_millis(300));
        for team in teams {
            team.call_by_name(SUM, in_place(&mut [1f32]), "later").unwrap();
        }
    });
}

#[test]
fn a_rank_that_joins_contributes_zeros_to_calls_by_name() {
    for hosts in &WORLDS[1..] {
        patient(hosts).run(|rank| {
            if rank.rank > 0 {
                let names = if rank.rank == 1 { ["a", "b", "c"] } else { ["c", "a", "b"] };
                let mut data = [[1f32; 50], [2.0; 50], [3.0; 50]];
                let calls: Vec<_> = data
                    .iter_mut()
                    .zip(names)
                    .map(|(data, name)| rank.start_by_name(SUM, in_place(data), name))
                    .collect();
                calls.into_iter().for_each(|call| call.recv().unwrap().unwrap());
            }
            let join = rank.team.group().start_join(Timeout::Override(None)).unwrap();
            join.handle.wait(None, || {}).unwrap();
            assert!(join.last() > 0, "rank 0 has made no call");
        });
    }
}

#[test]
fn a_group_that_ends_fails_the_calls_that_are_left() {
    for hosts in &WORLDS[1..] {
        patient(hosts).run(|rank| {
            let (mut data, mut both) = (vec![[1f32; 10]; 5], [1f32]);
            let names: Vec<String> = (0..5).map(|number| format!("call {number}")).collect();
            let left: Vec<_> = match rank.rank {
                0 => data
                    .iter_mut()
                    .zip(&names)
                    .map(|(data, name)| rank.start_by_name(SUM, in_place(data), name))
                    .collect(),
                _ => Vec::new(),
            };
            rank.call_by_name(SUM, in_place(&mut both), "both").unwrap();
            if rank.rank == 0 {
                let since = Instant::now();
                for call in left {
                    assert!(matches!(call.recv().unwrap(), Err(Error::Mismatch(_) | Error::PeerLost(_))));
                }
                assert!(since.elapsed() < Duration::from_secs(20));
            }
        });
    }
}

#[test]
fn a_call_by_name_needs_a_name_and_one_in_order_does_not_match_it() {
    World::new(&[2]).run(|rank| {
        let unnamed = rank.call_by_name(SUM, in_place(&mut [1f32]), "");
        assert!(matches!(unnamed, Err(Error::Invalid(_))), "{unnamed:?}");
        let mut data = [1f32];
        if rank.rank == 0 {
            let result = rank.call(SUM, in_place(&mut data), "a");
            let Err(Error::Mismatch(text)) = result else { panic!("{result:?}") };
            assert!(text.contains("'a' on") && text.contains("'a' by name"), "{text}");
        }
        rank.call_by_name(SUM, in_place(&mut data), "a").unwrap();
        assert_eq!(data, [2.0]);
    });
}

/// The time of 60 calls of 64 KiB in contrary orders, beside that of one order; and of 2000 short ones that meet few.
#[test]
#[ignore = "a measurement: cargo test --release -p dl_comm_core --test by_name -- --ignored --nocapture"]
fn contrary_orders_cost_little() {
    for hosts in [&[2][..], &[1, 1]] {
        let world = World { slot: 256 << 10, access: Access::Peer, ..patient(hosts) };
        let times = world.run(|rank| {
            let mut data = vec![vec![1f32; 16 << 10]; 60];
            let mut times = [Vec::new(), Vec::new(), Vec::new()];
            for round in 0..300 {
                let kind = round % 3;
                rank.call(Op::BARRIER, Vec::new(), "").unwrap();
                let since = Instant::now();
                let order: Vec<usize> =
                    if kind == 2 && rank.rank == 1 { (0..60).rev().collect() } else { (0..60).collect() };
                let mut calls = Vec::new();
                let mut left: Vec<_> = data.iter_mut().map(Some).collect();
                for number in order {
                    let (towers, name) = (in_place(left[number].take().unwrap()), format!("tensor {number}"));
                    calls.push(match kind {
                        0 => rank.start(Op::MEAN, towers, &name),
                        _ => rank.start_by_name(Op::MEAN, towers, &name),
                    });
                }
                calls.into_iter().for_each(|call| call.recv().unwrap().unwrap());
                if round >= 30 {
                    times[kind].push(since.elapsed());
                }
            }
            times.map(|mut times| {
                times.sort_unstable();
                times[times.len() / 2].as_secs_f64()
            })
        });
        let [in_order, same, contrary] = times[0];
        println!(
            "{hosts:?}: 60 calls of 64 KiB in order {:.0} us; by name {:.0} us, x {:.2}; contrary {:.0} us, x {:.2}",
            in_order * 1e6,
            same * 1e6,
            same / in_order,
            contrary * 1e6,
            contrary / same
        );
        for window in [2000, 50, 1] {
            let since = Instant::now();
            world.run(|rank| match rank.rank {
                0 => run_window(rank, 0..2000, 8, 2000),
                _ => run_window(rank, (0..2000).rev(), 8, window),
            });
            println!("{hosts:?}: 2000 calls in flight meet {window}: {:.0} ms", since.elapsed().as_secs_f64() * 1e3);
        }
    }
}
