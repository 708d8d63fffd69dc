//! The numbers of a channel's steps, which wrap: they are compared by signed distance.
//!
//! Debug builds compare the low eight bits only, so that every test passes the wrap many times. Numbers start shortly
//! before the wrap in every build, so that the first steps of every job pass it too.

/// How many bits of a number are compared.
const BITS: u32 = if cfg!(loom) {
    4
} else if cfg!(debug_assertions) {
    8
} else {
    32
};

/// The number before the first step. Even, so that a step's slot follows from its number.
pub const START: u32 = 0u32.wrapping_sub(4);

/// A flag that was not raised for so many steps must be raised again. Distances stay far below half of the range, up to
/// which "reached" can be told from "not yet".
pub const REFRESH: u32 = 1 << (BITS - 3);

/// Whether a counter at `value` has come to `target`.
#[inline]
pub fn reached(value: u32, target: u32) -> bool {
    (value.wrapping_sub(target) << (32 - BITS)).cast_signed() >= 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_compared_across_the_wrap() {
        assert!(reached(1, u32::MAX) && reached(u32::MAX, u32::MAX) && !reached(u32::MAX, 1));
        assert!(!reached(START, START.wrapping_add(1)) && reached(START.wrapping_add(9), START));
        assert!(reached(2 * REFRESH, 0) && !reached(0, 2 * REFRESH));
    }
}
