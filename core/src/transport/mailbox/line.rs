//! A cache line of its own for a value that two ranks share.

/// A value in a cache line of its own.
#[repr(C, align(64))]
#[derive(Default)]
pub(super) struct Line<T>(pub T);
