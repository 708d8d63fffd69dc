//! The table of choices: it is the one of `docs/algorithms.md`; whatever its limits, a call gives the same bits; the paths
//! cost what the page says.
#![allow(missing_docs, clippy::unwrap_used)]

mod common;

use std::fmt::Write as _;
use std::path::Path;

use common::{Rank, SHORT_MOVES, World, tensor};
use dl_comm_core::buffer::{Buffer, Tensor};
use dl_comm_core::collective::selection::{Limit, RANKS, ROWS, Row};
use dl_comm_core::collective::{AlgorithmSetting, Op, Pattern, Selection, TABLE};
use dl_comm_core::dtype::DType;
use dl_comm_core::reduce::ReduceOp;
use dl_comm_core::transport::in_process::Access;
use dl_comm_core::transport::mailbox::ring::CELL_BYTES;

/// The page without line breaks in its paragraphs.
fn page() -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/algorithms.md");
    std::fs::read_to_string(path).unwrap()
}

fn size(bytes: usize) -> String {
    match bytes {
        bytes if bytes % (1 << 30) == 0 => format!("{} GiB", bytes >> 30),
        bytes if bytes % (1 << 20) == 0 => format!("{} MiB", bytes >> 20),
        bytes => format!("{} KiB", bytes >> 10),
    }
}

/// The rows as the page has them.
fn printed() -> String {
    let mut text = String::new();
    for Row { name, calls, of, bytes, inclusive, short, long, .. } in &ROWS {
        let bound = if *inclusive { "up to" } else { "below" };
        let limit = if *of == RANKS { bytes.to_string() } else { size(*bytes) };
        writeln!(text, "| `{name}` | {calls} | {of} | {bound} {limit} | {short} | {long} |").unwrap();
    }
    text
}

#[test]
fn the_page_has_the_table() {
    let (page, rows) = (page(), printed());
    println!("{rows}");
    let (_, limits) = page.split_once("\n## Limits\n").unwrap();
    let (_, table) = limits.split_once("|---|---|---|---|---|---|\n").unwrap();
    let (table, _) = table.split_once("\n\n").unwrap();
    assert_eq!(format!("{table}\n"), rows, "docs/algorithms.md differs from core/src/collective/selection.rs");
}

#[test]
fn the_page_has_every_collective_and_algorithm() {
    let page = page();
    let section = |name: &str| {
        let (_, rest) = page.split_once(&format!("\n## {name}\n")).unwrap();
        rest.split_once("\n## ").map_or(rest, |(section, _)| section).to_owned()
    };
    for collective in &TABLE {
        assert!(section("On one host").contains(&format!("\n| {} |", collective.name)), "{}", collective.name);
        assert!(section("Between hosts").contains(collective.name), "{}", collective.name);
    }
    for name in ["doubling", "halving", "pairwise", "ring"] {
        assert!(AlgorithmSetting::parse(name).is_ok());
        assert!(section("Between hosts").contains(&format!("| `{name}`")), "{name}");
    }
    for path in ["nccl", "ipc", "ipc+staged", "staged"] {
        assert!(section("On GPUs").contains(&format!("| `{path}`")), "{path}");
    }
    assert!(section("Messages").contains(&size(CELL_BYTES)));
}

/// The operations of all collectives with the same inputs: `len` floats for each block.
fn ops(root: usize) -> Vec<Op> {
    TABLE.iter().map(|row| Op::from_code(row.code, ReduceOp::Mean, root).unwrap()).collect()
}

/// Values that repeat after a prime number of elements: to make them must not take longer than the call.
fn repeated<T: Copy>(len: usize, value: impl Fn(usize) -> T) -> Vec<T> {
    let first: Vec<T> = (0..len.min(997)).map(value).collect();
    let mut all = first.repeat(len.div_ceil(997));
    all.truncate(len);
    all
}

