//! Threads that call a group, and whether all of them are blocked. Then no further call can come before one of theirs
//! ends, except from a new thread.
//!
//! Thread rule: any thread.

use std::cell::Cell;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};

use crate::lock::lock;

/// The kernel's thread id.
pub(super) type ThreadId = i32;

/// What the thread that makes a call does then.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Caller {
    /// It waits for the call.
    Waits,
    /// It goes on, and may make more calls.
    GoesOn,
    /// It is one of a pool, and has made the call for somebody else, who may wait.
    OfPool,
}

/// Who has made a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Origin {
    /// A thread that waits for it.
    Waiting(ThreadId),
    /// A thread of a pool.
    Pool,
    #[default]
    Other,
}

impl Origin {
    /// The thread that waits for the call.
    pub fn waiting(self) -> Option<ThreadId> {
        match self {
            Origin::Waiting(thread) => Some(thread),
            Origin::Pool | Origin::Other => None,
        }
    }
}

/// The threads that have called a group.
#[derive(Debug, Default)]
pub(super) struct CallerThreads {
    threads: Mutex<Vec<ThreadId>>,
    /// The thread of the last call; saves searching the list.
    last: AtomicI32,
    /// Whether threads of pools have called, too. Which ones is chance, so they are not listed.
    pools: AtomicBool,
}

impl CallerThreads {
    /// Records a call of this thread. A call that a completion makes on a group's thread is none: that thread makes
    /// further calls only by completions.
    pub fn record(&self, what: Caller) -> Origin {
        let caller = this_thread();
        if caller == 0 {
            return Origin::Other;
        }
        if what == Caller::OfPool {
            self.pools.store(true, Ordering::Relaxed);
            return Origin::Pool;
        }
        if self.last.load(Ordering::Relaxed) != caller {
            self.last.store(caller, Ordering::Relaxed);
            let mut threads = lock(&self.threads);
            if !threads.contains(&caller) {
                // Removes exited threads before the list grows.
                if threads.len() == threads.capacity() {
                    threads.retain(|&thread| is_alive(thread));
                }
                threads.push(caller);
            }
        }
        if what == Caller::Waits { Origin::Waiting(caller) } else { Origin::Other }
    }

    /// Whether threads of pools have called.
    pub fn include_pools(&self) -> bool {
        self.pools.load(Ordering::Relaxed)
    }

    /// Whether every live thread that has called is in `waiting`. Reads the system's list of threads.
    pub fn all_blocked(&self, waiting: &[ThreadId]) -> bool {
        let mut threads = lock(&self.threads);
        threads.retain(|&thread| is_alive(thread));
        threads.iter().all(|thread| waiting.contains(thread))
    }
}

fn is_alive(thread: ThreadId) -> bool {
    Path::new(&format!("/proc/self/task/{thread}")).exists()
}

thread_local!(static THREAD_ID: Cell<ThreadId> = Cell::new(rustix::thread::gettid().as_raw_nonzero().get()));

/// The calling thread; 0 for a group's thread.
pub(super) fn this_thread() -> ThreadId {
    THREAD_ID.try_with(Cell::get).unwrap_or(0)
}

/// Whether the calling thread is a group's thread.
pub(super) fn is_group_thread() -> bool {
    this_thread() == 0
}

/// Makes the calling thread a group's thread.
pub(super) fn mark_group_thread() {
    THREAD_ID.set(0);
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    #[test]
    fn a_group_thread_is_no_caller() {
        let callers = CallerThreads::default();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                mark_group_thread();
                assert_eq!(callers.record(Caller::Waits), Origin::Other);
                assert!(callers.all_blocked(&[]));
            });
        });
        assert!(callers.record(Caller::GoesOn) == Origin::Other && !callers.all_blocked(&[]));
    }

    #[test]
    fn only_live_threads_count() {
        let callers = CallerThreads::default();
        let caller = callers.record(Caller::Waits).waiting().unwrap();
        assert!(callers.all_blocked(&[caller]) && !callers.all_blocked(&[]));
        let (sender, receiver) = channel();
        let (end, ended) = channel::<()>();
        std::thread::scope(|scope| {
            let callers = &callers;
            let other = scope.spawn(move || {
                sender.send(callers.record(Caller::Waits).waiting().unwrap()).unwrap();
                ended.recv().unwrap_err();
            });
            let other_thread = receiver.recv().unwrap();
            assert!(!callers.all_blocked(&[caller]) && callers.all_blocked(&[other_thread, caller]));
            drop(end);
            other.join().unwrap();
        });
        // An exited thread may stay in /proc for a moment.
        while !callers.all_blocked(&[caller]) {
            std::thread::yield_now();
        }
        assert_eq!(callers.record(Caller::GoesOn), Origin::Other);
        assert!(callers.all_blocked(&[caller]) && !callers.all_blocked(&[]), "it may wait for the call later");
    }

    #[test]
    fn threads_of_pools_are_not_listed() {
        let callers = CallerThreads::default();
        assert!(!callers.include_pools());
        assert_eq!(callers.record(Caller::OfPool), Origin::Pool);
        assert!(callers.include_pools() && callers.all_blocked(&[]));
    }

    #[test]
    fn exited_threads_are_removed_from_the_list() {
        let callers = CallerThreads::default();
        for _ in 0..500 {
            std::thread::scope(|scope| {
                scope.spawn(|| callers.record(Caller::Waits));
            });
        }
        assert!(callers.threads.lock().unwrap().len() < 100);
    }
}
