//! The long messages that a receive has matched, from one other rank.
//!
//! Thread rule: used under the lock of the endpoint.

use super::message::{Spans, Status};
use super::pending::{Finished, Receive, Send};
use crate::error::{Error, Result};
use crate::transport::mailbox::ring::{Envelope, LongEnvelope, LongState};
use crate::transport::mailbox::{Mailbox, process_memory};

/// Bytes that are copied at a time under the lock.
const COPY_BYTES: usize = 1 << 20;

/// Up to this size one copy by the receiver is faster than two that overlap: the second core has other work then.
const ONE_COPY_BYTES: usize = 4 << 20;

/// A message without a receive.
pub struct Early {
    pub envelope: Envelope,
    pub body: Body,
}

/// Where the data of a message without a receive is.
pub enum Body {
    /// Here.
    Data(Box<[u8]>),
    /// With the sender, and what it has exported.
    Long(LongEnvelope, Box<[u8]>),
    /// With the sender on another host, which has given it this number.
    Remote(u64),
    /// In a send of this rank to itself.
    Own(Box<Send>),
}

/// Where the data of a long message comes from.
#[derive(Clone, Copy)]
enum Place {
    /// Shared memory.
    Shared(*const u8),
    /// The sender's process, and the address there.
    Process(i32, u64),
    /// Memory that the receive's device has opened.
    Device,
    /// The staging area.
    Parts,
}

impl Place {
    fn in_parts(self) -> bool {
        matches!(self, Place::Parts)
    }

    /// The state of a message that comes from here.
    fn state(self) -> LongState {
        if self.in_parts() { LongState::Streaming } else { LongState::Copying }
    }
}

/// A long message with its receive.
struct Incoming {
    id: u64,
    slot: usize,
    place: Place,
    received: usize,
    status: Status,
    receive: Receive,
}

impl Incoming {
    /// Whether its data can come without the sender: what a device has opened may be gone with it before it is copied.
    fn needs_nobody(&self) -> bool {
        match self.place {
            Place::Device => self.receive.into.is_copying(),
            place => !place.in_parts(),
        }
    }
}

// SAFETY: the place is an address in shared memory, which any thread may use.
unsafe impl std::marker::Send for Incoming {}

/// See the module's documentation.
#[derive(Default)]
pub struct IncomingFrom {
    list: Vec<Incoming>,
}

impl IncomingFrom {
    /// Whether nothing is under way.
    #[inline]
    pub fn is_idle(&self) -> bool {
        self.list.is_empty()
    }

    /// Whether a message is being copied from its place, which needs nobody else.
    pub fn is_copying(&self) -> bool {
        self.list.iter().any(|incoming| !incoming.place.in_parts())
    }

    /// Starts to receive a long message.
    pub fn start(
        &mut self,
        mailbox: &mut Mailbox,
        from: usize,
        long: LongEnvelope,
        receive: Receive,
        status: Status,
        finished: &mut Finished,
    ) {
        let shared = match long.place {
            0 => None,
            place => mailbox.memory().resolve(from, place - 1, status.bytes),
        };
        let mut process = || mailbox.process(from).filter(|_| long.address != 0 && status.bytes <= ONE_COPY_BYTES);
        let place = match shared {
            _ if receive.into.is_open() => Place::Device,
            Some(place) => Place::Shared(place),
            None => process().map_or(Place::Parts, |pid| Place::Process(pid, long.address)),
        };
        let slot = long.slot as usize;
        let wanted = place.state();
        match change(mailbox, from, slot, LongState::Announced, wanted) {
            Ok(()) => self.list.push(Incoming { id: long.id, slot, place, received: 0, status, receive }),
            Err(error) => finished.push((receive.request, Err(error))),
        }
    }

