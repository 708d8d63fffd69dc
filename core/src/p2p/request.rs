//! The handle of a send or receive.
//!
//! Thread rule: any thread.

use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use super::endpoint::Endpoint;
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

/// A started send or receive.
#[derive(Clone)]
pub enum Transfer {
    /// It ended at once.
    Ended(Status),
    /// It may be under way.
    Started(Arc<Endpoint>, Arc<Request>),
}

impl Transfer {
    /// The result, if it has ended.
    pub fn result(&self) -> Option<Result<Status>> {
        match self {
            Transfer::Ended(status) => Some(Ok(*status)),
            Transfer::Started(_, request) => request.result().cloned(),
        }
    }

    /// As [`Transfer::result`], but makes progress. Does not block.
    pub fn test(&self) -> Option<Result<Status>> {
        match self {
            Transfer::Ended(status) => Some(Ok(*status)),
            Transfer::Started(endpoint, request) => endpoint.test(request),
        }
    }

    /// Waits for the end, as [`Endpoint::wait`].
    ///
    /// # Errors
    /// Those of the send or receive, and of the wait.
    pub fn wait(&self, timeout: Option<Duration>) -> Result<Status> {
        match self {
            Transfer::Ended(status) => Ok(*status),
            Transfer::Started(endpoint, request) => endpoint.wait(request, timeout),
        }
    }
}
