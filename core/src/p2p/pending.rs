//! Sends and receives that have not ended, and their ends.

use std::sync::Arc;

use super::message::{Limits, Spans, Status};
use super::request::Request;
use crate::error::Result;
use crate::transport::mailbox::ring::Envelope;

/// A send that has not ended.
pub struct Send {
    pub request: Arc<Request>,
    pub limits: Limits,
    pub envelope: Envelope,
    pub from: Spans,
    pub status: Status,
}

/// A receive that has not ended.
pub struct Receive {
    pub request: Arc<Request>,
    pub limits: Limits,
    pub into: Spans,
    /// Whether the message must be as long as `into`.
    pub exact: bool,
    /// Whether a rank of another host may send its message.
    pub awaits_network: bool,
}

/// A send that waits for its device, or for one before it to the same rank.
pub struct Held {
    /// The receiver's rank in the job.
    pub world: usize,
    /// That on this host, if it is here.
    pub local: Option<usize>,
    pub send: Send,
}

/// What has ended, but for the copies to devices.
#[derive(Default)]
pub struct Finished {
    /// Results to be given out once the lock is free.
    pub results: Vec<(Arc<Request>, Result<Status>)>,
    /// Receives with their data in host memory, which goes to a device.
    pub deliveries: Vec<(Receive, Status)>,
}

impl Finished {
    /// Adds a result.
    #[inline]
    pub fn push(&mut self, result: (Arc<Request>, Result<Status>)) {
        self.results.push(result);
    }

    /// Adds that of a receive.
    #[inline]
    pub fn received(&mut self, receive: Receive, result: Result<Status>) {
        match result {
            Ok(status) if receive.into.is_on_device() => self.deliveries.push((receive, status)),
            result => self.push((receive.request, result)),
        }
    }
}