    /// Does what can be done without waiting; returns whether that was anything.
    pub fn advance(&mut self, mailbox: &mut Mailbox, from: usize, finished: &mut Finished) -> bool {
        let mut moved = self.take_parts(mailbox, from);
        let mut index = 0;
        while let Some(incoming) = self.list.get_mut(index) {
            let Incoming { slot, place, received, status, receive, .. } = incoming;
            let len = (status.bytes - *received).min(COPY_BYTES);
            if len > 0 && !place.in_parts() {
                // SAFETY: the message has `bytes` bytes, and the receive at least as many.
                let copied = unsafe { copy(*place, &mut receive.into, *received, len, status.bytes) };
                let copied = copied.and_then(|copied| {
                    if copied.is_none() {
                        mailbox.forget_process(from);
                        (*place, *received) = (Place::Parts, 0);
                        change(mailbox, from, *slot, LongState::Copying, LongState::Streaming)?;
                    }
                    Ok(copied)
                });
                match copied {
                    Ok(Some(0)) => {}
                    Ok(copied) => {
                        *received += copied.unwrap_or(0);
                        moved = true;
                    }
                    Err(error) => {
                        let Incoming { slot, place, receive, .. } = self.list.remove(index);
                        if let Place::Device = place {
                            // If the sender gave up too, this is as good.
                            let _noted = change(mailbox, from, slot, place.state(), LongState::Refused);
                        }
                        finished.push((receive.request, Err(error)));
                        moved = true;
                        continue;
                    }
                }
            }
            let (slot, ended) = (*slot, *received == status.bytes);
            let aborted =
                mailbox.inbox(from).is_some_and(|inbox| inbox.ring.ring().long_state(slot) == LongState::Aborted);
            if !ended && (!aborted || receive.into.is_copying()) {
                index += 1;
                continue;
            }
            let Incoming { place, status, receive, .. } = self.list.remove(index);
            let result = change(mailbox, from, slot, place.state(), LongState::Done);
            finished.received(receive, result.map(|()| status));
            moved = true;
        }
        moved
    }

    /// Copies the parts that are there. Those of messages without a receive are dropped.
    fn take_parts(&mut self, mailbox: &mut Mailbox, from: usize) -> bool {
        let mut moved = false;
        if self.list.iter().all(|incoming| !incoming.place.in_parts()) {
            return false;
        }
        if let Some(staged) = mailbox.staged(from)
            && let Some((info, data)) = staged.peek()
        {
            if let Some(incoming) = self.list.iter_mut().find(|incoming| incoming.id == info.id) {
                // SAFETY: the part has these bytes, and so has the receive.
                unsafe { incoming.receive.into.write(info.offset as usize, data, info.len as usize) };
                incoming.received += info.len as usize;
            }
            staged.take();
            mailbox.notify(from);
            moved = true;
        }
        moved
    }

    /// Ends the receives for which `fails` has an error, and tells the sender.
    pub fn fail(
        &mut self,
        mailbox: &mut Mailbox,
        from: usize,
        fails: impl Fn(&Receive, Status, bool) -> Option<Error>,
        finished: &mut Finished,
    ) {
        let mut index = 0;
        while let Some(incoming) = self.list.get(index) {
            match fails(&incoming.receive, incoming.status, incoming.needs_nobody()) {
                None => index += 1,
                Some(error) => {
                    let Incoming { slot, place, mut receive, .. } = self.list.remove(index);
                    receive.into.settle();
                    // If the sender gave up too, this is as good.
                    let _noted = change(mailbox, from, slot, place.state(), LongState::Refused);
                    finished.push((receive.request, Err(error)));
                }
            }
        }
    }
}

/// Copies `len` of `total` bytes from `offset` on, and returns how many are there now: none or all if a device copies them.
/// `None` if the system does not allow it.
///
/// # Errors
/// Those of a device.
///
/// # Safety
/// The memory of both is valid.
unsafe fn copy(place: Place, into: &mut Spans, offset: usize, len: usize, total: usize) -> Result<Option<usize>> {
    match place {
        Place::Shared(place) => {
            // SAFETY: guaranteed by the caller.
            unsafe { into.write(offset, place.wrapping_add(offset), len) };
            Ok(Some(len))
        }
        Place::Process(pid, address) => {
            let from = address + offset as u64;
            // SAFETY: as above.
            let fill = |to, at, count| unsafe { process_memory::read(pid, from + at as u64, to, count) };
            Ok(into.fill(offset, len, fill).is_ok().then_some(len))
        }
        Place::Device => Ok(Some(if into.copied()? { total } else { 0 })),
        Place::Parts => Ok(None),
    }
}

/// Changes the state of a long message from rank `from`, and tells the sender.
///
/// # Errors
/// [`Error::PeerLost`] if the sender has given up; then its slot is free.
pub fn change(mailbox: &mut Mailbox, from: usize, slot: usize, now: LongState, next: LongState) -> Result<()> {
    let Some(inbox) = mailbox.inbox(from) else {
        return Err(Error::Internal("a message without a ring".into()));
    };
    let ring = inbox.ring.ring();
    let changed = ring.change_long(slot, now, next);
    if changed.is_err() {
        ring.set_long(slot, LongState::Free);
    }
    mailbox.notify(from);
    changed.map_err(|_| Error::PeerLost("the sender gave up before all data was received".into()))
}
