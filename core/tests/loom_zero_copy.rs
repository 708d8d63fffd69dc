//! Zero-copy rounds on one host under Loom, as in `loom.rs`. Tensors are tracked, too: a rank that reads or writes a
//! tensor of another one at the wrong time is reported, also when its owner uses it between two calls.
#![cfg(loom)]
#![allow(clippy::unwrap_used)]

mod loom_support;

use std::sync::Arc;

use dl_comm_core::buffer::{Buffer, Tensor};
use dl_comm_core::collective::{Call, CallConfig, Channel, Counts, Op};
use dl_comm_core::dtype::DType;
use dl_comm_core::topology::Topology;
use dl_comm_core::transport::ShmRegion;
use dl_comm_core::transport::in_process::Access;
use loom_support::{FLOATS, Floats, call, config, explore, regions, run, spawn};

/// What each rank does in turn.
#[derive(Debug, Clone, Copy)]
enum Step {
    /// An allreduce of this many floats. In peer memory, unless it is small.
    Reduce(usize),
    /// An allreduce of this many tensors of one float, so many that their places do not fit a slot.
    Copied(usize),
    /// An all-gather of so many floats.
    Gather(usize),
    /// A gather to rank 0 of so many floats.
    ToRoot(usize),
}

/// Small calls have at most this many floats.
const SMALL: usize = 16;

/// The value of element `index` of the input of `rank` in step `number`.
fn value(number: usize, rank: usize, index: usize) -> f32 {
    (100 * number + 10 * rank + index / SMALL) as f32
}

impl Step {
    /// The number of floats of a rank.
    fn len(self) -> usize {
        match self {
            Step::Reduce(len) | Step::Copied(len) | Step::Gather(len) | Step::ToRoot(len) => len,
        }
    }

    fn op(self) -> Op {
        match self {
            Step::Reduce(_) | Step::Copied(_) => Op::MEAN,
            Step::Gather(_) => Op::ALLGATHER,
            Step::ToRoot(_) => Op::gather(0),
        }
    }

    fn call(self, topology: &Topology, src: &Floats, dst: &Floats) -> Call {
        let (from, to, config) = (src.ptr(), dst.ptr(), config(topology, SMALL * size_of::<f32>()));
        let buffer = |from: *const f32, to: *mut f32, len| Buffer::new(from.cast(), to.cast(), len, DType::F32);
        match self {
            Step::Reduce(len) => call(self.op(), buffer(to, to, len), "", config),
            Step::Copied(len) => {
                let part = |at: usize| Tensor::new(buffer(to.wrapping_add(at), to.wrapping_add(at), 1), &[]);
                let tensors = vec![(0..len).map(part).collect()];
                Call::new(self.op(), tensors, Counts::Even, "", "", String::new(), config).unwrap()
            }
            Step::Gather(len) | Step::ToRoot(len) => call(self.op(), buffer(from, to, len), "", config),
        }
    }

    /// Runs the step as its number `number`, and checks its result.
    fn run(self, number: usize, channel: &mut Channel, topology: &Topology, region: &ShmRegion, own: &mut [Floats; 2]) {
        let (me, ranks, len) = (topology.rank(), topology.size(), self.len());
        let [src, dst] = own;
        src.fill(|index| value(number, me, index));
        dst.fill(|index| value(number, me, index));
        assert!(run(channel, &self.call(topology, src, dst), region));
        let mean = |index| (0..ranks).map(|rank| value(number, rank, index)).sum::<f32>() / ranks as f32;
        dst.expect(|index| match self {
            Step::Reduce(_) | Step::Copied(_) if index < len => mean(index),
            Step::Gather(_) if index < ranks * len => value(number, index / len, index % len),
            Step::ToRoot(_) if index < ranks * len && me == 0 => value(number, index / len, index % len),
            _ => value(number, me, index),
        });
    }
}

/// The tensors of a rank: source and destination of its calls.
fn tensors(ranks: usize, steps: &[Step]) -> [Floats; 2] {
    let longest = steps.iter().map(|step| step.len()).max().unwrap();
    [Floats::new(longest), Floats::new(ranks * longest)]
}

