//! Small calls that a rank starts from its cache, without blocking, under Loom.
#![cfg(loom)]
#![allow(clippy::unwrap_used)]

mod loom_support;

use std::sync::Arc;

use dl_comm_core::buffer::Buffer;
use dl_comm_core::collective::{Channel, Op};
use dl_comm_core::dtype::DType;
use dl_comm_core::topology::Topology;
use dl_comm_core::transport::ShmRegion;
use dl_comm_core::transport::in_process::Access;
use loom_support::{FLOATS, SLOT, call, config, explore, regions, spawn, with_wait_context};

/// Every rank runs `rounds` calls of `op` on `len` elements, all but the first from a plan where the channel lets it.
#[derive(Clone, Copy)]
struct Model {
    op: Op,
    ranks: usize,
    preemptions: usize,
    rounds: usize,
    len: usize,
    /// Reductions from this size on take turns between one round and slices.
    measured: Option<usize>,
    access: Access,
}

const TWO_RANKS: Model =
    Model { op: Op::MEAN, ranks: 2, preemptions: 2, rounds: 4, len: FLOATS, measured: None, access: Access::Slots };

fn cached(model: Model) {
    let Model { op, ranks, preemptions, rounds, len, measured, access } = model;
    explore(Some(preemptions), move || {
        let rank = |(rank, region): (usize, Arc<ShmRegion>)| {
            spawn(move || {
                let topology = Arc::new(Topology::new(rank, &vec![0; ranks]));
                let mut config = config(&topology, SLOT);
                config.limits.reductions.measured = measured;
                let mut channel = Channel::new(topology, region.channel(0));
                let mut plan = None;
                for number in 0..rounds {
                    let value = |rank: usize| (10 * number + rank) as f32;
                    let (mut src, mut dst) = (vec![value(rank); len], vec![-1f32; ranks * len]);
                    let buffer = Buffer::new(src.as_mut_ptr().cast(), dst.as_mut_ptr().cast(), len, DType::F32);
                    let call = call(op, buffer, "", config.clone());
                    assert!(call.is_small());
                    let posted = plan.as_ref().and_then(|plan| channel.try_post(&call, plan, u32::MAX));
                    with_wait_context(&region, |wait_ctx| match posted {
                        None => assert!(channel.run_first_chunk(&call, wait_ctx).unwrap()),
                        Some(posted) => {
                            let plan = plan.as_mut().unwrap();
                            if !channel.try_finish_posted(&call, plan, &posted) {
                                assert!(channel.finish_posted(&call, plan, posted, wait_ctx).unwrap());
                            }
                        }
                    });
                    if plan.is_none() {
                        plan = Some(channel.take_small_plan(&call).unwrap());
                    }
                    if op == Op::MEAN {
                        let mean = (0..ranks).map(value).sum::<f32>() / ranks as f32;
                        assert!(dst[..len].iter().all(|&found| found == mean));
                    } else {
                        assert!((0..ranks).all(|from| dst[from * len..][..len].iter().all(|&at| at == value(from))));
                    }
                }
            })
        };
        let ranks: Vec<_> = regions(ranks, access).into_iter().enumerate().map(rank).collect();
        ranks.into_iter().for_each(|rank| rank.join().unwrap());
    });
}

#[test]
fn cached_allreduces_of_two_ranks() {
    cached(TWO_RANKS);
}

#[test]
fn cached_allreduces_of_three_ranks() {
    cached(Model { ranks: 3, preemptions: 1, rounds: 3, ..TWO_RANKS });
}

#[test]
fn cached_allgathers_of_two_ranks() {
    cached(Model { op: Op::ALLGATHER, len: FLOATS / 2, ..TWO_RANKS });
}

/// At first the calls take the paths one, two, two, one.
#[test]
fn cached_allreduces_with_two_paths() {
    cached(Model { measured: Some(1), ..TWO_RANKS });
}

#[test]
fn cached_allreduces_with_two_paths_in_shared_tensors() {
    cached(Model { measured: Some(1), access: Access::Peer, ..TWO_RANKS });
}
