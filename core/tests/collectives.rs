//! Collectives on ranks that are threads, on hosts of many shapes: values, element types, chunks, order of addition.
#![allow(missing_docs, clippy::unwrap_used)]

mod common;

use common::{Element, Rank, World, tensor};
use dl_comm_core::buffer::{Buffer, Tensor};
use dl_comm_core::cases::cases;
use dl_comm_core::collective::{Algorithm, AlgorithmSetting, Op, Pattern};
use dl_comm_core::dtype::DType;
use dl_comm_core::reduce::ReduceOp;
use dl_comm_core::transport::in_process::Access;
use half::{bf16, f16};
use proptest::prelude::*;

const SHAPES: [&[usize]; 12] = [
    &[1],
    &[2],
    &[3],
    &[5],
    &[1, 1],
    &[2, 2],
    &[2, 1],
    &[1, 3, 2],
    &[1, 1, 1, 1],
    &[2, 1, 1, 1, 1],
    &[1, 2, 1, 2, 1, 1],
    &[1, 1, 1, 1, 1, 1, 1],
];

/// Algorithms that give the same bits.
const SAME_BITS: [AlgorithmSetting; 4] = [
    AlgorithmSetting::Auto,
    AlgorithmSetting::Always(Algorithm::Doubling),
    AlgorithmSetting::Always(Algorithm::Halving),
    AlgorithmSetting::Always(Algorithm::Pairwise),
];
const RING: AlgorithmSetting = AlgorithmSetting::Always(Algorithm::Ring);

/// Worlds of every shape, with every algorithm if there are several hosts, and some whose notices take a tree.
fn worlds() -> impl Iterator<Item = World> {
    let all = SHAPES.into_iter().flat_map(|hosts| {
        let choices = SAME_BITS.into_iter().chain([RING]).take(if hosts.len() > 1 { 5 } else { 1 });
        choices.map(|algorithm| World { algorithm, ..World::new(hosts) })
    });
    let trees = [(&[3][..], 1), (&[5], 2), (&[1, 3, 2], 2), (&[4, 4], 2)];
    all.chain(trees.map(|(hosts, fan_out)| World { fan_out: Some(fan_out), ..World::new(hosts) }))
}

/// A short reduction goes in one round or in slices; at first the calls of a kind take turns. The bits are the same.
#[test]
fn one_round_and_slices_give_the_same_bits() {
    for size in [2, 3] {
        World { slot: 512 << 10, ..World::new(&[size]) }.run(|rank| {
            for len in [2100, 5000, 12_000] {
                let input: Vec<f32> =
                    (0..len).map(|index| (index as f32 * 0.1 + rank.rank as f32 * 1e5).sin() * 1e3).collect();
                let (mut results, mut flags) = (Vec::new(), Vec::new());
                for _ in 0..60 {
                    let mut data = input.clone();
                    let before = num_flags(rank);
                    rank.average(vec![tensor(&mut data)]).unwrap();
                    flags.push(num_flags(rank) - before);
                    results.push(data.iter().map(|value| value.to_bits()).collect::<Vec<_>>());
                }
                assert!(results.iter().all(|result| *result == results[0]), "{len}");
                let (fewest, flags) = (flags.iter().min(), &flags[..8]);
                assert!(flags.iter().filter(|count| Some(*count) == fewest).count() >= 3, "{len}: {flags:?}");
                assert!(flags.iter().filter(|count| Some(*count) > fewest).count() >= 3, "{len}: {flags:?}");
            }
        });
    }
}

/// The flags that this rank has raised.
fn num_flags(rank: &Rank) -> u64 {
    rank.team.group().stats()["shm_flags"].as_u64().unwrap()
}

