//! Tests that cross the crates; see tests/*.rs.
