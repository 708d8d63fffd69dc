//! Reductions with known results.

use half::{bf16, f16};
use proptest::prelude::*;

use super::*;
use crate::error::Error;
#[cfg(target_arch = "x86_64")]
use crate::float_state::with_other_state;

fn mean<T: Copy + Default>(reduction: Reduction, sources: &[Vec<T>], divisor: u32) -> Vec<T> {
    combine(Reduction { divisor, ..reduction }, sources)
}

fn combine<T: Copy + Default>(reduction: Reduction, sources: &[Vec<T>]) -> Vec<T> {
    let mut out = vec![T::default(); sources[0].len()];
    let pointers: Vec<*const u8> = sources.iter().map(|source| source.as_ptr().cast()).collect();
    let mut bound = out.clone();
    // SAFETY: the vectors have equal lengths and the reduction's element type.
    unsafe {
        reduction.combine(&pointers, &[out.as_mut_ptr().cast()], out.len());
        reduction.bind().unwrap().combine(&pointers, &[bound.as_mut_ptr().cast()], bound.len());
    }
    let bytes = |values: &[T]| {
        // SAFETY: element types have no padding.
        unsafe { std::slice::from_raw_parts(values.as_ptr().cast::<u8>(), size_of_val(values)).to_vec() }
    };
    assert_eq!(bytes(&out), bytes(&bound), "{reduction:?}");
    out
}

fn reduction_of(dtype: DType) -> Reduction {
    Reduction { op: ReduceOp::Mean, dtype, acc_f64: false, wire_is_acc: false, divisor: 1 }
}

fn combined<T: Copy + Default>(op: ReduceOp, dtype: DType, sources: &[Vec<T>]) -> Vec<T> {
    combine(Reduction { op, ..reduction_of(dtype) }, sources)
}

#[test]
fn integers_round_toward_zero() {
    assert_eq!(mean(reduction_of(DType::I32), &[vec![-3, 3, 7], vec![0, 0, 8]], 2), [-1, 1, 7]);
    assert_eq!(mean(reduction_of(DType::U8), &[vec![255u8, 1], vec![255, 2]], 2), [255, 1]);
    assert_eq!(
        mean(reduction_of(DType::I64), &[vec![i64::MAX, i64::MIN], vec![i64::MAX, i64::MIN]], 2),
        [i64::MAX, i64::MIN]
    );
    assert_eq!(mean(reduction_of(DType::I8), &[vec![-128i8], vec![-128], vec![-128]], 3), [-128]);
}

#[test]
fn sixteen_bit_floats_are_added_in_float32() {
    let one = bf16::from_f32(256.0);
    let small = bf16::from_f32(1.0);
    // In bfloat16, 256 + 1 is 256 each time; the float32 sum is 259.
    let sources = [vec![one], vec![small], vec![small], vec![small]];
    assert_eq!(mean(reduction_of(DType::BF16), &sources, 1), [bf16::from_f32(259.0)]);
    let big = f16::from_f32(60000.0);
    assert_eq!(mean(reduction_of(DType::F16), &[vec![big], vec![big]], 2), [big]);
}

#[test]
fn acc_f64_keeps_what_float32_loses() {
    let sources = [vec![1e8f32], vec![1.0], vec![-1e8], vec![1.0]];
    assert_eq!(mean(reduction_of(DType::F32), &sources, 1), [1.0]);
    assert_eq!(mean(Reduction { acc_f64: true, ..reduction_of(DType::F32) }, &sources, 1), [2.0]);
}

proptest! {
    /// Two-level sums, as between hosts, equal one-level sums when the inner sums are exact. Wire formats with
    /// accumulators and with elements give the same bits.
    #[test]
    fn two_level_sums_and_both_wire_formats_agree(values in prop::collection::vec((-1000i16..1000, -1000i16..1000, -1000i16..1000), 1..1500)) {
        let sources: Vec<Vec<f32>> = (0..3).map(|k| values.iter().map(|v| f32::from([v.0, v.1, v.2][k])).collect()).collect();
        let reduction = Reduction { divisor: 3, ..reduction_of(DType::F32) };
        let direct = combine(reduction, &sources);
        let pointers: Vec<*const u8> = sources.iter().map(|source| source.as_ptr().cast()).collect();
        let mut first = vec![0f32; values.len()];
        let mut second = vec![0f32; values.len()];
        let mut out = vec![0f32; values.len()];
        let mut narrow = vec![0f32; values.len()];
        // SAFETY: all vectors have one length; float32 is its own accumulator.
        unsafe {
            reduction.partial(&pointers[..2], first.as_mut_ptr().cast(), first.len());
            reduction.partial(&pointers[2..], second.as_mut_ptr().cast(), second.len());
            let accs = [first.as_ptr().cast::<u8>(), second.as_ptr().cast()];
            reduction.finish(&accs, &[out.as_mut_ptr().cast()], out.len());
            let wide = Reduction { wire_is_acc: true, ..reduction };
            wide.combine(&pointers, &[second.as_mut_ptr().cast()], second.len());
            wide.narrow(second.as_ptr().cast(), narrow.as_mut_ptr().cast(), narrow.len());
        }
        prop_assert_eq!(&direct, &out);
        prop_assert_eq!(&direct, &narrow);
    }
}

