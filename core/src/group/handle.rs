//! A handle on a submitted call.
//!
//! Thread rule: any thread may use a [`CallHandle`], and several may wait.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

use super::lead::Lead;
use super::lost::Loss;
use super::work::{OnComplete, SIGNAL_POLL};
use crate::error::{Error, Result, guard};
use crate::fork;
use crate::lock::{Wakeup, lock};
use crate::log::log_line;
use crate::signals;

/// The state of a call for its handles.
#[derive(Default)]
struct CallState {
    progress: Mutex<Progress>,
    ended: Wakeup,
    /// Of a call that had ended with success.
    loss: Loss,
}

#[derive(Default)]
enum Progress {
    #[default]
    Running,
    /// The callback runs on this thread, which alone sees the result.
    Completing(ThreadId, Result<()>),
    Ended(Result<()>),
}

impl Progress {
    fn result(&self) -> Option<&Result<()>> {
        match self {
            Progress::Running => None,
            Progress::Completing(thread, result) => (*thread == thread::current().id()).then_some(result),
            Progress::Ended(result) => Some(result),
        }
    }
}

impl CallState {
    fn result(&self, progress: &Progress) -> Option<Result<()>> {
        Some(self.loss.reported(progress.result()?.clone()))
    }

    fn end(&self, result: Result<()>) {
        *lock(&self.progress) = Progress::Ended(result);
        self.ended.notify_all();
    }
}

/// A call that has not ended. Dropping it is an error of the call.
struct Running(Arc<CallState>);

impl Drop for Running {
    fn drop(&mut self) {
        if !matches!(*lock(&self.0.progress), Progress::Ended(_)) {
            self.0.end(Err(Error::Internal("a call was dropped without an outcome".into())));
        }
    }
}

/// What the handle of a held call knows of it.
struct HeldHandle {
    lead: Weak<Lead>,
    /// The number of the call.
    number: u64,
    /// Whether it was left to the group's thread.
    handed_over: AtomicBool,
}

impl HeldHandle {
    /// Leaves it to the group's thread.
    fn hand_over(&self) {
        if !self.handed_over.swap(true, Ordering::AcqRel)
            && let Some(lead) = self.lead.upgrade()
            && lead.may_hold(Some(self.number))
        {
            lead.wake();
        }
    }
}

impl Drop for HeldHandle {
    fn drop(&mut self) {
        // The threads of a child are those of its parent.
        if !fork::is_child() {
            self.hand_over();
        }
    }
}

/// A handle on a submitted call. Dropping it does not affect the call.
#[derive(Clone, Default)]
pub struct CallHandle {
    state: Arc<CallState>,
    /// Whoever waits may run the call.
    lead: Weak<Lead>,
    /// Of a call that the group's thread does not run by itself.
    held: Option<Arc<HeldHandle>>,
}

impl CallHandle {
    /// A handle, and the callback that ends the call. `then` gets the result on the thread that completes the call. Other
    /// threads see it after `then` has returned: they may free what it uses. It must not block, and may submit further
    /// calls.
    pub fn new(then: Option<OnComplete>) -> (CallHandle, OnComplete) {
        let handle = CallHandle::default();
        let running = Running(Arc::clone(&handle.state));
        let done = move |result: Result<()>| {
            let state = &running.0;
            let Some(then) = then else { return state.end(result) };
            *lock(&state.progress) = Progress::Completing(thread::current().id(), result.clone());
            let called = guard(|| {
                then(result.clone());
                Ok(())
            });
            state.end(result);
            if let Err(error) = called {
                log_line(&format!("the callback of a call failed: {error}"));
            }
        };
        (handle, Box::new(done))
    }

    /// This handle: whoever waits may run the calls of `lead`.
    pub(super) fn led_by(self, lead: &Arc<Lead>) -> CallHandle {
        CallHandle { lead: Arc::downgrade(lead), ..self }
    }

    /// This handle, of the call `number` that `lead` holds.
    pub(super) fn of_held(self, lead: &Arc<Lead>, number: u64) -> CallHandle {
        let held = HeldHandle { lead: Arc::downgrade(lead), number, handed_over: AtomicBool::new(false) };
        CallHandle { held: Some(Arc::new(held)), ..self.led_by(lead) }
    }

    /// What learns that the call was lost after its end; for the options of the call.
    pub fn loss(&self) -> Loss {
        self.state.loss.clone()
    }

