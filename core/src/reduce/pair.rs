//! Two adjacent bfloat16 as one element, for sums of bfloat16 without float64 accumulation: the gradients of most
//! large models.
//!
//! A single bfloat16 must move to another vector lane when it is widened to float32 and back, because the size doubles.
//! In a 32-bit pair, each half becomes a float32 in place, by a shift or a mask.

use super::convert::rounded_to_bf16;
use super::types::ReduceType;

/// A pair of [`super::types::BF16`].
pub(super) struct BF16Pair;

const UPPER: u32 = 0xffff_0000;

impl ReduceType for BF16Pair {
    type Element = u32;
    /// The lower and the upper element.
    type Acc = [f32; 2];
    const IS_PAIR: bool = true;
    #[inline(always)]
    fn widen(pair: u32) -> [f32; 2] {
        [f32::from_bits(pair << 16), f32::from_bits(pair & UPPER)]
    }
    #[inline(always)]
    fn narrow([lower, upper]: [f32; 2]) -> u32 {
        rounded_to_bf16(lower) >> 16 | rounded_to_bf16(upper) & UPPER
    }
}
