//! How elements lie in memory.

use super::types::ReduceType;

/// How an element lies in memory.
pub(crate) trait StorageFormat<S: ReduceType> {
    /// The type there.
    type Stored: Copy;
    /// It is the element itself.
    const NATIVE: bool;
    /// Storing rounds to an element.
    const ROUNDS: bool;
    /// From memory.
    fn load(stored: Self::Stored) -> S::Acc;
    /// To memory.
    fn store(acc: S::Acc) -> Self::Stored;
}

/// As the element itself.
pub(super) struct AsElement;
/// As an accumulator.
pub(super) struct AsAccumulator;
/// As an accumulator, rounded to an element when it is stored.
pub(super) struct AsRoundedAccumulator;

impl<S: ReduceType> StorageFormat<S> for AsElement {
    type Stored = S::Element;
    const NATIVE: bool = true;
    const ROUNDS: bool = true;
    #[inline(always)]
    fn load(stored: S::Element) -> S::Acc {
        S::widen(stored)
    }
    #[inline(always)]
    fn store(acc: S::Acc) -> S::Element {
        S::narrow(acc)
    }
}

impl<S: ReduceType> StorageFormat<S> for AsAccumulator {
    type Stored = S::Acc;
    const NATIVE: bool = false;
    const ROUNDS: bool = false;
    #[inline(always)]
    fn load(stored: S::Acc) -> S::Acc {
        stored
    }
    #[inline(always)]
    fn store(acc: S::Acc) -> S::Acc {
        acc
    }
}

impl<S: ReduceType> StorageFormat<S> for AsRoundedAccumulator {
    type Stored = S::Acc;
    const NATIVE: bool = false;
    const ROUNDS: bool = true;
    #[inline(always)]
    fn load(stored: S::Acc) -> S::Acc {
        stored
    }
    #[inline(always)]
    fn store(acc: S::Acc) -> S::Acc {
        S::widen(S::narrow(acc))
    }
}
