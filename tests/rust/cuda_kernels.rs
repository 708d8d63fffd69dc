//! The CUDA kernels, compiled for the CPU (`cuda_host_kernels.cc`), give the same bits as the core's reduction.
#![allow(missing_docs, clippy::expect_used)]

use std::ffi::CString;

use dl_comm_core::dtype::DType;
use dl_comm_core::reduce::{ReduceOp, Reduction};
use proptest::prelude::*;

/// Offset of device addresses from host addresses, as in `kernels_shim.h`.
const DEVICE: u64 = 1 << 60;
/// Guard bytes before and after every buffer, which must not change.
const GUARD: usize = 64;
const GUARD_BYTE: u8 = 0xa5;

struct BlockRange {
    first: u64,
    piece: u32,
    count: u32,
}

/// Length of the lists in the parameters, as in `memory.cuh`.
const TABLE: usize = 448;

#[repr(C)]
struct KernelArgs {
    lists: u64,
    stop: u64,
    items: u32,
    sources: u32,
    targets: u32,
    nitems: u32,
    nsources: u32,
    ntargets: u32,
    divisor: u32,
    fills: u32,
    pre: f64,
    post: f64,
    table: [u64; TABLE],
}

#[link(name = "dl_comm_host_kernels", kind = "static")]
#[link(name = "stdc++")]
unsafe extern "C" {
    fn dl_comm_host_kernel_launch(
        name: *const std::ffi::c_char,
        args: *const KernelArgs,
        blocks: u32,
        threads: u32,
    ) -> bool;
}

// What that calls.
#[link(name = "host_kernels", kind = "static")]
unsafe extern "C" {}

/// The host kernels share one set of thread indices.
static LAUNCH_LOCK: std::sync::Mutex<()> = std::sync::Mutex::new(());

fn device<T>(data: &[T]) -> u64 {
    data.as_ptr() as u64 + DEVICE
}

/// Elements at a given offset from a multiple of 16 bytes, between guard bytes.
#[derive(Clone)]
struct Buffer {
    bytes: Vec<u8>,
    start: usize,
    len: usize,
}

impl Buffer {
    fn new(content: &[u8], misaligned: usize) -> Buffer {
        let mut bytes = vec![GUARD_BYTE; content.len() + 2 * GUARD + 32];
        let start = GUARD + (bytes[GUARD..].as_ptr() as usize).wrapping_neg() % 16 + misaligned;
        bytes[start..start + content.len()].copy_from_slice(content);
        Buffer { bytes, start, len: content.len() }
    }
    fn content(&self) -> &[u8] {
        &self.bytes[self.start..self.start + self.len]
    }
    fn address(&self) -> u64 {
        device(self.content())
    }
    fn guards_are_intact(&self) -> bool {
        let (before, after) = (&self.bytes[..self.start], &self.bytes[self.start + self.len..]);
        before.iter().chain(after).all(|byte| *byte == GUARD_BYTE)
    }
}

/// A tensor range: `sources[source]` and `targets[target]`. A target may be one of the sources.
struct Piece {
    sources: Vec<Buffer>,
    targets: Vec<Target>,
    count: usize,
}

enum Target {
    Source(usize),
    Apart(Buffer),
}

impl Piece {
    fn target(&self, target: usize) -> &Buffer {
        match &self.targets[target] {
            Target::Source(source) => &self.sources[*source],
            Target::Apart(buffer) => buffer,
        }
    }
}

/// How a launch is divided into items.
#[derive(Debug, Clone)]
struct Cut {
    items: Vec<u32>,
    blocks: u32,
    threads: u32,
    /// Whether the lists are passed as parameters, if they fit.
    inside: bool,
}

/// Items of the ranges, with sizes taken cyclically from `cut`; the last range first.
fn items(pieces: &[Piece], cut: &Cut) -> Vec<BlockRange> {
    let mut sizes = cut.items.iter().cycle();
    let mut items = Vec::new();
    for (piece, Piece { count, .. }) in pieces.iter().enumerate().rev() {
        let mut first = 0;
        while first < *count {
            let size = (*sizes.next().expect("a cycle") as usize).min(count - first);
            items.push(BlockRange { first: first as u64, piece: piece as u32, count: size as u32 });
            first += size;
        }
    }
    items
}

/// The usual factors of the scaled operators.
const FACTORS: (f64, f64) = (0.3, 1.7);

