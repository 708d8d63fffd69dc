//! Adding up and dividing elements, for every type. Pure arithmetic on raw memory, no threads.
//!
//! Sources are added in the order given, in an accumulator that is wider than the element (float16 and bfloat16 in
//! float32, integers in the next wider integer; all but float64 in float64 when `precise`), and the result is rounded to
//! the element type once. The order, and so the bits, depend on nothing but the order of the sources.
//!
//! On the wire an element stands as itself, or, when a process contributes several replicas (`wide`), as the accumulator
//! that already holds their sum.

use half::{bf16, f16};

use crate::dtype::DType;

/// How elements of one type are averaged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reduction {
    /// The element type; not [`DType::Bool`] for anything but sizes.
    pub dtype: DType,
    /// Accumulate floating point in float64.
    pub precise: bool,
    /// The wire holds accumulators.
    pub wide: bool,
}

/// The element and accumulator types of a reduction, and the conversions between them.
trait Scheme {
    type Element: Copy;
    type Acc: Copy;
    const ZERO: Self::Acc;
    fn widen(element: Self::Element) -> Self::Acc;
    /// Rounds to nearest even; exact where the value came from `widen`.
    fn narrow(acc: Self::Acc) -> Self::Element;
    fn add(left: Self::Acc, right: Self::Acc) -> Self::Acc;
    /// Divides; integers round toward zero.
    fn divide(acc: Self::Acc, count: u32) -> Self::Acc;
}

macro_rules! scheme {
    ($name:ident, $element:ty, $acc:ty, $zero:expr, $widen:expr, $narrow:expr, $add:expr, $divide:expr) => {
        pub(super) struct $name;
        impl Scheme for $name {
            type Element = $element;
            type Acc = $acc;
            const ZERO: $acc = $zero;
            #[inline(always)]
            fn widen(element: $element) -> $acc {
                let widen: fn($element) -> $acc = $widen;
                widen(element)
            }
            #[inline(always)]
            fn narrow(acc: $acc) -> $element {
                let narrow: fn($acc) -> $element = $narrow;
                narrow(acc)
            }
            #[inline(always)]
            fn add(left: $acc, right: $acc) -> $acc {
                let add: fn($acc, $acc) -> $acc = $add;
                add(left, right)
            }
            #[inline(always)]
            fn divide(acc: $acc, count: u32) -> $acc {
                let divide: fn($acc, u32) -> $acc = $divide;
                divide(acc, count)
            }
        }
    };
}

#[allow(clippy::cast_possible_truncation)] // narrowing is what `narrow` is for
mod schemes {
    use super::{Scheme, bf16, f16};

    scheme!(F16, f16, f32, 0.0, |e| e.to_f32(), f16::from_f32, |a, b| a + b, |a, n| a / n as f32);
    scheme!(F16Precise, f16, f64, 0.0, |e| e.to_f64(), f16::from_f64, |a, b| a + b, |a, n| a / f64::from(n));
    scheme!(BF16, bf16, f32, 0.0, |e| e.to_f32(), bf16::from_f32, |a, b| a + b, |a, n| a / n as f32);
    scheme!(BF16Precise, bf16, f64, 0.0, |e| e.to_f64(), bf16::from_f64, |a, b| a + b, |a, n| a / f64::from(n));
    scheme!(F32, f32, f32, 0.0, |e| e, |a| a, |a, b| a + b, |a, n| a / n as f32);
    scheme!(F32Precise, f32, f64, 0.0, f64::from, |a| a as f32, |a, b| a + b, |a, n| a / f64::from(n));
    scheme!(F64, f64, f64, 0.0, |e| e, |a| a, |a, b| a + b, |a, n| a / f64::from(n));
    scheme!(I8, i8, i32, 0, i32::from, |a| a as i8, i32::wrapping_add, |a, n| a / n as i32);
    scheme!(U8, u8, i32, 0, i32::from, |a| a as u8, i32::wrapping_add, |a, n| a / n as i32);
    scheme!(I32, i32, i64, 0, i64::from, |a| a as i32, i64::wrapping_add, |a, n| a / i64::from(n));
    scheme!(I64, i64, i128, 0, i128::from, |a| a as i64, i128::wrapping_add, |a, n| a / i128::from(n));
}
use schemes::*;

