//! How long property tests run. Thread rule: any thread.

/// How many random cases a property test runs: all with `DL_COMM_TEST_CASES=all`, as `tests/heavy.sh properties` sets it, else a
/// third.
#[must_use]
pub fn cases(all: u32) -> u32 {
    let wants_all = std::env::var_os("DL_COMM_TEST_CASES").is_some_and(|value| value == "all");
    if wants_all { all } else { all.div_ceil(3) }
}
