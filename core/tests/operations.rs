//! Every collective against a plain reference, on ranks that are threads: operators, element types, world shapes,
//! lengths around the borders of chunks, lists, blocks of different lengths, memory in place; mismatches.
#![allow(missing_docs, clippy::unwrap_used)]

mod common;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use common::{Rank, World};
use dl_comm_core::buffer::{Buffer, Tensor};
use dl_comm_core::cases::{cases, wants_all};
use dl_comm_core::collective::{Bounds, Collective, Counts, Op, Pattern, Root, TABLE};
use dl_comm_core::dtype::DType;
use dl_comm_core::error::{Error, Result};
use dl_comm_core::group::{CallOptions, Timeout};
use dl_comm_core::reduce::ReduceOp;
use dl_comm_core::transport::in_process::Access;
use half::{bf16, f16};
use proptest::prelude::*;

const SHAPES: [&[usize]; 13] = [
    &[1],
    &[2],
    &[3],
    &[7],
    &[1, 1],
    &[2, 2],
    &[2, 1],
    &[1, 3],
    &[1, 3, 2],
    &[2, 2, 2],
    &[1, 1, 1, 1],
    &[3, 1, 2, 1],
    &[1, 5],
];

/// One case on all ranks.
#[derive(Debug, Clone)]
struct Case {
    op: Op,
    /// Element type and length of each tensor.
    tensors: Vec<(DType, usize)>,
    /// Whether the blocks of the only tensor have different lengths.
    ragged: bool,
    in_place: bool,
}

/// The bytes of `value` as an element.
fn encode(dtype: DType, value: i64) -> Vec<u8> {
    match dtype {
        DType::F16 => f16::from_f64(value as f64).to_le_bytes().to_vec(),
        DType::BF16 => bf16::from_f64(value as f64).to_le_bytes().to_vec(),
        DType::F32 => (value as f32).to_le_bytes().to_vec(),
        DType::F64 => (value as f64).to_le_bytes().to_vec(),
        DType::Complex64 => [(value as f32).to_le_bytes(), (-value as f32).to_le_bytes()].concat(),
        DType::Complex128 => [(value as f64).to_le_bytes(), (-value as f64).to_le_bytes()].concat(),
        DType::Bool => vec![u8::from(value & 1 == 1)],
        integer => value.to_le_bytes()[..integer.size()].to_vec(),
    }
}

/// Element `index` of the block that `sender` sends to `receiver`: small, and with an exact mean.
fn value(op: Op, size: usize, sender: usize, receiver: usize, index: usize) -> i64 {
    let receiver = if op.pattern() == Pattern::Line { 0 } else { receiver };
    let value = match op.reduce.without_factors() {
        _ if !op.collective.reduces => (sender * 31 + receiver * 7 + index * 3) % 100,
        ReduceOp::Mean => (index + receiver) % 5 + 2 * sender,
        ReduceOp::Product => 1 + usize::from((index + sender + receiver).is_multiple_of(size.max(4))),
        _ => (index * 7 + sender * 3 + receiver) % 8,
    };
    i64::try_from(value).unwrap()
}

/// After how many elements the values of a block repeat.
fn period(op: Op, size: usize) -> usize {
    match op.reduce.without_factors() {
        _ if !op.collective.reduces => 100,
        ReduceOp::Mean => 5,
        ReduceOp::Product => size.max(4),
        _ => 8,
    }
}

/// Appends a block of `len` elements, of which the first `period` are computed: the reference must not take longer than
/// the call.
fn extend(block: &mut Vec<u8>, len: usize, period: usize, element: impl Fn(usize) -> Vec<u8>) {
    let (start, computed) = (block.len(), len.min(period));
    if computed > 0 {
        let first: Vec<u8> = (0..computed).flat_map(element).collect();
        block.extend(first.repeat(len.div_ceil(period)));
        block.truncate(start + len * (first.len() / computed));
    }
}

