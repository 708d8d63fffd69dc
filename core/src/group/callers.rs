//! Threads that call a group, and whether all of them are blocked. Then no further call can come before one of theirs
//! ends, except from a new thread.
//!
//! Thread rule: any thread.

use std::path::Path;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Mutex, PoisonError};

/// The kernel's thread id.
pub(super) type ThreadId = i32;

/// The threads that have called a group.
#[derive(Debug, Default)]
pub(super) struct CallerThreads {
    known: Mutex<Vec<ThreadId>>,
    /// The thread of the last call; saves searching the list.
    last: AtomicI32,
}

impl CallerThreads {
    /// Records a call of this thread. Returns the thread if the call blocks it.
    pub fn record(&self, blocks: bool) -> Option<ThreadId> {
        let here = this_thread();
        if self.last.load(Ordering::Relaxed) != here {
            self.last.store(here, Ordering::Relaxed);
            let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
            if !known.contains(&here) {
                // Removes exited threads before the list grows.
                if known.len() == known.capacity() {
                    known.retain(|&thread| is_alive(thread));
                }
                known.push(here);
            }
        }
        blocks.then_some(here)
    }

    /// Whether every live thread that has called is in `waiting`. Reads the system's list of threads.
    pub fn all_blocked(&self, waiting: &[ThreadId]) -> bool {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        known.retain(|&thread| is_alive(thread));
        known.iter().all(|thread| waiting.contains(thread))
    }
}

fn is_alive(thread: ThreadId) -> bool {
    Path::new(&format!("/proc/self/task/{thread}")).exists()
}

pub(super) fn this_thread() -> ThreadId {
    thread_local!(static HERE: ThreadId = rustix::thread::gettid().as_raw_nonzero().get());
    HERE.try_with(|here| *here).unwrap_or(0)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    #[test]
    fn only_live_threads_count() {
        let callers = CallerThreads::default();
        let here = callers.record(true).unwrap();
        assert!(callers.all_blocked(&[here]) && !callers.all_blocked(&[]));
        let (sender, receiver) = channel();
        let (end, ended) = channel::<()>();
        std::thread::scope(|scope| {
            let callers = &callers;
            let other = scope.spawn(move || {
                sender.send(callers.record(true).unwrap()).unwrap();
                ended.recv().unwrap_err();
            });
            let other_thread = receiver.recv().unwrap();
            assert!(!callers.all_blocked(&[here]) && callers.all_blocked(&[other_thread, here]));
            drop(end);
            other.join().unwrap();
        });
        // An exited thread may stay in /proc for a moment.
        while !callers.all_blocked(&[here]) {
            std::thread::yield_now();
        }
        assert_eq!(callers.record(false), None);
        assert!(callers.all_blocked(&[here]) && !callers.all_blocked(&[]), "it may wait for the call later");
    }

    #[test]
    fn exited_threads_are_removed_from_the_list() {
        let callers = CallerThreads::default();
        for _ in 0..500 {
            std::thread::scope(|scope| {
                scope.spawn(|| callers.record(true));
            });
        }
        assert!(callers.known.lock().unwrap().len() < 100);
    }
}
