//! The shared memory protocol under Loom. Loom runs every order of the ranks' operations within the bounds below, with
//! every value that the memory model allows for a load. Only with `--cfg loom`; `docs/verification.md` has the command
//! and the limits of the model.
#![cfg(loom)]
#![allow(clippy::unwrap_used)]

mod loom_support;

use std::sync::Arc;

use dl_comm_core::buffer::Buffer;
use dl_comm_core::collective::{Call, Channel, Op};
use dl_comm_core::dtype::DType;
use dl_comm_core::error::{Error, Result};
use dl_comm_core::topology::Topology;
use dl_comm_core::transport::counter::START;
use dl_comm_core::transport::flag::Flag;
use dl_comm_core::transport::in_process::Access;
use dl_comm_core::transport::{Phase, ShmChannel, ShmRegion};
use loom_support::{FLOATS, SLOT, call, config, explore, spawn, with_wait_context};

/// The regions of `ranks` ranks that only share slots.
fn regions(ranks: usize) -> Vec<Arc<ShmRegion>> {
    loom_support::regions(ranks, Access::Slots)
}

/// An allreduce of `data` on `ranks` ranks.
fn average(data: &mut [f32], ranks: usize, name: &str) -> Call {
    let buffer = Buffer::in_place(data.as_mut_ptr().cast(), data.len(), DType::F32);
    call(Op::MEAN, buffer, name, config(&Topology::new(0, &vec![0; ranks]), SLOT))
}

/// Every rank averages `steps` slots of floats, with one chunk packed ahead as in the group's threads.
fn averages(ranks: usize, steps: usize) {
    averages_on(regions(ranks), steps);
}

/// As [`averages`], with notices that take a chain of ranks.
fn averages_in_chain(ranks: usize, steps: usize) {
    averages_on(loom_support::regions_in_tree(ranks, Access::Slots, Some(1)), steps);
}

fn averages_on(regions: Vec<Arc<ShmRegion>>, steps: usize) {
    let ranks = regions.len();
    let rank = |(rank, region): (usize, Arc<ShmRegion>)| {
        spawn(move || {
            let mut channel = Channel::new(Arc::new(Topology::new(rank, &vec![0; ranks])), region.channel(0));
            let value = |rank: usize, index: usize| (rank * 1000 + index) as f32;
            let mut data: Vec<f32> = (0..steps * FLOATS).map(|index| value(rank, index)).collect();
            let call = average(&mut data, ranks, "");
            assert_eq!(call.layout.chunks(), steps);
            with_wait_context(&region, |wait_ctx| {
                assert!(channel.run_first_chunk(&call, wait_ctx).unwrap());
                channel.run_chunks(&call, 1..steps, channel.plan(), wait_ctx).unwrap();
            });
            let mean = |index| (0..ranks).map(|rank| value(rank, index)).sum::<f32>() / ranks as f32;
            assert!(data.iter().enumerate().all(|(index, &value)| value == mean(index)));
        })
    };
    let ranks: Vec<_> = regions.into_iter().enumerate().map(rank).collect();
    ranks.into_iter().for_each(|rank| rank.join().unwrap());
}

/// Notices are gathered up a tree and released down it: a root and a leaf, then a rank between them, too.
#[test]
fn notices_take_a_chain() {
    explore(Some(2), || averages_in_chain(2, 3));
    explore(Some(2), || averages_in_chain(3, 1));
    explore(Some(1), || averages_in_chain(3, 2));
}

#[test]
fn two_ranks_three_chunks() {
    explore(Some(3), || averages(2, 3));
}

/// More chunks than slots.
#[test]
fn two_ranks_six_chunks() {
    explore(Some(2), || averages(2, 6));
}

#[test]
fn three_ranks_two_chunks() {
    explore(Some(1), || averages(3, 2));
}

/// Rounds in which ranks read each other's slots directly, before and after rounds in which shards reduce.
#[test]
fn direct_and_reducing_rounds_mix() {
    explore(Some(2), || {
        let rank = |(rank, region): (usize, Arc<ShmRegion>)| {
            spawn(move || {
                let topology = Arc::new(Topology::new(rank, &[0, 0]));
                let config = config(&topology, SLOT);
                let mut channel = Channel::new(topology, region.channel(0));
                for (number, (op, chunks)) in
                    [(Op::ALLGATHER, 2), (Op::MEAN, 2), (Op::ALLGATHER, 1)].into_iter().enumerate()
                {
                    let len = chunks * FLOATS;
                    let value = |rank: usize| (10 * number + rank) as f32;
                    let (mut src, mut dst) = (vec![value(rank); len], vec![0f32; 2 * len]);
                    let buffer = Buffer::new(src.as_mut_ptr().cast(), dst.as_mut_ptr().cast(), len, DType::F32);
                    let call = call(op, buffer, "", config.clone());
                    assert_eq!(call.layout.chunks(), chunks);
                    with_wait_context(&region, |wait_ctx| {
                        assert!(channel.run_first_chunk(&call, wait_ctx).unwrap());
                        channel.run_chunks(&call, 1..chunks, channel.plan(), wait_ctx).unwrap();
                    });
                    if op == Op::MEAN {
                        assert!(dst[..len].iter().all(|&found| found == value(0) + 0.5));
                    } else {
                        assert!((0..2).all(|from| dst[from * len..][..len].iter().all(|&found| found == value(from))));
                    }
                }
            })
        };
        let ranks: Vec<_> = regions(2).into_iter().enumerate().map(rank).collect();
        ranks.into_iter().for_each(|rank| rank.join().unwrap());
    });
}

