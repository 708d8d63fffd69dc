//! A thread of a group that starts with its first item, and ends when no item has come for a while.
//!
//! Thread rule: any thread may send, and take what was sent. The body runs on one thread at a time.

use std::collections::VecDeque;
use std::mem;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use super::callers::mark_group_thread;
use crate::affinity::{bind, request_short_slice};
use crate::error::{Error, Result};
use crate::lock::{Wakeup, lock};
use crate::log::log_line;

/// What the thread runs, until [`GroupThread::wait`] returns false.
type Body<T> = Arc<dyn Fn(&GroupThread<T>) + Send + Sync>;

/// Where the thread runs.
#[derive(Debug, Clone)]
pub(super) struct ThreadSettings {
    /// The name.
    pub name: String,
    /// The processor, if it is pinned.
    pub cpu: Option<usize>,
    /// How long it stays without an item; `None`: until it is closed.
    pub idle_timeout: Option<Duration>,
}

/// A thread that runs while it has items.
pub(super) struct GroupThread<T>(Arc<Inner<T>>);

impl<T> Clone for GroupThread<T> {
    fn clone(&self) -> GroupThread<T> {
        GroupThread(Arc::clone(&self.0))
    }
}

struct Inner<T> {
    settings: ThreadSettings,
    state: Mutex<State<T>>,
    /// Items that were sent and not taken, as in the state.
    number: AtomicUsize,
    arrived: Wakeup,
}

struct State<T> {
    items: VecDeque<T>,
    life: Life<T>,
}

enum Life<T> {
    /// Has not started, or has ended for want of items.
    Idle(Body<T>),
    Running(Body<T>, JoinHandle<()>),
    Closed,
}

impl<T: Send + 'static> GroupThread<T> {
    /// A thread that has not started. `body` runs until [`GroupThread::wait`] returns false.
    pub fn new(settings: ThreadSettings, body: impl Fn(&GroupThread<T>) + Send + Sync + 'static) -> GroupThread<T> {
        let state = State { items: VecDeque::new(), life: Life::Idle(Arc::new(body)) };
        let (state, number) = (Mutex::new(state), AtomicUsize::new(0));
        GroupThread(Arc::new(Inner { settings, state, number, arrived: Wakeup::default() }))
    }

    /// Starts the thread, if it does not run.
    ///
    /// # Errors
    /// [`Error::System`] if the system refuses a thread.
    pub fn start(&self) -> Result<()> {
        self.start_locked(&mut self.lock())
    }

    fn start_locked(&self, state: &mut State<T>) -> Result<()> {
        let Life::Idle(body) = &state.life else { return Ok(()) };
        let (thread, run, body) = (self.clone(), Arc::clone(body), Arc::clone(body));
        let run = move || {
            mark_group_thread();
            request_short_slice();
            if let Some(Err(error)) = thread.0.settings.cpu.map(bind) {
                log_line(&format!("{error}; the thread runs where the process may"));
            }
            run(&thread);
        };
        let handle = Builder::new().name(self.0.settings.name.clone()).spawn(run).map_err(Error::no_thread)?;
        state.life = Life::Running(body, handle);
        Ok(())
    }

    /// Sends the thread an item, and starts it if needed. Returns the item, with the reason, if that failed; without a
    /// reason it is closed.
    pub fn send(&self, item: T) -> std::result::Result<(), (T, Option<Error>)> {
        let mut state = self.lock();
        if let Err(error) = self.start_locked(&mut state) {
            return Err((item, Some(error)));
        }
        if matches!(state.life, Life::Closed) {
            return Err((item, None));
        }
        state.items.push_back(item);
        self.0.number.store(state.items.len(), Ordering::Release);
        drop(state);
        self.0.arrived.notify_all();
        Ok(())
    }

    /// Lets the thread handle the items that were sent, and waits until it has ended. Not from a thread of a group.
    pub fn close(&self) {
        let life = mem::replace(&mut self.lock().life, Life::Closed);
        self.0.arrived.notify_all();
        if let Life::Running(body, handle) = life {
            if handle.join().is_err() {
                log_line(&format!("thread {} panicked", self.0.settings.name));
            }
            drop(body);
        }
    }
}

