//! The arithmetic of accumulators: sums, products, multiplication by a factor, and division by the divisor of a mean.

/// A type of sums and products.
pub(crate) trait Number: Copy + Send + 'static {
    /// Whether it is floating point.
    const FLOAT: bool;
    /// Whether it is float32.
    const SINGLE: bool = false;
    /// Integers wrap around.
    fn add(self, other: Self) -> Self;
    /// Integers wrap around.
    fn multiply(self, other: Self) -> Self;
}

/// A type of sums that are divided.
pub(crate) trait Divisible: Number {
    /// A divisor for `divide`, from 1 to `i32::MAX`.
    fn divisor(count: u32) -> Self;
    /// Divides; integers round toward zero.
    fn divide(self, divisor: Self) -> Self;
    /// The divisor 2^`log` for `divide_power`; `log` is from 0 to 30.
    fn power(log: u8) -> Self;
    /// As `divide`, with the same bits, for a divisor from `power`.
    fn divide_power(self, power: Self) -> Self;
}

/// A type of numbers that a factor multiplies.
pub(crate) trait Scalable: Number {
    /// A factor: of floating point, rounded to this type; of integers, float64.
    type Factor: Copy + Send + 'static;
    /// The factor nearest to `value`.
    fn factor(value: f64) -> Self::Factor;
    /// The product. Integers are multiplied in float64 and rounded toward zero; beyond the type, to its limits.
    fn scale(self, factor: Self::Factor) -> Self;
}

macro_rules! integer_number {
    ($($type:ty)*) => { $(
        impl Number for $type {
            const FLOAT: bool = false;
            #[inline(always)]
            fn add(self, other: $type) -> $type {
                self.wrapping_add(other)
            }
            #[inline(always)]
            fn multiply(self, other: $type) -> $type {
                self.wrapping_mul(other)
            }
        }

        impl Scalable for $type {
            type Factor = f64;
            fn factor(value: f64) -> f64 {
                value
            }
            #[inline(always)]
            fn scale(self, factor: f64) -> $type {
                (self as f64 * factor) as $type
            }
        }
    )* };
}
integer_number!(u8 u16 u32 u64 u128 i8 i16 i32 i64 i128);

macro_rules! float {
    ($($type:ty, $single:literal;)*) => { $(
        impl Number for $type {
            const FLOAT: bool = true;
            const SINGLE: bool = $single;
            #[inline(always)]
            fn add(self, other: $type) -> $type {
                self + other
            }
            #[inline(always)]
            fn multiply(self, other: $type) -> $type {
                self * other
            }
        }

        impl Divisible for $type {
            fn divisor(count: u32) -> $type {
                count as $type
            }
            #[inline(always)]
            fn divide(self, divisor: $type) -> $type {
                self / divisor
            }
            /// The reciprocal, which is exact: quotient and product are the same real number and round equally.
            fn power(log: u8) -> $type {
                1.0 / (1u32 << log) as $type
            }
            #[inline(always)]
            fn divide_power(self, power: $type) -> $type {
                self * power
            }
        }

        impl Scalable for $type {
            type Factor = $type;
            fn factor(value: f64) -> $type {
                value as $type
            }
            #[inline(always)]
            fn scale(self, factor: $type) -> $type {
                self * factor
            }
        }
    )* };
}
float!(f32, true; f64, false;);

/// Element by element.
impl<T: Number> Number for [T; 2] {
    const FLOAT: bool = T::FLOAT;
    const SINGLE: bool = T::SINGLE;
    #[inline(always)]
    fn add(self, other: [T; 2]) -> [T; 2] {
        [self[0].add(other[0]), self[1].add(other[1])]
    }
    #[inline(always)]
    fn multiply(self, other: [T; 2]) -> [T; 2] {
        [self[0].multiply(other[0]), self[1].multiply(other[1])]
    }
}

impl<T: Divisible> Divisible for [T; 2] {
    fn divisor(count: u32) -> [T; 2] {
        [T::divisor(count); 2]
    }
    #[inline(always)]
    fn divide(self, divisor: [T; 2]) -> [T; 2] {
        [self[0].divide(divisor[0]), self[1].divide(divisor[1])]
    }
    fn power(log: u8) -> [T; 2] {
        [T::power(log); 2]
    }
    #[inline(always)]
    fn divide_power(self, power: [T; 2]) -> [T; 2] {
        [self[0].divide_power(power[0]), self[1].divide_power(power[1])]
    }
}

impl<T: Scalable> Scalable for [T; 2] {
    type Factor = T::Factor;
    fn factor(value: f64) -> T::Factor {
        T::factor(value)
    }
    #[inline(always)]
    fn scale(self, factor: T::Factor) -> [T; 2] {
        [self[0].scale(factor), self[1].scale(factor)]
    }
}

macro_rules! integer_division {
    ($($type:ty, $sign:expr, $divide:expr;)*) => { $(
        impl Divisible for $type {
            fn divisor(count: u32) -> $type {
                count as $type
            }
            #[inline(always)]
            fn divide(self, divisor: $type) -> $type {
                ($divide)(self, divisor)
            }
            fn power(log: u8) -> $type {
                log.into()
            }
            /// A shift rounds down, so add divisor - 1 to negative numbers first.
            #[inline(always)]
            fn divide_power(self, power: $type) -> $type {
                self.wrapping_add(($sign)(self) & ((1 << power) - 1)) >> power
            }
        }
    )* };
}
integer_division! {
    i32, |value: i32| value >> 31, divide_i32;
    u32, |_| 0, divide_u32;
    i64, |value: i64| value >> 63, |sum, divisor| sum / divisor;
    u64, |_| 0, |sum, divisor| sum / divisor;
    i128, |value: i128| value >> 127, divide_i128;
    u128, |_| 0, divide_u128;
}

/// `sum / divisor` in float64, which vectorizes.
///
/// A quotient that is not an integer differs from the nearest integer by at least `1 / divisor`, relatively more than
/// 2^-31. So 53 bits of precision never round it up to that integer.
#[inline(always)]
fn divide_i32(sum: i32, divisor: i32) -> i32 {
    let quotient = f64::from(sum) / f64::from(divisor);
    // SAFETY: the divisor is at least 1, so the quotient is within the range of `sum`.
    unsafe { quotient.to_int_unchecked() }
}

/// As [`divide_i32`]: the relative difference is more than 2^-32.
#[inline(always)]
fn divide_u32(sum: u32, divisor: u32) -> u32 {
    let quotient = f64::from(sum) / f64::from(divisor);
    // SAFETY: as in `divide_i32`.
    unsafe { quotient.to_int_unchecked() }
}

/// `sum / divisor`, in 64 bits if `sum` fits.
#[inline(always)]
fn divide_i128(sum: i128, divisor: i128) -> i128 {
    match i64::try_from(sum) {
        Ok(sum) => (sum / divisor as i64).into(),
        Err(_) => sum / divisor,
    }
}

/// As [`divide_i128`].
#[inline(always)]
fn divide_u128(sum: u128, divisor: u128) -> u128 {
    match u64::try_from(sum) {
        Ok(sum) => (sum / divisor as u64).into(),
        Err(_) => sum / divisor,
    }
}
