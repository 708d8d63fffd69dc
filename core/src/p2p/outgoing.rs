//! The messages of this rank to one other rank.
//!
//! Messages go into the ring in their order. One whose ring is full waits here, and so do those after it. A long message
//! is announced, and waits until the receiver has copied it or wants it in parts. One message is sent in parts at a time.
//! Thread rule: used under the lock of the endpoint.

use std::collections::VecDeque;

use super::message::Spans;
use super::pending::{Finished, Send};
use crate::error::{Error, Result};
use crate::transport::mailbox::Mailbox;
use crate::transport::mailbox::ring::{CELL_BYTES, Envelope, LONG_SLOTS, LongEnvelope, LongState};
use crate::transport::mailbox::staging::PartInfo;

/// An announced long message.
struct Long {
    id: u64,
    slot: usize,
    /// Bytes sent in parts.
    sent: usize,
    /// `None` once given up: the slot is free when the receiver knows.
    send: Option<Send>,
}

/// See the module's documentation.
#[derive(Default)]
pub struct Outgoing {
    queue: VecDeque<Send>,
    longs: Vec<Long>,
    last_id: u64,
    /// Whether a device copies what the receiver wants in parts to host memory.
    pub is_staging: bool,
}

/// Puts a short message into a cell, if there is room and nothing is before it.
///
/// # Safety
/// The memory of the message is valid.
#[inline]
pub unsafe fn send_short(mailbox: &mut Mailbox, to: usize, envelope: Envelope, from: &Spans) -> Result<bool> {
    let ring = &mut mailbox.outbox(to)?.ring;
    if !ring.has_room() {
        return Ok(false);
    }
    // SAFETY: there is room; the message fits a cell, and its memory is valid.
    unsafe { ring.send(envelope, from.len(), |cell| from.read(0, from.len(), cell)) };
    mailbox.notify(to);
    Ok(true)
}

impl Outgoing {
    /// Whether nothing is under way.
    #[inline]
    pub fn is_idle(&self) -> bool {
        self.queue.is_empty() && self.longs.is_empty()
    }

    /// Whether a new message would have to wait behind others.
    #[inline]
    pub fn has_queue(&self) -> bool {
        !self.queue.is_empty()
    }

    /// Adds a message.
    pub fn push(&mut self, send: Send) {
        self.queue.push_back(send);
    }

    /// Does what can be done without waiting; returns whether that was anything.
    pub fn advance(&mut self, mailbox: &mut Mailbox, to: usize, finished: &mut Finished) -> bool {
        let mut moved = false;
        self.is_staging = false;
        if !self.longs.is_empty() {
            moved |= self.end_longs(mailbox, to, finished);
            moved |= self.send_part(mailbox, to, finished);
        }
        while let Some(send) = self.queue.pop_front() {
            match self.put(mailbox, to, send, finished) {
                Some(send) => {
                    self.queue.push_front(send);
                    break;
                }
                None => moved = true,
            }
        }
        moved
    }

    /// Puts a message into the ring; returns it if there is no room.
    fn put(&mut self, mailbox: &mut Mailbox, to: usize, send: Send, finished: &mut Finished) -> Option<Send> {
        if send.from.len() <= CELL_BYTES {
            // SAFETY: the caller of the send keeps its memory valid.
            match unsafe { send_short(mailbox, to, send.envelope, &send.from) } {
                Ok(false) => return Some(send),
                Ok(true) => finished.push((send.request, Ok(send.status))),
                Err(error) => finished.push((send.request, Err(error))),
            }
            return None;
        }
        let Some(slot) = (0..LONG_SLOTS).find(|&slot| self.longs.iter().all(|long| long.slot != slot)) else {
            return Some(send);
        };
        let place = send.from.range().and_then(|range| mailbox.memory().offset_of(range));
        let ring = match mailbox.outbox(to) {
            Ok(outbox) => &mut outbox.ring,
            Err(error) => {
                finished.push((send.request, Err(error)));
                return None;
            }
        };
        if !ring.has_room() {
            return Some(send);
        }
        self.last_id += 1;
        let place = place.map_or(0, |offset| offset + 1);
        let address = send.from.range().map_or(0, |range| range.start as u64);
        let exported = send.from.exported();
        let (slot, exported_bytes) = (slot as u32, exported.len() as u32);
        let long = LongEnvelope { id: self.last_id, place, slot, exported: exported_bytes, address };
        ring.ring().set_long(slot as usize, LongState::Announced);
        // SAFETY: there is room.
        unsafe { ring.announce(send.envelope, long, exported) };
        mailbox.notify(to);
        self.longs.push(Long { id: self.last_id, slot: slot as usize, sent: 0, send: Some(send) });
        None
    }

