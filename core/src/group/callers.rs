//! Threads that call a group, and whether all of them are blocked. Then no further call can come before one of theirs
//! ends, except from a new thread.
//!
//! Thread rule: any thread.

use std::cell::Cell;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicI32, Ordering};

use crate::lock::lock;

/// The kernel's thread id.
pub(super) type ThreadId = i32;

/// The threads that have called a group.
#[derive(Debug, Default)]
pub(super) struct CallerThreads {
    threads: Mutex<Vec<ThreadId>>,
    /// The thread of the last call; saves searching the list.
    last: AtomicI32,
}

impl CallerThreads {
    /// Records a call of this thread. Returns the thread if the call blocks it. A call that a completion makes on a
    /// group's thread is none: that thread makes further calls only by completions.
    pub fn record(&self, blocks: bool) -> Option<ThreadId> {
        let caller = this_thread();
        if caller == 0 {
            return None;
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
        blocks.then_some(caller)
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
                assert_eq!(callers.record(true), None);
                assert!(callers.all_blocked(&[]));
            });
        });
        assert!(callers.record(false).is_none() && !callers.all_blocked(&[]));
    }

    #[test]
    fn only_live_threads_count() {
        let callers = CallerThreads::default();
        let caller = callers.record(true).unwrap();
        assert!(callers.all_blocked(&[caller]) && !callers.all_blocked(&[]));
        let (sender, receiver) = channel();
        let (end, ended) = channel::<()>();
        std::thread::scope(|scope| {
            let callers = &callers;
            let other = scope.spawn(move || {
                sender.send(callers.record(true).unwrap()).unwrap();
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
        assert_eq!(callers.record(false), None);
        assert!(callers.all_blocked(&[caller]) && !callers.all_blocked(&[]), "it may wait for the call later");
    }

    #[test]
    fn exited_threads_are_removed_from_the_list() {
        let callers = CallerThreads::default();
        for _ in 0..500 {
            std::thread::scope(|scope| {
                scope.spawn(|| callers.record(true));
            });
        }
        assert!(callers.threads.lock().unwrap().len() < 100);
    }
}
