//! Messages between "hosts" whose ranks are threads of one process, for tests. They arrive and end after random delays:
//! in order only where [`MessageNetwork`] promises it.
//!
//! Thread rule: each rank's end is used by one thread at a time.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use crate::error::{Error, Result};
use crate::lock::lock;
use crate::transport::memory::Aligned;
use crate::transport::messages::{Completed, MessageNetwork};

/// Messages on their way to one rank, by sender.
type Inbox = Mutex<Vec<VecDeque<(usize, Vec<u8>)>>>;

/// The end of one rank.
pub struct ThreadMessages {
    me: usize,
    inboxes: Arc<[Inbox]>,
    receives: Vec<Receive>,
    /// What has ended, but is not shown yet.
    ended: Vec<Completed>,
    random: u64,
    /// One in this many things happens in a poll.
    slowness: u64,
    max_tag: usize,
    /// Starts that succeed before all fail.
    starts_left: usize,
}

struct Receive {
    from: Option<usize>,
    tag: usize,
    buffer: Aligned,
    token: u64,
}

impl ThreadMessages {
    /// The ends of `ranks` ranks. About one in `slowness` messages moves in a poll.
    pub fn world(ranks: usize, seed: u64, slowness: u64) -> Vec<ThreadMessages> {
        let inbox = |_| Mutex::new((0..ranks).map(|_| VecDeque::new()).collect());
        let inboxes: Arc<[Inbox]> = (0..ranks).map(inbox).collect();
        let end = |me| ThreadMessages {
            me,
            inboxes: Arc::clone(&inboxes),
            receives: Vec::new(),
            ended: Vec::new(),
            random: seed.wrapping_add(me as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1,
            slowness: slowness.max(1),
            max_tag: 32767,
            starts_left: usize::MAX,
        };
        (0..ranks).map(end).collect()
    }

    /// Lets everything fail after `starts` more sends and receives.
    #[must_use]
    pub fn failing_after(self, starts: usize) -> ThreadMessages {
        ThreadMessages { starts_left: starts, ..self }
    }

    /// Whether something happens in this poll (xorshift64).
    fn happens(&mut self) -> bool {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random >> 11).is_multiple_of(self.slowness)
    }

    fn start(&mut self) -> Result<()> {
        let left = self.starts_left.checked_sub(1);
        self.starts_left = left.ok_or_else(|| Error::Network("the network is broken".into()))?;
        Ok(())
    }
}

impl MessageNetwork for ThreadMessages {
    fn max_tag(&self) -> usize {
        self.max_tag
    }

    fn send(&mut self, to: usize, tag: usize, buffer: Aligned, len: usize, token: u64) -> Result<()> {
        self.start()?;
        lock(&self.inboxes[to])[self.me].push_back((tag, buffer.as_slice()[..len].to_vec()));
        self.ended.push(Completed { token, buffer, source: 0, len });
        Ok(())
    }

    fn receive(&mut self, from: Option<usize>, tag: usize, buffer: Aligned, token: u64) -> Result<()> {
        self.start()?;
        self.receives.push(Receive { from, tag, buffer, token });
        Ok(())
    }

    fn poll(&mut self, done: &mut Vec<Completed>) -> Result<()> {
        if self.starts_left == 0 {
            return Err(Error::Network("the network is broken".into()));
        }
        let inboxes = Arc::clone(&self.inboxes);
        let mut inbox = lock(&inboxes[self.me]);
        for (source, messages) in inbox.iter_mut().enumerate() {
            let mut index = 0;
            while index < messages.len() && self.happens() {
                let tag = messages[index].0;
                let fits = |receive: &Receive| receive.tag == tag && receive.from.is_none_or(|from| from == source);
                // Another tag may overtake.
                let is_first = messages.iter().take(index).all(|&(other, _)| other != tag);
                let Some(found) = self.receives.iter().position(fits).filter(|_| is_first) else {
                    index += 1;
                    continue;
                };
                let Receive { mut buffer, token, .. } = self.receives.remove(found);
                if let Some((_, bytes)) = messages.remove(index) {
                    buffer.as_mut_slice()[..bytes.len()].copy_from_slice(&bytes);
                    self.ended.push(Completed { token, buffer, source, len: bytes.len() });
                }
            }
        }
        drop(inbox);
        let mut index = 0;
        while index < self.ended.len() {
            if self.happens() {
                done.push(self.ended.swap_remove(index));
            } else {
                index += 1;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_match_in_order_by_tag_and_source() {
        let mut ends = ThreadMessages::world(3, 7, 2);
        let mut last = ends.pop().unwrap();
        let (mut middle, mut first) = (ends.pop().unwrap(), ends.pop().unwrap());
        let buffer = |value: u8| {
            let mut buffer = Aligned::new(4);
            buffer.as_mut_slice().fill(value);
            buffer
        };
        for (value, tag) in [(1, 0), (2, 1), (3, 0)] {
            first.send(2, tag, buffer(value), value as usize, 0).unwrap();
        }
        middle.send(2, 0, buffer(9), 4, 0).unwrap();
        for (token, (from, tag)) in [(Some(0), 0), (Some(0), 0), (None, 1), (None, 0)].into_iter().enumerate() {
            last.receive(from, tag, buffer(0), token as u64).unwrap();
        }
        let mut done = Vec::new();
        while done.len() < 4 {
            last.poll(&mut done).unwrap();
        }
        done.sort_by_key(|completed| completed.token);
        let found: Vec<_> = done.iter().map(|one| (one.buffer.as_slice()[0], one.source, one.len)).collect();
        assert_eq!(found, [(1, 0, 1), (3, 0, 3), (2, 0, 2), (9, 1, 4)]);
        let mut broken = middle.failing_after(0);
        assert!(broken.send(2, 0, buffer(9), 4, 0).is_err() && broken.poll(&mut done).is_err());
    }
}
