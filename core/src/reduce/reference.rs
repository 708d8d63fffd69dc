//! The arithmetic of the oracle: one element at a time, without the crate's own.

use std::cmp::Ordering;
use std::fmt::Debug;

use half::{bf16, f16};

use super::ReduceOp;

/// Elements or accumulators in the reference. Operations that an operator does not need for a type are unreachable.
pub(super) trait OracleNumber: Copy + Debug {
    /// Same bits, or both NaN.
    fn is_same(self, other: Self) -> bool;
    /// Same bits, those of NaN too.
    fn is_identical(self, other: Self) -> bool {
        self.is_same(other)
    }
    fn arithmetic(self, _op: ReduceOp, _other: Self) -> Self {
        unreachable!("no arithmetic")
    }
    fn divide(self, _divisor: u32) -> Self {
        unreachable!("no division")
    }
    fn scale(self, _factor: f64) -> Self {
        unreachable!("no factors")
    }
    /// A NaN, or the lesser or greater one.
    fn extremum(self, _op: ReduceOp, _other: Self) -> Self {
        unreachable!("no order")
    }
    fn bitwise(self, _op: ReduceOp, _other: Self) -> Self {
        unreachable!("no bit operations")
    }
}

/// Whether `op` keeps the left operand of these in the order `order`.
fn keeps_left(op: ReduceOp, order: Ordering) -> bool {
    if op.without_factors() == ReduceOp::Min { order.is_le() } else { order.is_ge() }
}

macro_rules! float_equality {
    ($float:ty, $half:literal) => {
        fn is_same(self, other: $float) -> bool {
            self.to_bits() == other.to_bits() || self.is_nan() && other.is_nan()
        }
        fn is_identical(self, other: $float) -> bool {
            self.to_bits() == other.to_bits()
        }
        fn extremum(self, op: ReduceOp, other: $float) -> $float {
            if self.is_nan() || other.is_nan() {
                let sign = <$float>::from_bits(0).to_bits() ^ (-<$float>::from_bits(0)).to_bits();
                let [left, right] = [self, other].map(<$float>::to_bits);
                let both = if op.without_factors() == ReduceOp::Min || $half {
                    left | right
                } else {
                    (left | right) & !sign | left & right
                };
                <$float>::from_bits(both)
            } else if keeps_left(op, self.total_cmp(&other)) {
                self
            } else {
                other
            }
        }
    };
}
macro_rules! numbers {
    ($($half:ty)*; $($float:ty)*; $($integer:ty)*) => {
        $(impl OracleNumber for $half {
            float_equality!($half, true);
        })*
        $(impl OracleNumber for $float {
            float_equality!($float, false);
            fn arithmetic(self, op: ReduceOp, other: $float) -> $float {
                if op.without_factors() == ReduceOp::Product { self * other } else { self + other }
            }
            fn divide(self, divisor: u32) -> $float {
                self / divisor as $float
            }
            fn scale(self, factor: f64) -> $float {
                self * factor as $float
            }
        })*
        $(impl OracleNumber for $integer {
            fn is_same(self, other: $integer) -> bool {
                self == other
            }
            fn arithmetic(self, op: ReduceOp, other: $integer) -> $integer {
                if op.without_factors() == ReduceOp::Product { self.wrapping_mul(other) } else { self.wrapping_add(other) }
            }
            fn divide(self, divisor: u32) -> $integer {
                self / divisor as $integer
            }
            fn scale(self, factor: f64) -> $integer {
                (self as f64 * factor) as $integer
            }
            fn extremum(self, op: ReduceOp, other: $integer) -> $integer {
                if keeps_left(op, self.cmp(&other)) { self } else { other }
            }
            fn bitwise(self, op: ReduceOp, other: $integer) -> $integer {
                match op {
                    ReduceOp::BitAnd => self & other,
                    ReduceOp::BitOr => self | other,
                    _ => self ^ other,
                }
            }
        })*
    };
}
numbers!(f16 bf16; f32 f64; i8 u8 i16 u16 i32 u32 i64 u64 i128 u128);

/// Logical operations.
impl OracleNumber for bool {
    fn is_same(self, other: bool) -> bool {
        self == other
    }
    fn bitwise(self, op: ReduceOp, other: bool) -> bool {
        match op {
            ReduceOp::BitAnd => self && other,
            ReduceOp::BitOr => self || other,
            _ => self != other,
        }
    }
}

/// A complex number.
impl<T: OracleNumber> OracleNumber for [T; 2] {
    fn is_same(self, other: [T; 2]) -> bool {
        self[0].is_same(other[0]) && self[1].is_same(other[1])
    }
    fn arithmetic(self, op: ReduceOp, other: [T; 2]) -> [T; 2] {
        [self[0].arithmetic(op, other[0]), self[1].arithmetic(op, other[1])]
    }
    fn divide(self, divisor: u32) -> [T; 2] {
        self.map(|part| part.divide(divisor))
    }
    fn scale(self, factor: f64) -> [T; 2] {
        self.map(|part| part.scale(factor))
    }
}

/// The accumulator of an element.
pub(super) fn lift<A: OracleNumber>(op: ReduceOp, widened: A) -> A {
    op.factors().map_or(widened, |(pre, _)| widened.scale(pre))
}

pub(super) fn combine<A: OracleNumber>(op: ReduceOp, left: A, right: A) -> A {
    match op.without_factors() {
        ReduceOp::Min | ReduceOp::Max => left.extremum(op, right),
        ReduceOp::BitAnd | ReduceOp::BitOr | ReduceOp::BitXor => left.bitwise(op, right),
        _ => left.arithmetic(op, right),
    }
}

/// The result before it is rounded.
pub(super) fn finish<A: OracleNumber>(op: ReduceOp, acc: A, divisor: u32) -> A {
    let scaled = op.factors().map_or(acc, |(_, post)| acc.scale(post));
    if op.without_factors() == ReduceOp::Mean { scaled.divide(divisor) } else { scaled }
}
