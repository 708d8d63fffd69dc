//! Storage formats: the representation of elements in memory.

use super::types::ReduceType;

/// The representation of an element in memory.
pub(crate) trait StorageFormat<S: ReduceType>: 'static {
    /// The stored type.
    type Stored: Copy;
    /// Whether it stores elements, not accumulators.
    const NATIVE: bool;
    /// Whether storing rounds to the element type.
    const ROUNDS: bool;
    /// Loads an accumulator.
    fn load(stored: Self::Stored) -> S::Acc;
    /// Stores an accumulator.
    fn store(acc: S::Acc) -> Self::Stored;
}

/// As an element.
pub(super) struct AsElement;
/// As an accumulator.
pub(super) struct AsAccumulator;
/// As an accumulator, rounded to the element type when stored.
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