fn launch(name: &str, pieces: &[Piece], divisor: u32, cut: &Cut) {
    launch_with(name, pieces, divisor, cut, FACTORS, (0, false));
}

/// `stop` is the address of a stop flag, or 0; `fills`: whether a stopped launch fills its targets.
fn launch_with(
    name: &str,
    pieces: &[Piece],
    divisor: u32,
    cut: &Cut,
    (pre, post): (f64, f64),
    (stop, fills): (u64, bool),
) {
    let items = items(pieces, cut);
    let (nsources, ntargets) = (pieces[0].sources.len(), pieces[0].targets.len());
    let sources: Vec<u64> = pieces.iter().flat_map(|piece| piece.sources.iter().map(Buffer::address)).collect();
    let targets: Vec<u64> =
        pieces.iter().flat_map(|piece| (0..ntargets).map(|target| piece.target(target).address())).collect();
    let mut lists: Vec<u64> =
        items.iter().flat_map(|item| [item.first, u64::from(item.piece) | u64::from(item.count) << 32]).collect();
    lists.extend(sources.iter().chain(&targets));
    let mut table = [0; TABLE];
    let inside = cut.inside && lists.len() <= TABLE;
    if inside {
        table[..lists.len()].copy_from_slice(&lists);
    }
    let starts = [0, 16 * items.len(), 16 * items.len() + 8 * sources.len()].map(|start| start as u32);
    let args = KernelArgs {
        lists: if inside { 0 } else { device(&lists) },
        stop,
        items: starts[0],
        sources: starts[1],
        targets: starts[2],
        table,
        fills: u32::from(fills),
        pre,
        post,
        nitems: items.len() as u32,
        nsources: nsources as u32,
        ntargets: ntargets as u32,
        divisor,
    };
    let name = CString::new(name).expect("no NUL");
    let _alone = LAUNCH_LOCK.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    // SAFETY: the tables and the ranges' memory outlive the call, and items do not overlap.
    let found = unsafe { dl_comm_host_kernel_launch(name.as_ptr(), &raw const args, cut.blocks, cut.threads) };
    assert!(found, "there is no kernel {name:?}");
}

/// The mean of `dtype` in the core; with `precise`, sums are float64.
fn mean_of(dtype: DType, precise: bool) -> Reduction {
    reduction_of(ReduceOp::Mean, dtype, precise)
}

fn reduction_of(op: ReduceOp, dtype: DType, precise: bool) -> Reduction {
    Reduction { op, dtype, acc_f64: precise, wire_is_acc: false, divisor: 1 }
}

/// What the core makes of the sources.
fn reduced(reduction: Reduction, sources: &[Buffer], count: usize, divisor: u32) -> Vec<u8> {
    let sources: Vec<*const u8> = sources.iter().map(|source| source.content().as_ptr()).collect();
    let mut out = vec![0; count * reduction.dtype.size()];
    // SAFETY: all have `count` elements.
    unsafe { Reduction { divisor, ..reduction }.combine(&sources, &[out.as_mut_ptr()], count) };
    out
}

fn number(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte))
}

/// Whether the bits are equal, or both are NaN. Sign and payload of a NaN depend on the processor, except for bfloat16.
fn same(dtype: DType, got: u64, wanted: u64) -> bool {
    let nan = |bits: u64| match dtype {
        DType::F16 => bits & 0x7fff > 0x7c00,
        DType::F32 => bits & 0x7fff_ffff > 0x7f80_0000,
        DType::F64 => bits & (u64::MAX >> 1) > 0x7ff0 << 48,
        _ => false,
    };
    got == wanted || nan(got) && nan(wanted)
}

