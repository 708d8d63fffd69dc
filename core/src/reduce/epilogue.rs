//! The operation on an accumulator before it is rounded.

use super::number::{Divisible, Scalable};

/// The operation on an accumulator before it is rounded.
pub(crate) trait Epilogue<A>: Copy + Send + 'static {
    /// Applies the operation.
    fn apply(self, acc: A) -> A;
}

/// No operation.
#[derive(Clone, Copy)]
pub(super) struct Identity;
/// Division by a power of two; for floating point, multiplication by its reciprocal.
#[derive(Clone, Copy)]
pub(super) struct DividePow2<A>(A);
/// Division by any divisor.
#[derive(Clone, Copy)]
pub(super) struct Divide<A>(A);
/// Multiplication by a factor.
#[derive(Clone, Copy)]
pub(super) struct Scale<A: Scalable>(A::Factor);
/// Multiplication by a factor, then division.
#[derive(Clone, Copy)]
pub(super) struct ScaleAndDivide<A: Scalable>(Scale<A>, Divide<A>);

impl<A: Divisible> DividePow2<A> {
    /// Division by 2 to the power `log`.
    pub fn new(log: u8) -> DividePow2<A> {
        DividePow2(A::power(log))
    }
}

impl<A: Scalable> Scale<A> {
    /// Multiplication by `factor`.
    pub fn new(factor: f64) -> Scale<A> {
        Scale(A::factor(factor))
    }
}

impl<A: Divisible> Divide<A> {
    /// Division by `divisor`.
    pub fn new(divisor: u32) -> Divide<A> {
        Divide(A::divisor(divisor))
    }
}

impl<A: Divisible + Scalable> ScaleAndDivide<A> {
    /// Multiplication by `factor`, then division by `divisor`.
    pub fn new(factor: f64, divisor: u32) -> ScaleAndDivide<A> {
        ScaleAndDivide(Scale::new(factor), Divide::new(divisor))
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

impl<A: Scalable> Epilogue<A> for Scale<A> {
    #[inline(always)]
    fn apply(self, acc: A) -> A {
        acc.scale(self.0)
    }
}

impl<A: Divisible + Scalable> Epilogue<A> for ScaleAndDivide<A> {
    #[inline(always)]
    fn apply(self, acc: A) -> A {
        self.1.apply(self.0.apply(acc))
    }
}

impl<A: Divisible> Epilogue<A> for Divide<A> {
    #[inline(always)]
    fn apply(self, acc: A) -> A {
        acc.divide(self.0)
    }
}
