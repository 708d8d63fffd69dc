//! Who calls a team: whether every thread that does waits for a call. Then no other call will come before one of these has
//! ended, unless from a thread that has made none so far.
//!
//! Thread rule: may be used from any thread.

use std::path::Path;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Mutex, PoisonError};

/// The kernel's number of a thread.
pub(super) type ThreadId = i32;

/// What is known of a team's callers.
#[derive(Debug, Default)]
pub(super) struct CallerThreads {
    known: Mutex<Vec<ThreadId>>,
    /// The caller of the last call, who needs no look at the list.
    last: AtomicI32,
}

impl CallerThreads {
    /// Notes a call of this thread, which waits for the call (`blocks`) or goes on. Returns the thread if it waits.
    pub fn note(&self, blocks: bool) -> Option<ThreadId> {
        let here = this_thread();
        if self.last.load(Ordering::Relaxed) != here {
            self.last.store(here, Ordering::Relaxed);
            let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
            if !known.contains(&here) {
                // Where threads come and go, those that have gone must not fill the list.
                if known.len() == known.capacity() {
                    known.retain(|&thread| is_alive(thread));
                }
                known.push(here);
            }
        }
        blocks.then_some(here)
    }

    /// Whether every thread that has called, and is alive, is among `waiting`. Looks at the system's list of threads.
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
    fn threads_count_as_long_as_they_live() {
        let callers = CallerThreads::default();
        let here = callers.note(true).unwrap();
        assert!(callers.all_blocked(&[here]) && !callers.all_blocked(&[]));
        let (sender, receiver) = channel();
        let (end, ended) = channel::<()>();
        std::thread::scope(|scope| {
            let callers = &callers;
            let other = scope.spawn(move || {
                sender.send(callers.note(true).unwrap()).unwrap();
                ended.recv().unwrap_err();
            });
            let there = receiver.recv().unwrap();
            assert!(!callers.all_blocked(&[here]) && callers.all_blocked(&[there, here]));
            drop(end);
            other.join().unwrap();
        });
        // The system may take a moment to forget a thread.
        while !callers.all_blocked(&[here]) {
            std::thread::yield_now();
        }
        assert_eq!(callers.note(false), None);
        assert!(callers.all_blocked(&[here]) && !callers.all_blocked(&[]), "it may wait for the call later");
    }

    #[test]
    fn threads_that_have_gone_do_not_fill_the_list() {
        let callers = CallerThreads::default();
        for _ in 0..500 {
            std::thread::scope(|scope| {
                scope.spawn(|| callers.note(true));
            });
        }
        assert!(callers.known.lock().unwrap().len() < 100);
    }
}
