//! A thread of a group that starts with its first item, and ends when no item has come for a while.
//!
//! Thread rule: any thread may send. The body runs on one thread at a time.

use std::mem;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError, channel};
use std::sync::{Arc, Mutex};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use super::callers::mark_group_thread;
use crate::affinity::{bind, request_short_slice};
use crate::error::{Error, Result};
use crate::lock::lock;
use crate::log::log_line;

/// What the thread runs, from its first item to the end of its [`Inbox`].
type Body<T> = Arc<dyn Fn(&Inbox<T>) + Send + Sync>;

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

struct Inner<T> {
    settings: ThreadSettings,
    state: Mutex<State<T>>,
}

enum State<T> {
    /// Has not started, or has ended for want of items.
    Idle(Body<T>),
    Running(Body<T>, Sender<T>, JoinHandle<()>),
    Closed,
}

/// The items for the thread, as its body sees them.
pub(super) struct Inbox<T> {
    receiver: Receiver<T>,
    thread: Arc<Inner<T>>,
}

/// The result of a wait for an item.
pub(super) enum Received<T> {
    Item(T),
    /// No item has come for a while: the body returns, and is run again for the next item.
    Idle,
    /// No item will come.
    Closed,
}

impl<T: Send + 'static> GroupThread<T> {
    /// A thread that has not started. `body` runs until [`Inbox::wait`] returns no item.
    pub fn new(settings: ThreadSettings, body: impl Fn(&Inbox<T>) + Send + Sync + 'static) -> GroupThread<T> {
        GroupThread(Arc::new(Inner { settings, state: Mutex::new(State::Idle(Arc::new(body))) }))
    }

    /// Starts the thread, if it does not run.
    ///
    /// # Errors
    /// [`Error::System`] if the system refuses a thread.
    pub fn start(&self) -> Result<()> {
        self.start_locked(&mut lock(&self.0.state))
    }

    fn start_locked(&self, state: &mut State<T>) -> Result<()> {
        let State::Idle(body) = state else { return Ok(()) };
        let (sender, receiver) = channel();
        let inbox = Inbox { receiver, thread: Arc::clone(&self.0) };
        let (cpu, run) = (self.0.settings.cpu, Arc::clone(body));
        let run = move || {
            mark_group_thread();
            request_short_slice();
            if let Some(Err(error)) = cpu.map(bind) {
                log_line(&format!("{error}; the thread runs where the process may"));
            }
            run(&inbox);
        };
        let handle = Builder::new().name(self.0.settings.name.clone()).spawn(run);
        let handle = handle.map_err(Error::no_thread)?;
        *state = State::Running(Arc::clone(body), sender, handle);
        Ok(())
    }

    /// Sends the thread an item, and starts it if needed. Returns the item, with the reason, if that failed; without a
    /// reason it is closed.
    pub fn send(&self, item: T) -> std::result::Result<(), (T, Option<Error>)> {
        let mut state = lock(&self.0.state);
        if let Err(error) = self.start_locked(&mut state) {
            return Err((item, Some(error)));
        }
        match &*state {
            State::Running(_, sender, _) => sender.send(item).map_err(|unsent| (unsent.0, None)),
            State::Idle(_) | State::Closed => Err((item, None)),
        }
    }

    /// Whether it accepts no more items.
    pub fn is_closed(&self) -> bool {
        matches!(&*lock(&self.0.state), State::Closed)
    }

    /// Lets the thread handle the items that were sent, and waits until it has ended. Not from a thread of a group.
    pub fn close(&self) {
        let state = mem::replace(&mut *lock(&self.0.state), State::Closed);
        if let State::Running(body, sender, handle) = state {
            drop(sender);
            if handle.join().is_err() {
                log_line(&format!("thread {} panicked", self.0.settings.name));
            }
            drop(body);
        }
    }
}

impl<T> Inbox<T> {
    /// Waits for an item.
    pub fn wait(&self) -> Received<T> {
        let Some(timeout) = self.thread.settings.idle_timeout else {
            return self.receiver.recv().map_or(Received::Closed, Received::Item);
        };
        match self.receiver.recv_timeout(timeout) {
            Ok(item) => Received::Item(item),
            Err(RecvTimeoutError::Disconnected) => Received::Closed,
            Err(RecvTimeoutError::Timeout) => {
                // A sender holds this lock.
                let mut state = lock(&self.thread.state);
                if let Ok(item) = self.receiver.try_recv() {
                    return Received::Item(item);
                }
                match mem::replace(&mut *state, State::Closed) {
                    State::Running(body, ..) | State::Idle(body) => {
                        *state = State::Idle(body);
                        Received::Idle
                    }
                    State::Closed => Received::Closed,
                }
            }
        }
    }

    /// Waits up to `timeout` for an item.
    ///
    /// # Errors
    /// As for [`Receiver::recv_timeout`].
    pub fn wait_timeout(&self, timeout: Duration) -> std::result::Result<T, RecvTimeoutError> {
        self.receiver.recv_timeout(timeout)
    }

    /// An item that was sent.
    ///
    /// # Errors
    /// As for [`Receiver::try_recv`].
    pub fn try_receive(&self) -> std::result::Result<T, TryRecvError> {
        self.receiver.try_recv()
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
        let thread = GroupThread::new(settings, move |inbox: &Inbox<usize>| {
            shared[1].fetch_add(1, Ordering::SeqCst);
            while let Received::Item(item) = inbox.wait() {
                shared[0].fetch_add(item, Ordering::SeqCst);
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
                while !matches!(&*lock(&thread.0.state), State::Idle(_)) {
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
