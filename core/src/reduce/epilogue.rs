//! The operation on a sum before it is rounded.

use super::types::ReduceType;

/// The operation on a sum before it is rounded.
pub(crate) trait Epilogue<S: ReduceType>: Copy {
    /// Applies the operation.
    fn apply(self, acc: S::Acc) -> S::Acc;
}

/// No operation.
#[derive(Clone, Copy)]
pub(super) struct Identity;
/// Division by a power of two.
pub(super) struct DividePow2<S: ReduceType>(S::Acc);
/// Division by any divisor.
pub(super) struct Divide<S: ReduceType>(S::Acc);

impl<S: ReduceType> DividePow2<S> {
    /// Division by 2 to the power `log`.
    pub fn new(log: u8) -> DividePow2<S> {
        DividePow2(S::power(log))
    }
}

impl<S: ReduceType> Divide<S> {
    /// Division by `divisor`.
    pub fn new(divisor: u32) -> Divide<S> {
        Divide(S::divisor(divisor))
    }
}

impl<S: ReduceType> Epilogue<S> for Identity {
    #[inline(always)]
    fn apply(self, acc: S::Acc) -> S::Acc {
        acc
    }
}

impl<S: ReduceType> Clone for DividePow2<S> {
    fn clone(&self) -> DividePow2<S> {
        *self
    }
}
impl<S: ReduceType> Copy for DividePow2<S> {}
impl<S: ReduceType> Epilogue<S> for DividePow2<S> {
    #[inline(always)]
    fn apply(self, acc: S::Acc) -> S::Acc {
        S::divide_power(acc, self.0)
    }
}

impl<S: ReduceType> Clone for Divide<S> {
    fn clone(&self) -> Divide<S> {
        *self
    }
}
impl<S: ReduceType> Copy for Divide<S> {}
impl<S: ReduceType> Epilogue<S> for Divide<S> {
    #[inline(always)]
    fn apply(self, acc: S::Acc) -> S::Acc {
        S::divide(acc, self.0)
    }
}
