//! Whether this process was forked from one that uses dl_comm, without asking the system at every call.
//!
//! Thread rule: may be used from any thread, and before any lock: a forked child may find locks held for ever.

use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};

static CHILD: AtomicBool = AtomicBool::new(false);

/// Runs in a forked child, where only async-signal-safe things are allowed.
extern "C" fn mark_child() {
    CHILD.store(true, Ordering::Relaxed);
}

/// From now on, [`is_child`] tells the children of this process.
pub fn install_handler() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: the handler stores to an atomic. Fails for want of memory; children are not told apart then.
        let _status = unsafe { libc::pthread_atfork(None, None, Some(mark_child)) };
    });
}

/// Whether this process was forked, by fork(3), from one that had called [`watch`].
pub fn is_child() -> bool {
    CHILD.load(Ordering::Relaxed)
}