    /// The result, if the call has ended. Does not block. A call on a GPU may be lost later: then it has an error.
    pub fn test(&self) -> Option<Result<()>> {
        self.held.iter().for_each(|held| held.hand_over());
        self.state.result(&lock(&self.state.progress))
    }

    /// The result, if the call has ended, or if it is a small one that this thread can complete without a wait that lasts.
    pub fn complete(&self) -> Option<Result<()>> {
        if let Some(held) = &self.held
            && let Some(lead) = held.lead.upgrade()
            && lead.complete_held(held.number)
        {
            held.handed_over.store(true, Ordering::Release);
        }
        self.state.result(&lock(&self.state.progress))
    }

    /// Waits for the result. The call goes on if `timeout` passes first; `None` waits until the call ends, which its own
    /// deadline bounds. If a signal should end the wait, calls `interrupt`, which must soon cause a result.
    ///
    /// # Errors
    /// The error of the call; [`Error::Timeout`] if `timeout` has passed.
    pub fn wait(&self, timeout: Option<Duration>, interrupt: impl Fn()) -> Result<()> {
        let since = Instant::now();
        match timeout {
            None => self.lead.upgrade().iter().for_each(|lead| {
                lead.run_until(|| lock(&self.state.progress).result().is_some());
            }),
            // To run it may take longer.
            Some(_) => self.held.iter().for_each(|held| held.hand_over()),
        }
        let mut progress = lock(&self.state.progress);
        loop {
            if let Some(result) = self.state.result(&progress) {
                return result;
            }
            let left = timeout.map_or(SIGNAL_POLL, |timeout| timeout.saturating_sub(since.elapsed()));
            if left.is_zero() {
                let seconds = timeout.unwrap_or_default().as_secs_f64();
                return Err(Error::Timeout(format!("the call has not ended after {seconds:.1} s; it goes on")));
            }
            progress = self.state.ended.wait(progress, Some(left.min(SIGNAL_POLL))).0;
            if progress.result().is_none() && signals::interrupted() {
                drop(progress);
                interrupt();
                progress = lock(&self.state.progress);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    #[test]
    fn every_waiter_gets_the_result_and_the_callback_runs_once() {
        let (sender, receiver) = channel();
        let (handle, done) = CallHandle::new(Some(Box::new(move |result| sender.send(result).unwrap())));
        assert_eq!(handle.test(), None);
        assert!(matches!(handle.wait(Some(Duration::from_millis(1)), || {}), Err(Error::Timeout(_))));
        std::thread::scope(|scope| {
            let waits = [(); 2].map(|()| scope.spawn(|| handle.wait(None, || {})));
            done(Err(Error::Invalid("no".into())));
            for wait in waits {
                assert_eq!(wait.join().unwrap(), Err(Error::Invalid("no".into())));
            }
        });
        assert_eq!(handle.test(), Some(Err(Error::Invalid("no".into()))));
        assert_eq!(receiver.iter().count(), 1);
        let (dropped, done) = CallHandle::new(None);
        drop(done);
        assert!(matches!(dropped.test(), Some(Err(Error::Internal(_)))));
    }

    #[test]
    fn the_callback_sees_the_result_before_others_do() {
        let seen = Arc::new(AtomicBool::new(false));
        let own = Arc::new(Mutex::new(None::<CallHandle>));
        let (inside, sees) = (Arc::clone(&own), Arc::clone(&seen));
        let (handle, done) = CallHandle::new(Some(Box::new(move |_| {
            let handle = inside.lock().unwrap().clone().unwrap();
            assert_eq!(handle.test(), Some(Ok(())));
            assert_eq!(handle.wait(None, || {}), Ok(()));
            std::thread::scope(|scope| scope.spawn(|| assert_eq!(handle.test(), None)).join().unwrap());
            std::thread::sleep(Duration::from_millis(20));
            sees.store(true, Ordering::SeqCst);
            panic!("a callback that fails");
        })));
        *own.lock().unwrap() = Some(handle.clone());
        std::thread::scope(|scope| {
            let wait = scope.spawn(|| {
                handle.wait(None, || {}).unwrap();
                assert!(seen.load(Ordering::SeqCst));
            });
            done(Ok(()));
            wait.join().unwrap();
        });
        assert_eq!(handle.test(), Some(Ok(())));
    }
}