/// A pseudo-random generator (splitmix64).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    }
    fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit as u64) as usize
    }

    /// An element: random bits, a boundary value, or a frequent value that keeps sums finite.
    fn element(&mut self, dtype: DType) -> u64 {
        let (bits, kind) = (self.next(), self.next());
        let limit = |limits: &[u64]| limits[(kind >> 32) as usize % limits.len()];
        let sign = bits >> 63;
        match (kind % 4, dtype) {
            (0, _) => bits,
            (1, DType::F16) => {
                limit(&[0x7c00, 0xfc00, 0x7e00, 0x7d01, 0x7bff, 0xfbff, 0x400, 0x3ff, 1, 0x8001, 0, 0x8000])
            }
            (1, DType::BF16) => {
                limit(&[0x7f80, 0xff80, 0x7fc0, 0x7f81, 0x7f7f, 0xff7f, 0x80, 0x7f, 1, 0x8001, 0, 0x8000])
            }
            (1, DType::F32) => {
                let upper = [0x7f80 << 16, 0x7fc0 << 16, 0x7fa0 << 16, 0x7f7f_ffff, 0x80 << 16, 0x7f_ffff, 1, 0];
                sign << 31 | limit(&upper)
            }
            (1, DType::F64) => {
                let upper =
                    [0x7ff0 << 48, 0x7ff8 << 48, 0x7ff4 << 48, (0x7ff0 << 48) - 1, 1 << 52, (1 << 52) - 1, 1, 0];
                sign << 63 | limit(&upper)
            }
            // Finite, from about 2^-9 to 2^7.
            (_, DType::F16) => sign << 15 | ((6 << 10) + bits % (16 << 10)),
            (_, DType::BF16) => sign << 15 | ((118 << 7) + bits % (16 << 7)),
            (_, DType::F32) => sign << 31 | ((118 << 23) + bits % (16 << 23)),
            (_, DType::F64) => sign << 63 | ((1014 << 52) + bits % (16 << 52)),
            (1, _) => {
                let top = 1u64 << (8 * dtype.size() - 1);
                limit(&[top, top, top - 1, top - 1, top + 1, 0, 1, u64::MAX])
            }
            (_, _) => (bits as i64 >> 49) as u64,
        }
    }

    fn elements(&mut self, dtype: DType, count: usize) -> Vec<u8> {
        let size = dtype.size();
        (0..count).flat_map(|_| self.element(dtype).to_le_bytes().into_iter().take(size)).collect()
    }
}

#[derive(Debug, Clone)]
struct Case {
    seed: u64,
    counts: Vec<usize>,
    nsources: usize,
    ntargets: usize,
    divisor: u32,
    /// Offsets of buffers from multiples of 16 bytes: all 0, all equal, equal modulo 4, or random.
    alignment: u8,
    cut: Cut,
}

/// Ranges of random elements of size `unit`; some targets are sources.
fn pieces(case: &Case, random: &mut Random, dtype: DType) -> Vec<Piece> {
    let size = dtype.size();
    let common = random.below(16 / size) * size;
    let mut piece = |count: usize| {
        let misaligned = |random: &mut Random| match case.alignment {
            0 => 0,
            1 => common,
            2 => (common + 4 * random.below(4)) / size * size % 16,
            _ => random.below(16 / size) * size,
        };
        let sources: Vec<Buffer> = (0..case.nsources)
            .map(|_| {
                let elements = random.elements(dtype, count);
                Buffer::new(&elements, misaligned(random))
            })
            .collect();
        let in_place = random.below(2 * case.nsources);
        let target = |target: usize| match (in_place + target, random.below(2)) {
            // Each source is used at most once.
            (source, 0) if source < case.nsources => Target::Source(source),
            _ => Target::Apart(Buffer::new(&vec![0x11; count * size], misaligned(random))),
        };
        Piece { sources, targets: (0..case.ntargets).map(target).collect(), count }
    };
    case.counts.iter().map(|count| piece(*count)).collect()
}

fn check(name: &str, reduction: Reduction, case: &Case) {
    let (dtype, size) = (reduction.dtype, reduction.dtype.size());
    let pieces = pieces(case, &mut Random(case.seed), dtype);
    let wanted: Vec<Vec<u8>> =
        pieces.iter().map(|piece| reduced(reduction, &piece.sources, piece.count, case.divisor)).collect();
    let before: Vec<Vec<Buffer>> = pieces.iter().map(|piece| piece.sources.clone()).collect();
    launch_with(name, &pieces, case.divisor, &case.cut, reduction.op.factors().unwrap_or(FACTORS), (0, false));
    for ((piece, wanted), before) in pieces.iter().zip(&wanted).zip(&before) {
        for target in 0..case.ntargets {
            let got = piece.target(target).content();
            for (i, (got, wanted)) in got.chunks(size).zip(wanted.chunks(size)).enumerate() {
                let (got, wanted) = (number(got), number(wanted));
                assert!(
                    same(dtype, got, wanted),
                    "{name}: element {i} of target {target} is {got:#x}, not {wanted:#x}"
                );
            }
            assert!(piece.target(target).guards_are_intact(), "{name}: target {target} was written outside");
        }
        for (source, (now, before)) in piece.sources.iter().zip(before).enumerate() {
            let target = piece.targets.iter().any(|target| matches!(target, Target::Source(s) if *s == source));
            assert!(target || now.content() == before.content(), "{name}: source {source} was written");
        }
    }
}

