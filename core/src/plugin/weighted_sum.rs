//! The weighted sum of a call's own mean and the carried mean; see [`crate::plugin`]. Pure arithmetic on raw memory.
//!
//! Floating-point sums are computed in float64 and rounded once. Integers are not split: a weight of at least 0.5
//! counts as 1, any other as 0, so the total weight of a mean stays one.

use crate::dtype::DType;
use crate::float_state::DefaultFloatState;
use crate::reduce::types::{BF16AccF64, F16AccF64, ReduceType};

/// The carries to and from a call.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CarryWeights {
    /// The share of the call's own mean that the next call returns.
    pub left: f64,
    /// The share of the previous mean that this call returns.
    pub carried: f64,
}

impl CarryWeights {
    fn rounded(self) -> CarryWeights {
        let rounded = |share: f64| if share >= 0.5 { 1.0 } else { 0.0 };
        CarryWeights { left: rounded(self.left), carried: rounded(self.carried) }
    }
}

/// Writes `(1 - left) own + carried before` to `out`, element by element.
///
/// # Safety
/// `own`, `before` and `out` have `len` valid, aligned elements of `dtype`; `out` may equal either input.
pub unsafe fn weighted_sum(
    dtype: DType,
    own: *const u8,
    before: *const u8,
    out: *mut u8,
    len: usize,
    weights: CarryWeights,
) {
    macro_rules! with {
        ($element:ty, $weights:expr, $mix:expr) => {{
            let CarryWeights { left, carried } = $weights;
            let mix: fn($element, $element, f64, f64) -> $element = $mix;
            let (own, before, out) = (own.cast::<$element>(), before.cast::<$element>(), out.cast::<$element>());
            for index in 0..len {
                // SAFETY: guaranteed by the caller; each element is read before it is written.
                unsafe { *out.add(index) = mix(*own.add(index), *before.add(index), 1.0 - left, carried) };
            }
        }};
    }
    /// A zero weight ignores the value: infinity times zero would be NaN.
    #[inline(always)]
    fn sum(own: f64, before: f64, share: f64, carried: f64) -> f64 {
        match (share == 0.0, carried == 0.0) {
            (true, true) => 0.0,
            (true, false) => before * carried,
            (false, true) => own * share,
            (false, false) => own * share + before * carried,
        }
    }
    macro_rules! integer {
        ($element:ty) => {
            with!($element, weights.rounded(), |own, before, share, carried| {
                let own = if share > 0.0 { own } else { 0 };
                own.wrapping_add(if carried > 0.0 { before } else { 0 })
            })
        };
    }
    macro_rules! half {
        ($type:ty) => {
            with!(u16, weights, |own, before, a, b| {
                <$type>::narrow(sum(<$type>::widen(own), <$type>::widen(before), a, b))
            })
        };
    }
    let _default = DefaultFloatState::enter();
    match dtype {
        DType::F16 => half!(F16AccF64),
        DType::BF16 => half!(BF16AccF64),
        DType::F32 => with!(f32, weights, |own, before, a, b| sum(f64::from(own), f64::from(before), a, b) as f32),
        DType::F64 => with!(f64, weights, |own, before, a, b| sum(own, before, a, b)),
        DType::I8 => integer!(i8),
        DType::U8 | DType::Bool => integer!(u8),
        DType::I32 => integer!(i32),
        DType::I64 => integer!(i64),
        DType::I16 => integer!(i16),
        DType::U16 => integer!(u16),
        DType::U32 => integer!(u32),
        DType::U64 => integer!(u64),
        // SAFETY: a complex number is two floating-point numbers.
        DType::Complex64 => unsafe { weighted_sum(DType::F32, own, before, out, 2 * len, weights) },
        // SAFETY: as above.
        DType::Complex128 => unsafe { weighted_sum(DType::F64, own, before, out, 2 * len, weights) },
    }
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::*;

    fn weighted<T: Copy>(dtype: DType, own: T, before: T, left: f64, carried: f64) -> T {
        let mut out = before;
        // SAFETY: one element each.
        unsafe {
            let out: *mut T = &raw mut out;
            weighted_sum(dtype, (&raw const own).cast(), out.cast(), out.cast(), 1, CarryWeights { left, carried });
        }
        out
    }

    #[test]
    fn weighted_means_are_added() {
        assert_eq!(weighted(DType::F32, 4f32, 8.0, 0.25, 0.5), 7.0);
        assert_eq!(weighted(DType::F64, 4f64, 8.0, 0.0, 1.0), 12.0);
        assert_eq!(weighted(DType::F16, f16::from_f32(4.0), f16::from_f32(8.0), 1.0, 1.0), f16::from_f32(8.0));
        assert_eq!(weighted(DType::BF16, bf16::from_f32(4.0), bf16::from_f32(8.0), 1.0, 0.0), bf16::ZERO);
    }

    #[test]
    fn two_byte_floats_are_rounded_once() {
        // Just above the tie between 1 and the next representable value.
        let above_tie = |log| f64::powi(2.0, log) + f64::powi(2.0, -40);
        assert_eq!(weighted(DType::F16, f16::ONE, f16::ONE, 0.0, above_tie(-11)), f16::from_bits(0x3c01));
        assert_eq!(weighted(DType::BF16, bf16::ONE, bf16::ONE, 0.0, above_tie(-8)), bf16::from_bits(0x3f81));
    }

    #[test]
    fn values_of_zero_weight_are_ignored() {
        assert_eq!(weighted(DType::F32, f32::INFINITY, 8.0, 1.0, 1.0), 8.0);
        assert_eq!(weighted(DType::F64, 4.0, f64::NAN, 0.0, 0.0), 4.0);
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn the_state_of_the_thread_does_not_decide_the_bits() {
        let sums = || {
            let single = weighted(DType::F32, 1e-39f32, 1.1e-39, 0.3, 0.7);
            (single.to_bits(), weighted(DType::F64, 0.1f64, 0.7, 0.3, 0.7).to_bits())
        };
        assert_eq!(crate::float_state::with_other_state(sums), sums());
    }

    #[test]
    fn integer_weights_are_rounded() {
        assert_eq!(weighted(DType::I32, 5, 7, 0.4, 0.6), 12);
        assert_eq!(weighted(DType::I64, 5i64, 7, 0.5, 0.4), 0);
        assert_eq!(weighted(DType::U8, 5u8, 7, 0.6, 0.5), 7);
        assert_eq!(weighted(DType::I8, -5i8, 7, 0.0, 0.0), -5);
        assert_eq!(weighted(DType::I16, -500i16, 7, 0.0, 1.0), -493);
        assert_eq!(weighted(DType::U16, u16::MAX, 2, 0.0, 1.0), 1);
        assert_eq!(weighted(DType::U32, 5u32, u32::MAX, 1.0, 1.0), u32::MAX);
        assert_eq!(weighted(DType::U64, u64::MAX, 7, 0.4, 0.4), u64::MAX);
    }

    #[test]
    fn both_parts_of_complex_numbers_are_weighted() {
        assert_eq!(weighted(DType::Complex64, [4f32, 2.0], [8.0, -8.0], 0.25, 0.5), [7.0, -2.5]);
        assert_eq!(weighted(DType::Complex128, [4f64, 2.0], [8.0, -8.0], 0.0, 1.0), [12.0, -6.0]);
    }
}
