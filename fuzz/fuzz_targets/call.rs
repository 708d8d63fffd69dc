//! Calls as the ranks describe them: any lists of tensors give a job or an error, equal lists equal signatures, and texts
//! keep to their limit.
#![no_main]

use arbitrary::Arbitrary;
use dl_comm_core::buffer::{Buffer, Tensor};
use dl_comm_core::collective::{Call, CallConfig, Op};
use dl_comm_core::dtype::DType;
use libfuzzer_sys::fuzz_target;

#[derive(Debug, Arbitrary)]
struct Input {
    op: u8,
    root: u8,
    /// By tower, the place (one of few, so that they meet), type, length and shape of each tensor. Nothing is read there.
    towers: Vec<Vec<(u16, u8, Length, Vec<i64>)>>,
    name: String,
    instance: String,
    labels: String,
    ranks: u8,
    channels: u8,
    lines: u16,
    acc_f64: bool,
    range: (u8, u8),
    limit: u16,
    left: f64,
}

#[derive(Debug, Clone, Copy, Arbitrary)]
enum Length {
    Small(u8),
    Any(usize),
}

fuzz_target!(|input: Input| {
    let tensor = |(place, code, length, shape): &(u16, u8, Length, Vec<i64>)| {
        let length = match *length {
            Length::Small(length) => usize::from(length),
            Length::Any(length) => length,
        };
        let place = std::ptr::without_provenance_mut(usize::from(*place));
        Tensor::new(Buffer::in_place(place, length, DType::ALL[usize::from(*code) % DType::ALL.len()]), shape)
    };
    let towers: Vec<Vec<Tensor>> = input.towers.iter().map(|tower| tower.iter().map(tensor).collect()).collect();
    let op = match input.op % 3 {
        0 => Op::Allreduce,
        1 => Op::Broadcast { root: usize::from(input.root) },
        _ => Op::Barrier,
    };
    let carrier = CallConfig {
        team: i32::from(input.channels) - 1,
        ranks: usize::from(input.ranks) + 1,
        channels: usize::from(input.channels) + 1,
        slot: (usize::from(input.lines) + 1) * 64,
        small_max: 0,
        single_thread_max: usize::from(input.lines) * 32,
        acc_f64: input.acc_f64,
    };
    let job = || Call::new(op, towers.clone(), &input.name, &input.instance, input.labels.clone(), carrier);
    let Ok(mut first) = job() else { return };
    let second = job().expect("what was a call is one again");
    assert_eq!((first.signature, first.list_hash, first.key()), (second.signature, second.list_hash, second.key()));
    let (start, end) = input.range;
    let limit = usize::from(input.limit);
    first.schedule(input.left, ", warm-up".into());
    assert!(first.describe(start.into()..end.into(), limit).len() <= limit);
    assert!(first.summary().starts_with(&first.name_line()));
    assert_eq!(first.range_hash(start.into()..end.into()), second.range_hash(start.into()..end.into()));
});
