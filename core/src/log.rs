//! Log lines: on standard error, each in one write, so that lines of several ranks do not mix; or to the program.
//!
//! Thread rule: any thread.

use std::ffi::{CString, c_char};
use std::io::Write;
use std::sync::{PoisonError, RwLock};

/// Takes a line without "dl_comm: ", or null: the process ends now. As `dl_comm_set_log`.
pub type Sink = extern "C" fn(line: *const c_char);

static SINK: RwLock<Option<Sink>> = RwLock::new(None);

/// Sends lines to `sink` from now on; `None`: to standard error.
pub fn set_sink(sink: Option<Sink>) {
    *SINK.write().unwrap_or_else(PoisonError::into_inner) = sink;
}

fn sink() -> Option<Sink> {
    *SINK.read().unwrap_or_else(PoisonError::into_inner)
}

/// Logs `text`: writes `dl_comm: text` as one line, unless there is a sink. Write errors are ignored.
pub fn log_line(text: &str) {
    if let Some(sink) = sink()
        && let Ok(line) = CString::new(text)
    {
        return sink(line.as_ptr());
    }
    let line = format!("dl_comm: {text}\n");
    let _ignored = std::io::stderr().lock().write_all(line.as_bytes());
}

/// The last line of this process, which ends now: on standard error, after those that a sink keeps.
pub fn log_last_line(text: &str) {
    if let Some(sink) = sink() {
        sink(std::ptr::null());
        set_sink(None);
    }
    log_line(text);
}
