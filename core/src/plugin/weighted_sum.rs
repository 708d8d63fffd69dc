//! The weighted sum of a call's own mean and the one carried over from the call before; see [`crate::plugin`]. Pure
//! arithmetic on raw memory.
//!
//! Floating point is computed in float64 and rounded to the element type once. Integers cannot be split: a share of a
//! half or more counts as all, less as nothing, which keeps every mean's total weight at one.

use crate::dtype::DType;
use crate::reduce::types::{BF16AccF64, F16AccF64, ReduceType};

/// The carries that a call's result is made of.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CarryWeights {
    /// The share of its own mean that the call leaves to the next one.
    pub left: f64,
    /// The share of the mean before that was left to this call.
    pub carried: f64,
}

impl CarryWeights {
    fn whole(self) -> CarryWeights {
        let whole = |share: f64| if share >= 0.5 { 1.0 } else { 0.0 };
        CarryWeights { left: whole(self.left), carried: whole(self.carried) }
    }
}

/// Writes `(1 - left) own + carried before` to `out`, element by element.
///
/// # Safety
/// `own`, `before` and `out` are `len` valid elements of `dtype`, aligned; `out` may be either of the others.
pub unsafe fn weighted_sum(
    dtype: DType,
    own: *const u8,
    before: *const u8,
    out: *mut u8,
    len: usize,
    shares: CarryWeights,
) {
    macro_rules! with {
        ($element:ty, $shares:expr, $mix:expr) => {{
            let CarryWeights { left, carried } = $shares;
            let mix: fn($element, $element, f64, f64) -> $element = $mix;
            let (own, before, out) = (own.cast::<$element>(), before.cast::<$element>(), out.cast::<$element>());
            for index in 0..len {
                // SAFETY: the caller's promise; each element is read before it is written.
                unsafe { *out.add(index) = mix(*own.add(index), *before.add(index), 1.0 - left, carried) };
            }
        }};
    }
    /// A share of zero takes nothing, whatever the value: an infinity of another call does not become a NaN here.
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
            with!($element, shares.whole(), |own, before, share, carried| {
                let own = if share > 0.0 { own } else { 0 };
                own.wrapping_add(if carried > 0.0 { before } else { 0 })
            })
        };
    }
    macro_rules! half {
        ($type:ty) => {
            with!(u16, shares, |own, before, a, b| {
                <$type>::narrow(sum(<$type>::widen(own), <$type>::widen(before), a, b))
            })
        };
    }
    match dtype {
        DType::F16 => half!(F16AccF64),
        DType::BF16 => half!(BF16AccF64),
        DType::F32 => with!(f32, shares, |own, before, a, b| sum(f64::from(own), f64::from(before), a, b) as f32),
        DType::F64 => with!(f64, shares, |own, before, a, b| sum(own, before, a, b)),
        DType::I8 => integer!(i8),
        DType::U8 | DType::Bool => integer!(u8),
        DType::I32 => integer!(i32),
        DType::I64 => integer!(i64),
    }
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::*;

    fn blended<T: Copy>(dtype: DType, own: T, before: T, left: f64, carried: f64) -> T {
        let mut out = before;
        // SAFETY: one element each.
        unsafe {
            let out: *mut T = &raw mut out;
            weighted_sum(dtype, (&raw const own).cast(), out.cast(), out.cast(), 1, CarryWeights { left, carried });
        }
        out
    }

    #[test]
    fn shares_of_both_means_are_added() {
        assert_eq!(blended(DType::F32, 4f32, 8.0, 0.25, 0.5), 7.0);
        assert_eq!(blended(DType::F64, 4f64, 8.0, 0.0, 1.0), 12.0);
        assert_eq!(blended(DType::F16, f16::from_f32(4.0), f16::from_f32(8.0), 1.0, 1.0), f16::from_f32(8.0));
        assert_eq!(blended(DType::BF16, bf16::from_f32(4.0), bf16::from_f32(8.0), 1.0, 0.0), bf16::ZERO);
    }

    #[test]
    fn two_byte_floats_are_rounded_once() {
        // Just above the tie between 1 and the next number.
        let above = |log| f64::powi(2.0, log) + f64::powi(2.0, -40);
        assert_eq!(blended(DType::F16, f16::ONE, f16::ONE, 0.0, above(-11)), f16::from_bits(0x3c01));
        assert_eq!(blended(DType::BF16, bf16::ONE, bf16::ONE, 0.0, above(-8)), bf16::from_bits(0x3f81));
    }

    #[test]
    fn what_has_no_share_does_not_matter() {
        assert_eq!(blended(DType::F32, f32::INFINITY, 8.0, 1.0, 1.0), 8.0);
        assert_eq!(blended(DType::F64, 4.0, f64::NAN, 0.0, 0.0), 4.0);
    }

    #[test]
    fn integers_go_as_a_whole() {
        assert_eq!(blended(DType::I32, 5, 7, 0.4, 0.6), 12);
        assert_eq!(blended(DType::I64, 5i64, 7, 0.5, 0.4), 0);
        assert_eq!(blended(DType::U8, 5u8, 7, 0.6, 0.5), 7);
        assert_eq!(blended(DType::I8, -5i8, 7, 0.0, 0.0), -5);
    }
}
