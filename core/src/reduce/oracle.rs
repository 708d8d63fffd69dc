//! Tests: every kernel gives the bits of a simple loop over elements with independent arithmetic (`reference.rs`) and
//! conversions.

use std::fmt::Debug;

use half::{bf16, f16};
use proptest::prelude::*;

use super::convert::{bf16_to_f32, f16_to_f32, f32_to_bf16, f32_to_f16, f64_to_odd_f32};
use super::reference::{OracleNumber, combine, finish, lift};
use super::{Kernel, ReduceOp, Reduction, Step};
use crate::dtype::DType;

/// The element and accumulator types of some operators for an element type.
trait OracleType {
    const DTYPE: DType;
    const ACC_F64: bool;
    type Element: OracleNumber;
    type Acc: OracleNumber;
    /// Random bits, or (one in four) a limit of the type.
    fn element(random: u64) -> Self::Element;
    fn widen(element: Self::Element) -> Self::Acc;
    fn narrow(acc: Self::Acc) -> Self::Element;
}

macro_rules! oracle {
    ($name:ident, $dtype:ident, $precise:expr, $element:ty, $acc:ty, $of_bits:expr, $limits:expr, $widen:expr, $narrow:expr) => {
        struct $name;
        impl OracleType for $name {
            const DTYPE: DType = DType::$dtype;
            const ACC_F64: bool = $precise;
            type Element = $element;
            type Acc = $acc;
            fn element(random: u64) -> $element {
                let limits = $limits;
                let bits = random.rotate_left(24);
                if random % 4 == 0 { limits[(random >> 2) as usize % limits.len()] } else { ($of_bits)(bits) }
            }
            fn widen(element: $element) -> $acc {
                ($widen)(element)
            }
            fn narrow(acc: $acc) -> $element {
                ($narrow)(acc)
            }
        }
    };
}

/// The elements of `$wide`, which are their own accumulators.
macro_rules! plain {
    ($($name:ident: $wide:ident;)*) => { $(
        struct $name;
        impl OracleType for $name {
            const DTYPE: DType = $wide::DTYPE;
            const ACC_F64: bool = $wide::ACC_F64;
            type Element = <$wide as OracleType>::Element;
            type Acc = Self::Element;
            fn element(random: u64) -> Self::Element {
                $wide::element(random)
            }
            fn widen(element: Self::Element) -> Self::Element {
                element
            }
            fn narrow(acc: Self::Element) -> Self::Element {
                acc
            }
        }
    )* };
}

/// Pairs of `$part`.
macro_rules! complex {
    ($($name:ident: $dtype:ident, $part:ident;)*) => { $(
        struct $name;
        impl OracleType for $name {
            const DTYPE: DType = DType::$dtype;
            const ACC_F64: bool = $part::ACC_F64;
            type Element = [<$part as OracleType>::Element; 2];
            type Acc = [<$part as OracleType>::Acc; 2];
            fn element(random: u64) -> Self::Element {
                [random, random.rotate_left(17)].map($part::element)
            }
            fn widen(element: Self::Element) -> Self::Acc {
                element.map($part::widen)
            }
            fn narrow(acc: Self::Acc) -> Self::Element {
                acc.map($part::narrow)
            }
        }
    )* };
}

/// The limits of a floating-point type with smallest subnormal `$tiny`.
macro_rules! limits {
    ($float:ty, $tiny:expr) => {
        [
            <$float>::NAN,
            <$float>::INFINITY,
            <$float>::NEG_INFINITY,
            <$float>::MAX,
            <$float>::MIN,
            <$float>::MIN_POSITIVE,
            $tiny,
            -$tiny,
            <$float>::from_bits(0),
            -<$float>::from_bits(0),
        ]
    };
}

fn f16_bits(bits: u64) -> f16 {
    f16::from_bits(bits as u16)
}
fn bf16_bits(bits: u64) -> bf16 {
    bf16::from_bits(bits as u16)
}
fn f32_bits(bits: u64) -> f32 {
    f32::from_bits(bits as u32)
}

/// The 16-bit float nearest to `value`, by binary search. `double` converts bits to a value. `infinity` is the bits of
/// infinity, which is treated as the number after the largest one.
fn nearest(value: f64, double: impl Fn(u16) -> f64, infinity: u16) -> u16 {
    let sign = u16::from(value.is_sign_negative()) << 15;
    if value.is_nan() {
        return infinity | 1;
    }
    let step = double(infinity - 1) - double(infinity - 2);
    let value_of = |bits: u16| if bits == infinity { double(infinity - 1) + step } else { double(bits) };
    let (mut low, mut high) = (0, infinity);
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        *(if value_of(middle) <= value.abs() { &mut low } else { &mut high }) = middle;
    }
    let tie = (value_of(low) + value_of(high)) / 2.0;
    let up = value.abs() > tie || value.abs() == tie && low % 2 == 1;
    sign | if up { high } else { low }
}