/// Small calls raise only one of the three flags. After any number of them, a longer call still waits for its data.
#[test]
fn many_small_calls_do_not_break_the_flags() {
    for hosts in [&[2][..], &[3], &[1, 1]] {
        let world = World { threads: 2, ..World::new(hosts) };
        world.run(|rank| {
            for phase in [1usize, 100, 127, 128, 129, 250, 256, 300] {
                for call in 0..phase {
                    let value = (rank.rank + call % 5) as f32;
                    let mean = (call % 5) as f32 + (rank.size - 1) as f32 / 2.0;
                    expect(rank, vec![value; 3], &[mean; 3]);
                }
                let long: Vec<f32> = (0..9000).map(|index| (index % 100 + rank.rank) as f32).collect();
                let mean = |index: usize| (index % 100) as f32 + (rank.size - 1) as f32 / 2.0;
                expect(rank, long, &(0..9000).map(mean).collect::<Vec<_>>());
            }
        });
    }
}

fn expect<T: Element>(rank: &Rank, mut data: Vec<T>, expected: &[T]) {
    rank.average(vec![tensor(&mut data)]).unwrap();
    assert_eq!(data, expected, "rank {} of {}", rank.rank, rank.size);
}

#[test]
fn every_dtype_is_averaged() {
    for world in worlds() {
        world.run(|rank| {
            let own_rank = u8::try_from(rank.rank).unwrap();
            let size = u8::try_from(rank.size).unwrap();
            let sum = size * (size - 1) / 2;
            let mean = f64::from(sum) / f64::from(size);
            let posted = |i: u8| f64::from(i) + mean;
            let values = || (0..100u8).map(move |i| i + own_rank);
            let expected = || (0..100u8).map(posted);
            expect(rank, values().map(f64::from).collect(), &expected().collect::<Vec<f64>>());
            let narrow = |value: u8| f32::from(value);
            let sums = |i: u8| (0..size).map(|r| narrow(i + r)).sum::<f32>() / narrow(size);
            expect(rank, values().map(narrow).collect(), &(0..100).map(sums).collect::<Vec<f32>>());
            expect(
                rank,
                values().map(f16::from).collect(),
                &(0..100).map(|i| f16::from_f32(sums(i))).collect::<Vec<_>>(),
            );
            expect(
                rank,
                values().map(bf16::from).collect(),
                &(0..100).map(|i| bf16::from_f32(sums(i))).collect::<Vec<_>>(),
            );
            expect(rank, values().map(i32::from).collect(), &expected().map(|x| x as i32).collect::<Vec<_>>());
            expect(rank, values().map(i64::from).collect(), &expected().map(|x| x as i64).collect::<Vec<_>>());
            expect(rank, values().collect(), &expected().map(|x| x as u8).collect::<Vec<u8>>());
            expect(rank, values().map(i16::from).collect(), &expected().map(|x| x as i16).collect::<Vec<_>>());
            expect(rank, values().map(u16::from).collect(), &expected().map(|x| x as u16).collect::<Vec<_>>());
            expect(rank, values().map(u32::from).collect(), &expected().map(|x| x as u32).collect::<Vec<_>>());
            expect(rank, values().map(u64::from).collect(), &expected().map(|x| x as u64).collect::<Vec<_>>());
            let complex = values().map(|value| [narrow(value), 1.0]).collect();
            expect(rank, complex, &(0..100).map(|i| [sums(i), 1.0]).collect::<Vec<_>>());
            let complex = values().map(|value| [f64::from(value), 1.0]).collect();
            expect(rank, complex, &expected().map(|x| [x, 1.0]).collect::<Vec<_>>());
            let negative = |value: u8| -i8::try_from(value / 4).unwrap();
            let total = |i: u8| (0..size).map(|r| i32::from(negative(i + r))).sum::<i32>() / i32::from(size);
            let expected = (0..100).map(|i| i8::try_from(total(i)).unwrap()).collect::<Vec<_>>();
            expect(rank, values().map(negative).collect(), &expected);
        });
    }
}

#[test]
fn every_root_broadcasts_every_dtype() {
    for world in worlds() {
        world.run(|rank| {
            for root in 0..rank.size {
                let mut flags: Vec<bool> = (0..2000).map(|i| rank.rank == root && i % 3 == 0).collect();
                let mut halves = vec![f16::from_f32(rank.rank as f32); 70];
                let mut longs = vec![rank.rank as i64; 1000];
                rank.broadcast(root, vec![tensor(&mut flags), tensor(&mut halves), tensor(&mut longs)]).unwrap();
                assert!(flags.iter().enumerate().all(|(i, &flag)| flag == (i % 3 == 0)));
                assert!(halves.iter().all(|&half| half == f16::from_f32(root as f32)));
                assert!(longs.iter().all(|&long| long == root as i64));
            }
        });
    }
}

