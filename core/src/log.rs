//! Log lines on standard error, each in one write, so that lines of several ranks do not mix.

use std::io::Write;

/// Writes `dl_comm: text` as one line. Write errors are ignored.
pub fn log_line(text: &str) {
    let line = format!("dl_comm: {text}\n");
    let _ignored = std::io::stderr().lock().write_all(line.as_bytes());
}