fn nearest_f16(value: f64) -> f16 {
    f16::from_bits(nearest(value, |bits| f16::from_bits(bits).to_f64(), 0x7c00))
}
fn nearest_bf16(value: f64) -> bf16 {
    bf16::from_bits(nearest(value, |bits| bf16::from_bits(bits).to_f64(), 0x7f80))
}

const TINY_F16: f16 = f16::from_bits(1);
const TINY_BF16: bf16 = bf16::from_bits(1);
const TINY_F32: f32 = f32::from_bits(1);
const TINY_F64: f64 = f64::from_bits(1);

oracle!(F16, F16, false, f16, f32, f16_bits, limits!(f16, TINY_F16), f16::to_f32, f16::from_f32);
oracle!(F16P, F16, true, f16, f64, f16_bits, limits!(f16, TINY_F16), f16::to_f64, nearest_f16);
oracle!(BF16, BF16, false, bf16, f32, bf16_bits, limits!(bf16, TINY_BF16), bf16::to_f32, bf16::from_f32);
oracle!(BF16P, BF16, true, bf16, f64, bf16_bits, limits!(bf16, TINY_BF16), bf16::to_f64, nearest_bf16);
oracle!(F32, F32, false, f32, f32, f32_bits, limits!(f32, TINY_F32), |e| e, |a| a);
oracle!(F32P, F32, true, f32, f64, f32_bits, limits!(f32, TINY_F32), f64::from, |a| a as f32);
oracle!(F64, F64, false, f64, f64, f64::from_bits, limits!(f64, TINY_F64), |e| e, |a| a);
oracle!(F64P, F64, true, f64, f64, f64::from_bits, limits!(f64, TINY_F64), |e| e, |a| a);
oracle!(I8, I8, false, i8, i32, |b| b as i8, [i8::MIN, i8::MAX, -1, 0], i32::from, |a| a as i8);
oracle!(U8, U8, false, u8, i32, |b| b as u8, [u8::MIN, u8::MAX, 1], i32::from, |a| a as u8);
oracle!(I16, I16, false, i16, i32, |b| b as i16, [i16::MIN, i16::MAX, -1, 0], i32::from, |a| a as i16);
oracle!(U16, U16, false, u16, u32, |b| b as u16, [u16::MIN, u16::MAX, 1], u32::from, |a| a as u16);
oracle!(I32, I32, false, i32, i64, |b| b as i32, [i32::MIN, i32::MAX, -1, 0], i64::from, |a| a as i32);
oracle!(U32, U32, false, u32, u64, |b| b as u32, [u32::MIN, u32::MAX, 1], u64::from, |a| a as u32);
oracle!(I64, I64, false, i64, i128, |b| b as i64, [i64::MIN, i64::MAX, -1, 0], i128::from, |a| a as i64);
oracle!(U64, U64, false, u64, u128, |b| b, [u64::MIN, u64::MAX, 1], u128::from, |a| a as u64);
oracle!(Bool, Bool, false, bool, bool, |b| b % 2 == 1, [true], |e| e, |a| a);
plain! {
    PlainF16: F16; PlainF16P: F16P; PlainBF16: BF16; PlainBF16P: BF16P; PlainF32P: F32P;
    PlainI8: I8; PlainU8: U8; PlainI16: I16; PlainU16: U16;
    PlainI32: I32; PlainU32: U32; PlainI64: I64; PlainU64: U64;
}
complex! {
    Complex64: Complex64, F32;
    Complex64P: Complex64, F32P;
    Complex128: Complex128, F64;
    Complex128P: Complex128, F64P;
}

/// Numbers at an unaligned address.
struct Memory {
    bytes: Vec<u8>,
    offset: usize,
}

impl Memory {
    fn new<T: Copy>(values: &[T], offset: usize) -> Memory {
        let mut memory = Memory { bytes: vec![0; size_of_val(values) + offset], offset };
        // SAFETY: the buffer has that many bytes from the offset.
        unsafe { memory.at().copy_from_nonoverlapping(values.as_ptr().cast(), size_of_val(values)) };
        memory
    }
    fn at(&mut self) -> *mut u8 {
        self.bytes[self.offset..].as_mut_ptr()
    }
    fn read<T: Copy>(&self) -> Vec<T> {
        let whole = self.bytes[self.offset..].chunks_exact(size_of::<T>());
        // SAFETY: a chunk has the size of a T and was written as one.
        whole.map(|chunk| unsafe { chunk.as_ptr().cast::<T>().read_unaligned() }).collect()
    }
}

