//! Detects a forked child of a process that uses dl_comm, without a system call per check.
//!
//! Thread rule: may be called from any thread, and before any lock is taken: a forked child may inherit locked mutexes.

use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};

static CHILD: AtomicBool = AtomicBool::new(false);

/// The handler runs in the forked child; only async-signal-safe operations are allowed there.
extern "C" fn mark_child() {
    CHILD.store(true, Ordering::Relaxed);
}

/// Makes [`is_child`] return true in future children of this process.
pub fn install_handler() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: the handler only stores to an atomic. Registration fails when memory is exhausted; then children are
        // not detected.
        let _status = unsafe { libc::pthread_atfork(None, None, Some(mark_child)) };
    });
}

/// Whether this process is a forked child of a process that called [`install_handler`].
pub fn is_child() -> bool {
    CHILD.load(Ordering::Relaxed)
}
