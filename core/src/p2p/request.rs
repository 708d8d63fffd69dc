//! The result of a send or receive that has started.
//!
//! Thread rule: any thread.

use std::sync::{Arc, Mutex, OnceLock};
use std::thread::{self, ThreadId};

use super::message::Status;
use crate::error::{Result, guard};
use crate::lock::lock;
use crate::log::log_line;

/// Called once with the result, on the thread that completes the send or receive, without locks. It must not block, and
/// may start others.
pub type Then = Box<dyn FnOnce(Result<Status>) + Send>;

/// A send or receive under way.
#[derive(Default)]
pub struct Request {
    result: OnceLock<Result<Status>>,
    then: Option<Box<Completion>>,
}

/// What happens at the end.
struct Completion {
    then: Mutex<Option<Then>>,
    /// The thread that runs it, which alone sees the result meanwhile.
    running: OnceLock<(ThreadId, Result<Status>)>,
}

impl Request {
    pub(super) fn new(then: Option<Then>) -> Request {
        let completion = |then| Box::new(Completion { then: Mutex::new(Some(then)), running: OnceLock::new() });
        Request { result: OnceLock::new(), then: then.map(completion) }
    }

    /// The result, if it has ended.
    #[inline]
    pub fn result(&self) -> Option<&Result<Status>> {
        self.result.get().or_else(|| {
            let (thread, result) = self.then.as_ref()?.running.get()?;
            (*thread == thread::current().id()).then_some(result)
        })
    }

    /// Ends it. The callback comes first: who has seen the result may free what the callback uses.
    pub(super) fn finish(&self, result: Result<Status>) {
        if let Some(completion) = &self.then
            && let Some(then) = lock(&completion.then).take()
        {
            let _first = completion.running.set((thread::current().id(), result.clone()));
            call(then, result.clone());
        }
        let _first = self.result.set(result);
    }
}

/// Runs a callback. Its panic is not that of who happens to complete it, which has others to complete.
fn call(then: Then, result: Result<Status>) {
    let called = guard(|| {
        then(result);
        Ok(())
    });
    if let Err(error) = called {
        log_line(&format!("the callback of a send or receive failed: {error}"));
    }
}

/// What a start has made.
pub enum Started {
    /// The send or receive ended at once.
    Ended(Status),
    /// It may be under way.
    Open(Arc<Request>),
}

impl Started {
    pub(super) fn ended(status: Status, then: Option<Then>) -> Started {
        if let Some(then) = then {
            call(then, Ok(status));
        }
        Started::Ended(status)
    }
}