/// Calls `$body` with `$S` as the scheme of `$reduction`.
macro_rules! with_scheme {
    ($reduction:expr, $S:ident => $body:expr) => {{
        match ($reduction.dtype, $reduction.precise) {
            (DType::F16, false) => {
                type $S = F16;
                $body
            }
            (DType::F16, true) => {
                type $S = F16Precise;
                $body
            }
            (DType::BF16, false) => {
                type $S = BF16;
                $body
            }
            (DType::BF16, true) => {
                type $S = BF16Precise;
                $body
            }
            (DType::F32, false) => {
                type $S = F32;
                $body
            }
            (DType::F32, true) => {
                type $S = F32Precise;
                $body
            }
            (DType::F64, _) => {
                type $S = F64;
                $body
            }
            (DType::I8, _) => {
                type $S = I8;
                $body
            }
            (DType::U8 | DType::Bool, _) => {
                type $S = U8;
                $body
            }
            (DType::I32, _) => {
                type $S = I32;
                $body
            }
            (DType::I64, _) => {
                type $S = I64;
                $body
            }
        }
    }};
}

/// Elements are summed in blocks of this many, so that the accumulators stay in the first-level cache.
const BLOCK: usize = 512;

impl Reduction {
    /// Bytes of an accumulator.
    pub fn acc_size(self) -> usize {
        with_scheme!(self, S => size_of::<<S as Scheme>::Acc>())
    }

    /// Bytes of an element on the wire.
    pub fn wire_size(self) -> usize {
        if self.wide { self.acc_size() } else { self.dtype.size() }
    }

    /// `out[i] = round((sources[0][i] + sources[1][i] + …) / divisor)`, all in wire form. `out` may be one of the sources.
    ///
    /// # Safety
    /// Every pointer is valid for `count` wire elements and aligned for them; nobody else writes there.
    pub unsafe fn mean(self, sources: &[*const u8], outs: &[*mut u8], count: usize, divisor: u32) {
        let out = outs[0];
        // SAFETY: the caller's promise.
        with_scheme!(self, S => unsafe {
            if self.wide {
                blocks::<S, Wide, Wide>(sources, out, count, |acc| S::widen(S::narrow(S::divide(acc, divisor))))
            } else {
                blocks::<S, Native, Native>(sources, out, count, |acc| S::divide(acc, divisor))
            }
        });
        for &other in &outs[1..] {
            // SAFETY: the caller's promise.
            unsafe { std::ptr::copy_nonoverlapping(out, other, count * self.wire_size()) };
        }
    }

    /// `acc[i] = sources[0][i] + sources[1][i] + …`: wire elements into accumulators.
    ///
    /// # Safety
    /// As for [`Reduction::mean`], `acc` being valid for `count` accumulators and no source.
    pub unsafe fn sum(self, sources: &[*const u8], acc: *mut u8, count: usize) {
        // SAFETY: the caller's promise.
        with_scheme!(self, S => unsafe {
            if self.wide {
                blocks::<S, Wide, Wide>(sources, acc, count, |acc| acc)
            } else {
                blocks::<S, Native, Wide>(sources, acc, count, |acc| acc)
            }
        });
    }

    /// `out[i] = round((accs[0][i] + accs[1][i] + …) / divisor)`: accumulators into wire elements.
    ///
    /// # Safety
    /// As for [`Reduction::mean`], `accs` being valid for `count` accumulators each.
    pub unsafe fn finish(self, accs: &[*const u8], out: *mut u8, count: usize, divisor: u32) {
        // SAFETY: the caller's promise.
        with_scheme!(self, S => unsafe {
            if self.wide {
                blocks::<S, Wide, Wide>(accs, out, count, |acc| S::widen(S::narrow(S::divide(acc, divisor))))
            } else {
                blocks::<S, Wide, Native>(accs, out, count, |acc| S::divide(acc, divisor))
            }
        });
    }

    /// Turns rounded accumulators (the wide wire form of a result) into elements.
    ///
    /// # Safety
    /// As for [`Reduction::mean`], `acc` being valid for `count` accumulators and `out` for as many elements.
    pub unsafe fn narrow(self, acc: *const u8, out: *mut u8, count: usize) {
        // SAFETY: the caller's promise.
        with_scheme!(self, S => unsafe { blocks::<S, Wide, Native>(&[acc], out, count, |acc| acc) });
    }
}

/// How an element lies in memory.
trait Form<S: Scheme> {
    type Stored: Copy;
    fn load(stored: Self::Stored) -> S::Acc;
    fn store(acc: S::Acc) -> Self::Stored;
}

/// As the element itself.
struct Native;
/// As an accumulator.
struct Wide;

impl<S: Scheme> Form<S> for Native {
    type Stored = S::Element;
    #[inline(always)]
    fn load(stored: S::Element) -> S::Acc {
        S::widen(stored)
    }
    #[inline(always)]
    fn store(acc: S::Acc) -> S::Element {
        S::narrow(acc)
    }
}

impl<S: Scheme> Form<S> for Wide {
    type Stored = S::Acc;
    #[inline(always)]
    fn load(stored: S::Acc) -> S::Acc {
        stored
    }
    #[inline(always)]
    fn store(acc: S::Acc) -> S::Acc {
        acc
    }
}

