//! The element and accumulator types of reductions, and the conversions between them.

use std::marker::PhantomData;

use super::convert::{bf16_to_f32, f16_to_f32, f32_to_bf16, f32_to_f16, f64_to_odd_f32};

/// The element and accumulator types of a reduction, and the conversions between them.
pub(crate) trait ReduceType: Sized + 'static {
    /// The type of a tensor's elements; `u16` stands for float16 and bfloat16.
    type Element: Copy + Default;
    /// The type of partial results.
    type Acc: Copy + Default;
    /// Whether the accumulator is the element.
    const PLAIN: bool = false;
    /// Whether it stands for two elements of a tensor.
    const IS_PAIR: bool = false;
    /// Exact conversion.
    fn widen(element: Self::Element) -> Self::Acc;
    /// Rounds to nearest even; exact for values from `widen`. Integers wrap around.
    fn narrow(acc: Self::Acc) -> Self::Element;
}

/// A type that is its own accumulator.
pub(crate) struct Plain<T>(PhantomData<T>);

impl<T: Copy + Default + 'static> ReduceType for Plain<T> {
    type Element = T;
    type Acc = T;
    const PLAIN: bool = true;
    #[inline(always)]
    fn widen(element: T) -> T {
        element
    }
    #[inline(always)]
    fn narrow(acc: T) -> T {
        acc
    }
}

/// Types with a wider accumulator.
macro_rules! wide {
    ($($name:ident: $element:ty, $acc:ty, $widen:expr, $narrow:expr;)*) => { $(
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
        }
    )* };
}
wide! {
    F16: u16, f32, f16_to_f32, f32_to_f16;
    F16AccF64: u16, f64, |e| f16_to_f32(e).into(), |a| f32_to_f16(f64_to_odd_f32(a));
    BF16: u16, f32, bf16_to_f32, f32_to_bf16;
    BF16AccF64: u16, f64, |e| bf16_to_f32(e).into(), |a| f32_to_bf16(f64_to_odd_f32(a));
    F32AccF64: f32, f64, f64::from, |a| a as f32;
    I8: i8, i32, i32::from, |a| a as i8;
    U8: u8, i32, i32::from, |a| a as u8;
    I16: i16, i32, i32::from, |a| a as i16;
    U16: u16, u32, u32::from, |a| a as u16;
    I32: i32, i64, i64::from, |a| a as i32;
    U32: u32, u64, u64::from, |a| a as u32;
    I64: i64, i128, i128::from, |a| a as i64;
    U64: u64, u128, u128::from, |a| a as u64;
}