#[test]
fn lists_of_thousands_of_tensors_and_empty_tensors() {
    for threads in [1, 3] {
        World { threads, ..World::new(&[2, 1]) }.run(|rank| {
            let mut list: Vec<Vec<f32>> = (0..3000).map(|i| vec![(i + rank.rank) as f32; i % 7]).collect();
            rank.average(list.iter_mut().map(|data| tensor(data)).collect()).unwrap();
            for (i, data) in list.iter().enumerate() {
                assert!(data.len() == i % 7 && data.iter().all(|&value| value == i as f32 + 1.0), "{i}: {data:?}");
            }
        });
    }
}

#[test]
fn tiny_and_long_tensors_in_shared_memory() {
    // An offset takes eight bytes: those of the second list exceed one slot.
    for lengths in [&[70_000, 1, 3, 0, 2, 9_000, 1][..], &[1; 5_000], &[40_000, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]] {
        for (threads, hosts) in [(1, &[3][..]), (3, &[3]), (1, &[1, 2]), (2, &[2, 1])] {
            World { threads, access: Access::Peer, ..World::new(hosts) }.run(|rank| {
                let mut list: Vec<Vec<f32>> = lengths.iter().map(|&len| vec![rank.rank as f32; len]).collect();
                rank.average(list.iter_mut().map(|data| tensor(data)).collect()).unwrap();
                assert!(list.iter().flatten().all(|&value| value == 1.0));
            });
        }
    }
}

#[test]
fn towers_are_averaged_and_all_get_the_result() {
    for world in worlds() {
        World { threads: 2, ..world }.run(|rank| {
            let size = rank.size as f32;
            let mut towers: Vec<(Vec<f32>, Vec<bf16>, Vec<i8>)> = (0..3)
                .map(|tower| {
                    let value = (3 * rank.rank + tower) as f32;
                    (vec![value; 50_000], vec![bf16::from_f32(value); 33], vec![-(value as i8); 5])
                })
                .collect();
            let lists = towers.iter_mut().map(|(a, b, c)| vec![tensor(a), tensor(b), tensor(c)]).collect();
            rank.call(Op::MEAN, lists, "towers").unwrap();
            let mean = (3.0 * size - 1.0) / 2.0;
            for (a, b, c) in &towers {
                assert!(a.iter().all(|&value| value == mean));
                assert!(b.iter().all(|&value| value == bf16::from_f32(mean)));
                assert!(c.iter().all(|&value| value == -(mean as i8)));
            }
            let mut towers: Vec<Vec<i32>> = (0..2).map(|tower| vec![(10 * rank.rank + tower) as i32; 9]).collect();
            let root = rank.size - 1;
            let lists = towers.iter_mut().map(|data| vec![tensor(data)]).collect();
            rank.call(Op::broadcast(root), lists, "towers").unwrap();
            assert!(towers.iter().flatten().all(|&value| value == 10 * root as i32));
        });
    }
}

#[test]
fn acc_f64_keeps_what_float32_loses() {
    let values = [1e8f32, 1.0, -1e8, 1.0];
    for (acc_f64, mean) in [(false, 0.25), (true, 0.5)] {
        World { acc_f64, ..World::new(&[4]) }.run(|rank| expect(rank, vec![values[rank.rank]; 3], &[mean; 3]));
    }
}

#[test]
fn many_calls_in_flight_complete_in_order() {
    World { threads: 2, ..World::new(&[2, 2]) }.run(|rank| {
        let mut data: Vec<Vec<f64>> = (0..200).map(|i| vec![(i * rank.rank) as f64; 1 + 37 * i]).collect();
        let calls: Vec<_> = data
            .iter_mut()
            .enumerate()
            .map(|(i, data)| rank.start(Op::MEAN, vec![vec![tensor(data)]], &i.to_string()))
            .collect();
        calls.into_iter().for_each(|call| call.recv().unwrap().unwrap());
        for (i, data) in data.iter().enumerate() {
            assert!(data.iter().all(|&value| value == i as f64 * 1.5));
        }
        rank.call(Op::BARRIER, Vec::new(), "").unwrap();
    });
}