#[test]
fn a_wire_of_accumulators_rounds_once() {
    let reduction = Reduction { wire_is_acc: true, divisor: 2, ..reduction_of(DType::BF16) };
    let mut acc = [259.0f32];
    let mut out = [bf16::ZERO];
    // SAFETY: one accumulator, one element.
    unsafe {
        reduction.combine(&[acc.as_ptr().cast()], &[acc.as_mut_ptr().cast()], 1);
        reduction.narrow(acc.as_ptr().cast(), out.as_mut_ptr().cast(), 1);
    }
    assert_eq!(acc, [bf16::from_f32(129.5).to_f32()]);
    assert_eq!(out, [bf16::from_f32(129.5)]);
}

/// Each combination of operator and element type has a result or an error, and those with an error have no kernel.
#[test]
fn the_table_is_complete() {
    let floats = [DType::F16, DType::BF16, DType::F32, DType::F64];
    let complex = [DType::Complex64, DType::Complex128];
    for op in ReduceOp::ALL {
        for dtype in DType::ALL {
            let exists = match op.without_factors() {
                ReduceOp::Sum | ReduceOp::Mean => dtype != DType::Bool,
                ReduceOp::Min | ReduceOp::Max | ReduceOp::Product => dtype != DType::Bool && !complex.contains(&dtype),
                _ => !floats.contains(&dtype) && !complex.contains(&dtype),
            };
            match op.check(dtype) {
                Ok(()) => assert!(exists, "{op:?}, {dtype:?}"),
                Err(Error::DType(text)) => {
                    assert!(!exists, "{op:?}, {dtype:?}");
                    assert!(text.starts_with(&format!("{} has no {}; ", dtype.name(), op.name())), "{text}");
                }
                Err(error) => panic!("{error}"),
            }
            for (acc_f64, wire_is_acc) in [(false, false), (false, true), (true, false), (true, true)] {
                let reduction = Reduction { op, dtype, acc_f64, wire_is_acc, divisor: 1 };
                // No element is larger than a cache line, and max_acc_bytes allows for four times the size.
                assert!((1..=4).contains(&(reduction.acc_size() / dtype.size())), "{reduction:?}");
                let size = if wire_is_acc { reduction.acc_size() } else { dtype.size() };
                assert_eq!(reduction.wire_size(), size);
                for step in [Step::Combine, Step::Partial, Step::Finish] {
                    let run = Run { reduction, kernel: Kernel::Baseline, step, sources: &[], outs: &[], count: 0 };
                    let source = 0u128;
                    let run = Run { sources: &[(&raw const source).cast()], ..run };
                    assert_eq!(reduction.visit(step, &run).is_some(), exists, "{reduction:?}, {step:?}");
                }
            }
        }
    }
}

#[test]
fn operators_have_stable_codes_and_names() {
    // 9 is Adasum, which is no operator of single elements.
    let plain = ["sum", "mean", "min", "max", "product", "bit_and", "bit_or", "bit_xor"];
    let scaled = ["scaled_sum", "scaled_mean", "scaled_min", "scaled_max", "scaled_product"];
    let known = (0..8).zip(plain).chain([8, 10, 11, 12, 13].into_iter().zip(scaled));
    for (op, (code, name)) in ReduceOp::ALL.into_iter().zip(known) {
        assert_eq!((op.code(), op.name()), (code, name));
        assert_eq!(ReduceOp::from_code(code.into()), Some(op));
        assert_eq!(op.keeps_single_input(), code < 8);
        assert_eq!(op.with_factors(2.0, 3.0).factors(), (code >= 8).then_some((2.0, 3.0)));
    }
    assert_eq!(ReduceOp::ALL.len(), plain.len() + scaled.len());
    let error = ReduceOp::Mean.check(DType::Bool).unwrap_err().to_string();
    assert_eq!(error, "bool has no mean; convert it first, or use one of bit_and, bit_or, bit_xor");
}