/// Runs `op` on blocks of `len` floats, and returns the bits of the output of this rank.
fn bits(rank: &Rank, op: Op, len: usize) -> Vec<u32> {
    let blocks = |has_many: bool| if has_many { rank.size } else { 1 };
    let (sent, received) = match op.pattern() {
        Pattern::Line => (1, 1),
        Pattern::Gather => (1, rank.size),
        Pattern::Scatter => (rank.size, 1),
        Pattern::Exchange => (blocks(true), blocks(true)),
    };
    let value = |index: usize| (index as f32 * 0.7 + rank.rank as f32 * 1e3).sin() * 1e3;
    if op.is_barrier() {
        rank.call(op, Vec::new(), "").unwrap();
        return Vec::new();
    }
    let input = repeated(sent * len, value);
    let mut output = if op.pattern() == Pattern::Line { input.clone() } else { vec![0.0; received * len] };
    let (from, to) = match op.pattern() {
        Pattern::Line => (output.as_ptr(), output.as_mut_ptr()),
        _ => (input.as_ptr(), output.as_mut_ptr()),
    };
    rank.call(op, vec![vec![Tensor::new(Buffer::new(from.cast(), to.cast(), len, DType::F32), &[])]], "").unwrap();
    output.iter().map(|value| value.to_bits()).collect()
}

#[test]
fn limits_change_no_bits() {
    let all = |bytes: usize| ROWS.iter().fold(Selection::default(), |all, row| all.with(row.limit, bytes));
    let unmeasured = SHORT_MOVES.into_iter().chain([Limit::ReduceMeasured]);
    let slots = unmeasured.fold(all(0), |all, limit| all.with(limit, usize::MAX));
    for (hosts, accesses) in [
        (&[1][..], &[Access::Peer][..]),
        (&[3], &[Access::Slots, Access::Peer, Access::EvenPeer, Access::Measured]),
        (&[2, 1], &[Access::Slots, Access::Peer]),
    ] {
        let results = accesses.iter().flat_map(|&access| {
            [Selection::default(), all(0), all(usize::MAX), slots].map(|selection| (access, selection))
        });
        let mut first = None;
        for (access, selection) in results {
            let world = World { access, selection, slot: 64 << 10, threads: 2, ..World::new(hosts) };
            let bits = world.run(|rank| {
                let mut all = Vec::new();
                for op in ops(rank.size - 1) {
                    for len in [0, 1, 100, 5000, 30_000] {
                        // Where a path is measured, the paths take turns at first.
                        let calls: Vec<_> = (0..5).map(|_| bits(rank, op, len)).collect();
                        assert!(calls.iter().all(|bits| *bits == calls[0]), "{} of {len}", op.collective.name);
                        all.extend_from_slice(&calls[0]);
                    }
                }
                all
            });
            let first = first.get_or_insert_with(|| bits.clone());
            assert!(bits == *first, "{hosts:?}, {access:?}, {}", selection.text());
        }
    }
}

/// The sum over all ranks of a list of several types, as the bits of this rank's output.
fn bits_of_types(rank: &Rank, op: Op, len: usize) -> Vec<u64> {
    let value = |index: usize| ((index as f64 * 0.7 + rank.rank as f64 * 1e3).sin() * 1e3).round() / 64.0;
    let mut floats: Vec<f32> = repeated(len, |index| value(index) as f32);
    let mut doubles: Vec<f64> = repeated(len / 2, value);
    let mut integers: Vec<i64> = repeated(len / 3, |index| value(index) as i64);
    // The bits of these are any finite numbers.
    let mut halves: Vec<u16> = repeated(len, |index| (index * 7 + rank.rank) as u16 & 0x3bff);
    let half = Buffer::new(halves.as_ptr().cast(), halves.as_mut_ptr().cast(), len, DType::BF16);
    let tensors = vec![tensor(&mut floats), tensor(&mut doubles), tensor(&mut integers), Tensor::new(half, &[])];
    rank.call(op, vec![tensors], "").unwrap();
    let (floats, doubles) = (floats.iter().map(|&value| value.to_bits().into()), doubles.iter().copied());
    let integers = integers.iter().map(|&value| value.cast_unsigned());
    floats.chain(doubles.map(f64::to_bits)).chain(integers).chain(halves.into_iter().map(u64::from)).collect()
}