    /// Ends the long messages that the receiver has, or does not want.
    fn end_longs(&mut self, mailbox: &mut Mailbox, to: usize, finished: &mut Finished) -> bool {
        let Ok(outbox) = mailbox.outbox(to) else { return false };
        let ring = outbox.ring.ring();
        let before = self.longs.len();
        self.longs.retain_mut(|long| {
            let result = match (ring.long_state(long.slot), &mut long.send) {
                (LongState::Done, Some(send)) => {
                    send.from.sent();
                    Ok(send.status)
                }
                (LongState::Refused, Some(send)) => {
                    let what = send.limits.describe("send", Some(send.envelope.tag), &format!("to local rank {to}"));
                    Err(Error::PeerLost(format!("the receiver gave up: {what}")))
                }
                (LongState::Free, None) => return false,
                _ => return true,
            };
            ring.set_long(long.slot, LongState::Free);
            if let Some(send) = long.send.take() {
                finished.push((send.request, result));
            }
            false
        });
        self.longs.len() < before
    }

    /// Sends a part of the first message that is wanted in parts and is not sent yet.
    fn send_part(&mut self, mailbox: &mut Mailbox, to: usize, finished: &mut Finished) -> bool {
        for index in 0..self.longs.len() {
            let long = &mut self.longs[index];
            let Some(send) = long.send.as_mut().filter(|send| long.sent < send.from.len()) else { continue };
            let state = mailbox.outbox(to).map(|outbox| outbox.ring.ring().long_state(long.slot));
            if state != Ok(LongState::Streaming) {
                continue;
            }
            let staging = match send.from.in_host_memory().and_then(|is_there| Ok((is_there, mailbox.staging(to)?))) {
                Ok((true, staging)) => staging,
                Ok((false, _)) => {
                    self.is_staging = true;
                    continue;
                }
                Err(error) => {
                    self.give_up(mailbox, to, index, error, finished);
                    return true;
                }
            };
            if !staging.has_room() {
                return false;
            }
            let len = PartInfo::len_at(long.sent, send.from.len());
            let info = PartInfo { id: long.id, offset: long.sent as u64, len: len as u64 };
            // SAFETY: a part is free and has the length; whoever started the send keeps its memory valid.
            unsafe { staging.send(info, |part| send.from.read(long.sent, len, part)) };
            mailbox.notify(to);
            long.sent += len;
            return true;
        }
        false
    }

    /// Ends the long message `index` with an error, and tells the receiver.
    fn give_up(&mut self, mailbox: &mut Mailbox, to: usize, index: usize, error: Error, finished: &mut Finished) {
        let Ok(outbox) = mailbox.outbox(to) else { return };
        let (ring, long) = (outbox.ring.ring(), &mut self.longs[index]);
        loop {
            let state = ring.long_state(long.slot);
            if matches!(state, LongState::Done | LongState::Refused) {
                // It has just ended.
                return;
            }
            if ring.change_long(long.slot, state, LongState::Aborted).is_ok() {
                break;
            }
        }
        if let Some(send) = long.send.take() {
            finished.push((send.request, Err(error)));
        }
        mailbox.notify(to);
    }

    /// Ends the messages for which `fails` has an error.
    pub fn fail(
        &mut self,
        mailbox: &mut Mailbox,
        to: usize,
        fails: impl Fn(&Send) -> Option<Error>,
        finished: &mut Finished,
    ) {
        self.queue = std::mem::take(&mut self.queue)
            .into_iter()
            .filter_map(|send| match fails(&send) {
                None => Some(send),
                Some(error) => {
                    finished.push((send.request, Err(error)));
                    None
                }
            })
            .collect();
        for index in 0..self.longs.len() {
            if let Some(error) = self.longs[index].send.as_ref().and_then(&fails) {
                self.give_up(mailbox, to, index, error, finished);
            }
        }
    }
}