/// The reduction of the ranks' values.
fn reduced(op: Op, dtype: DType, size: usize, receiver: &dyn Fn(usize) -> usize, index: usize) -> Vec<u8> {
    let values = (0..size).map(|sender| value(op, size, sender, receiver(sender), index));
    let bits = values.clone().map(|value| if dtype == DType::Bool { value & 1 } else { value });
    encode(
        dtype,
        match op.reduce {
            // The factors are 1 and 1, or 2 and 1/2.
            ReduceOp::ScaledProduct { pre, .. } => values.product::<i64>() << if pre == 1.0 { 0 } else { size - 1 },
            scaled if scaled.factors().is_some() => {
                return reduced(Op { reduce: scaled.without_factors(), ..op }, dtype, size, receiver, index);
            }
            ReduceOp::Sum => values.sum(),
            ReduceOp::Mean => values.sum::<i64>() / i64::try_from(size).unwrap(),
            ReduceOp::Min => values.min().unwrap(),
            ReduceOp::Max => values.max().unwrap(),
            ReduceOp::Product => values.product(),
            ReduceOp::BitAnd => bits.reduce(|a, b| a & b).unwrap(),
            ReduceOp::BitOr => bits.reduce(|a, b| a | b).unwrap(),
            _ => bits.reduce(|a, b| a ^ b).unwrap(),
        },
    )
}

/// The length of the block from `sender` to `receiver`; in a gather of the sender, in a scatter of the receiver.
fn length(case: &Case, tensor: usize, sender: usize, receiver: usize) -> usize {
    let len = case.tensors[tensor].1;
    if !case.ragged {
        return len;
    }
    // The longest block of a tensor is not that of the same rank as of another.
    match case.op.pattern() {
        Pattern::Line => len,
        Pattern::Gather => len * ((sender + tensor) % 3) + sender,
        Pattern::Scatter => len * ((receiver + tensor) % 3) + receiver,
        Pattern::Exchange => (len * ((sender + 2 * receiver + tensor) % 4)) / 2 + sender,
    }
}

fn counts(case: &Case, me: usize, size: usize) -> Counts {
    if !case.ragged {
        return Counts::Even;
    }
    let bounds = |length: &dyn Fn(usize, usize) -> usize| {
        let of_tensor = |tensor| Bounds::new(&(0..size).map(|peer| length(tensor, peer)).collect::<Vec<_>>()).unwrap();
        (0..case.tensors.len()).map(of_tensor).collect()
    };
    match case.op.pattern() {
        Pattern::Exchange => Counts::Pairs {
            send: bounds(&|tensor, peer| length(case, tensor, me, peer)),
            receive: bounds(&|tensor, peer| length(case, tensor, peer, me)),
        },
        _ => Counts::Ranks(bounds(&|tensor, peer| length(case, tensor, peer, peer))),
    }
}

