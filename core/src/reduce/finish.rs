//! What is done to a sum before it is rounded.

use super::scheme::Scheme;

/// What is done to a sum before it is rounded.
pub(crate) trait Finish<S: Scheme>: Copy {
    /// Does it.
    fn apply(self, acc: S::Acc) -> S::Acc;
}

/// Nothing.
#[derive(Clone, Copy)]
pub(super) struct Keep;
/// Dividing by a power of two.
pub(super) struct Power<S: Scheme>(S::Acc);
/// Dividing by any number.
pub(super) struct Divide<S: Scheme>(S::Acc);

impl<S: Scheme> Power<S> {
    /// Dividing by 2 to the `log`.
    pub fn new(log: u8) -> Power<S> {
        Power(S::power(log))
    }
}

impl<S: Scheme> Divide<S> {
    /// Dividing by `divisor`.
    pub fn new(divisor: u32) -> Divide<S> {
        Divide(S::divisor(divisor))
    }
}

impl<S: Scheme> Finish<S> for Keep {
    #[inline(always)]
    fn apply(self, acc: S::Acc) -> S::Acc {
        acc
    }
}

impl<S: Scheme> Clone for Power<S> {
    fn clone(&self) -> Power<S> {
        *self
    }
}
impl<S: Scheme> Copy for Power<S> {}
impl<S: Scheme> Finish<S> for Power<S> {
    #[inline(always)]
    fn apply(self, acc: S::Acc) -> S::Acc {
        S::divide_power(acc, self.0)
    }
}

impl<S: Scheme> Clone for Divide<S> {
    fn clone(&self) -> Divide<S> {
        *self
    }
}
impl<S: Scheme> Copy for Divide<S> {}
impl<S: Scheme> Finish<S> for Divide<S> {
    #[inline(always)]
    fn apply(self, acc: S::Acc) -> S::Acc {
        S::divide(acc, self.0)
    }
}
