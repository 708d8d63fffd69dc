//! Calls: any lists of tensors give a call or an error, equal lists give equal signatures, and texts keep their limits.
#![no_main]

use arbitrary::Arbitrary;
use dl_comm_core::buffer::{Buffer, Tensor};
use dl_comm_core::collective::{Bounds, Call, CallConfig, Counts, Op};
use dl_comm_core::dtype::DType;
use dl_comm_core::group_key::GroupKey;
use dl_comm_core::reduce::ReduceOp;
use dl_comm_core::topology::Topology;
use libfuzzer_sys::fuzz_target;

#[derive(Debug, Arbitrary)]
struct Input {
    op: u8,
    reduce: u8,
    root: u8,
    /// This rank; the number of hosts.
    me: u8,
    hosts: u8,
    /// Lengths of blocks, of each tensor.
    counts: Option<Vec<Vec<usize>>>,
    receive: Option<Vec<Vec<usize>>>,
    /// The tensors of each tower.
    towers: Vec<Vec<AnyTensor>>,
    name: String,
    instance: String,
    tensor_names: String,
    ranks: u8,
    channels: u8,
    lines: u16,
    acc_f64: bool,
    range: (u8, u8),
    limit: u16,
    carry: f64,
}

/// A tensor, whose memory is never read.
#[derive(Debug, Arbitrary)]
struct AnyTensor {
    /// From a small range, so that tensors overlap.
    address: u16,
    dtype: u8,
    length: Length,
    shape: Vec<i64>,
}

#[derive(Debug, Clone, Copy, Arbitrary)]
enum Length {
    Small(u8),
    Any(usize),
}

fuzz_target!(|input: Input| {
    let tensor = |AnyTensor { address, dtype, length, shape }: &AnyTensor| {
        let length = match *length {
            Length::Small(length) => usize::from(length),
            Length::Any(length) => length,
        };
        let address = std::ptr::without_provenance_mut(usize::from(*address));
        Tensor::new(Buffer::in_place(address, length, DType::ALL[usize::from(*dtype) % DType::ALL.len()]), shape)
    };
    let towers: Vec<Vec<Tensor>> = input.towers.iter().map(|tower| tower.iter().map(tensor).collect()).collect();
    let reduce = ReduceOp::ALL[usize::from(input.reduce) % ReduceOp::ALL.len()];
    let Ok(op) = Op::from_code(i32::from(input.op % 10), reduce, usize::from(input.root)) else { return };
    let hosts: Vec<u8> = (0..=input.ranks).map(|rank| rank % (input.hosts % 4 + 1)).collect();
    let topology = Topology::new(usize::from(input.me) % hosts.len(), &hosts);
    let slot = (usize::from(input.lines) + 1) * 64;
    let config = CallConfig {
        max_channels: usize::from(input.lines) % (usize::from(input.channels) + 1) + 1,
        acc_f64: input.acc_f64,
        ..CallConfig::new(
            &topology,
            GroupKey::team(i32::from(input.channels) - 1),
            usize::from(input.channels) + 1,
            slot,
        )
    };
    let lengths =
        |lists: &Vec<Vec<usize>>| lists.iter().map(|lengths| Bounds::new(lengths)).collect::<Option<Vec<_>>>();
    let counts = match (input.counts.as_ref().map(lengths), input.receive.as_ref().map(lengths)) {
        (Some(Some(send)), Some(Some(receive))) => Counts::Pairs { send, receive },
        (Some(Some(bounds)), None) => Counts::Ranks(bounds),
        (None, _) => Counts::Even,
        _ => return,
    };
    let labels = || input.tensor_names.clone();
    let make = || Call::new(op, towers.clone(), counts.clone(), &input.name, &input.instance, labels(), config.clone());
    let Ok(mut first) = make() else { return };
    let second = make().expect("what was a call is one again");
    assert_eq!((first.signature, first.list_hash, first.key()), (second.signature, second.list_hash, second.key()));
    let (start, end) = input.range;
    let limit = usize::from(input.limit);
    first.schedule(input.carry, ", warm-up".into());
    assert!(first.describe(start.into()..end.into(), limit).len() <= limit);
    assert!(first.summary().starts_with(&first.name_line()));
    assert_eq!(first.range_hash(start.into()..end.into()), second.range_hash(start.into()..end.into()));
});