/// Every rank carries out `steps`, of which `uncopied` end without copies through slots; between them it overwrites its
/// tensors, as a caller may.
fn steps(preemptions: usize, ranks: usize, access: Access, uncopied: usize, steps: &'static [Step]) {
    explore(Some(preemptions), move || {
        let rank = |(rank, region): (usize, Arc<ShmRegion>)| {
            let mut own = tensors(ranks, steps);
            spawn(move || {
                let topology = Arc::new(Topology::new(rank, &vec![0; ranks]));
                let mut channel = Channel::new(Arc::clone(&topology), region.channel(0));
                let mut found = 0;
                for (number, step) in steps.iter().enumerate() {
                    step.run(number, &mut channel, &topology, &region, &mut own);
                    found += usize::from(channel.plan().zero_copy);
                }
                assert_eq!(found, uncopied);
                // The memory is tracked until the execution ends.
                std::mem::forget(own);
            })
        };
        let ranks: Vec<_> = regions(ranks, access).into_iter().enumerate().map(rank).collect();
        ranks.into_iter().for_each(|rank| rank.join().unwrap());
    });
}

#[test]
fn two_allreduces_in_peer_memory() {
    steps(3, 2, Access::Peer, 2, &[Step::Reduce(2 * FLOATS), Step::Reduce(FLOATS)]);
}

#[test]
fn three_ranks_in_peer_memory() {
    steps(1, 3, Access::Peer, 2, &[Step::Reduce(FLOATS + SMALL), Step::Reduce(FLOATS + SMALL)]);
}

/// Rounds without copies end with another flag than rounds with copies and small calls. All use the same slots.
#[test]
fn all_kinds_of_rounds_mix() {
    steps(
        2,
        2,
        Access::Peer,
        2,
        &[Step::Reduce(FLOATS), Step::Reduce(SMALL), Step::Copied(FLOATS), Step::Reduce(FLOATS)],
    );
}

/// The root's tensors are written by all, in an all-gather each rank reads those of the others.
#[test]
fn ranks_move_blocks_in_peer_memory() {
    steps(2, 2, Access::Peer, 2, &[Step::ToRoot(FLOATS), Step::Gather(FLOATS), Step::Copied(3 * FLOATS)]);
}

/// Only rank 0 posts places: all repeat the round with copies.
#[test]
fn a_round_is_repeated_if_a_rank_has_no_access() {
    steps(2, 2, Access::EvenPeer, 0, &[Step::Reduce(2 * FLOATS), Step::Gather(FLOATS)]);
}

#[test]
fn ranks_copy_from_private_memory() {
    steps(2, 2, Access::Private, 2, &[Step::Gather(2 * FLOATS), Step::ToRoot(FLOATS), Step::Reduce(FLOATS)]);
    steps(2, 2, Access::EvenPeerOddPrivate, 1, &[Step::Gather(FLOATS), Step::Reduce(FLOATS)]);
}

/// The system refuses a copy of rank 1 in the first call, or in the second after other copies. All repeat with copies.
#[test]
fn a_refused_copy_repeats_the_round_on_all_ranks() {
    steps(2, 2, Access::Refused(0), 0, &[Step::Gather(2 * FLOATS), Step::Gather(FLOATS)]);
    steps(2, 2, Access::Refused(2), 1, &[Step::Gather(FLOATS), Step::Gather(3 * FLOATS)]);
}

/// The rounds after the first, of a call whose chunks several channels share.
#[test]
fn further_chunks_are_refused() {
    const LEN: usize = 3 * FLOATS;
    explore(Some(2), || {
        let rank = |(rank, region): (usize, Arc<ShmRegion>)| {
            let mut own = tensors(2, &[Step::Gather(LEN)]);
            spawn(move || {
                let topology = Arc::new(Topology::new(rank, &[0, 0]));
                let mut channel = Channel::new(Arc::clone(&topology), region.channel(0));
                let [src, dst] = &mut own;
                src.fill(|index| value(0, rank, index));
                let buffer = Buffer::new(src.ptr().cast(), dst.ptr().cast(), LEN, DType::F32);
                let config = CallConfig { max_channels: 2, ..config(&topology, 0) };
                let gather = call(Op::ALLGATHER, buffer, "", config);
                assert_eq!(gather.layout.chunks(), 3);
                assert!(run(&mut channel, &gather, &region));
                assert!(!channel.plan().zero_copy);
                assert_eq!(channel.plan().chunks(&gather), 3);
                dst.expect(|index| value(0, index / LEN, index % LEN));
                src.fill(|_| 0.0);
                std::mem::forget(own);
            })
        };
        let ranks: Vec<_> = regions(2, Access::Refused(2)).into_iter().enumerate().map(rank).collect();
        ranks.into_iter().for_each(|rank| rank.join().unwrap());
    });
}
