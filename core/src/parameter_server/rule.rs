//! What an update does to the elements of a shard. Pure arithmetic on raw memory.

use serde::{Deserialize, Serialize};

use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::reduce::{ReduceOp, Reduction};
use crate::stream_copy::stream_copy;

/// What an update does to the server's elements.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub enum Rule {
    /// Sets them to zero; the update has no elements.
    Zero,
    /// Replaces them.
    Copy,
    /// Adds the update. Integers wrap around.
    Add,
    /// Adds the update times this factor, as [`ReduceOp::ScaledSum`] multiplies. The product is rounded, then the sum.
    AddScaled(f64),
}

impl Rule {
    /// The rule with this code of `dl_comm.h`; `factor` is that of the scaled addition.
    ///
    /// # Errors
    /// [`Error::Invalid`] for another code.
    pub fn from_code(code: i32, factor: f64) -> Result<Rule> {
        match code {
            0 => Ok(Rule::Zero),
            1 => Ok(Rule::Copy),
            2 => Ok(Rule::Add),
            3 => Ok(Rule::AddScaled(factor)),
            _ => Err(Error::Invalid(format!("no rule of a parameter server has the code {code}"))),
        }
    }

    /// Whether the update has elements.
    pub fn has_elements(self) -> bool {
        self != Rule::Zero
    }

    /// Checks that the rule exists for elements of `dtype`.
    ///
    /// # Errors
    /// [`Error::DType`]
    pub fn check(self, dtype: DType) -> Result<()> {
        match self {
            Rule::Zero | Rule::Copy => Ok(()),
            Rule::Add => ReduceOp::Sum.check(dtype),
            Rule::AddScaled(_) => ReduceOp::ScaledSum { pre: 1.0, post: 1.0 }.check(dtype),
        }
    }
}

/// A reduction of one input for each output.
fn reduction(op: ReduceOp, dtype: DType) -> Reduction {
    Reduction { op, dtype, acc_f64: false, wire_is_acc: false, divisor: 1 }
}

/// Whether elements of `dtype` are stored as float32.
fn is_half(dtype: DType) -> bool {
    matches!(dtype, DType::F16 | DType::BF16)
}

/// Memory for the elements of a block, before they are added.
#[derive(Default)]
pub struct Scratch(Vec<u64>);

impl Scratch {
    fn bytes(&mut self, len: usize) -> *mut u8 {
        if self.0.len() * 8 < len {
            self.0.resize(len.div_ceil(8), 0);
        }
        self.0.as_mut_ptr().cast()
    }
}

/// Applies an update of `count` elements of `dtype` to a part of a block, which stores them as
/// [`Stored::storage`](super::layout::Stored::storage) says. `streams`: the block is not read soon.
///
/// # Safety
/// The memory is valid for the elements; that of the block is written by nobody else.
pub unsafe fn apply(
    rule: Rule,
    dtype: DType,
    block: *mut u8,
    update: *const u8,
    count: usize,
    streams: bool,
    scratch: &mut Scratch,
) {
    let storage = if is_half(dtype) { DType::F32 } else { dtype };
    let bytes = count * storage.size();
    // SAFETY: guaranteed by the caller; the scratch has room for `count` elements of the storage type.
    unsafe {
        match rule {
            Rule::Zero => block.write_bytes(0, bytes),
            Rule::Copy if is_half(dtype) => reduction(ReduceOp::Sum, dtype).partial(&[update], block, count),
            Rule::Copy if streams => stream_copy(update, block, bytes),
            Rule::Copy => block.copy_from_nonoverlapping(update, bytes),
            Rule::Add if !is_half(dtype) => reduction(ReduceOp::Sum, dtype).combine(&[block, update], &[block], count),
            Rule::Add | Rule::AddScaled(_) => {
                let added = scratch.bytes(bytes);
                match rule {
                    Rule::AddScaled(pre) if !is_half(dtype) => {
                        let scaled = ReduceOp::ScaledSum { pre, post: 1.0 };
                        reduction(scaled, dtype).combine(&[update], &[added], count);
                    }
                    Rule::AddScaled(pre) => {
                        let scaled = ReduceOp::ScaledSum { pre, post: 1.0 };
                        reduction(scaled, dtype).partial(&[update], added, count);
                    }
                    _ => reduction(ReduceOp::Sum, dtype).partial(&[update], added, count),
                }
                reduction(ReduceOp::Sum, storage).combine(&[block, added], &[block], count);
            }
        }
    }
}