/// Floating types with the suffixes of their kernels, and whether accumulators are float64.
const FLOATS: [(&str, DType, bool); 7] = [
    ("f32", DType::F32, false),
    ("f64", DType::F64, false),
    ("f16", DType::F16, false),
    ("bf16", DType::BF16, false),
    ("f32_precise", DType::F32, true),
    ("f16_precise", DType::F16, true),
    ("bf16_precise", DType::BF16, true),
];
const INTEGERS: [(&str, DType, bool); 8] = [
    ("i8", DType::I8, false),
    ("u8", DType::U8, false),
    ("i16", DType::I16, false),
    ("u16", DType::U16, false),
    ("i32", DType::I32, false),
    ("u32", DType::U32, false),
    ("i64", DType::I64, false),
    ("u64", DType::U64, false),
];
/// Of integers modulo a power of two.
const RESIDUES: [(&str, DType, bool); 8] = [
    ("bits8", DType::I8, false),
    ("bits8", DType::U8, false),
    ("bits16", DType::I16, false),
    ("bits16", DType::U16, false),
    ("bits32", DType::I32, false),
    ("bits32", DType::U32, false),
    ("bits64", DType::I64, false),
    ("bits64", DType::U64, false),
];

/// The kernels with factors.
fn scaled<'a>(
    types: impl Iterator<Item = &'a (&'a str, DType, bool)> + Clone,
    (pre, post): (f64, f64),
) -> Vec<(String, Reduction)> {
    let ops = [
        ("average", ReduceOp::ScaledMean { pre, post }),
        ("min", ReduceOp::ScaledMin { pre, post }),
        ("max", ReduceOp::ScaledMax { pre, post }),
        ("product", ReduceOp::ScaledProduct { pre, post }),
    ];
    let of = |(what, op): (&str, ReduceOp), &(suffix, dtype, precise): &(&str, DType, bool)| {
        (format!("scaled_{what}_{suffix}"), reduction_of(op, dtype, precise))
    };
    ops.into_iter().flat_map(|op| types.clone().map(move |each| of(op, each))).collect()
}

/// The kernels that write elements, and the reductions that they are.
fn kernels() -> Vec<(String, Reduction)> {
    let plain = FLOATS[..4].iter().chain(&INTEGERS);
    let of = |what: &str, op, &(suffix, dtype, precise): &(&str, DType, bool)| {
        (format!("{what}_{suffix}"), reduction_of(op, dtype, precise))
    };
    let mut kernels: Vec<_> = FLOATS.iter().chain(&INTEGERS).map(|each| of("average", ReduceOp::Mean, each)).collect();
    kernels.extend(plain.clone().map(|each| of("min", ReduceOp::Min, each)));
    kernels.extend(plain.map(|each| of("max", ReduceOp::Max, each)));
    kernels.extend(FLOATS.iter().chain(&RESIDUES).map(|each| of("product", ReduceOp::Product, each)));
    let bits = [("bit_and", ReduceOp::BitAnd), ("bit_or", ReduceOp::BitOr), ("bit_xor", ReduceOp::BitXor)];
    kernels.extend(bits.map(|(name, op)| (name.to_owned(), reduction_of(op, DType::U8, false))));
    kernels.extend(scaled(FLOATS.iter().chain(&INTEGERS), FACTORS));
    // Sums of integers are means with the divisor 1.
    kernels.extend(INTEGERS.iter().map(|each| of("average", ReduceOp::Sum, each)));
    kernels
}

