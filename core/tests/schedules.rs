//! Schedules on ranks that are threads: the result of every call, and that every mean is returned once.
#![allow(missing_docs, clippy::unwrap_used)]

mod common;

use common::{Rank, World};
use dl_comm_core::cases::cases;
use dl_comm_core::error::Error;
use dl_comm_core::plugin::{Arguments, Cooldown, Schedule};
use proptest::prelude::*;

fn schedule(trans_alg: i32, ksteps: i32, max_steps: i32) -> Schedule {
    let cooldown = Cooldown::After;
    Schedule::new(Arguments { trans_alg, ksteps, max_steps, verbosity: 0, perf_freq: 0, cooldown }).unwrap()
}

/// The input of call `index`. Its mean over the ranks is a power of two, so a sum shows which means it contains.
fn input(rank: &Rank, index: usize) -> Vec<f32> {
    vec![mean(index) + rank.rank as f32 - (rank.size - 1) as f32 / 2.0; 3000]
}

fn mean(index: usize) -> f32 {
    (1 << index) as f32
}

fn result_of(rank: &Rank, index: usize, name: &str) -> f32 {
    let result = rank.gradients(&mut input(rank, index), name).unwrap();
    assert!(result.iter().all(|&value| value == result[0]), "call {index} of rank {}", rank.rank);
    result[0]
}

const SHAPES: [&[usize]; 4] = [&[1], &[2], &[3], &[2, 1]];

#[test]
fn non_blocking_calls_return_the_previous_mean_and_the_last_both() {
    for hosts in SHAPES {
        World { threads: 2, ..World::new(hosts) }.run(|rank| {
            rank.team.configure(schedule(0, 2, 7));
            let results: Vec<f32> = (0..9).map(|index| result_of(rank, index, "")).collect();
            let m = mean;
            // Warm-up (2 calls), the first non-blocking call, zeros, the previous mean, all remaining means, blocking.
            assert_eq!(results, [m(0), m(1), m(2), 0.0, m(3), m(4), m(5) + m(6), m(7), m(8)]);
            assert_eq!(rank.team.undelivered_means(), 0);
        });
    }
}

#[test]
fn a_cool_down_returns_the_remaining_means() {
    for hosts in SHAPES {
        World::new(hosts).run(|rank| {
            rank.team.configure(schedule(0, -4, 7));
            let results: Vec<f32> = (0..7).map(|index| result_of(rank, index, "")).collect();
            let m = mean;
            assert_eq!(results, [m(0), 0.0, m(1), m(2), m(3) + m(4), m(5), m(6)]);
        });
    }
}

#[test]
fn lists_do_not_receive_each_others_means() {
    World::new(&[2]).run(|rank| {
        rank.team.configure(schedule(0, 2, 10));
        let results: Vec<f32> = (0..10).map(|index| result_of(rank, index, ["a", "b"][index % 2])).collect();
        let m = mean;
        assert_eq!(results, [m(0), m(1), m(2), m(3), 0.0, 0.0, m(4), m(5), m(6) + m(8), m(7) + m(9)]);
    });
}

#[test]
fn a_new_schedule_returns_the_carried_mean() {
    World::new(&[2]).run(|rank| {
        rank.team.configure(schedule(0, 0, 10));
        let results: Vec<f32> = (0..4).map(|index| result_of(rank, index, "")).collect();
        assert_eq!(results, [mean(0), 0.0, mean(1), mean(2)]);
        assert_eq!(rank.team.undelivered_means(), 1);
        // With a new schedule (here: blocking), the next call returns the mean that the old schedule carried.
        rank.team.configure(Schedule::BLOCKING);
        assert_eq!(result_of(rank, 4, ""), mean(3) + mean(4));
    });
}

