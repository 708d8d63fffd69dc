//! The operations that combine two accumulators.

use std::marker::PhantomData;

use super::number::{Number, Scalable};
use super::ordered::Ordered;

/// Combines accumulators of type `A`.
pub(crate) trait Operator<A>: Copy + Send + 'static {
    /// The same on accumulators, which contain the factor.
    type OnAccs: Operator<A> + Default;
    /// [`Operator::lift`] alone.
    type Lift: Operator<A>;
    /// Whether speed matters more than code size: one loop takes up to four sources, not
    /// two, and is compiled for AVX-512 too.
    const IS_HOT: bool = false;
    /// As `IS_HOT`, of elements that a factor multiplies.
    const IS_SCALED_HOT: bool = false;
    /// Whether `lift` changes elements.
    const LIFTS: bool = false;
    /// [`Operator::Lift`]
    fn lift_alone(self) -> Self::Lift;
    /// Makes an accumulator of an element that was widened.
    #[inline(always)]
    fn lift(self, element: A) -> A {
        element
    }
    /// Combines two accumulators.
    fn combine(left: A, right: A) -> A;
}

/// For loops of one source.
#[derive(Clone, Copy, Default)]
pub(super) struct Keep;

impl<A> Operator<A> for Keep {
    type OnAccs = Keep;
    type Lift = Keep;
    fn lift_alone(self) -> Keep {
        Keep
    }
    #[inline(always)]
    fn combine(left: A, _: A) -> A {
        left
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
    type OnAccs = O::OnAccs;
    type Lift = OfScaled<Keep, A>;
    const IS_HOT: bool = O::IS_SCALED_HOT;
    const LIFTS: bool = true;
    #[inline(always)]
    fn lift_alone(self) -> OfScaled<Keep, A> {
        OfScaled(self.0, PhantomData)
    }
    #[inline(always)]
    fn lift(self, element: A) -> A {
        element.scale(self.0)
    }
    #[inline(always)]
    fn combine(left: A, right: A) -> A {
        O::combine(left, right)
    }
}

macro_rules! operator {
    ($(#[$doc:meta])* $operator:ident, ($($generics:tt)*) $acc:ty, $combine:expr $(, $($constants:item)+)?) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Default)]
        pub(super) struct $operator;

        impl<$($generics)*> Operator<$acc> for $operator {
            type OnAccs = $operator;
            type Lift = Keep;
            $($($constants)+)?
            #[inline(always)]
            fn lift_alone(self) -> Keep {
                Keep
            }
            #[inline(always)]
            fn combine(left: $acc, right: $acc) -> $acc {
                ($combine)(left, right)
            }
        }
    };
}
operator!(
    /// Sums.
    Add, (A: Number) A, A::add, const IS_HOT: bool = A::FLOAT; const IS_SCALED_HOT: bool = A::SINGLE;
);
operator!(
    /// Products.
    Multiply, (A: Number) A, A::multiply, const IS_HOT: bool = A::SINGLE;
);
operator!(
    /// Minima.
    Lesser, (A: Ordered) A, A::lesser, const IS_HOT: bool = A::SINGLE;
);
operator!(
    /// Maxima.
    Greater, (A: Ordered) A, A::greater, const IS_HOT: bool = A::SINGLE;
);
operator!(
    /// Bitwise and.
    And, () u8, |left, right| left & right
);
operator!(
    /// Bitwise or.
    Or, () u8, |left, right| left | right
);
operator!(
    /// Bitwise exclusive or.
    Xor, () u8, |left, right| left ^ right
);