/// On hosts with more ranks than shards: 20 and 18 ranks, 16 shards.
#[test]
fn ranks_without_a_shard_reduce_parts_and_change_no_bits() {
    for algorithm in ["doubling", "halving", "pairwise", "ring"] {
        let results = [Access::Slots, Access::Peer].into_iter().flat_map(|access| {
            [0, usize::MAX].map(|alone| (access, Selection::default().with(Limit::OwnerAlone, alone)))
        });
        let mut first = None;
        for (access, selection) in results {
            let algorithm = AlgorithmSetting::parse(algorithm).unwrap();
            let world = World { access, selection, algorithm, slot: 8 << 10, ..World::new(&[20, 18]) };
            let bits = world.run(|rank| {
                let ops = [Op::reduce(ReduceOp::Sum, 19), Op::MEAN, Op::allreduce(ReduceOp::Max)];
                let calls = ops.into_iter().flat_map(|op| [0, 1, 100, 3000].map(|len| (op, len)));
                calls.flat_map(|(op, len)| bits_of_types(rank, op, len)).collect::<Vec<_>>()
            });
            let first = first.get_or_insert_with(|| bits.clone());
            assert!(bits == *first, "{algorithm:?}, {access:?}, {}", selection.text());
        }
    }
}

/// Many chunks without parts come before one with parts, on a helper's channel and in calls that are under way together:
/// the flag of a rank without a shard has not lagged until it seems to be ahead. Builds with assertions compare 8 bits.
#[test]
fn parts_come_after_many_chunks_without() {
    const CHUNKS: usize = 140;
    let selection = Selection::default().with(Limit::OwnerAlone, 0);
    World { selection, threads: 2, slot: 8 << 10, ..World::new(&[20, 18]) }.run(|rank| {
        let mut floats: Vec<f32> = (0..4096).map(|index| (index + rank.rank) as f32).collect();
        let sum = |index: usize| (38 * index + 38 * 37 / 2) as f32;
        let mut halves = vec![0u16; 8192];
        let buffer = Buffer::in_place(halves.as_mut_ptr().cast(), halves.len(), DType::BF16);
        for _ in 0..CHUNKS {
            rank.call(Op::allreduce(ReduceOp::Sum), vec![vec![Tensor::new(buffer, &[])]], "").unwrap();
        }
        rank.call(Op::allreduce(ReduceOp::Sum), vec![vec![tensor(&mut floats)]], "").unwrap();
        assert!(floats.iter().enumerate().all(|(index, &found)| found == sum(index)));
        let mut roots = vec![0f32; CHUNKS];
        let moves = roots.chunks_mut(1).map(|one| (Op::broadcast(0), tensor(one)));
        let last = (Op::allreduce(ReduceOp::Sum), tensor(&mut floats));
        let done: Vec<_> = moves.chain([last]).map(|(op, list)| rank.start(op, vec![vec![list]], "")).collect();
        done.into_iter().for_each(|done| done.recv().unwrap().unwrap());
        assert!(floats.iter().enumerate().all(|(index, &found)| found == 38.0 * sum(index)));
    });
}

/// A rank that reduces a part raises another flag. Short slices, and types with wider accumulators, have no parts.
#[test]
fn ranks_without_a_shard_reduce_parts_of_long_slices() {
    let world = |alone| {
        let selection = Selection::default().with(Limit::OwnerAlone, alone);
        World { selection, slot: 64 << 10, ..World::new(&[20, 18]) }
    };
    // Slices of 1 KiB.
    for (alone, op, flags) in
        [(1023, Op::MEAN, 3), (1024, Op::MEAN, 2), (1023, Op::reduce(ReduceOp::Min, 0), 3), (0, Op::broadcast(0), 2)]
    {
        let found: Vec<u64> = cost(&world(alone), op, 4096).into_iter().map(|[_, flags, _, _]| flags).collect();
        let expected: Vec<u64> = (0..38)
            .map(|rank| if [16..20, 36..38].iter().any(|few| few.contains(&rank)) { flags } else { 3 })
            .collect();
        assert_eq!(found, expected, "{op:?}, alone up to {alone}");
    }
    let flags = world(0).run(|rank| {
        let mut halves = [0x3c00u16; 4096];
        let (from, to) = (halves.as_ptr().cast(), halves.as_mut_ptr().cast());
        rank.average(vec![Tensor::new(Buffer::new(from, to, 4096, DType::F16), &[])]).unwrap();
        rank.team.group().stats()["shm_flags"].as_u64().unwrap()
    });
    assert_eq!((flags[0], flags[16]), (3, 2));
}

/// The rounds and flags of this rank, its messages and their bytes, of one call.
fn cost(world: &World, op: Op, len: usize) -> Vec<[u64; 4]> {
    world.run(|rank| {
        bits(rank, op, len);
        let stats = rank.team.group().stats();
        ["shm_rounds", "shm_flags", "messages", "sent_bytes"].map(|name| stats[name].as_u64().unwrap())
    })
}