/// The mean in the documented order: ranks within a host, then the hosts. Hosts beyond a power of two are added to
/// their predecessors, then neighbours are added, then neighbouring pairs, and so on.
fn reference(hosts: &[usize], inputs: &[Vec<f32>]) -> Vec<f32> {
    let mut next = inputs.iter();
    let sums: Vec<Vec<f32>> = hosts
        .iter()
        .map(|&ranks| {
            let add = |sum: Vec<f32>, part: &Vec<f32>| sum.iter().zip(part).map(|(a, b)| a + b).collect();
            let first = next.next().unwrap().clone();
            next.by_ref().take(ranks - 1).fold(first, add)
        })
        .collect();
    let pair_up = |sums: Vec<Vec<f32>>, pairs: usize| -> Vec<Vec<f32>> {
        let add = |pair: &[Vec<f32>]| pair[0].iter().zip(&pair[1]).map(|(a, b)| a + b).collect();
        let (paired, single) = sums.split_at(2 * pairs);
        paired.chunks(2).map(add).chain(single.iter().cloned()).collect()
    };
    let mut sums = pair_up(sums, hosts.len() - (1 << hosts.len().ilog2()));
    while sums.len() > 1 {
        let pairs = sums.len() / 2;
        sums = pair_up(sums, pairs);
    }
    let count = inputs.len() as f32;
    sums[0].iter().map(|sum| sum / count).collect()
}

