//! The result of a send or receive that has started.
//!
//! Thread rule: any thread.

use std::sync::{Arc, Mutex, OnceLock};

use super::message::Status;
use crate::error::Result;
use crate::lock::lock;

/// Called once with the result, on the thread that completes the send or receive, without locks. It must not block, and
/// may start others.
pub type Then = Box<dyn FnOnce(Result<Status>) + Send>;

/// A send or receive under way.
#[derive(Default)]
pub struct Request {
    result: OnceLock<Result<Status>>,
    then: Option<Mutex<Option<Then>>>,
}

impl Request {
    pub(super) fn new(then: Option<Then>) -> Request {
        Request { result: OnceLock::new(), then: then.map(|then| Mutex::new(Some(then))) }
    }

    /// The result, if it has ended.
    #[inline]
    pub fn result(&self) -> Option<&Result<Status>> {
        self.result.get()
    }

    pub(super) fn finish(&self, result: Result<Status>) {
        // The callback first: who has seen the result may free what the callback uses.
        let then = self.then.as_ref().and_then(|then| lock(then).take());
        if let Some(then) = then {
            let copy = result.clone();
            let _first = self.result.set(result);
            then(copy);
        } else {
            let _first = self.result.set(result);
        }
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
            then(Ok(status));
        }
        Started::Ended(status)
    }
}