/// Two ranks make consecutive calls with the given numbers of chunks.
fn calls(preemptions: usize, chunks: &'static [usize]) {
    explore(Some(preemptions), move || {
        let rank = |(rank, region): (usize, Arc<ShmRegion>)| {
            spawn(move || {
                let mut channel = Channel::new(Arc::new(Topology::new(rank, &[0, 0])), region.channel(0));
                for (number, &chunks) in chunks.iter().enumerate() {
                    let mut data = vec![(rank + number) as f32; chunks * FLOATS];
                    let call = average(&mut data, 2, "");
                    assert_eq!(call.layout.chunks(), chunks);
                    with_wait_context(&region, |wait_ctx| {
                        assert!(channel.run_first_chunk(&call, wait_ctx).unwrap());
                        channel.run_chunks(&call, 1..chunks, channel.plan(), wait_ctx).unwrap();
                    });
                    assert!(data.iter().all(|&value| value == number as f32 + 0.5));
                }
            })
        };
        let ranks: Vec<_> = regions(2).into_iter().enumerate().map(rank).collect();
        ranks.into_iter().for_each(|rank| rank.join().unwrap());
    });
}

/// Small calls (one exchange) before and after a call of several chunks, in the same slots.
#[test]
fn small_and_long_calls_mix() {
    calls(2, &[1, 2, 1, 1]);
}

/// Long calls and small ones, which alternate between two slots, take each other's slots.
#[test]
fn long_calls_take_the_slots_of_small_ones() {
    calls(2, &[1, 1, 1, 4]);
    calls(2, &[1, 1, 4, 1, 1]);
}

/// After enough small calls, the flags that they do not raise would look ahead; a long call then waits for these flags.
#[test]
fn many_small_calls_do_not_break_the_flags() {
    calls(1, &[1, 1, 1, 1, 1, 1, 1, 1, 1, 2]);
}

/// Both ranks detect that their calls differ, and the channel still works afterwards.
fn differing(longer: usize) {
    explore(Some(3), move || {
        let rank = move |(rank, region): (usize, Arc<ShmRegion>)| {
            spawn(move || {
                let mut channel = Channel::new(Arc::new(Topology::new(rank, &[0, 0])), region.channel(0));
                let mut data = vec![rank as f32; FLOATS];
                let mut other_data = vec![0.0; if rank == 0 { FLOATS } else { longer }];
                let other = average(&mut other_data, 2, if rank == 0 { "a" } else { "b" });
                let same = average(&mut data, 2, "c");
                with_wait_context(&region, |wait_ctx| {
                    assert!(!channel.run_first_chunk(&other, wait_ctx).unwrap());
                    assert!(channel.run_first_chunk(&same, wait_ctx).unwrap());
                });
                assert!(data.iter().all(|&value| value == 0.5));
            })
        };
        let ranks: Vec<_> = regions(2).into_iter().enumerate().map(rank).collect();
        ranks.into_iter().for_each(|rank| rank.join().unwrap());
    });
}

#[test]
fn both_ranks_detect_different_calls() {
    differing(FLOATS);
}

/// As above, where one rank's call takes one exchange and the other's several rounds.
#[test]
fn both_ranks_detect_different_lengths() {
    differing(2 * FLOATS);
}

/// Two raises, and one sleeper per target.
fn raises(targets: &'static [u32]) {
    let flag = Arc::new(Flag::default());
    let wait = |&target: &u32| {
        let flag = Arc::clone(&flag);
        spawn(move || flag.sleep(START.wrapping_add(target), &mut || Ok(())).unwrap())
    };
    let waiters: Vec<_> = targets.iter().map(wait).collect();
    flag.raise(START.wrapping_add(1));
    flag.raise(START.wrapping_add(2));
    waiters.into_iter().for_each(|waiter| waiter.join().unwrap());
}

/// No wake is lost: without futex timeouts, a lost wake would be a deadlock.
#[test]
fn a_raise_wakes_every_sleeper() {
    explore(None, || raises(&[2]));
    explore(Some(2), || raises(&[1, 2]));
}

/// The first round.
const FIRST: u32 = START.wrapping_add(1);

/// Waits for `Packed` of both ranks in the first round.
fn wait_packed(channel: &ShmChannel) -> Result<()> {
    with_wait_context(channel.region(), |wait_ctx| channel.wait(Phase::Packed, FIRST, 2, wait_ctx))
}

/// Of two concurrent failures, all waiters get one, complete, at the latest after a futex timeout.
#[test]
fn waiters_get_one_complete_failure() {
    explore(Some(3), || {
        let regions = regions(2);
        let fail = |rank: usize, error: Error| {
            let region = Arc::clone(&regions[rank]);
            spawn(move || region.set_failure(&error))
        };
        let failing = [fail(0, Error::PeerLost("one".into())), fail(1, Error::Timeout("two".into()))];
        let channel = regions[0].channel(0);
        let waiter = spawn(move || {
            let error = wait_packed(&channel).unwrap_err();
            assert!(error == Error::PeerLost("one".into()) || error == Error::Timeout("two".into()), "{error:?}");
        });
        failing.into_iter().for_each(|failing| failing.join().unwrap());
        regions[0].end_waits();
        waiter.join().unwrap();
    });
}

/// A rank that departs after its last round is not lost; a rank that departs before it is.
#[test]
fn a_rank_that_departs_after_its_round_is_not_lost() {
    for packs in [true, false] {
        explore(Some(3), move || {
            let regions = regions(2);
            let (waiting, other) = (regions[0].channel(0), regions[1].channel(0));
            let waiter = spawn(move || {
                waiting.raise(Phase::Packed, FIRST);
                let result = wait_packed(&waiting);
                assert_eq!(result.is_ok(), packs, "{result:?}");
            });
            if packs {
                other.raise(Phase::Packed, FIRST);
            }
            regions[1].set_departed();
            regions[0].end_waits();
            waiter.join().unwrap();
        });
    }
}