impl<T> GroupThread<T> {
    fn lock(&self) -> MutexGuard<'_, State<T>> {
        lock(&self.0.state)
    }

    /// Whether it accepts no more items.
    pub fn is_closed(&self) -> bool {
        matches!(self.lock().life, Life::Closed)
    }

    /// Whether there are items that nobody has taken. Quick.
    pub fn has_items(&self) -> bool {
        self.0.number.load(Ordering::Acquire) > 0
    }

    /// Takes an item.
    pub fn take(&self) -> Option<T> {
        let mut state = self.lock();
        let item = state.items.pop_front();
        self.0.number.store(state.items.len(), Ordering::Release);
        item
    }

    /// Only for the thread: waits until there is an item. False if none comes: then the body returns, and is run again
    /// for the next item, unless the thread is closed.
    pub fn wait(&self) -> bool {
        let mut state = self.lock();
        while state.items.is_empty() {
            if matches!(state.life, Life::Closed) {
                return false;
            }
            let is_late;
            (state, is_late) = self.0.arrived.wait(state, self.0.settings.idle_timeout);
            if is_late && state.items.is_empty() {
                if let Life::Running(body, _) = mem::replace(&mut state.life, Life::Closed) {
                    state.life = Life::Idle(body);
                }
                return false;
            }
        }
        true
    }

    /// Waits up to `timeout` for an item, beside [`GroupThread::wait`]; returns whether there is one.
    pub fn wait_timeout(&self, timeout: Duration) -> bool {
        let mut state = self.lock();
        if state.items.is_empty() {
            state = self.0.arrived.wait(state, Some(timeout)).0;
        }
        !state.items.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::thread::sleep;

    use super::*;

    /// A thread that adds the items, and the number of its starts.
    fn adder(idle_timeout: Option<Duration>) -> (GroupThread<usize>, Arc<[AtomicUsize; 2]>) {
        let counts: Arc<[AtomicUsize; 2]> = Arc::default();
        let shared = Arc::clone(&counts);
        let settings = ThreadSettings { name: "adder".into(), cpu: None, idle_timeout };
        let thread = GroupThread::new(settings, move |thread: &GroupThread<usize>| {
            shared[1].fetch_add(1, Ordering::SeqCst);
            while thread.wait() {
                shared[0].fetch_add(thread.take().unwrap_or(0), Ordering::SeqCst);
            }
        });
        (thread, counts)
    }

    #[test]
    fn items_are_handled_across_ends_and_starts() {
        let (thread, counts) = adder(Some(Duration::from_millis(1)));
        assert_eq!(counts[1].load(Ordering::SeqCst), 0, "no item, no thread");
        for item in 1..=200 {
            assert!(thread.send(item).is_ok());
            if item % 50 == 0 {
                while !matches!(thread.lock().life, Life::Idle(_)) {
                    sleep(Duration::from_millis(1));
                }
            }
        }
        thread.close();
        assert_eq!(counts[0].load(Ordering::SeqCst), 200 * 201 / 2);
        assert!(counts[1].load(Ordering::SeqCst) >= 4);
        assert!(thread.is_closed() && matches!(thread.send(1), Err((1, None))));
    }

    #[test]
    fn a_lasting_thread_starts_once() {
        let (thread, counts) = adder(None);
        assert!(thread.start().is_ok() && thread.start().is_ok());
        sleep(Duration::from_millis(5));
        assert!(thread.send(7).is_ok());
        thread.close();
        thread.close();
        assert_eq!((counts[0].load(Ordering::SeqCst), counts[1].load(Ordering::SeqCst)), (7, 1));
    }
}
