//! Two neighbouring bfloat16 as one element: the mean of plain bfloat16, which is the gradient of most large models.
//!
//! One alone has to be moved to another shard of the vectors on its way to float32 and back, as that is twice as wide. Of a
//! pair in 32 bits, either half becomes a float32 in the shard where it is, by a shift or a mask.

use super::convert::rounded_to_bf16;
use super::types::{BF16, ReduceType};

/// Pairs of [`BF16`].
pub(super) struct BF16Pair;

const UPPER: u32 = 0xffff_0000;

impl ReduceType for BF16Pair {
    type Element = u32;
    /// Of the lower and of the upper half.
    type Acc = [f32; 2];
    #[inline(always)]
    fn widen(pair: u32) -> [f32; 2] {
        [f32::from_bits(pair << 16), f32::from_bits(pair & UPPER)]
    }
    #[inline(always)]
    fn narrow([lower, upper]: [f32; 2]) -> u32 {
        rounded_to_bf16(lower) >> 16 | rounded_to_bf16(upper) & UPPER
    }
    #[inline(always)]
    fn add(left: [f32; 2], right: [f32; 2]) -> [f32; 2] {
        [left[0] + right[0], left[1] + right[1]]
    }
    fn divisor(count: u32) -> [f32; 2] {
        [BF16::divisor(count); 2]
    }
    #[inline(always)]
    fn divide(acc: [f32; 2], divisor: [f32; 2]) -> [f32; 2] {
        [BF16::divide(acc[0], divisor[0]), BF16::divide(acc[1], divisor[1])]
    }
    fn power(log: u8) -> [f32; 2] {
        [BF16::power(log); 2]
    }
    #[inline(always)]
    fn divide_power(acc: [f32; 2], power: [f32; 2]) -> [f32; 2] {
        [BF16::divide_power(acc[0], power[0]), BF16::divide_power(acc[1], power[1])]
    }
}
