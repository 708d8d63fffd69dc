//! The handle of a send or receive.
//!
//! Thread rule: any thread.

use std::sync::{Mutex, OnceLock};

use super::message::Status;
use crate::error::Result;
use crate::lock::lock;

/// Called once with the result, on the thread that completes the send or receive, without locks. It must not block, and
/// may start others.
pub type Then = Box<dyn FnOnce(Result<Status>) + Send>;

/// A started send or receive.
#[derive(Default)]
pub struct Request {
    result: OnceLock<Result<Status>>,
    then: Mutex<Option<Then>>,
}

impl Request {
    pub(super) fn new(then: Option<Then>) -> Request {
        Request { result: OnceLock::new(), then: Mutex::new(then) }
    }

    /// The result, if it has ended.
    pub fn result(&self) -> Option<&Result<Status>> {
        self.result.get()
    }

    pub(super) fn finish(&self, result: Result<Status>) {
        // The callback first: who has seen the result may free what the callback uses.
        let then = lock(&self.then).take();
        if let Some(then) = then {
            let copy = result.clone();
            let _first = self.result.set(result);
            then(copy);
        } else {
            let _first = self.result.set(result);
        }
    }
}
