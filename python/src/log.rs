//! Log lines of the core go through Python's `logging`.
//!
//! A thread passes them on. Whoever logs a line may hold locks that a thread with the GIL waits for, so it does not wait
//! for the GIL itself.

use std::collections::VecDeque;
use std::ffi::c_char;
use std::io::Write;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use pyo3::prelude::*;

use crate::api::{ffi, text};

/// The lines that Python has not got yet.
struct Lines {
    waiting: VecDeque<String>,
    /// Python logs one now.
    is_busy: bool,
    /// A Python function of a line; set by [`log_to`].
    logger: Option<Py<PyAny>>,
}

static LINES: Mutex<Lines> = Mutex::new(Lines { waiting: VecDeque::new(), is_busy: false, logger: None });
static CHANGED: Condvar = Condvar::new();
/// The process whose thread passes the lines on; 0: none.
static OWNER: AtomicU32 = AtomicU32::new(0);

fn lines() -> MutexGuard<'static, Lines> {
    LINES.lock().unwrap_or_else(PoisonError::into_inner)
}

fn write(line: &str) {
    let _ignored = std::io::stderr().lock().write_all(format!("dl_comm: {line}\n").as_bytes());
}

/// Takes a line of the core.
extern "C" fn take(line: *const c_char) {
    let is_child = OWNER.load(Ordering::Relaxed) != std::process::id();
    if line.is_null() {
        // A fork may have left the mutex locked.
        if !is_child {
            lines().waiting.drain(..).for_each(|line| write(&line));
        }
        return;
    }
    // SAFETY: a C string of the core.
    let line = unsafe { text(line) };
    if is_child {
        return write(&line);
    }
    lines().waiting.push_back(line);
    CHANGED.notify_all();
}

fn pass_on() {
    loop {
        let mut found = lines();
        let line = loop {
            if let Some(line) = found.waiting.pop_front() {
                break line;
            }
            found = CHANGED.wait(found).unwrap_or_else(PoisonError::into_inner);
        };
        found.is_busy = true;
        drop(found);
        let is_logged = Python::try_attach(|py| {
            let logger = lines().logger.as_ref().map(|logger| logger.clone_ref(py));
            // An error of the program's handler must not hide the line.
            logger.is_some_and(|logger| logger.call1(py, (&line,)).is_ok())
        });
        if is_logged != Some(true) {
            write(&line);
        }
        lines().is_busy = false;
        CHANGED.notify_all();
    }
}

/// From now on, calls `logger` with each log line of the core, on a thread of its own.
///
/// # Errors
/// If the thread cannot be started.
#[pyfunction]
pub fn log_to(logger: Py<PyAny>) -> PyResult<()> {
    lines().logger = Some(logger);
    if OWNER.swap(std::process::id(), Ordering::Relaxed) != std::process::id() {
        std::thread::Builder::new().name("dlcomm-log".into()).spawn(pass_on)?;
    }
    // SAFETY: a function that lives for ever.
    unsafe { ffi::dl_comm_set_log(Some(take)) };
    Ok(())
}

/// Waits until Python has all lines, at most a second, and sends later ones to standard error.
#[pyfunction]
pub fn end_log(py: Python<'_>) {
    // SAFETY: may be called at any time.
    unsafe { ffi::dl_comm_set_log(None) };
    if OWNER.load(Ordering::Relaxed) != std::process::id() {
        return;
    }
    py.detach(|| {
        let until = Instant::now() + Duration::from_secs(1);
        let mut found = lines();
        while found.is_busy || !found.waiting.is_empty() {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            found = CHANGED.wait_timeout(found, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        found.waiting.drain(..).for_each(|line| write(&line));
    });
}
