//! Minima and maxima. They need no arithmetic, so a partial result has the size of an element.
//!
//! Floating point: -0.0 is less than +0.0, and the result of NaN and anything is NaN. Two operands that are equal or
//! not comparable give the bits of both, or of either: of equal numbers only the signs of zeros differ, and a NaN has
//! all bits of the exponent and others. This is faster than to select the NaN, and exact: all kernels give the same bits.

/// A type with minima and maxima.
pub(crate) trait Ordered: Copy {
    /// Whether it is float32.
    const SINGLE: bool = false;
    /// The lesser one.
    fn lesser(self, other: Self) -> Self;
    /// The greater one.
    fn greater(self, other: Self) -> Self;
}

macro_rules! integers {
    ($($type:ty)*) => { $(
        impl Ordered for $type {
            #[inline(always)]
            fn lesser(self, other: $type) -> $type {
                self.min(other)
            }
            #[inline(always)]
            fn greater(self, other: $type) -> $type {
                self.max(other)
            }
        }
    )* };
}
integers!(i8 u8 i16 u16 i32 u32 i64 u64);

macro_rules! floats {
    ($($type:ty, $bits:ty, $single:literal;)*) => { $(
        impl Ordered for $type {
            const SINGLE: bool = $single;
            #[inline(always)]
            fn lesser(self, other: $type) -> $type {
                let number = if self < other { self } else { other };
                let (left, right) = (self.to_bits(), other.to_bits());
                if (self < other) | (self > other) { number } else { <$type>::from_bits(left | right) }
            }
            #[inline(always)]
            fn greater(self, other: $type) -> $type {
                /// All bits except the sign.
                const MAGNITUDE: $bits = !0 >> 1;
                let number = if self > other { self } else { other };
                let (left, right) = (self.to_bits(), other.to_bits());
                let either = <$type>::from_bits((left & right) | ((left | right) & MAGNITUDE));
                if (self < other) | (self > other) { number } else { either }
            }
        }
    )* };
}
floats!(f32, u32, true; f64, u64, false;);

/// Element by element.
impl<T: Ordered> Ordered for [T; 2] {
    const SINGLE: bool = T::SINGLE;
    #[inline(always)]
    fn lesser(self, other: [T; 2]) -> [T; 2] {
        [self[0].lesser(other[0]), self[1].lesser(other[1])]
    }
    #[inline(always)]
    fn greater(self, other: [T; 2]) -> [T; 2] {
        [self[0].greater(other[0]), self[1].greater(other[1])]
    }
}

/// A 16-bit float, compared by its bits, which is faster than by a conversion to float32. `INFINITY` is the bits of
/// infinity.
#[derive(Clone, Copy, Default)]
#[repr(transparent)]
pub(crate) struct HalfBits<const INFINITY: u16>(u16);

/// float16.
pub(crate) type F16Bits = HalfBits<0x7c00>;
/// bfloat16.
pub(crate) type BF16Bits = HalfBits<0x7f80>;

impl<const INFINITY: u16> HalfBits<INFINITY> {
    /// An integer in the order of the numbers: bits are sign and magnitude.
    #[inline(always)]
    fn key(self) -> i16 {
        let bits = self.0 as i16;
        bits ^ ((bits >> 15) & i16::MAX)
    }
    /// `number`, unless an operand is NaN.
    #[inline(always)]
    fn or_nan(self, other: Self, number: Self) -> Self {
        let magnitude = |value: Self| value.0 & 0x7fff;
        let is_nan = magnitude(self).max(magnitude(other)) > INFINITY;
        if is_nan { HalfBits(self.0 | other.0) } else { number }
    }
}

impl<const INFINITY: u16> Ordered for HalfBits<INFINITY> {
    #[inline(always)]
    fn lesser(self, other: Self) -> Self {
        self.or_nan(other, if self.key() < other.key() { self } else { other })
    }
    #[inline(always)]
    fn greater(self, other: Self) -> Self {
        self.or_nan(other, if self.key() > other.key() { self } else { other })
    }
}