#[test]
fn different_schedules_do_not_match() {
    World::new(&[2]).run(|rank| {
        rank.team.configure(schedule(0, rank.rank as i32, 9));
        assert_eq!(result_of(rank, 0, ""), mean(0));
        // Rank 0 carries this mean over; rank 1 is at its first non-blocking call, which blocks.
        let error = rank.gradients(&mut input(rank, 1), "").err();
        let later = rank.gradients(&mut input(rank, 2), "").err();
        let error = error.or(later).unwrap();
        assert!(matches!(&error, Error::Mismatch(text) if text.contains("call 1 of 9, non-blocking")), "{error}");
    });
}

#[test]
fn a_failed_call_loses_no_other_mean() {
    World::new(&[2]).run(|rank| {
        rank.team.configure(schedule(0, 0, 9));
        let first: Vec<f32> = (0..3).map(|index| result_of(rank, index, "")).collect();
        assert_eq!(first, [mean(0), 0.0, mean(1)]);
        // Call 3 differs between the ranks. It returns the previous mean, and the next call gets its error. The mean of
        // that call is carried to the call after it.
        let mut different = input(rank, 3);
        let before = rank.gradients_of(&mut different, "", &rank.rank.to_string()).unwrap();
        assert_eq!(before[0], mean(2));
        let error = rank.gradients(&mut input(rank, 4), "").unwrap_err();
        assert!(matches!(&error, Error::Mismatch(text) if text.contains("call 3 of 9")), "{error}");
        let rest: Vec<f32> = (5..9).map(|index| result_of(rank, index, "")).collect();
        assert_eq!(rest, [mean(4), mean(5), mean(6), mean(7) + mean(8)]);
        // The last call differs: the carried mean that it should have returned is not lost.
        rank.team.configure(schedule(0, 0, 3));
        assert_eq!([result_of(rank, 0, ""), result_of(rank, 1, "")], [mean(0), 0.0]);
        assert!(rank.gradients_of(&mut input(rank, 2), "", &rank.rank.to_string()).is_err());
        assert_eq!(result_of(rank, 3, ""), mean(1) + mean(3));
    });
}

#[test]
fn a_failure_in_a_transition_reaches_every_rank_once() {
    World::new(&[2]).run(|rank| {
        rank.team.configure(schedule(1, 0, 60)); // a window of 3 calls
        assert_eq!(result_of(rank, 0, ""), mean(0));
        assert!(rank.gradients_of(&mut input(rank, 1), "", &rank.rank.to_string()).is_err());
        // Two thirds of this mean are carried over; the failed call contributes nothing.
        let third = result_of(rank, 2, "");
        assert!((third - mean(2) / 3.0).abs() < 1e-5, "{third}");
        let fourth = result_of(rank, 3, "");
        assert!((fourth - mean(2) * 2.0 / 3.0).abs() < 1e-5, "{fourth}");
        assert_eq!(result_of(rank, 4, ""), mean(3));
    });
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases(24)))]

    #[test]
    fn every_mean_is_returned_once(
        shape in 0..SHAPES.len(), trans_alg in 0..2, ksteps in -25..25i32, max_steps in 1..24i32, lists in 1..3usize,
    ) {
        World { threads: 2, ..World::new(SHAPES[shape]) }.run(|rank| {
            rank.team.configure(schedule(trans_alg, ksteps, max_steps));
            let names = ["a", "b"];
            let calls = max_steps as usize;
            // Small integers: sums are exact, and multiples of 1/24 round equally on all ranks.
            let mut sums = [0f64; 2];
            let mut expected = [0f64; 2];
            for index in 0..calls {
                let list = index % lists;
                let mut data = vec![(3 * index + 2 * rank.rank) as f32; 700];
                let result = rank.gradients(&mut data, names[list]).unwrap();
                sums[list] += f64::from(result[0]);
                expected[list] += (3 * index + rank.size - 1) as f64;
            }
            for (sum, expected) in sums.iter().zip(expected) {
                assert!((sum - expected).abs() <= 1e-4 * expected.max(1.0), "{sum} for {expected}");
            }
            assert_eq!(rank.team.undelivered_means(), 0);
        });
    }
}