/// Aligned memory for any element type.
fn memory(bytes: &[u8]) -> Vec<u128> {
    let mut memory = vec![0u128; bytes.len().div_ceil(16) + 1];
    // SAFETY: the vector has at least as many bytes.
    unsafe { memory.as_mut_ptr().cast::<u8>().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
    memory
}

fn bytes(memory: &[u128], len: usize) -> &[u8] {
    // SAFETY: numbers have no invalid bytes; `memory` has at least `len`.
    unsafe { std::slice::from_raw_parts(memory.as_ptr().cast(), len) }
}

fn submit(rank: &Rank, op: Op, tensors: Vec<Tensor>, counts: Counts, name: &str) -> Result<()> {
    let options = CallOptions { name: name.to_owned(), counts, caller_blocks: true, ..CallOptions::default() };
    start(rank, op, tensors, options).recv().unwrap()
}

fn start(rank: &Rank, op: Op, tensors: Vec<Tensor>, options: CallOptions) -> Receiver<Result<()>> {
    let (sender, receiver) = channel();
    let done = Box::new(move |result| sender.send(result).unwrap());
    // SAFETY: the tests wait for the outcome before they drop the memory.
    unsafe { rank.team.group().submit(op, vec![tensors], options, done) };
    receiver
}

/// Runs a case and compares the outputs with the reference.
fn check(rank: &Rank, case: &Case) {
    let (me, size, op) = (rank.rank, rank.size, case.op);
    let blocks = |all: bool| if all { 0..size } else { me..me + 1 };
    let (all_inputs, all_outputs) = (
        matches!(op.pattern(), Pattern::Scatter | Pattern::Exchange),
        matches!(op.pattern(), Pattern::Gather | Pattern::Exchange),
    );
    let mut all: Vec<(Vec<u128>, Vec<u128>, Vec<u8>)> = Vec::new();
    let mut tensors = Vec::new();
    for (tensor, &(dtype, len)) in case.tensors.iter().enumerate() {
        let mut input = Vec::new();
        for receiver in blocks(all_inputs) {
            extend(&mut input, length(case, tensor, me, receiver), period(op, size), |index| {
                encode(dtype, value(op, size, me, receiver, index))
            });
        }
        let mut expected = Vec::new();
        for sender in blocks(all_outputs) {
            let source = if op.has_input(sender) || all_outputs { sender } else { op.root };
            extend(&mut expected, length(case, tensor, sender, me), period(op, size), |index| {
                match (op.pattern(), op.collective.reduces) {
                    (Pattern::Line, true) => reduced(op, dtype, size, &|sender| sender, index),
                    (Pattern::Line, false) => encode(dtype, value(op, size, op.root, op.root, index)),
                    (Pattern::Gather, _) => encode(dtype, value(op, size, sender, sender, index)),
                    (Pattern::Scatter, true) => reduced(op, dtype, size, &|_| me, index),
                    (Pattern::Scatter, false) => encode(dtype, value(op, size, op.root, me, index)),
                    (Pattern::Exchange, _) => encode(dtype, value(op, size, source, me, index)),
                }
            });
        }
        let (mut input, mut output) = (memory(&input), memory(&vec![0xa5; expected.len()]));
        let own = |peer: usize| (0..peer).map(|other| length(case, tensor, other, other) * dtype.size()).sum::<usize>();
        let (mut src, mut dst) = (input.as_mut_ptr().cast::<u8>(), output.as_mut_ptr().cast::<u8>());
        if case.in_place {
            match op.pattern() {
                Pattern::Line => src = dst,
                // SAFETY: the offset is inside the output.
                Pattern::Gather => src = unsafe { dst.add(own(me)) },
                // SAFETY: as above.
                Pattern::Scatter => dst = unsafe { src.add(own(me)) },
                Pattern::Exchange => {}
            }
            let bytes =
                bytes(&input, input.len() * 16)[..expected.len().min(own_len(case, tensor, me, dtype))].to_vec();
            if op.pattern() != Pattern::Scatter {
                // SAFETY: this rank's block has these bytes.
                unsafe { src.copy_from(bytes.as_ptr(), bytes.len()) };
            }
        }
        if !op.has_output(me) {
            expected = vec![0xa5; expected.len()];
            if case.in_place {
                all.push((input, output, Vec::new()));
                tensors.push(Tensor::new(Buffer::new(src, std::ptr::null_mut(), len, dtype), &[]));
                continue;
            }
        }
        tensors.push(Tensor::new(Buffer::new(src, dst, len, dtype), &[]));
        if case.in_place && op.pattern() == Pattern::Scatter {
            // The result lies in the input.
            let start = own(me);
            all.push((output, input, expected));
            let last = all.len() - 1;
            all[last].0 = vec![start as u128];
        } else {
            all.push((input, output, expected));
        }
    }
    submit(rank, op, tensors, counts(case, me, size), "").unwrap();
    for (tensor, (input, output, expected)) in all.iter().enumerate() {
        let start = if case.in_place && op.pattern() == Pattern::Scatter && op.has_output(me) {
            usize::try_from(input[0]).unwrap()
        } else {
            0
        };
        let found = &bytes(output, start + expected.len())[start..];
        if found != expected {
            let different = (0..found.len()).find(|&index| found[index] != expected[index]);
            panic!("rank {me} of {size}, tensor {tensor}, byte {different:?}: {case:?}");
        }
    }
}

fn own_len(case: &Case, tensor: usize, me: usize, dtype: DType) -> usize {
    length(case, tensor, me, me) * dtype.size()
}

/// Every collective, with each root and these operators.
fn operations(size: usize, operators: &[ReduceOp]) -> Vec<Op> {
    let with = |collective: &Collective, reduce| {
        (0..size).map(|root| Op::from_code(collective.code, reduce, root).unwrap()).collect::<Vec<_>>()
    };
    let mut all = Vec::new();
    for collective in TABLE.iter().filter(|collective| collective.name != "barrier") {
        for &reduce in if collective.reduces { operators } else { &operators[..1] } {
            for op in with(collective, reduce) {
                if !all.contains(&op) {
                    all.push(op);
                }
            }
        }
    }
    all
}

#[test]
fn every_collective_at_every_length() {
    let lengths: &[usize] =
        if wants_all() { &[0, 1, 15, 16, 17, 127, 1024, 1025, 3000] } else { &[0, 1, 17, 1025, 3000] };
    for hosts in SHAPES {
        for &threads in if hosts.len() > 2 { &[1][..] } else { &[1, 3] } {
            World { threads, ..World::new(hosts) }.run(|rank| {
                for op in operations(rank.size, &[ReduceOp::Sum, ReduceOp::Mean, ReduceOp::Max]) {
                    for &len in lengths {
                        for (ragged, in_place) in [(false, false), (false, true), (true, false)] {
                            if ragged && op.pattern() == Pattern::Line {
                                continue;
                            }
                            check(rank, &Case { op, tensors: vec![(DType::F32, len)], ragged, in_place });
                        }
                    }
                }
            });
        }
    }
}

#[test]
fn every_operator_and_element_type() {
    let mut operators = ReduceOp::ALL.to_vec();
    operators.extend(ReduceOp::ALL.into_iter().filter(|op| op.factors().is_some()).map(|op| op.with_factors(2.0, 0.5)));
    for hosts in [&[1][..], &[3], &[2, 1], &[1, 2, 2]] {
        World { threads: 2, ..World::new(hosts) }.run(|rank| {
            for op in operations(rank.size, &operators) {
                for dtype in DType::ALL {
                    let case = Case { op, tensors: vec![(dtype, 700)], ragged: false, in_place: false };
                    if !op.collective.reduces || op.reduce.check(dtype).is_ok() {
                        check(rank, &case);
                    } else {
                        let mut data = memory(&[0; 32]);
                        let buffer = Buffer::in_place(data.as_mut_ptr().cast(), 1, dtype);
                        let result =
                            submit(rank, Op::allreduce(op.reduce), vec![Tensor::new(buffer, &[])], Counts::Even, "");
                        assert!(matches!(result, Err(Error::DType(text)) if text.contains(op.reduce.name())));
                    }
                }
            }
        });
    }
}

#[test]
fn lists_of_tensors_are_fused() {
    let list = vec![(DType::F32, 900), (DType::I64, 3), (DType::F32, 0), (DType::BF16, 2100), (DType::F32, 17)];
    for hosts in SHAPES {
        World { threads: 2, ..World::new(hosts) }.run(|rank| {
            for op in operations(rank.size, &[ReduceOp::Sum]) {
                for (ragged, in_place) in [(false, false), (false, true), (true, false)] {
                    if !ragged || op.pattern() != Pattern::Line {
                        check(rank, &Case { op, tensors: list.clone(), ragged, in_place });
                    }
                }
            }
        });
    }
}

/// Tensors that the ranks of a host reach without slots: all, some, or until the system refuses it.
#[test]
fn every_collective_with_every_access() {
    let list = vec![(DType::F32, 900), (DType::I64, 3), (DType::F32, 0), (DType::BF16, 2100), (DType::F32, 17)];
    for access in Access::ALL {
        for (hosts, threads) in [(&[1][..], 1), (&[2], 1), (&[3], 1), (&[3], 3), (&[2, 1], 2)] {
            World { threads, access, ..World::new(hosts) }.run(|rank| {
                for op in operations(rank.size, &[ReduceOp::Sum]) {
                    for len in [0, 17, 1025, 20_000] {
                        for (ragged, in_place) in [(false, false), (false, true), (true, false)] {
                            if !ragged || op.pattern() != Pattern::Line {
                                check(rank, &Case { op, tensors: vec![(DType::F32, len)], ragged, in_place });
                            }
                        }
                    }
                    for (ragged, in_place) in [(false, false), (false, true), (true, false)] {
                        if !ragged || op.pattern() != Pattern::Line {
                            check(rank, &Case { op, tensors: list.clone(), ragged, in_place });
                        }
                    }
                }
            });
        }
    }
}

/// Long calls wrap the flags of channels whose rounds do not raise all of them.
#[test]
fn many_chunks_and_many_calls() {
    let rounds = if wants_all() { 3 } else { 1 };
    for hosts in [&[2][..], &[3], &[2, 1]] {
        for access in [Access::Slots, Access::Private] {
            World { threads: 2, slot: 512, access, ..World::new(hosts) }.run(|rank| {
                for round in 0..rounds {
                    for op in operations(rank.size, &[ReduceOp::Sum]) {
                        for (len, ragged) in [(40_000, false), (3, false), (5_000, op.pattern() != Pattern::Line)] {
                            let tensors = vec![(DType::I32, len + round)];
                            check(rank, &Case { op, tensors, ragged, in_place: false });
                            if round == 0 {
                                let tensors = vec![(DType::I32, len), (DType::F64, len / 3), (DType::I32, 700)];
                                check(rank, &Case { op, tensors, ragged, in_place: false });
                            }
                        }
                    }
                }
            });
        }
    }
}

/// Chunks that are shorter than a slot take turns in its places, and calls of one kind take turns between paths. Calls of
/// other lengths, and calls that do not match, come between them.
#[test]
fn calls_that_are_shorter_than_a_slot() {
    for (hosts, access) in
        [(&[2][..], Access::Slots), (&[3], Access::Slots), (&[4], Access::Measured), (&[2, 1], Access::Slots)]
    {
        World { slot: 512 << 10, access, ..World::new(hosts) }.run(|rank| {
            for round in 0..3 {
                for op in operations(rank.size, &[ReduceOp::Sum]) {
                    for len in [2000, 2100 + round, 9000, 17, 20_000] {
                        let ragged = round == 2 && op.pattern() != Pattern::Line;
                        check(rank, &Case { op, tensors: vec![(DType::I32, len)], ragged, in_place: false });
                    }
                    let mut memory = vec![0f32; 8192 * rank.size];
                    let buffer = Buffer::in_place(memory.as_mut_ptr().cast(), 2048 + rank.rank, DType::F32);
                    let error = submit(rank, Op::MEAN, vec![Tensor::new(buffer, &[])], Counts::Even, "x");
                    assert!(matches!(error, Err(Error::Mismatch(_))));
                }
            }
        });
    }
}

#[test]
fn different_collectives_are_a_mismatch_and_the_next_calls_work() {
    for (hosts, access) in [
        (&[2][..], Access::Slots),
        (&[2], Access::EvenPeerOddPrivate),
        (&[3], Access::Private),
        (&[1, 2], Access::Slots),
    ] {
        World { access, ..World::new(hosts) }.run(|rank| {
            let all = operations(rank.size, &[ReduceOp::Sum, ReduceOp::Max]);
            for pair in all.windows(2) {
                let op = pair[usize::from(rank.rank == 0)];
                let (mut input, mut output) = (memory(&[1; 400]), memory(&[2; 400]));
                let buffer = Buffer::new(input.as_mut_ptr().cast(), output.as_mut_ptr().cast(), 5, DType::F32);
                let error = submit(rank, op, vec![Tensor::new(buffer, &[])], Counts::Even, "x").unwrap_err();
                let Error::Mismatch(text) = &error else { panic!("{error:?}") };
                assert!(pair.iter().all(|op| text.contains(&op.title())), "{text}");
                assert_eq!(bytes(&output, 400), [2; 400], "{text}");
                check(rank, &Case { op: pair[0], tensors: vec![(DType::F32, 5)], ragged: false, in_place: false });
            }
        });
    }
}

#[test]
fn an_all_to_all_whose_pairs_differ_is_a_mismatch() {
    for (hosts, access) in [(&[3][..], Access::Slots), (&[3], Access::Private), (&[1, 2], Access::Slots)] {
        World { access, ..World::new(hosts) }.run(|rank| {
            let size = rank.size;
            let mut send = vec![4; size];
            if rank.rank == 1 {
                send[2] = 5;
            }
            let even = || Bounds::new(&vec![4; size]).unwrap();
            for tensors in [1, 2] {
                let mut counts = vec![even(); tensors];
                *counts.last_mut().unwrap() = Bounds::new(&send).unwrap();
                let counts = Counts::Pairs { send: counts, receive: vec![even(); tensors] };
                let mut all: Vec<_> = (0..tensors).map(|_| (memory(&[1; 400]), memory(&[2; 400]))).collect();
                let tensor = |(input, output): &mut (Vec<u128>, Vec<u128>)| {
                    let (src, dst) = (input.as_mut_ptr().cast(), output.as_mut_ptr().cast());
                    Tensor::new(Buffer::new(src, dst, 0, DType::F32), &[])
                };
                let list = all.iter_mut().map(tensor).collect();
                let error = submit(rank, Op::ALLTOALL, list, counts, "x").unwrap_err();
                let Error::Mismatch(text) = &error else { panic!("{error:?}") };
                let of = if tensors > 1 { " of tensor 1" } else { "" };
                let wanted = format!("rank 1 sends 5 elements{of} to rank 2, which expects 4");
                assert!(text.contains(&wanted), "{text}");
                assert!(all.iter().all(|(_, output)| bytes(output, 400) == [2; 400]));
                let tensors = vec![(DType::F32, 9); tensors];
                check(rank, &Case { op: Op::ALLTOALL, tensors, ragged: true, in_place: false });
            }
        });
    }
}

/// Every rank starts the same calls in an order of its own.
#[test]
fn calls_in_different_order_run_in_one() {
    for hosts in [&[2][..], &[3], &[2, 1]] {
        World { threads: 2, ..World::new(hosts) }.run(|rank| {
            let all = operations(rank.size, &[ReduceOp::Sum, ReduceOp::Max]);
            let value = |sender: usize| sender as f32 + 1.0;
            let mut memory: Vec<(Vec<f32>, Vec<f32>)> =
                all.iter().map(|_| (vec![value(rank.rank); 30 * rank.size], vec![0.0; 30 * rank.size])).collect();
            let mut calls = Vec::new();
            for index in 0..all.len() {
                let index = if rank.rank == 1 { all.len() - 1 - index } else { (index + 5 * rank.rank) % all.len() };
                let (src, dst) = &mut memory[index];
                let buffer = Buffer::new(src.as_mut_ptr().cast(), dst.as_mut_ptr().cast(), 30, DType::F32);
                let options = CallOptions { name: index.to_string(), ..CallOptions::default() };
                calls.push(start(rank, all[index], vec![Tensor::new(buffer, &[])], options));
            }
            calls.into_iter().for_each(|call| call.recv().unwrap().unwrap());
            let total: f32 = (0..rank.size).map(value).sum();
            for (op, (_, found)) in all.iter().zip(&memory) {
                let expected = match op.reduce {
                    _ if !op.has_output(rank.rank) => 0.0,
                    ReduceOp::Max if op.collective.reduces => value(rank.size - 1),
                    _ if op.collective.reduces => total,
                    _ if op.collective.root == Root::Source => value(op.root),
                    _ => value(0),
                };
                assert_eq!(found[..30], [expected; 30], "{op:?}");
            }
        });
    }
}

/// A rank that never calls: the others fail at the deadline with the call's name, and no output has changed.
#[test]
fn a_passed_deadline_writes_nothing() {
    for (hosts, access) in
        [(&[2][..], Access::Slots), (&[2], Access::Private), (&[2], Access::Peer), (&[1, 2], Access::Slots)]
    {
        for op in operations(2, &[ReduceOp::Sum]) {
            let ended = AtomicUsize::new(0);
            World { access, match_timeout: Duration::from_secs(60), ..World::new(hosts) }.run(|rank| {
                if rank.rank == 0 {
                    // Its group must not end before the others have failed.
                    let since = Instant::now();
                    while ended.load(Ordering::Acquire) + 1 < rank.size && since.elapsed() < Duration::from_secs(60) {
                        std::thread::sleep(Duration::from_millis(5));
                    }
                    return;
                }
                let (mut src, mut dst) = (vec![1f32; 40 * rank.size], vec![2f32; 40 * rank.size]);
                let buffer = Buffer::new(src.as_mut_ptr().cast(), dst.as_mut_ptr().cast(), 40, DType::F32);
                let timeout = Timeout::from_seconds(0.1);
                let options = CallOptions { name: "late".into(), timeout, ..CallOptions::default() };
                let error = start(rank, op, vec![Tensor::new(buffer, &[])], options).recv().unwrap().unwrap_err();
                ended.fetch_add(1, Ordering::Release);
                assert!(matches!(&error, Error::Timeout(text) if text.contains(&op.title())), "{error:?}");
                assert!(dst.iter().all(|&value| value == 2.0));
            });
        }
    }
}

#[test]
fn invalid_arguments_are_rejected() {
    World::new(&[2]).run(|rank| {
        let mut data = memory(&[0; 4096]);
        let at = |offset: usize| data.as_ptr().cast::<u8>().wrapping_add(offset).cast_mut();
        let error = |op: Op, src: *mut u8, dst: *mut u8, len: usize, counts: Counts| {
            let tensor = Tensor::new(Buffer::new(src, dst, len, DType::F32), &[]);
            submit(rank, op, vec![tensor], counts, "").unwrap_err().to_string()
        };
        let (none, null) = (Counts::Even, std::ptr::null_mut());
        assert!(error(Op::gather(2), at(0), at(64), 1, none.clone()).contains("root 2 is not a rank"));
        // The blocks of an output must not overlap the input, except this rank's own block.
        assert!(error(Op::ALLGATHER, at(4), at(0), 2, none.clone()).contains("share memory"));
        assert!(error(Op::ALLTOALL, at(0), at(0), 2, none.clone()).contains("share memory"));
        assert!(error(Op::reduce_scatter(ReduceOp::Sum), at(0), at(4), 2, none.clone()).contains("share memory"));
        assert!(error(Op::ALLGATHER, null, at(0), 2, none.clone()).contains("null"));
        assert!(error(Op::ALLGATHER, at(0), at(64), usize::MAX / 8, none).contains("addressable"));
        let bounds = |lengths: &[usize]| Bounds::new(lengths).unwrap();
        let ranks = |lengths: &[usize]| Counts::Ranks(vec![bounds(lengths)]);
        assert!(error(Op::ALLGATHER, at(0), at(64), 1, ranks(&[1])).contains("1 counts for 2 ranks"));
        let two = Counts::Ranks(vec![bounds(&[1, 1]), bounds(&[1, 1])]);
        assert!(error(Op::ALLGATHER, at(0), at(64), 1, two).contains("counts of 2 tensors; the list has 1"));
        assert!(Counts::from_lists(Op::ALLGATHER, 2, Some(&[1, 2, 3]), None).is_err());
        assert!(error(Op::MEAN, at(0), at(64), 1, ranks(&[1, 1])).contains("no such counts"));
        assert!(error(Op::ALLTOALL, at(0), at(64), 1, ranks(&[1, 1])).contains("no such counts"));
        assert!(Bounds::new(&[usize::MAX, 1]).is_none());
        check(rank, &Case { op: Op::ALLGATHER, tensors: vec![(DType::U8, 3)], ragged: false, in_place: false });
        data.clear();
    });
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases(48)))]

    /// An allreduce is an all-gather of a reduce-scatter, to the bit, and a reduce gives its root the same.
    #[test]
    fn an_allreduce_is_a_reduce_scatter_and_an_all_gather(
        hosts in prop::sample::select(SHAPES.to_vec()),
        threads in 1usize..4,
        lines in 16usize..60,
        len in 1usize..900,
        seed in any::<u32>(),
        reduce in prop::sample::select(vec![ReduceOp::Mean, ReduceOp::Sum, ReduceOp::Min, ReduceOp::ScaledMean { pre: 0.3, post: 1.7 }]),
    ) {
        World { threads, slot: lines * 64, ..World::new(hosts) }.run(|rank| {
            let size = rank.size;
            let mixed = |i: usize| (seed ^ (rank.rank * 7919 + i) as u32).wrapping_mul(2_654_435_761);
            let float = |i: usize| (f64::from(mixed(i)) / 1e5).sin() as f32 * 10f32.powi(i32::try_from(mixed(i) % 12).unwrap() - 6);
            let mut input: Vec<f32> = (0..len * size).map(float).collect();
            let (mut whole, mut block) = (vec![0f32; len * size], vec![0f32; len]);
            let (mut gathered, mut at_root) = (vec![0f32; len * size], vec![0f32; len * size]);
            let tensor = |src: &mut [f32], dst: &mut [f32], len| {
                vec![Tensor::new(Buffer::new(src.as_mut_ptr().cast(), dst.as_mut_ptr().cast(), len, DType::F32), &[])]
            };
            let run = |op, tensors| submit(rank, op, tensors, Counts::Even, "").unwrap();
            run(Op::allreduce(reduce), tensor(&mut input, &mut whole, len * size));
            run(Op::reduce_scatter(reduce), tensor(&mut input, &mut block, len));
            run(Op::ALLGATHER, tensor(&mut block, &mut gathered, len));
            run(Op::reduce(reduce, size - 1), tensor(&mut input, &mut at_root, len * size));
            let bits = |data: &[f32]| data.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(&whole), bits(&gathered));
            if rank.rank == size - 1 {
                assert_eq!(bits(&whole), bits(&at_root));
            }
        });
    }
}
