//! Reductions with known results.

use half::{bf16, f16};
use proptest::prelude::*;

use super::*;

fn mean<T: Copy + Default>(reduction: Reduction, sources: &[Vec<T>], divisor: u32) -> Vec<T> {
    let mut out = vec![T::default(); sources[0].len()];
    let pointers: Vec<*const u8> = sources.iter().map(|source| source.as_ptr().cast()).collect();
    // SAFETY: the vectors have equal lengths and the reduction's element type.
    unsafe { reduction.mean(&pointers, &[out.as_mut_ptr().cast()], out.len(), divisor) };
    out
}

fn reduction_of(dtype: DType) -> Reduction {
    Reduction { dtype, acc_f64: false, wire_is_acc: false }
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
        let reduction = reduction_of(DType::F32);
        let direct = mean(reduction, &sources, 3);
        let pointers: Vec<*const u8> = sources.iter().map(|source| source.as_ptr().cast()).collect();
        let mut first = vec![0f32; values.len()];
        let mut second = vec![0f32; values.len()];
        let mut out = vec![0f32; values.len()];
        let mut narrow = vec![0f32; values.len()];
        // SAFETY: all vectors have one length; float32 is its own accumulator.
        unsafe {
            reduction.sum(&pointers[..2], first.as_mut_ptr().cast(), first.len());
            reduction.sum(&pointers[2..], second.as_mut_ptr().cast(), second.len());
            let accs = [first.as_ptr().cast::<u8>(), second.as_ptr().cast()];
            reduction.finish(&accs, &[out.as_mut_ptr().cast()], out.len(), 3);
            let wide = Reduction { wire_is_acc: true, ..reduction };
            wide.mean(&pointers, &[second.as_mut_ptr().cast()], second.len(), 3);
            wide.narrow(second.as_ptr().cast(), narrow.as_mut_ptr().cast(), narrow.len());
        }
        prop_assert_eq!(&direct, &out);
        prop_assert_eq!(&direct, &narrow);
    }
}

#[test]
fn a_wire_of_accumulators_rounds_once() {
    let reduction = Reduction { dtype: DType::BF16, acc_f64: false, wire_is_acc: true };
    let mut acc = [259.0f32];
    let mut out = [bf16::ZERO];
    // SAFETY: one accumulator, one element.
    unsafe {
        reduction.mean(&[acc.as_ptr().cast()], &[acc.as_mut_ptr().cast()], 1, 2);
        reduction.narrow(acc.as_ptr().cast(), out.as_mut_ptr().cast(), 1);
    }
    assert_eq!(acc, [bf16::from_f32(129.5).to_f32()]);
    assert_eq!(out, [bf16::from_f32(129.5)]);
}
