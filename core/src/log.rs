//! Lines for the user on standard error, each written at once, so that those of several ranks do not mix.

use std::io::Write;

/// Writes `dl_comm: text` as one line. That nobody listens is no failure of the caller's.
pub fn log_line(text: &str) {
    let line = format!("dl_comm: {text}\n");
    let _heard = std::io::stderr().lock().write_all(line.as_bytes());
}