#[test]
fn operators_without_arithmetic_keep_the_size_of_elements() {
    for dtype in DType::ALL {
        for op in [ReduceOp::Min, ReduceOp::Max, ReduceOp::BitAnd, ReduceOp::BitOr, ReduceOp::BitXor] {
            assert_eq!(Reduction { op, acc_f64: true, ..reduction_of(dtype) }.acc_size(), dtype.size());
        }
    }
    let sizes = |op| {
        [DType::F16, DType::I8, DType::I64, DType::Complex64]
            .map(|dtype| Reduction { op, ..reduction_of(dtype) }.acc_size())
    };
    assert_eq!(sizes(ReduceOp::Mean), [4, 4, 16, 8]);
    assert_eq!(sizes(ReduceOp::Sum), [4, 1, 8, 8]);
    assert_eq!(Reduction { acc_f64: true, ..reduction_of(DType::Complex64) }.acc_size(), 16);
}

/// -0.0 is less than +0.0, in either order.
#[test]
fn signed_zeros_are_ordered() {
    let sources = [vec![0.0f32, -0.0, 0.0, -0.0], vec![-0.0, 0.0, 0.0, -0.0]];
    let bits = |op| combined(op, DType::F32, &sources).iter().map(|zero| zero.is_sign_negative()).collect::<Vec<_>>();
    assert_eq!(bits(ReduceOp::Min), [true, true, false, true]);
    assert_eq!(bits(ReduceOp::Max), [false, false, false, true]);
    for dtype in [DType::F16, DType::BF16] {
        assert_eq!(combined(ReduceOp::Min, dtype, &[vec![0u16], vec![0x8000]]), [0x8000]);
        assert_eq!(combined(ReduceOp::Max, dtype, &[vec![0x8000u16], vec![0]]), [0]);
    }
}

#[test]
fn extrema_propagate_nan() {
    let nans = [0xffc0_1234, 0x7fc0_5678, 0x7f80_0001].map(f32::from_bits);
    for (op, nan) in [ReduceOp::Min, ReduceOp::Max].into_iter().flat_map(|op| nans.map(|nan| (op, nan))) {
        for other in [1.0, -0.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN] {
            for (left, right) in [(nan, other), (other, nan)] {
                let found = combined(op, DType::F32, &[vec![left], vec![right], vec![2.0]]);
                assert!(found[0].is_nan(), "{op:?}, {left}, {right}");
            }
        }
        for (dtype, nan, infinity) in [(DType::F16, 0xfc01u16, 0x7c00), (DType::BF16, 0xff81, 0x7f80)] {
            for other in [0, 0x8000, infinity, infinity | 0x8000, infinity | 1] {
                let found = combined(op, dtype, &[vec![other], vec![nan], vec![other]]);
                assert!(found[0] & 0x7fff > infinity, "{op:?}, {other:#x}");
            }
            let infinities = [vec![infinity], vec![infinity | 0x8000]];
            let found = if op == ReduceOp::Min { infinity | 0x8000 } else { infinity };
            assert_eq!(combined(op, dtype, &infinities), [found]);
        }
    }
}

/// Subnormals, and sums that round differently up and down.
#[cfg(target_arch = "x86_64")]
#[test]
fn the_state_of_the_thread_does_not_decide_the_bits() {
    let (values, others) = ([1e-39, 1.3e-39, 0.1], [1.1e-39, -1.2e-39, 0.7]);
    let of = |values: [f64; 3], half: fn(f32) -> u16| values.map(|value| half(value as f32)).to_vec();
    let singles = [values.map(|value| value as f32).to_vec(), others.map(|value| value as f32).to_vec()];
    let doubles = [values.map(|value| value * 1e-270).to_vec(), others.map(|value| value * 1e-270).to_vec()];
    let f16 = [of(values, convert::f32_to_f16), of(others, convert::f32_to_f16)];
    let bf16 = [of(values, convert::f32_to_bf16), of(others, convert::f32_to_bf16)];
    let all = || {
        let mut bits: Vec<Vec<u64>> = Vec::new();
        for op in [ReduceOp::Mean, ReduceOp::Sum, ReduceOp::Min, ReduceOp::Max, ReduceOp::Product] {
            let reduction = |dtype| Reduction { op, divisor: 3, ..reduction_of(dtype) };
            bits.push(combine(reduction(DType::F32), &singles).iter().map(|value| value.to_bits().into()).collect());
            bits.push(combine(reduction(DType::F64), &doubles).iter().map(|value| value.to_bits()).collect());
            bits.push(combine(reduction(DType::F16), &f16).into_iter().map(u64::from).collect());
            bits.push(combine(reduction(DType::BF16), &bf16).into_iter().map(u64::from).collect());
        }
        bits
    };
    assert_eq!(with_other_state(all), all());
}