/// Adds the sources up block by block and stores `finish` of each sum.
///
/// # Safety
/// The pointers are valid and aligned for `count` elements of their form. `out` may equal a source: a block is read from
/// all sources before it is written.
unsafe fn blocks<S: Scheme, In: Form<S>, Out: Form<S>>(
    sources: &[*const u8],
    out: *mut u8,
    count: usize,
    finish: impl Fn(S::Acc) -> S::Acc,
) {
    let mut acc = [S::ZERO; BLOCK];
    let out = out.cast::<Out::Stored>();
    let mut at = 0;
    while at < count {
        let len = BLOCK.min(count - at);
        for (index, source) in sources.iter().enumerate() {
            let source = source.cast::<In::Stored>();
            for (i, acc) in acc[..len].iter_mut().enumerate() {
                // SAFETY: at + i < count.
                let value = In::load(unsafe { source.add(at + i).read() });
                *acc = if index == 0 { value } else { S::add(*acc, value) };
            }
        }
        for (i, acc) in acc[..len].iter().enumerate() {
            // SAFETY: at + i < count.
            unsafe { out.add(at + i).write(Out::store(finish(*acc))) };
        }
        at += len;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn mean<T: Copy + Default>(reduction: Reduction, sources: &[Vec<T>], divisor: u32) -> Vec<T> {
        let mut out = vec![T::default(); sources[0].len()];
        let pointers: Vec<*const u8> = sources.iter().map(|source| source.as_ptr().cast()).collect();
        // SAFETY: the vectors are of one length and of the reduction's type.
        unsafe { reduction.mean(&pointers, &[out.as_mut_ptr().cast()], out.len(), divisor) };
        out
    }

    fn plain(dtype: DType) -> Reduction {
        Reduction { dtype, precise: false, wide: false }
    }

    #[test]
    fn integers_round_toward_zero() {
        assert_eq!(mean(plain(DType::I32), &[vec![-3, 3, 7], vec![0, 0, 8]], 2), [-1, 1, 7]);
        assert_eq!(mean(plain(DType::U8), &[vec![255u8, 1], vec![255, 2]], 2), [255, 1]);
        assert_eq!(
            mean(plain(DType::I64), &[vec![i64::MAX, i64::MIN], vec![i64::MAX, i64::MIN]], 2),
            [i64::MAX, i64::MIN]
        );
        assert_eq!(mean(plain(DType::I8), &[vec![-128i8], vec![-128], vec![-128]], 3), [-128]);
    }

    #[test]
    fn half_types_are_added_in_float32() {
        let one = bf16::from_f32(256.0);
        let small = bf16::from_f32(1.0);
        // In bfloat16 256 + 1 is 256, three times over; the sum in float32 is 259.
        let sources = [vec![one], vec![small], vec![small], vec![small]];
        assert_eq!(mean(plain(DType::BF16), &sources, 1), [bf16::from_f32(259.0)]);
        let big = f16::from_f32(60000.0);
        assert_eq!(mean(plain(DType::F16), &[vec![big], vec![big]], 2), [big]);
    }

    #[test]
    fn precise_keeps_what_float32_loses() {
        let sources = [vec![1e8f32], vec![1.0], vec![-1e8], vec![1.0]];
        assert_eq!(mean(plain(DType::F32), &sources, 1), [1.0]);
        assert_eq!(mean(Reduction { precise: true, ..plain(DType::F32) }, &sources, 1), [2.0]);
    }

    proptest! {
        /// Summing on two levels, as between hosts, gives what one level gives when the inner sums are exact, and the wide
        /// form gives the bits of the native form.
        #[test]
        fn forms_agree(values in prop::collection::vec((-1000i16..1000, -1000i16..1000, -1000i16..1000), 1..1500)) {
            let sources: Vec<Vec<f32>> = (0..3).map(|k| values.iter().map(|v| f32::from([v.0, v.1, v.2][k])).collect()).collect();
            let reduction = plain(DType::F32);
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
                reduction.finish(&accs, out.as_mut_ptr().cast(), out.len(), 3);
                let wide = Reduction { wide: true, ..reduction };
                wide.mean(&pointers, &[second.as_mut_ptr().cast()], second.len(), 3);
                wide.narrow(second.as_ptr().cast(), narrow.as_mut_ptr().cast(), narrow.len());
            }
            prop_assert_eq!(&direct, &out);
            prop_assert_eq!(&direct, &narrow);
        }
    }

    #[test]
    fn wide_rounds_to_the_element_once() {
        let reduction = Reduction { dtype: DType::BF16, precise: false, wide: true };
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
}
