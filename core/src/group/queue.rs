//! The calls of a group that wait to run.
//!
//! Thread rule: the lead thread.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, TryRecvError};
use std::thread;
use std::time::{Duration, Instant};

use super::thread::{Inbox, Received};
use super::work::{QueueItem, Work};

/// Calls that the lead has received and not run.
pub(super) struct Queue<'a> {
    inbox: &'a Inbox<QueueItem>,
    pub calls: VecDeque<Arc<Work>>,
    /// When the last item came.
    pub arrived: Instant,
    /// Whether the lead was idle before the first item came.
    pub idle: bool,
    /// Whether other ranks are stalled in a round.
    pub joins_stalled: bool,
    pub closed: bool,
}

impl<'a> Queue<'a> {
    /// An empty queue.
    pub fn new(inbox: &'a Inbox<QueueItem>) -> Queue<'a> {
        let (calls, arrived) = (VecDeque::new(), Instant::now());
        Queue { inbox, calls, arrived, idle: true, joins_stalled: false, closed: false }
    }

    /// Waits for an item if there is no call; false if none comes.
    pub fn wait(&mut self) -> bool {
        self.idle = false;
        if self.calls.is_empty() {
            let item = self.inbox.try_receive().map(Received::Item).unwrap_or_else(|_| {
                self.idle = true;
                self.inbox.wait()
            });
            match item {
                Received::Item(item) => self.push(item),
                Received::Idle | Received::Closed => return false,
            }
        }
        true
    }

    /// Receives all submitted items.
    pub fn drain(&mut self) {
        loop {
            match self.inbox.try_receive() {
                Ok(item) => self.push(item),
                Err(TryRecvError::Empty) => return,
                Err(TryRecvError::Disconnected) => {
                    self.closed = true;
                    return;
                }
            }
        }
    }

    /// Waits up to `timeout` for an item; returns whether one came.
    pub fn wait_for_more(&mut self, timeout: Duration) -> bool {
        match self.inbox.wait_timeout(timeout) {
            Ok(item) => self.push(item),
            Err(RecvTimeoutError::Timeout) => return false,
            Err(RecvTimeoutError::Disconnected) => {
                self.closed = true;
                thread::sleep(timeout);
                return false;
            }
        }
        true
    }

    fn push(&mut self, item: QueueItem) {
        match item {
            QueueItem::Call(work) => self.calls.push_back(work),
            QueueItem::HandedBack => {}
            QueueItem::JoinStalled => self.joins_stalled = true,
        }
        self.arrived = Instant::now();
    }

    /// Moves the calls with the signatures `order` to the front, in that order.
    pub fn reorder(&mut self, order: &[u64]) {
        let mut first = VecDeque::with_capacity(self.calls.len());
        for &signature in order {
            let position = self.calls.iter().position(|work| work.call.signature == signature);
            first.extend(position.and_then(|position| self.calls.remove(position)));
        }
        self.calls.iter().for_each(|work| work.reset_unmatched());
        first.append(&mut self.calls);
        self.calls = first;
    }
}