/// Runs an operation on unaligned copies of `sources` and returns every out. With `in_place`, the first out is that
/// source.
fn run<In: Copy, Out: Copy>(
    (reduction, kernel, step): (Reduction, Kernel, Step),
    sources: &[Vec<In>],
    initial: Out,
    (offset, in_place, outs): (usize, Option<usize>, usize),
) -> Vec<Vec<Out>> {
    let count = sources[0].len();
    let mut inputs: Vec<Memory> =
        sources.iter().zip(0..).map(|(source, index)| Memory::new(source, (offset + index) % 11)).collect();
    let mut results: Vec<Memory> = (0..outs).map(|index| Memory::new(&vec![initial; count], offset + index)).collect();
    let pointers: Vec<*mut u8> = inputs.iter_mut().map(Memory::at).collect();
    let mut targets: Vec<*mut u8> = results.iter_mut().map(Memory::at).collect();
    if let Some(index) = in_place {
        targets[0] = pointers[index];
    }
    let pointers: Vec<*const u8> = pointers.into_iter().map(<*mut u8>::cast_const).collect();
    // SAFETY: the buffers have `count` elements each; the kernel is available.
    unsafe { reduction.run(kernel, step, &pointers, &targets, count) };
    if let Some(index) = in_place {
        results[0] = inputs.swap_remove(index);
    }
    results.iter().map(Memory::read).collect()
}

/// With `exact`, the bits of NaN are compared too.
fn assert_same<T: OracleNumber>(label: impl Debug, exact: bool, found: &[T], expected: &[T]) {
    assert_eq!(found.len(), expected.len(), "{label:?}");
    for (index, (found, expected)) in found.iter().zip(expected).enumerate() {
        let same = if exact { found.is_identical(*expected) } else { found.is_same(*expected) };
        assert!(same, "{label:?}: element {index} is {found:?}, not {expected:?}");
    }
}

/// Input for every type: `random[source][element]`.
#[derive(Debug)]
struct Case {
    random: Vec<Vec<u64>>,
    divisor: u32,
    /// The factors of scaled operators.
    factors: (f64, f64),
    offset: usize,
    in_place: usize,
    outs: usize,
}

fn check<P: OracleType>(op: ReduceOp, case: &Case) {
    let Case { divisor, offset, in_place, outs, .. } = *case;
    let reduction = Reduction { op, dtype: P::DTYPE, acc_f64: P::ACC_F64, wire_is_acc: false, divisor };
    assert_eq!(op.check(P::DTYPE), Ok(()));
    assert_eq!(reduction.acc_size(), size_of::<P::Acc>());
    let sources: Vec<Vec<P::Element>> =
        case.random.iter().map(|random| random.iter().map(|random| P::element(*random)).collect()).collect();
    let count = sources[0].len();
    let combine = |left, right| combine::<P::Acc>(op, left, right);
    let partial = |sources: &[Vec<P::Element>]| -> Vec<P::Acc> {
        let lifted = |index: usize| sources.iter().map(move |source| lift(op, P::widen(source[index])));
        (0..count).map(|index| lifted(index).reduce(combine).expect("a source")).collect()
    };
    let finish =
        |accs: &[P::Acc]| -> Vec<P::Element> { accs.iter().map(|acc| P::narrow(finish(op, *acc, divisor))).collect() };
    let direct = partial(&sources);
    let results = finish(&direct);
    // Two levels: partial results of the first two sources, then of each other source, and their combination.
    let (first, others) = sources.split_at(2.min(sources.len()));
    let mut partials = vec![partial(first)];
    partials.extend(others.iter().map(|source| partial(std::slice::from_ref(source))));
    let two_level: Vec<P::Acc> = (0..count)
        .map(|index| partials.iter().map(|partial| partial[index]).reduce(combine).expect("a part"))
        .collect();
    let finished = finish(&two_level);
    let rounded: Vec<P::Acc> = finished.iter().map(|element| P::widen(*element)).collect();
    let initial = (P::element(1), P::widen(P::element(1)));
    let wide = Reduction { wire_is_acc: true, ..reduction };
    let in_place = Some(in_place).filter(|in_place| *in_place < sources.len());
    let exact = matches!(op, ReduceOp::Min | ReduceOp::Max);
    for kernel in Kernel::available() {
        let label = |step: &str| format!("{reduction:?}, {kernel:?}, {step}");

        for out in run((reduction, kernel, Step::Combine), &sources, initial.0, (offset, in_place, outs)) {
            assert_same(label("combine"), exact, &out, &results);
        }
        let out = run((reduction, kernel, Step::Partial), &sources, initial.1, (offset, None, 1));
        assert_same(label("partial"), exact, &out[0], &direct);

        for out in run((reduction, kernel, Step::Finish), &partials, initial.0, (offset, None, outs)) {
            assert_same(label("finish"), exact, &out, &finished);
        }
        let out = run((wide, kernel, Step::Partial), &partials, initial.1, (offset, None, 1));
        assert_same(label("wide partial"), exact, &out[0], &two_level);
        let in_place = in_place.filter(|in_place| *in_place < partials.len());
        for step in [Step::Combine, Step::Finish] {
            for out in run((wide, kernel, step), &partials, initial.1, (offset, in_place, outs)) {
                assert_same(label("wide combine"), exact, &out, &rounded);
            }
        }
        let out = run((wide, kernel, Step::Narrow), std::slice::from_ref(&rounded), initial.0, (offset, None, 1));
        assert_same(label("narrow"), exact, &out[0], &finished);
    }
    if exact || P::DTYPE.name().contains("int") {
        assert_same("both levels at once", exact, &two_level, &direct);
    }
}

