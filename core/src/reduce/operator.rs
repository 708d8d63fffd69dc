//! The operations that combine two accumulators.

use std::marker::PhantomData;

use super::number::{Number, Scalable};
use super::ordered::Ordered;

/// Combines accumulators of type `A`.
pub(crate) trait Operator<A>: Copy + Send + 'static {
    /// Whether speed matters more than code size: the loop is compiled for up to four sources instead of two, and for
    /// AVX-512.
    const IS_HOT: bool = false;
    /// As `IS_HOT`, of elements that a factor multiplies.
    const IS_SCALED_HOT: bool = false;
    /// Whether code size matters more than speed: the loop is compiled for the target's minimum only.
    const IS_RARE: bool = false;
    /// Makes an accumulator of an element that was widened.
    #[inline(always)]
    fn lift(self, element: A) -> A {
        element
    }
    /// Combines two accumulators.
    fn combine(left: A, right: A) -> A;
}

/// Sums.
#[derive(Clone, Copy)]
pub(super) struct Add;

impl<A: Number> Operator<A> for Add {
    const IS_HOT: bool = A::FLOAT;
    const IS_SCALED_HOT: bool = A::SINGLE;
    #[inline(always)]
    fn combine(left: A, right: A) -> A {
        left.add(right)
    }
}

/// The operator `O` of elements that a factor multiplies.
#[derive(Clone, Copy)]
pub(super) struct OfScaled<O, A: Scalable>(A::Factor, PhantomData<O>);

impl<O, A: Scalable> OfScaled<O, A> {
    /// Every element is multiplied by `factor`.
    pub fn new(factor: f64) -> OfScaled<O, A> {
        OfScaled(A::factor(factor), PhantomData)
    }
}

impl<O: Operator<A>, A: Scalable> Operator<A> for OfScaled<O, A> {
    const IS_HOT: bool = O::IS_SCALED_HOT;
    const IS_RARE: bool = !O::IS_SCALED_HOT;
    #[inline(always)]
    fn lift(self, element: A) -> A {
        element.scale(self.0)
    }
    #[inline(always)]
    fn combine(left: A, right: A) -> A {
        O::combine(left, right)
    }
}

/// The operator `O` of accumulators that contain their factor.
#[derive(Clone, Copy)]
pub(super) struct OfLifted<O>(PhantomData<O>);

impl<O> OfLifted<O> {
    /// The operator.
    pub fn new() -> OfLifted<O> {
        OfLifted(PhantomData)
    }
}

impl<O: Operator<A>, A> Operator<A> for OfLifted<O> {
    const IS_HOT: bool = O::IS_SCALED_HOT;
    const IS_RARE: bool = !O::IS_SCALED_HOT;
    #[inline(always)]
    fn combine(left: A, right: A) -> A {
        O::combine(left, right)
    }
}

macro_rules! operator {
    ($(#[$doc:meta])* $operator:ident, ($($generics:tt)*) $acc:ty, $is_hot:expr, $combine:expr) => {
        $(#[$doc])*
        #[derive(Clone, Copy)]
        pub(super) struct $operator;

        impl<$($generics)*> Operator<$acc> for $operator {
            const IS_HOT: bool = $is_hot;
            #[inline(always)]
            fn combine(left: $acc, right: $acc) -> $acc {
                ($combine)(left, right)
            }
        }
    };
}
operator!(
    /// Products.
    Multiply, (A: Number) A, A::SINGLE, A::multiply
);
operator!(
    /// Minima.
    Lesser, (A: Ordered) A, A::SINGLE, A::lesser
);
operator!(
    /// Maxima.
    Greater, (A: Ordered) A, A::SINGLE, A::greater
);
operator!(
    /// Bitwise and.
    And, () u8, false, |left, right| left & right
);
operator!(
    /// Bitwise or.
    Or, () u8, false, |left, right| left | right
);
operator!(
    /// Bitwise exclusive or.
    Xor, () u8, false, |left, right| left ^ right
);