fn cases() -> impl Strategy<Value = Case> {
    let divisor = prop_oneof![6 => 1u32..=17, 1 => 1u32..=i32::MAX as u32, 1 => Just(i32::MAX as u32)];
    let threads = prop::sample::select(vec![1u32, 7, 32, 96, 256]);
    let cut = (prop::collection::vec(1u32..3000, 1..4), 1u32..5, threads, any::<bool>())
        .prop_map(|(items, blocks, threads, inside)| Cut { items, blocks, threads, inside });
    let shape = (prop::collection::vec(0usize..5000, 1..4), 1usize..=9, 1usize..=4);
    (any::<u64>(), shape, divisor, 0u8..4, cut).prop_map(
        |(seed, (counts, nsources, ntargets), divisor, alignment, cut)| Case {
            seed,
            counts,
            nsources,
            ntargets,
            divisor,
            alignment,
            cut,
        },
    )
}

fn factors() -> impl Strategy<Value = f64> {
    let power = 2f64.powi(64);
    let special = vec![0.0, -0.0, 1.0, -1.0, 0.5, 1e-300, 1e300, power, -power, 1.0 / power, f64::INFINITY, f64::NAN];
    prop_oneof![prop::sample::select(special), -3.0..3.0, -1e30..1e30]
}

proptest! {
    // A case runs all kernels.
    #![proptest_config(ProptestConfig::with_cases(dl_comm_core::cases::cases(30)))]

    #[test]
    fn kernels_give_the_same_bits_as_the_core(case in cases()) {
        for (name, reduction) in kernels() {
            let case = if reduction.op == ReduceOp::Sum { Case { divisor: 1, ..case.clone() } } else { case.clone() };
            check(&name, reduction, &case);
        }
    }

    /// Accumulators of all values, which have limits and wrap around: factors of 2^64 reach those of 128 bits.
    #[test]
    fn factors_of_integers_have_all_values(case in cases(), pre in factors(), post in factors()) {
        let scaled_sum = ReduceOp::ScaledSum { pre, post };
        let sums = INTEGERS.iter().map(|(name, dtype, precise)| {
            (format!("scaled_average_{name}"), reduction_of(scaled_sum, *dtype, *precise))
        });
        for (name, reduction) in scaled(INTEGERS.iter(), (pre, post)).into_iter().chain(sums) {
            let divisor = if reduction.op == scaled_sum { 1 } else { case.divisor };
            check(&name, reduction, &Case { divisor, ..case.clone() });
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(dl_comm_core::cases::cases(60)))]

    /// Lists in the parameters work like lists in memory.
    #[test]
    fn lists_in_parameters_give_the_same_result(case in cases()) {
        let cut = Cut { items: vec![3000], ..case.cut.clone() };
        for inside in [false, true] {
            let case = Case { cut: Cut { inside, ..cut.clone() }, ..case.clone() };
            prop_assert!(items(&pieces(&case, &mut Random(case.seed), DType::F32), &cut).len() * 2 + 3 * 13 <= TABLE);
            check("average_f32", mean_of(DType::F32, false), &case);
        }
    }

    /// The mean of bytes over one source is a copy.
    #[test]
    fn bytes_are_copied(case in cases()) {
        let copy = Case { nsources: 1, divisor: 1, ..case };
        check("copy_bytes", mean_of(DType::U8, false), &copy);
    }
}

const SUMS: [(&str, DType, bool); 11] = [
    ("sum_f32", DType::F32, false),
    ("sum_f64", DType::F64, false),
    ("sum_f16", DType::F16, false),
    ("sum_bf16", DType::BF16, false),
    ("sum_i8", DType::I8, false),
    ("sum_u8", DType::U8, false),
    ("sum_i32", DType::I32, false),
    ("sum_i64", DType::I64, false),
    ("sum_f32_precise", DType::F32, true),
    ("sum_f16_precise", DType::F16, true),
    ("sum_bf16_precise", DType::BF16, true),
];

