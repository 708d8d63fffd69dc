//! The element and accumulator types of reductions, with their arithmetic.

use super::convert::{bf16_to_f32, f16_to_f32, f32_to_bf16, f32_to_f16, f64_to_odd_f32};

/// The element and accumulator types of a reduction, and the conversions between them.
pub(crate) trait ReduceType: Sized {
    /// The type of a tensor's elements; `u16` stands for float16 and bfloat16.
    type Element: Copy;
    /// The type of sums.
    type Acc: Copy;
    /// Exact conversion.
    fn widen(element: Self::Element) -> Self::Acc;
    /// Rounds to nearest even; exact for values from `widen`.
    fn narrow(acc: Self::Acc) -> Self::Element;
    /// Integers wrap around.
    fn add(left: Self::Acc, right: Self::Acc) -> Self::Acc;
    /// A divisor for `divide`, from 1 to `i32::MAX`.
    fn divisor(count: u32) -> Self::Acc;
    /// Divides; integers round toward zero.
    fn divide(acc: Self::Acc, divisor: Self::Acc) -> Self::Acc;
    /// The divisor 2^`log` for `divide_power`; `log` is from 0 to 30.
    fn power(log: u8) -> Self::Acc;
    /// As `divide`, with the same bits, for a divisor from `power`.
    fn divide_power(acc: Self::Acc, power: Self::Acc) -> Self::Acc;
}

macro_rules! float {
    ($name:ident, $element:ty, $acc:ty, $widen:expr, $narrow:expr) => {
        pub(crate) struct $name;
        impl ReduceType for $name {
            type Element = $element;
            type Acc = $acc;
            #[inline(always)]
            fn widen(element: $element) -> $acc {
                ($widen)(element)
            }
            #[inline(always)]
            fn narrow(acc: $acc) -> $element {
                ($narrow)(acc)
            }
            #[inline(always)]
            fn add(left: $acc, right: $acc) -> $acc {
                left + right
            }
            fn divisor(count: u32) -> $acc {
                count as $acc
            }
            #[inline(always)]
            fn divide(acc: $acc, divisor: $acc) -> $acc {
                acc / divisor
            }
            /// The reciprocal, which is exact: quotient and product are the same real number and round equally.
            fn power(log: u8) -> $acc {
                1.0 / (1u32 << log) as $acc
            }
            #[inline(always)]
            fn divide_power(acc: $acc, power: $acc) -> $acc {
                acc * power
            }
        }
    };
}

macro_rules! integer {
    ($name:ident, $element:ty, $acc:ty, $divide:expr) => {
        pub(crate) struct $name;
        impl ReduceType for $name {
            type Element = $element;
            type Acc = $acc;
            #[inline(always)]
            fn widen(element: $element) -> $acc {
                element.into()
            }
            #[inline(always)]
            fn narrow(acc: $acc) -> $element {
                acc as $element
            }
            #[inline(always)]
            fn add(left: $acc, right: $acc) -> $acc {
                left.wrapping_add(right)
            }
            fn divisor(count: u32) -> $acc {
                count as $acc
            }
            #[inline(always)]
            fn divide(acc: $acc, divisor: $acc) -> $acc {
                ($divide)(acc, divisor)
            }
            fn power(log: u8) -> $acc {
                log.into()
            }
            /// A shift rounds down, so add divisor - 1 to negative numbers first.
            #[inline(always)]
            fn divide_power(acc: $acc, power: $acc) -> $acc {
                let sign = acc >> (<$acc>::BITS - 1);
                acc.wrapping_add(sign & ((1 << power) - 1)) >> power
            }
        }
    };
}

float!(F16, u16, f32, f16_to_f32, f32_to_f16);
float!(F16AccF64, u16, f64, |e| f16_to_f32(e).into(), |a| f32_to_f16(f64_to_odd_f32(a)));
float!(BF16, u16, f32, bf16_to_f32, f32_to_bf16);
float!(BF16AccF64, u16, f64, |e| bf16_to_f32(e).into(), |a| f32_to_bf16(f64_to_odd_f32(a)));
float!(F32, f32, f32, |e| e, |a| a);
float!(F32AccF64, f32, f64, f64::from, |a| a as f32);
float!(F64, f64, f64, |e| e, |a| a);
integer!(I8, i8, i32, divide_i32);
integer!(U8, u8, i32, divide_i32);
integer!(I32, i32, i64, |acc: i64, divisor| acc / divisor);
integer!(I64, i64, i128, divide_i128);

/// `acc / divisor` in float64, which vectorizes.
///
/// A quotient that is not an integer differs from the nearest integer by at least `1 / divisor`, relatively more than
/// 2^-31. So 53 bits of precision never round it up to that integer.
#[inline(always)]
fn divide_i32(acc: i32, divisor: i32) -> i32 {
    let quotient = f64::from(acc) / f64::from(divisor);
    // SAFETY: the divisor is at least 1, so the quotient is within the range of `acc`.
    unsafe { quotient.to_int_unchecked() }
}

/// `acc / divisor`, in 64 bits if `acc` fits.
#[inline(always)]
fn divide_i128(acc: i128, divisor: i128) -> i128 {
    match i64::try_from(acc) {
        Ok(acc) => (acc / divisor as i64).into(),
        Err(_) => acc / divisor,
    }
}
