//! The operation on an accumulator before it is rounded.

use super::number::{Divisible, Float};

/// The operation on an accumulator before it is rounded.
pub(crate) trait Epilogue<A>: Copy + Send + 'static {
    /// Applies the operation.
    fn apply(self, acc: A) -> A;
}

/// No operation.
#[derive(Clone, Copy)]
pub(super) struct Identity;
/// Division by a power of two; for floating point, multiplication by its reciprocal or any other factor.
#[derive(Clone, Copy)]
pub(super) struct DividePow2<A>(A);
/// Division by any divisor.
#[derive(Clone, Copy)]
pub(super) struct Divide<A>(A);

impl<A: Divisible> DividePow2<A> {
    /// Division by 2 to the power `log`.
    pub fn new(log: u8) -> DividePow2<A> {
        DividePow2(A::power(log))
    }
    /// Multiplication by `factor`, rounded to the accumulator's type.
    pub fn factor(factor: f64) -> DividePow2<A>
    where
        A: Float,
    {
        DividePow2(A::factor(factor))
    }
}

impl<A: Divisible> Divide<A> {
    /// Division by `divisor`.
    pub fn new(divisor: u32) -> Divide<A> {
        Divide(A::divisor(divisor))
    }
}

impl<A> Epilogue<A> for Identity {
    #[inline(always)]
    fn apply(self, acc: A) -> A {
        acc
    }
}

impl<A: Divisible> Epilogue<A> for DividePow2<A> {
    #[inline(always)]
    fn apply(self, acc: A) -> A {
        acc.divide_power(self.0)
    }
}

impl<A: Divisible> Epilogue<A> for Divide<A> {
    #[inline(always)]
    fn apply(self, acc: A) -> A {
        acc.divide(self.0)
    }
}