/// On two ranks, in a single chunk.
#[test]
fn paths_on_a_host_cost_what_the_page_says() {
    let world = |access, bytes: usize| {
        let selection = ROWS.iter().fold(Selection::default(), |all, row| all.with(row.limit, bytes));
        World { access, selection, slot: 64 << 10, ..World::new(&[2]) }
    };
    let (reduction, moves) =
        ([Op::MEAN, Op::reduce(ReduceOp::Sum, 0)], [Op::broadcast(0), Op::ALLGATHER, Op::ALLTOALL]);
    let every =
        || reduction.into_iter().chain(moves).chain([Op::reduce_scatter(ReduceOp::Sum), Op::gather(1), Op::scatter(1)]);
    for op in every().chain([Op::BARRIER]) {
        assert_eq!(cost(&world(Access::Slots, usize::MAX), op, 100), [[1, 1, 0, 0]; 2], "{op:?} in one round");
    }
    for op in every() {
        let flags = if reduction.contains(&op) { 3 } else { 2 };
        assert_eq!(cost(&world(Access::Slots, 0), op, 100), [[1, flags, 0, 0]; 2], "{op:?} through slots");
        assert_eq!(cost(&world(Access::Peer, 0), op, 100), [[1, 2, 0, 0]; 2], "{op:?} in place");
    }
    for op in moves {
        assert_eq!(cost(&world(Access::Private, 0), op, 100), [[1, 2, 0, 0]; 2], "{op:?}, direct copies");
    }
    // In place, all chunks take one round.
    assert_eq!(cost(&world(Access::Peer, 0), Op::MEAN, 100_000), [[1, 2, 0, 0]; 2]);
    let chunks = (4 * 100_000u64).div_ceil(64 << 10);
    assert_eq!(cost(&world(Access::Slots, 0), Op::MEAN, 100_000), [[chunks, 3 * chunks, 0, 0]; 2]);
}

/// On hosts of one rank, in a single chunk: messages, and bytes with a header of 64 for each message.
#[test]
fn algorithms_between_hosts_cost_what_the_page_says() {
    let (bytes, header) = (4 * 1024, 64);
    for hosts in [2usize, 4, 8] {
        let log = u64::from(hosts.ilog2());
        let others = hosts as u64 - 1;
        let piece = bytes / hosts as u64;
        for (name, messages, data) in [
            ("doubling", log, log * bytes),
            ("halving", 2 * log, 2 * others * piece),
            ("pairwise", log + 2 * others, 2 * others * piece),
            ("ring", log + 2 * others, 2 * others * piece),
        ] {
            let world = World {
                algorithm: AlgorithmSetting::parse(name).unwrap(),
                slot: 64 << 10,
                ..World::new(&vec![1; hosts])
            };
            let found = cost(&world, Op::MEAN, 1024);
            let expected = [messages, data + messages * header];
            assert!(
                found.iter().all(|[_, _, messages, sent]| [*messages, *sent] == expected),
                "{name}: {found:?}, {expected:?}"
            );
        }
        // Blocks are exchanged in pairs.
        for (op, data) in [
            (Op::ALLGATHER, others * bytes),
            (Op::reduce_scatter(ReduceOp::Sum), others * bytes),
            (Op::ALLTOALL, others * bytes),
        ] {
            let found = cost(&World { slot: 64 << 10, ..World::new(&vec![1; hosts]) }, op, 1024);
            let expected = [log + others, data + (log + others) * header];
            assert!(
                found.iter().all(|[_, _, messages, sent]| [*messages, *sent] == expected),
                "{op:?}: {found:?}, {expected:?}"
            );
        }
    }
}

/// The limits are taken by calls: a longer one takes another path.
#[test]
fn a_limit_divides_short_and_long_calls() {
    let flags = |selection: Selection, len: usize| {
        let world = World { selection, slot: 64 << 10, ..World::new(&[2]) };
        world.run(|rank| {
            let mut data = vec![1f32; len];
            rank.average(vec![tensor(&mut data)]).unwrap();
            rank.team.group().stats()["shm_flags"].as_u64().unwrap()
        })
    };
    let limit = Selection::default().with(Limit::ReduceOneRound, 400).with(Limit::ReduceMeasured, 4000);
    assert_eq!(flags(limit, 100), [1; 2]);
    assert_eq!(flags(limit, 101), [3; 2]);
}
