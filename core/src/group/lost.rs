//! Calls on GPUs that were lost after their callers had got success: their results are not valid, and the program must
//! learn of it.
//!
//! The loss is logged at once. It is *reported* when a call of the same group raises an error, or one of the functions here
//! does. As long as one is not reported, the process ends with a status other than 0.
//! Thread rule: any thread.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use crate::collective::device::{StreamRelease, TEARDOWN_TIMEOUT, poll_until};
use crate::error::{Error, Result};
use crate::exit_status::{fail_at_exit, fail_at_exit_while};
use crate::lock::lock;
use crate::log::log_line;

/// How often a wait looks for signals.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// The first lost call of each group since the job started.
static LOST: Mutex<Vec<Arc<LostCalls>>> = Mutex::new(Vec::new());
/// How many of these are not reported.
static UNREPORTED: AtomicUsize = AtomicUsize::new(0);
/// Calls that were enqueued and may still be lost.
static AT_WORK: (Mutex<usize>, Condvar) = (Mutex::new(0), Condvar::new());

/// The lost calls of a group.
#[derive(Debug, Default)]
pub(super) struct LostCalls(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// The error of the first one.
    error: Option<Error>,
    /// Whether the program knows that the group has failed.
    reported: bool,
}

impl LostCalls {
    /// Adds the call `name` of the rank `rank_name`, lost because of `cause`. Returns its error.
    pub fn add(self: &Arc<LostCalls>, name: &str, rank_name: &str, cause: &Error) -> Error {
        let text = format!(
            "{}; the results of {name}, which {rank_name} had enqueued, are not valid, nor are those of its later calls",
            cause.detail()
        );
        let error = Error::from_code(cause.code(), text);
        let mut state = lock(&self.0);
        if state.error.is_none() {
            state.error = Some(error.clone());
            lock(&LOST).push(Arc::clone(self));
            if !state.reported {
                UNREPORTED.fetch_add(1, Ordering::SeqCst);
                fail_at_exit_while(|| UNREPORTED.load(Ordering::SeqCst) > 0);
            }
            log_line(error.detail());
        }
        error
    }

    /// Notes that the program gets `error`, which ends the group; returns the error with the loss, if there is one.
    pub fn report(&self, error: Error) -> Error {
        let mut state = lock(&self.0);
        let reported = std::mem::replace(&mut state.reported, true);
        match &state.error {
            None => error,
            Some(lost) => {
                if !reported {
                    UNREPORTED.fetch_sub(1, Ordering::SeqCst);
                }
                if error == *lost {
                    error
                } else {
                    Error::from_code(error.code(), format!("{}; {}", error.detail(), lost.detail()))
                }
            }
        }
    }
}

/// The loss of one call, for its handle: the program hears of what happens to the call when it asks the handle.
#[derive(Clone, Default)]
pub struct Loss(Arc<CallLoss>);

#[derive(Default)]
struct CallLoss {
    /// The lost calls of its group.
    calls: OnceLock<Arc<LostCalls>>,
    error: OnceLock<Error>,
    /// What could lose it, if anything.
    streams: OnceLock<Arc<dyn StreamRelease>>,
    /// Whether it is known if it was lost.
    is_settled: AtomicBool,
}

impl std::fmt::Debug for Loss {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Loss").field("error", &self.0.error).finish_non_exhaustive()
    }
}

impl Loss {
    /// The call is one of the group of `calls`.
    pub(super) fn of(&self, calls: &Arc<LostCalls>) {
        // A call has one group.
        let _first = self.0.calls.set(Arc::clone(calls));
    }

    /// The call is enqueued. A release of `streams` loses it.
    pub(super) fn watch(&self, streams: &Arc<dyn StreamRelease>) {
        // A call is enqueued once.
        let _first = self.0.streams.set(Arc::clone(streams));
    }

    /// It is known whether the call was lost.
    pub(super) fn settle(&self) {
        self.0.is_settled.store(true, Ordering::Release);
    }

    /// The call was lost.
    pub(super) fn set(&self, error: Error) {
        // A call is lost once.
        let _first = self.0.error.set(error);
    }