fn cases() -> impl Strategy<Value = Case> {
    let divisor = prop::sample::select(vec![1, 2, 3, 4, 6, 7, 8, 12, 64, 1000, 1 << 20]);
    let factor = || prop::sample::select(vec![1.0, 0.5, 1.0 / 3.0, -2.5, 0.0, 1e3, 1e-30, f64::INFINITY]);
    let places = (0usize..11, 0usize..9, 1usize..4);
    let numbers = (divisor, (factor(), factor()));
    (1usize..8, 0usize..1200, numbers, places).prop_flat_map(
        |(sources, count, (divisor, factors), (offset, in_place, outs))| {
            let random = prop::collection::vec(prop::collection::vec(any::<u64>(), count), sources);
            random.prop_map(move |random| Case { random, divisor, factors, offset, in_place, outs })
        },
    )
}

/// The operators with the factors of `case`.
fn scaled<const N: usize>(ops: [ReduceOp; N], case: &Case) -> [ReduceOp; N] {
    let (pre, post) = case.factors;
    let with_factors =
        |op| ReduceOp::ALL.into_iter().find(|other| other.factors().is_some() && other.without_factors() == op);
    ops.map(|op| with_factors(op).expect("it takes factors").with_factors(pre, post))
}

/// Tests of these operators and types.
macro_rules! every_kernel_matches_the_oracle {
    ($($test:ident, $cases:literal, |$case:ident| $ops:expr, $($type:ident)*;)*) => { $(
        proptest! {
            #![proptest_config(ProptestConfig::with_cases(crate::cases::cases($cases)))]
            #[test]
            fn $test($case in cases()) {
                for op in $ops {
                    $(check::<$type>(op, &$case);)*
                }
            }
        }
    )* };
}
every_kernel_matches_the_oracle! {
    means, 30, |case| [ReduceOp::Mean],
        F16 F16P BF16 BF16P F32 F32P F64 F64P I8 U8 I16 U16 I32 U32 I64 U64
        Complex64 Complex64P Complex128 Complex128P;
    sums, 30, |case| [ReduceOp::Sum],
        F16 F16P BF16 BF16P F32 F32P F64 F64P
        PlainI8 PlainU8 PlainI16 PlainU16 PlainI32 PlainU32 PlainI64 PlainU64
        Complex64 Complex64P Complex128 Complex128P;
    products, 30, |case| [ReduceOp::Product],
        F16 F16P BF16 BF16P F32 F32P F64 F64P
        PlainI8 PlainU8 PlainI16 PlainU16 PlainI32 PlainU32 PlainI64 PlainU64;
    extrema, 30, |case| [ReduceOp::Min, ReduceOp::Max],
        PlainF16 PlainF16P PlainBF16 PlainBF16P F32 PlainF32P F64 F64P
        PlainI8 PlainU8 PlainI16 PlainU16 PlainI32 PlainU32 PlainI64 PlainU64;
    bit_operations, 20, |case| [ReduceOp::BitAnd, ReduceOp::BitOr, ReduceOp::BitXor],
        PlainI8 PlainU8 PlainI16 PlainU16 PlainI32 PlainU32 PlainI64 PlainU64 Bool;
    scaled_sums, 30, |case| scaled([ReduceOp::Sum, ReduceOp::Mean], &case),
        F16 F16P BF16 BF16P F32 F32P F64 F64P I8 U8 I16 U16 I32 U32 I64 U64
        Complex64 Complex64P Complex128 Complex128P;
    scaled_products_and_extrema, 20, |case| scaled([ReduceOp::Product, ReduceOp::Min, ReduceOp::Max], &case),
        F16 F16P BF16 BF16P F32 F32P F64 F64P
        PlainI8 PlainU8 PlainI16 PlainU16 PlainI32 PlainU32 PlainI64 PlainU64;
}

