//! Counters that wrap, of rounds and of messages, so they are compared by signed distance.
//!
//! Debug builds compare the low eight bits only, so every test wraps many times. Numbers start shortly before the wrap
//! in every build, so the first rounds of every job wrap too.

/// Number of compared bits.
const BITS: u32 = if cfg!(loom) {
    4
} else if cfg!(debug_assertions) {
    8
} else {
    32
};

/// The count before the first round. Even, because the slot of a round is its number mod 2.
pub const START: u32 = 0u32.wrapping_sub(4);

/// A flag must be raised again after at most this many rounds. Then distances stay far below half of the range, the
/// limit of the comparison.
pub const REFRESH: u32 = 1 << (BITS - 3);

/// Whether a counter at `value` has reached `target`.
#[inline]
pub fn reached(value: u32, target: u32) -> bool {
    (value.wrapping_sub(target) << (32 - BITS)).cast_signed() >= 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comparison_works_across_the_wrap() {
        assert!(reached(1, u32::MAX) && reached(u32::MAX, u32::MAX) && !reached(u32::MAX, 1));
        assert!(!reached(START, START.wrapping_add(1)) && reached(START.wrapping_add(9), START));
        assert!(reached(2 * REFRESH, 0) && !reached(0, 2 * REFRESH));
    }
}