#[test]
fn integers_wrap_around() {
    assert_eq!(combined(ReduceOp::Sum, DType::I8, &[vec![127i8], vec![1]]), [-128]);
    assert_eq!(combined(ReduceOp::Product, DType::U16, &[vec![300u16], vec![300]]), [24464]);
    assert_eq!(combined(ReduceOp::Product, DType::I64, &[vec![i64::MAX], vec![-2]]), [2]);
    assert_eq!(mean(reduction_of(DType::U64), &[vec![u64::MAX], vec![u64::MAX]], 2), [u64::MAX]);
}

#[test]
fn bit_operations_of_bool_are_logical() {
    let sources = [vec![false, true, false, true], vec![false, false, true, true]];
    let of = |op| combined(op, DType::Bool, &sources);
    assert_eq!(of(ReduceOp::BitAnd), [false, false, false, true]);
    assert_eq!(of(ReduceOp::BitOr), [false, true, true, true]);
    assert_eq!(of(ReduceOp::BitXor), [false, true, true, false]);
}

/// Two ranks with two towers each, as `Allreduce` runs them: `pre` applies once to each input, `post` and the mean's
/// divisor once to the whole.
#[test]
fn towers_are_reduced_as_single_inputs() {
    fn reduce_towers<T: Copy + Default, A: Copy + Default>(reduction: Reduction, ranks: [[T; 2]; 2]) -> T {
        assert_eq!(reduction.acc_size(), size_of::<A>());
        let wide = Reduction { wire_is_acc: true, ..reduction };
        let (mut slots, mut result) = ([A::default(); 2], T::default());
        // SAFETY: one element or accumulator each.
        unsafe {
            for (slot, towers) in slots.iter_mut().zip(&ranks) {
                let sources = [(&raw const towers[0]).cast(), (&raw const towers[1]).cast()];
                reduction.partial(&sources, (&raw mut *slot).cast(), 1);
            }
            let [own, other] = [(&raw mut slots[0]).cast::<u8>(), (&raw mut slots[1]).cast()];
            wide.combine(&[own.cast_const(), other.cast_const()], &[own], 1);
            wide.narrow(own, (&raw mut result).cast(), 1);
        }
        result
    }
    let of = |op, dtype| Reduction { op, divisor: 4, ..reduction_of(dtype) };
    let floats = [[1.0f32, 2.0], [5.0, 8.0]];
    assert_eq!(reduce_towers::<f32, f32>(of(ReduceOp::Sum, DType::F32), floats), 16.0);
    assert_eq!(reduce_towers::<f32, f32>(of(ReduceOp::Mean, DType::F32), floats), 4.0);
    assert_eq!(reduce_towers::<f32, f32>(of(ReduceOp::Product, DType::F32), floats), 80.0);
    assert_eq!(reduce_towers::<f32, f32>(of(ReduceOp::Min, DType::F32), floats), 1.0);
    let scaled = ReduceOp::ScaledSum { pre: 3.0, post: 0.5 };
    assert_eq!(reduce_towers::<f32, f32>(of(scaled, DType::F32), floats), 24.0);
    let halves = floats.map(|rank| rank.map(bf16::from_f32));
    assert_eq!(reduce_towers::<bf16, f32>(of(scaled, DType::BF16), halves), bf16::from_f32(24.0));
    assert_eq!(reduce_towers::<bf16, f32>(of(ReduceOp::Product, DType::BF16), halves), bf16::from_f32(80.0));
    assert_eq!(reduce_towers::<u16, u16>(of(ReduceOp::Max, DType::BF16), [[1, 2], [0x8001, 3]]), 3);
    let integers = [[200u8, 100], [50, 51]];
    let scaled = ReduceOp::ScaledMean { pre: 0.5, post: 1.5 };
    assert_eq!(reduce_towers::<u8, i32>(of(scaled, DType::U8), integers), 75);
    let scaled = ReduceOp::ScaledMax { pre: 0.25, post: 3.0 };
    assert_eq!(reduce_towers::<u8, u8>(of(scaled, DType::U8), integers), 150);
    assert_eq!(reduce_towers::<u8, i32>(of(ReduceOp::Mean, DType::U8), integers), 100);
    assert_eq!(reduce_towers::<u8, u8>(of(ReduceOp::Sum, DType::U8), integers), 145);
    assert_eq!(reduce_towers::<u8, u8>(of(ReduceOp::BitXor, DType::U8), integers), 200 ^ 100 ^ 50 ^ 51);
}