/// Copies a part of a block to `out`, elements of `dtype`, rounded to nearest even. `streams`: `out` is not read soon.
///
/// # Safety
/// The memory is valid for the elements; that of the block is written by nobody.
pub unsafe fn read(dtype: DType, block: *const u8, out: *mut u8, count: usize, streams: bool) {
    let bytes = count * dtype.size();
    // SAFETY: guaranteed by the caller.
    unsafe {
        if is_half(dtype) {
            reduction(ReduceOp::Sum, dtype).finish(&[block], &[out], count);
        } else if streams {
            stream_copy(block, out, bytes);
        } else {
            out.copy_from_nonoverlapping(block, bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn applied(rule: Rule, start: &[f32], update: &[f32]) -> Vec<f32> {
        let mut block = start.to_vec();
        // SAFETY: the vectors have these elements.
        unsafe {
            let (to, from) = (block.as_mut_ptr().cast(), update.as_ptr().cast());
            apply(rule, DType::F32, to, from, start.len(), false, &mut Scratch::default());
        }
        block
    }

    #[test]
    fn rules_do_what_they_say() {
        let (start, update) = ([1.0, -2.0, 0.5], [4.0, 8.0, f32::INFINITY]);
        assert_eq!(applied(Rule::Zero, &start, &update), [0.0; 3]);
        assert_eq!(applied(Rule::Copy, &start, &update), update);
        assert_eq!(applied(Rule::Add, &start, &update), [5.0, 6.0, f32::INFINITY]);
        assert_eq!(applied(Rule::AddScaled(-0.5), &start, &update), [-1.0, -6.0, f32::NEG_INFINITY]);
        let rules = [Rule::Zero, Rule::Copy, Rule::Add, Rule::AddScaled(0.25)];
        assert!((0..).zip(rules).all(|(code, rule)| Rule::from_code(code, 0.25) == Ok(rule)));
        assert!(Rule::from_code(4, 1.0).is_err());
    }

    #[test]
    fn small_updates_of_half_types_are_kept_in_float32() {
        // 1 + 2^-12 is no bfloat16 and no float16.
        for (dtype, one, tiny) in [(DType::BF16, 0x3f80u16, 0x3980u16), (DType::F16, 0x3c00, 0x0c00)] {
            let (mut block, mut out, mut scratch) = ([0f32], [0u16], Scratch::default());
            let to = block.as_mut_ptr().cast();
            // SAFETY: one element each.
            unsafe {
                apply(Rule::Copy, dtype, to, (&raw const one).cast(), 1, false, &mut scratch);
                assert_eq!(block[0], 1.0);
                for _ in 0..1 << 12 {
                    apply(Rule::Add, dtype, to, (&raw const tiny).cast(), 1, false, &mut scratch);
                }
                assert_eq!(block[0], 2.0, "{dtype:?}");
                apply(Rule::AddScaled(-1.0), dtype, to, (&raw const one).cast(), 1, false, &mut scratch);
                read(dtype, block.as_ptr().cast(), out.as_mut_ptr().cast(), 1, true);
            }
            assert_eq!((block[0], out[0]), (1.0, one));
        }
    }

    #[test]
    fn rules_exist_for_types_that_have_sums() {
        for dtype in DType::ALL {
            assert!(Rule::Zero.check(dtype).is_ok() && Rule::Copy.check(dtype).is_ok());
            assert_eq!(Rule::Add.check(dtype).is_ok(), dtype != DType::Bool, "{dtype:?}");
            assert_eq!(Rule::AddScaled(2.0).check(dtype).is_ok(), dtype != DType::Bool, "{dtype:?}");
        }
    }
}