fn sum_of(dtype: DType) -> Reduction {
    Reduction { op: ReduceOp::Sum, dtype, acc_f64: false, wire_is_acc: false, divisor: 1 }
}

#[test]
fn sixteen_bit_floats_are_widened_exactly() {
    let all_bits: Vec<u16> = (0..=u16::MAX).collect();
    for bits in &all_bits {
        assert!(f16_to_f32(*bits).is_same(f16::from_bits(*bits).to_f32()), "{bits:#x}");
        assert!(bf16_to_f32(*bits).is_same(bf16::from_bits(*bits).to_f32()), "{bits:#x}");
    }
    let expected: Vec<f32> = all_bits.iter().map(|bits| f16::from_bits(*bits).to_f32()).collect();
    for kernel in Kernel::available() {
        let out = run((sum_of(DType::F16), kernel, Step::Partial), std::slice::from_ref(&all_bits), 0f32, (0, None, 1));
        assert_same(kernel, false, &out[0], &expected);
    }
}

/// float32 values over the whole range, and next to the ties of 16-bit floats.
fn singles() -> Vec<f32> {
    let range = (0..=u32::MAX).step_by(9973).map(f32::from_bits);
    let ties = (0..u16::MAX).flat_map(|bits| {
        let [current, next] = [bits, bits + 1].map(|bits| f16::from_bits(bits).to_f64());
        let tie = ((current + next) / 2.0) as f32;
        let half = u32::from(bits) << 16 | 0x8000;
        let above = if tie.is_nan() { tie.to_bits() } else { tie.to_bits() + 1 };
        [tie, f32::from_bits(above), f32::from_bits(tie.to_bits() - 1)]
            .into_iter()
            .chain([half, half + 1, half - 1].map(f32::from_bits))
    });
    let largest = [65519.996f32, 65520.0, 65536.0, -65520.0].into_iter();
    range.chain(ties).chain(largest).collect()
}

#[test]
fn float32_is_rounded_to_nearest() {
    let singles = singles();
    for single in &singles {
        assert!(f16::from_bits(f32_to_f16(*single)).is_same(f16::from_f32(*single)), "{single:e}");
        assert!(bf16::from_bits(f32_to_bf16(*single)).is_same(bf16::from_f32(*single)), "{single:e}");
    }
    let (halves, bfloats): (Vec<f16>, Vec<bf16>) =
        singles.iter().map(|single| (f16::from_f32(*single), bf16::from_f32(*single))).unzip();
    for kernel in Kernel::available() {
        let out =
            run((sum_of(DType::F16), kernel, Step::Narrow), std::slice::from_ref(&singles), f16::ZERO, (0, None, 1));
        assert_same(kernel, false, &out[0], &halves);
        let out =
            run((sum_of(DType::BF16), kernel, Step::Narrow), std::slice::from_ref(&singles), bf16::ZERO, (0, None, 1));
        assert_same(kernel, false, &out[0], &bfloats);
    }
}

#[test]
fn float64_is_rounded_once() {
    for single in singles().into_iter().step_by(7) {
        let middle = f64::from(single);
        for double in [middle, middle * (1.0 + 1e-12), middle * (1.0 - 1e-12)] {
            let odd = f64_to_odd_f32(double);
            assert!(f16::from_bits(f32_to_f16(odd)).is_same(nearest_f16(double)), "{double:e}");
            assert!(bf16::from_bits(f32_to_bf16(odd)).is_same(nearest_bf16(double)), "{double:e}");
        }
    }
    // Rounded to the nearest float32 first, this value would be a tie and become 1.
    let above = 1.0 + 2f64.powi(-11) + 2f64.powi(-40);
    assert_eq!(f16::from_bits(f32_to_f16(f64_to_odd_f32(above))), f16::from_bits(0x3c01));
    assert_eq!(f16::from_bits(f32_to_f16(above as f32)), f16::ONE);
    assert_eq!(f64_to_odd_f32(1e-300).to_bits(), 1);
    assert_eq!(f64_to_odd_f32(1e300), f32::MAX);
    assert!(f64_to_odd_f32(f64::NAN).is_nan());
}