/// The sums in the accumulator type of the core.
fn check_sums(name: &str, reduction: Reduction, case: &Case) {
    let (dtype, size) = (reduction.dtype, reduction.acc_size());
    let mut pieces = pieces(case, &mut Random(case.seed), dtype);
    for piece in &mut pieces {
        piece.targets = vec![Target::Apart(Buffer::new(&vec![0x11; piece.count * size], 0))];
    }
    launch(name, &pieces, 1, &case.cut);
    for piece in &pieces {
        let sources: Vec<*const u8> = piece.sources.iter().map(|source| source.content().as_ptr()).collect();
        let mut wanted = vec![0; piece.count * size];
        // SAFETY: all have `count` elements, and the output has room for the sums.
        unsafe { reduction.partial(&sources, wanted.as_mut_ptr(), piece.count) };
        let got = piece.target(0);
        for (i, (got, wanted)) in got.content().chunks(size).zip(wanted.chunks(size)).enumerate() {
            let float = matches!(dtype, DType::F16 | DType::BF16 | DType::F32 | DType::F64);
            let nan_of = if size == 8 { DType::F64 } else { DType::F32 };
            let alike = got == wanted || float && same(nan_of, number(got), number(wanted));
            assert!(alike, "{name}: element {i} is {got:x?}, not {wanted:x?}");
        }
        assert!(got.guards_are_intact(), "{name}: the target was written outside");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(dl_comm_core::cases::cases(60)))]

    #[test]
    fn sums_have_the_same_bits_as_in_the_core(case in cases()) {
        for (name, dtype, precise) in SUMS {
            check_sums(name, mean_of(dtype, precise), &case);
        }
    }
}

/// A launch with a set stop flag writes nothing, or only ones if it fills; one with a clear flag writes everything, or
/// nothing if it has no sources.
#[test]
fn a_set_stop_flag_prevents_all_other_writes() {
    let cut = Cut { items: vec![100], blocks: 2, threads: 32, inside: true };
    let all = kernels().into_iter().map(|(name, Reduction { dtype, .. })| (name, dtype, dtype.size()));
    let sums = SUMS.iter().map(|&(name, dtype, precise)| (name.into(), dtype, mean_of(dtype, precise).acc_size()));
    for (name, dtype, made) in all.chain(sums).chain([("copy_bytes".into(), DType::U8, 1)]) {
        for (word, fills, nsources) in
            [(0u32, 0, 1), (1, 0, 1), (1 << 31, 0, 1), (0, 1, 1), (1, 1, 1), (0, 1, 0), (1, 1, 0)]
        {
            if name.starts_with("sum") && fills == 1 {
                continue;
            }
            let sources = vec![Buffer::new(&vec![1; 1000 * dtype.size()], 0); nsources];
            let target = Target::Apart(Buffer::new(&vec![0x11; 1000 * made], 0));
            let pieces = [Piece { sources, targets: vec![target], count: 1000 }];
            launch_with(&name, &pieces, 1, &cut, FACTORS, (device(&[word; 64]), fills == 1));
            let content = pieces[0].target(0).content();
            let all = |value: u8| content.iter().all(|byte| *byte == value);
            assert_eq!(all(0x11), if word == 0 { nsources == 0 } else { fills == 0 }, "{name}, {word}");
            assert_eq!(all(0xff), word != 0 && fills == 1, "{name}, {word}");
        }
    }
}

/// Full items in full blocks, so that each thread has several vectors in flight.
#[test]
fn full_items_are_reduced() {
    let cut = Cut { items: vec![8192], blocks: 2, threads: 64, inside: false };
    let numbers = [1, 2, 3, 4, 8, 9];
    // The kernels have their loops from the same templates: each runs with two of the numbers.
    for (index, (name, reduction)) in kernels().into_iter().enumerate() {
        for nsources in [numbers[index % 6], numbers[(index + 3) % 6]] {
            let case = Case {
                seed: 7,
                counts: vec![2 * 8192 + 5],
                nsources,
                ntargets: 2,
                divisor: if reduction.op == ReduceOp::Sum { 1 } else { nsources as u32 },
                alignment: 1,
                cut: cut.clone(),
            };
            check(&name, reduction, &case);
        }
    }
}

/// Both conversions of every float16 and bfloat16.
#[test]
fn every_two_byte_float_converts_both_ways() {
    let all: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
    let cut = Cut { items: vec![32768], blocks: 1, threads: 64, inside: true };
    for (name, reduction) in kernels().into_iter().filter(|(_, reduction)| reduction.dtype.size() == 2) {
        let source = Buffer::new(&all, 0);
        let wanted = reduced(reduction, std::slice::from_ref(&source), 1 << 16, 1);
        let target = Target::Apart(Buffer::new(&vec![0; all.len()], 0));
        let pieces = [Piece { sources: vec![source], targets: vec![target], count: 1 << 16 }];
        launch(&name, &pieces, 1, &cut);
        for (i, (got, wanted)) in pieces[0].target(0).content().chunks(2).zip(wanted.chunks(2)).enumerate() {
            assert_eq!(number(got), number(wanted), "{name}: {i:#x}");
        }
    }
}
