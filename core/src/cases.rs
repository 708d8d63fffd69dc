//! How long property tests run. Thread rule: any thread.

/// Whether tests run all their cases: with `DL_COMM_TEST_CASES=all`, as `tests/heavy.sh properties` sets it.
#[must_use]
pub fn wants_all() -> bool {
    std::env::var_os("DL_COMM_TEST_CASES").is_some_and(|value| value == "all")
}

/// How many random cases a property test runs: all if they are wanted, else a third.
#[must_use]
pub fn cases(all: u32) -> u32 {
    if wants_all() { all } else { all.div_ceil(3) }
}
