//! A handle on a submitted call.
//!
//! Thread rule: any thread may use a [`CallHandle`], and several may wait.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::work::{OnComplete, SIGNAL_POLL};
use crate::error::{Error, Result};
use crate::lock::lock;
use crate::signals;

/// The state of a call for its handles.
#[derive(Default)]
struct CallState {
    result: Mutex<Option<Result<()>>>,
    ended: Condvar,
}

/// A handle on a submitted call. Dropping it does not affect the call.
#[derive(Clone, Default)]
pub struct CallHandle(Arc<CallState>);

impl CallHandle {
    /// A handle, and the callback that ends the call. `then` gets the result, after the handle has it, on the thread
    /// that completes the call. It must not block, and may submit further calls.
    pub fn new(then: Option<OnComplete>) -> (CallHandle, OnComplete) {
        let handle = CallHandle::default();
        let state = Arc::clone(&handle.0);
        let done = move |result: Result<()>| {
            *lock(&state.result) = Some(result.clone());
            state.ended.notify_all();
            if let Some(then) = then {
                then(result);
            }
        };
        (handle, Box::new(done))
    }

    /// The result, if the call has ended. Does not block.
    pub fn test(&self) -> Option<Result<()>> {
        lock(&self.0.result).clone()
    }

    /// Waits for the result. The call goes on if `timeout` passes first; `None` waits until the call ends, which its own
    /// deadline bounds. If a signal should end the wait, calls `interrupt`, which must soon cause a result.
    ///
    /// # Errors
    /// The error of the call; [`Error::Timeout`] if `timeout` has passed.
    pub fn wait(&self, timeout: Option<Duration>, interrupt: impl Fn()) -> Result<()> {
        let since = Instant::now();
        let mut result = lock(&self.0.result);
        loop {
            if let Some(result) = &*result {
                return result.clone();
            }
            let left = timeout.map_or(SIGNAL_POLL, |timeout| timeout.saturating_sub(since.elapsed()));
            if left.is_zero() {
                let seconds = timeout.unwrap_or_default().as_secs_f64();
                return Err(Error::Timeout(format!("the call has not ended after {seconds:.1} s; it goes on")));
            }
            let ended = &self.0.ended;
            result = ended.wait_timeout(result, left.min(SIGNAL_POLL)).unwrap_or_else(PoisonError::into_inner).0;
            if result.is_none() && signals::interrupted() {
                drop(result);
                interrupt();
                result = lock(&self.0.result);
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
    }
}