/// Ranks that are alone on their hosts send half types as they are: the bits are those of the other algorithms, which send
/// partial sums, and a pairwise exchange sends two thirds of the bytes.
#[test]
fn half_types_between_hosts_of_one_rank() {
    const LEN: usize = 6000;
    let operators = [ReduceOp::Sum, ReduceOp::Mean, ReduceOp::Max, ReduceOp::Sum.with_factors(0.3, 1.7)];
    for (hosts, access) in
        [(&[1, 1][..], Access::Slots), (&[1, 1], Access::Peer), (&[1, 1, 1], Access::Slots), (&[1; 5], Access::Peer)]
    {
        let size = hosts.len();
        let all = SAME_BITS.map(|algorithm| {
            World { slot: 64 << 10, algorithm, access, threads: 2, ..World::new(hosts) }.run(|rank| {
                let value = |index: usize| ((index as f32 * 0.7 + rank.rank as f32 * 1e3).sin() * 1e2, index);
                let mut results: Vec<Vec<u16>> = Vec::new();
                for op in operators {
                    let ops = [Op::allreduce(op), Op::reduce(op, size - 1), Op::reduce_scatter(op)];
                    for (op, dtype) in ops.into_iter().flat_map(|op| [(op, DType::BF16), (op, DType::F16)]) {
                        let bits = |(value, _): (f32, usize)| match dtype {
                            DType::BF16 => bf16::from_f32(value).to_bits(),
                            _ => f16::from_f32(value).to_bits(),
                        };
                        // Another type in the middle, whose partial sums are as wide as its elements.
                        let blocks = if op.pattern() == Pattern::Scatter { size } else { 1 };
                        let input: Vec<u16> = (0..blocks * LEN).map(|index| bits(value(index))).collect();
                        let floats: Vec<f32> = (0..blocks * 999).map(|index| value(index).0).collect();
                        let (mut output, mut sums) = (vec![0u16; LEN], vec![0f32; 999]);
                        let halves = Buffer::new(input.as_ptr().cast(), output.as_mut_ptr().cast(), LEN, dtype);
                        let wide = Buffer::new(floats.as_ptr().cast(), sums.as_mut_ptr().cast(), 999, DType::F32);
                        let list = [wide, halves].map(|buffer| Tensor::new(buffer, &[])).to_vec();
                        rank.call(op, vec![list], "").unwrap();
                        results.push(output);
                        results.push(
                            sums.iter().flat_map(|sum| [sum.to_bits() as u16, (sum.to_bits() >> 16) as u16]).collect(),
                        );
                    }
                }
                results
            })
        });
        assert!(all.iter().all(|results| *results == all[0]), "{hosts:?} {access:?}");
    }
    let sent = |dtype: DType| {
        let algorithm = AlgorithmSetting::Always(Algorithm::Pairwise);
        let bytes = World { slot: 64 << 10, algorithm, ..World::new(&[1, 1]) }.run(|rank| {
            let mut data = vec![0u16; 400_000];
            let buffer = Buffer::in_place(data.as_mut_ptr().cast(), 800_000 / dtype.size(), dtype);
            rank.call(Op::MEAN, vec![vec![Tensor::new(buffer, &[])]], "").unwrap();
            rank.team.group().stats()["sent_bytes"].as_u64().unwrap()
        });
        bytes[0] as f64 / 800_000.0
    };
    // Each host sends a half of the elements and a half of the results, and headers.
    assert!((sent(DType::BF16) - 1.0).abs() < 0.01 && (sent(DType::F32) - 1.0).abs() < 0.01, "{}", sent(DType::BF16));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases(64)))]

    /// The bits depend on none of these: the algorithm between hosts, chunks, threads, the split into tensors, the tree
    /// of notices, and shared memory, also with out-of-place tensors on some ranks. A ring gives equal bits on all ranks, which may
    /// differ from those of the other algorithms.
    #[test]
    fn bits_depend_only_on_ranks_per_host(
        hosts in prop::sample::select(SHAPES.to_vec()),
        threads in 1usize..4,
        lines in 1usize..40,
        cuts in prop::collection::vec(0usize..3000, 0..4),
        seed in any::<u32>(),
        access in prop::sample::select(Access::ALL.to_vec()),
        out_of_place in prop::collection::vec(any::<bool>(), 8),
        algorithm in prop::sample::select([&SAME_BITS[..], &[RING]].concat()),
        oversubscribed in any::<bool>(),
        fan_out in prop::sample::select(vec![None, Some(1), Some(2)]),
    ) {
        let len = 3000;
        let value = |rank: usize, i: usize| {
            let mixed = (seed ^ (rank * 7919 + i) as u32).wrapping_mul(2_654_435_761);
            (f64::from(mixed) / 1e5).sin() as f32 * 10f32.powi(i32::try_from(mixed % 12).unwrap() - 6)
        };
        let size = hosts.iter().sum();
        let inputs: Vec<Vec<f32>> = (0..size).map(|rank| (0..len).map(|i| value(rank, i)).collect()).collect();
        let expected = reference(hosts, &inputs);
        let mut cuts = cuts;
        cuts.sort_unstable();
        let world =
            World { threads, slot: lines * 64, access, algorithm, oversubscribed, fan_out, ..World::new(hosts) };
        let results = world.run(|rank| {
            let mut data = inputs[rank.rank].clone();
            let mut means = vec![0f32; len];
            let is_out_of_place = out_of_place[rank.rank % out_of_place.len()];
            let mut list = Vec::new();
            for (&from, &to) in [0].iter().chain(&cuts).zip(cuts.iter().chain(&[len])) {
                let src = data[from..to].as_mut_ptr().cast::<u8>();
                let dst = if is_out_of_place { means[from..to].as_mut_ptr().cast() } else { src };
                list.push(Tensor::new(Buffer::new(src, dst, to - from, DType::F32), &[]));
            }
            rank.average(list).unwrap();
            if is_out_of_place { means } else { data }
        });
        let rings = algorithm == RING && hosts.len() > 1;
        let expected = if rings { &results[0] } else { &expected };
        for data in &results {
            prop_assert!(data.iter().zip(expected).all(|(a, b)| a.to_bits() == b.to_bits()));
        }
        let exact = |i: usize| inputs.iter().map(|input| f64::from(input[i])).sum::<f64>() / size as f64;
        let largest = |i: usize| inputs.iter().map(|input| input[i].abs()).fold(0f32, f32::max);
        prop_assert!((0..len).all(|i| (f64::from(results[0][i]) - exact(i)).abs() <= f64::from(largest(i)) * 1e-6));
    }
}
