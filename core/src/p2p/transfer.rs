//! The handle of a send or receive.
//!
//! Thread rule: any thread.

use std::sync::Arc;
use std::time::Duration;

use super::endpoint::{Endpoint, Message};
use super::message::{Spans, Status};
use super::request::{Request, Started, Then};
use crate::error::Result;

/// A started send or receive.
#[derive(Clone)]
pub enum Transfer {
    /// It ended at once.
    Ended(Status),
    /// It may be under way.
    Started(Arc<Endpoint>, Arc<Request>),
}

impl Transfer {
    /// Starts a send, as [`Endpoint::send`].
    ///
    /// # Errors
    /// As there.
    ///
    /// # Safety
    /// As there.
    pub unsafe fn send(
        endpoint: &Arc<Endpoint>,
        message: &Message<'_>,
        from: Spans,
        then: Option<Then>,
    ) -> Result<Transfer> {
        // SAFETY: guaranteed by the caller.
        unsafe { endpoint.send(message, from, then) }.map(|started| Transfer::new(endpoint, started))
    }

    /// Starts a receive, as [`Endpoint::receive`].
    ///
    /// # Errors
    /// As there.
    ///
    /// # Safety
    /// As there.
    pub unsafe fn receive(
        endpoint: &Arc<Endpoint>,
        message: &Message<'_>,
        into: Spans,
        then: Option<Then>,
    ) -> Result<Transfer> {
        // SAFETY: guaranteed by the caller.
        unsafe { endpoint.receive(message, into, then) }.map(|started| Transfer::new(endpoint, started))
    }

    fn new(endpoint: &Arc<Endpoint>, started: Started) -> Transfer {
        match started {
            Started::Ended(status) => Transfer::Ended(status),
            Started::Open(request) => Transfer::Started(Arc::clone(endpoint), request),
        }
    }

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