    /// The result that the program hears: `result`, or the error of the loss.
    ///
    /// # Errors
    /// Those.
    pub(super) fn reported(&self, result: Result<()>) -> Result<()> {
        let CallLoss { error, streams, is_settled, .. } = &*self.0;
        if result.is_ok() && streams.get().is_some_and(|streams| streams.is_released()) {
            // Another rank may have released the stream a moment ago: the program may see what that has left.
            poll_until(TEARDOWN_TIMEOUT, || error.get().is_some() || is_settled.load(Ordering::Acquire));
        }
        let result = result.and_then(|()| error.get().map_or(Ok(()), |error| Err(error.clone())));
        match (result, self.0.calls.get()) {
            (Err(error), Some(calls)) if !error.is_recoverable() => Err(calls.report(error)),
            (result, _) => result,
        }
    }
}

/// Counts a call that is enqueued, as long as it lives.
#[derive(Debug)]
pub(super) struct AtWork(());

impl AtWork {
    pub fn new() -> AtWork {
        *lock(&AT_WORK.0) += 1;
        AtWork(())
    }
}

impl Drop for AtWork {
    fn drop(&mut self) {
        *lock(&AT_WORK.0) -= 1;
        AT_WORK.1.notify_all();
    }
}

/// The error of a lost call that is not reported; then it is.
///
/// # Errors
/// This error.
pub fn check() -> Result<()> {
    if UNREPORTED.load(Ordering::SeqCst) == 0 {
        return Ok(());
    }
    let lost = lock(&LOST).clone();
    report_all(&lost)
}

fn report_all(lost: &[Arc<LostCalls>]) -> Result<()> {
    let unreported = lost.iter().filter(|calls| !lock(&calls.0).reported);
    let errors = unreported.map(|calls| calls.report_loss()).collect::<Vec<Error>>();
    errors.into_iter().next().map_or(Ok(()), Err)
}

/// Waits until the GPU has ended all enqueued calls of this process. Calls `look` from time to time.
///
/// # Errors
/// That of a call that was lost since the job started, also if it is reported. Those of `look`.
pub fn synchronize(look: impl Fn() -> Result<()>) -> Result<()> {
    let mut at_work = lock(&AT_WORK.0);
    while *at_work > 0 {
        at_work = AT_WORK.1.wait_timeout(at_work, LOOK_EVERY).unwrap_or_else(PoisonError::into_inner).0;
        if *at_work > 0 {
            drop(at_work);
            look()?;
            at_work = lock(&AT_WORK.0);
        }
    }
    drop(at_work);
    // A group that adds a call has its own lock first.
    let lost = lock(&LOST).clone();
    let errors = lost.iter().map(|calls| calls.report_loss()).collect::<Vec<Error>>();
    errors.into_iter().next().map_or(Ok(()), Err)
}

/// Forgets the lost calls at the end of the job.
///
/// # Errors
/// That of the first one that is not reported; the process then ends with a status other than 0.
pub fn end() -> Result<()> {
    let lost = std::mem::take(&mut *lock(&LOST));
    report_all(&lost).inspect_err(|_| fail_at_exit())
}

impl LostCalls {
    /// The error of the first lost call, which is reported by that.
    fn report_loss(&self) -> Error {
        let error = lock(&self.0).error.clone();
        self.report(error.unwrap_or_else(|| Error::Internal("a call that was not lost".into())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loss_is_reported_once_by_whatever_comes_first() {
        let calls = Arc::new(LostCalls::default());
        let cause = Error::Timeout("late".into());
        let error = calls.add("allreduce", "rank 1", &cause);
        assert!(matches!(&error, Error::Timeout(text) if text.contains("are not valid")), "{error}");
        assert_eq!(UNREPORTED.load(Ordering::SeqCst), 1);
        calls.add("another", "rank 1", &cause);
        assert_eq!(UNREPORTED.load(Ordering::SeqCst), 1);
        let reported = calls.report(Error::PeerLost("rank 0 is gone".into()));
        assert!(matches!(&reported, Error::PeerLost(text) if text.starts_with("rank 0") && text.contains("allreduce")));
        assert_eq!(UNREPORTED.load(Ordering::SeqCst), 0);
        assert_eq!(calls.report(error.clone()), error);
        assert_eq!(check(), Ok(()));
        assert_eq!(synchronize(|| Ok(())), Err(error), "also a loss that is reported");
        assert_eq!(end(), Ok(()));
        assert_eq!(synchronize(|| Ok(())), Ok(()));
        // An error before the loss was noticed.
        let calls = Arc::new(LostCalls::default());
        assert_eq!(calls.report(cause.clone()), cause);
        calls.add("allreduce", "rank 1", &cause);
        assert_eq!(check(), Ok(()));
        assert_eq!((UNREPORTED.load(Ordering::SeqCst), end()), (0, Ok(())));
    }
}
