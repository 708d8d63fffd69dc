//! The state of an endpoint, and how messages get on without waiting. [`super::endings`] ends what cannot.
//!
//! Thread rule: used under the lock of the endpoint.

use std::sync::Arc;
use std::time::Duration;

use super::incoming::{Body, Early, IncomingFrom, change};
use super::matching::{Matching, Pattern};
use super::message::{Spans, Status, Types};
use super::outgoing::{Outgoing, send_short};
use super::pending::{Finished, Held, Receive, Send};
use super::remote::{Arrival, Remote};
use crate::clock::coarse_now;
use crate::error::{Error, Result};
use crate::transport::Calls;
use crate::transport::mailbox::ring::{Arrived, CELL_BYTES, Envelope, LONG, LongEnvelope, LongState};
use crate::transport::mailbox::{Mailbox, has_departed};
use crate::transport::shm_region::Liveness;

/// Messages that are taken from one rank before others have their turn.
const BATCH: usize = 16;

/// Short sends check whether the receiver lives at most so often.
const CHECK_LIFE_AFTER: Duration = Duration::from_millis(20);

/// What is said of a rank that sends no more.
const DEPARTED: &str = "has called finalize";

/// The ranks that an endpoint can name.
pub struct Peers {
    /// Those of this host, in the job, ascending.
    pub world: Vec<usize>,
    /// The names of all ranks of the job, for messages.
    pub names: Arc<[String]>,
    /// Whether those of this host live.
    pub liveness: Box<dyn Liveness>,
    /// The calls of this process, if receives that wait long look at them.
    pub calls: Option<Arc<dyn Calls>>,
}

impl Peers {
    /// The local rank of a world rank.
    pub fn local(&self, world: usize) -> Option<usize> {
        self.world.binary_search(&world).ok()
    }

    /// The name of a world rank.
    pub fn name(&self, world: usize) -> &str {
        self.names.get(world).map_or("an unknown rank", String::as_str)
    }
}

/// A receive from one rank of the host, before it is posted.
pub struct ShortReceive<'a> {
    pub context: u64,
    /// The tag; `None` for any.
    pub tag: Option<u32>,
    pub into: &'a Spans,
    /// Whether the message must be as long as `into`.
    pub exact: bool,
}

/// What such a receive finds.
pub enum Short {
    /// Its message, which is now in its memory.
    Taken { tag: u32, bytes: usize },
    /// No message.
    NotYet,
    /// A message that needs the general way.
    Other,
}

/// See the module's documentation.
pub struct State {
    pub mailbox: Mailbox,
    pub me: usize,
    pub peers: Arc<Peers>,
    pub matching: Matching<Receive, Early>,
    /// The ranks of other hosts, if there is a network to them.
    pub remote: Option<Remote>,
    /// Receives without a message that wait for the network.
    pub(super) awaiting_network: usize,
    /// For what has come from it.
    pub(super) arrivals: Vec<Arrival>,
    pub(super) outgoing: Vec<Outgoing>,
    pub(super) incoming: Vec<IncomingFrom>,
    /// Ranks from which something is being copied, or for which a device copies something.
    pub(super) copying: Vec<usize>,
    /// Sends that wait for their device.
    pub(super) held: Vec<Held>,
    /// When short sends last checked whether each rank lives.
    checked: Vec<Duration>,
    /// Results to be given out once the lock is free.
    pub finished: Finished,
}

impl State {
    pub fn new(mailbox: Mailbox, peers: Arc<Peers>, remote: Option<Remote>) -> State {
        let (me, ranks) = (mailbox.memory().me(), mailbox.memory().ranks());
        State {
            mailbox,
            me,
            peers,
            matching: Matching::default(),
            remote,
            awaiting_network: 0,
            arrivals: Vec::new(),
            outgoing: (0..ranks).map(|_| Outgoing::default()).collect(),
            incoming: (0..ranks).map(|_| IncomingFrom::default()).collect(),
            copying: Vec::new(),
            held: Vec::new(),
            checked: vec![Duration::ZERO; ranks],
            finished: Finished::default(),
        }
    }

    /// Sends a short message to another rank, if it need not wait.
    ///
    /// # Errors
    /// Those of [`send_short`].
    ///
    /// # Safety
    /// As for [`send_short`].
    #[inline]
    pub unsafe fn send_short(&mut self, to: usize, envelope: Envelope, from: &Spans) -> Result<bool> {
        // SAFETY: guaranteed by the caller.
        Ok(self.held.is_empty()
            && !self.is_gone(to)
            && !self.outgoing[to].has_queue()
            && unsafe { send_short(&mut self.mailbox, to, envelope, from) }?)
    }

    /// Whether a rank of the host has ended, as far as a short send can find out: it must not take long.
    #[inline]
    fn is_gone(&mut self, rank: usize) -> bool {
        if has_departed(&**self.mailbox.memory(), rank) {
            return true;
        }
        let now = coarse_now();
        if now.saturating_sub(self.checked[rank]) < CHECK_LIFE_AFTER {
            return false;
        }
        let is_gone = self.peers.liveness.lost(rank).is_some();
        if !is_gone {
            self.checked[rank] = now;
        }
        is_gone
    }

    /// How a rank of the host has ended, if it has.
    pub(super) fn gone(&self, rank: usize) -> Option<String> {
        if has_departed(&**self.mailbox.memory(), rank) {
            return Some(DEPARTED.to_owned());
        }
        self.peers.liveness.lost(rank)
    }

    /// Starts a send.
    pub fn send(&mut self, to: usize, send: Send) {
        if to == self.me {
            return self.send_to_self(send);
        }
        if self.is_gone(to)
            && let Some(how) = self.gone(to)
        {
            return self.send_to_gone(self.peers.world[to], &how, send);
        }
        self.outgoing[to].push(send);
        self.outgoing[to].advance(&mut self.mailbox, to, &mut self.finished);
    }

    /// Fails a send to rank `world` of the job.
    pub(super) fn send_to_gone(&mut self, world: usize, how: &str, send: Send) {
        let name = self.peers.name(world);
        let what = send.limits.describe("send", Some(send.envelope.tag), &format!("to {name}"));
        self.finished.push((send.request, Err(Error::PeerLost(format!("{name} {how}, in the {what}")))));
    }

    fn send_to_self(&mut self, send: Send) {
        let (envelope, total) = (send.envelope, send.from.len());
        let me = self.peers.world[self.me];
        if let Some(receive) = self.receive_for(envelope.context, me, envelope.tag) {
            return self.pass(send, receive);
        }
        let body = if total <= CELL_BYTES {
            let mut data = vec![0; total].into_boxed_slice();
            // SAFETY: the caller of the send keeps its memory valid.
            unsafe { send.from.read(0, total, data.as_mut_ptr()) };
            self.finished.push((send.request, Ok(send.status)));
            Body::Data(data)
        } else {
            Body::Own(Box::new(send))
        };
        self.keep(me, Early { envelope, body });
    }

    /// Keeps a message of rank `world` of the job until a receive fits it.
    pub(super) fn keep(&mut self, world: usize, early: Early) {
        let Envelope { context, tag, .. } = early.envelope;
        self.matching.keep(context, world, tag, early);
    }

    /// Gives a message of this rank to a receive of this rank.
    fn pass(&mut self, send: Send, receive: Receive) {
        // SAFETY: whoever started the two keeps the memory valid; the message fits.
        let copy = |into: &Spans| unsafe { into.copy_from(&send.from) };
        self.take_data(receive, self.peers.world[self.me], send.envelope, copy);
        self.finished.push((send.request, Ok(send.status)));
    }

    /// Gives a receive a message of rank `world` of the job whose data is here: `write` copies it.
    #[inline]
    pub(super) fn take_data(
        &mut self,
        mut receive: Receive,
        world: usize,
        envelope: Envelope,
        write: impl FnOnce(&Spans),
    ) {
        let result = self.status(&receive, world, envelope).and_then(|status| {
            receive.into.make_host_memory(status.bytes)?;
            write(&receive.into);
            Ok(status)
        });
        self.finished.received(receive, result);
    }

    /// Starts a receive.
    pub fn receive(&mut self, pattern: Pattern, receive: Receive) {
        let context = receive.limits.scope.context();
        while let Some((from, _, Early { envelope, body })) = self.matching.message_for(context, pattern) {
            match body {
                Body::Data(data) => {
                    // SAFETY: the caller of the receive keeps its memory valid; the message fits.
                    let write = |into: &Spans| unsafe { into.write(0, data.as_ptr(), data.len()) };
                    self.take_data(receive, from, envelope, write);
                }
                Body::Own(send) => self.pass(*send, receive),
                Body::Long(long, exported) => {
                    let Some(local) = self.peers.local(from) else { continue };
                    if self.is_aborted(local, long) {
                        continue;
                    }
                    self.start_long(receive, local, envelope, long, &exported);
                }
                Body::Remote(id) => self.start_remote(receive, from, envelope, id),
            }
            return;
        }
        self.awaiting_network += usize::from(receive.awaits_network);
        self.matching.post(context, pattern, receive);
    }

    /// Removes the first receive that fits a message.
    #[inline]
    pub(super) fn receive_for(&mut self, context: u64, world: usize, tag: u32) -> Option<Receive> {
        let receive = self.matching.receive_for(context, world, tag)?;
        self.awaiting_network -= usize::from(receive.awaits_network);
        Some(receive)
    }

    /// The result of a receive that has matched a message of rank `world` of the job.
    pub(super) fn status(&self, receive: &Receive, world: usize, envelope: Envelope) -> Result<Status> {
        let (tag, total, len) = (envelope.tag, envelope.total as usize, receive.into.len());
        let (sent, expected) = (Types(envelope.types), receive.into.types());
        let describe = || receive.limits.describe("receive", Some(tag), &format!("from {}", self.peers.name(world)));
        if !sent.fit(expected) {
            return Err(Error::Mismatch(format!(
                "{} expects {}, and the message has {}; it was dropped, and nothing was written",
                describe(),
                expected.name(),
                sent.name()
            )));
        }
        if total > len || (receive.exact && total < len) {
            let what = describe();
            return Err(match receive.exact {
                true => Error::Mismatch(format!(
                    "{what} expects {len} bytes, and the message has {total}; it was dropped, and nothing was written"
                )),
                false => Error::Invalid(format!(
                    "{what} has room for {len} bytes, and the message has {total}; it was dropped"
                )),
            });
        }
        Ok(Status { source: receive.limits.scope.of_world(world).unwrap_or(world), tag, bytes: total })
    }

    /// Whether the sender of a long message has given up; if so, lets it use the slot again.
    fn is_aborted(&mut self, from: usize, long: LongEnvelope) -> bool {
        let Some(inbox) = self.mailbox.inbox(from) else { return true };
        let ring = inbox.ring.ring();
        let aborted = ring.long_state(long.slot as usize) == LongState::Aborted;
        if aborted {
            ring.set_long(long.slot as usize, LongState::Free);
            self.mailbox.notify(from);
        }
        aborted
    }

    /// Gives a long message to a receive.
    fn start_long(
        &mut self,
        mut receive: Receive,
        from: usize,
        envelope: Envelope,
        long: LongEnvelope,
        exported: &[u8],
    ) {
        let world = self.peers.world[from];
        let accepted = self.status(&receive, world, envelope).and_then(|status| {
            // The memory of a rank that has ended may be gone.
            let opens = receive.into.is_on_device() && self.gone(from).is_none();
            if !opens || !receive.into.open(world, exported, status.bytes) {
                receive.into.make_host_memory(status.bytes)?;
            }
            Ok(status)
        });
        match accepted {
            Ok(status) => {
                let State { incoming, mailbox, finished, .. } = self;
                incoming[from].start(mailbox, from, long, receive, status, finished);
                self.note_copying(from);
            }
            Err(error) => {
                // The send has succeeded, as a short one would have.
                let _noted = change(&mut self.mailbox, from, long.slot as usize, LongState::Announced, LongState::Done);
                self.finished.push((receive.request, Err(error)));
            }
        }
    }

    /// Notes a rank from or for which something is being copied, which needs looks.
    #[inline]
    fn note_copying(&mut self, rank: usize) {
        let copies = self.incoming[rank].is_copying() || self.outgoing[rank].is_staging;
        if copies && !self.copying.contains(&rank) {
            self.copying.push(rank);
        }
    }

    /// Handles a message in its cell.
    #[inline]
    fn arrived(&mut self, from: usize, message: &Arrived) {
        let envelope = message.envelope;
        let total = envelope.total as usize;
        let long = (envelope.kind == LONG).then(|| message.long());
        if long.is_some_and(|long| self.is_aborted(from, long)) {
            return;
        }
        let world = self.peers.world[from];
        let Some(receive) = self.receive_for(envelope.context, world, envelope.tag) else {
            let body = match long {
                Some(long) => Body::Long(long, message.exported(&long).into()),
                // SAFETY: the cell has these bytes.
                None => Body::Data(unsafe { std::slice::from_raw_parts(message.data, total) }.into()),
            };
            return self.keep(world, Early { envelope, body });
        };
        if let Some(long) = long {
            return self.start_long(receive, from, envelope, long, message.exported(&long));
        }
        // SAFETY: the cell has these bytes; whoever started the receive keeps its memory valid; the message fits.
        let write = |into: &Spans| unsafe { into.write(0, message.data, total) };
        self.take_data(receive, world, envelope, write);
    }

    /// Gives the cell of the message that was peeked at back to its sender.
    #[inline]
    fn take_cell(&mut self, from: usize) {
        if self.mailbox.inbox(from).is_some_and(|inbox| inbox.ring.take()) {
            self.mailbox.notify(from);
        }
    }

    /// Takes the next message of `from` if it fits `receive`, which is not posted.
    ///
    /// # Safety
    /// The memory of the receive is valid.
    #[inline]
    pub unsafe fn take_short(&mut self, from: usize, receive: &ShortReceive<'_>) -> Short {
        let Some(message) = self.mailbox.inbox(from).and_then(|inbox| inbox.ring.peek()) else { return Short::NotYet };
        let Envelope { context, total, tag, kind, types } = message.envelope;
        let (total, room) = (total as usize, receive.into.len());
        let fits = (total == room || (total < room && !receive.exact)) && Types(types).fit(receive.into.types());
        if kind == LONG || !fits || context != receive.context || receive.tag.is_some_and(|wanted| wanted != tag) {
            return Short::Other;
        }
        // SAFETY: the cell has these bytes; the caller keeps its memory valid; the message fits.
        unsafe { receive.into.write(0, message.data, total) };
        self.take_cell(from);
        Short::Taken { tag, bytes: total }
    }

    /// Handles what has come from `rank`.
    pub(super) fn receive_from(&mut self, from: usize) -> bool {
        let mut moved = false;
        for _ in 0..BATCH {
            let Some(message) = self.mailbox.inbox(from).and_then(|inbox| inbox.ring.peek()) else { break };
            self.arrived(from, &message);
            self.take_cell(from);
            moved = true;
        }
        if !self.incoming[from].is_idle() {
            moved |= self.incoming[from].advance(&mut self.mailbox, from, &mut self.finished);
        }
        moved
    }

    /// Does what can be done with `rank`; returns whether that was anything.
    #[inline]
    pub fn look_at(&mut self, rank: usize) -> bool {
        let moved = self.receive_from(rank);
        let outgoing = &mut self.outgoing[rank];
        if outgoing.is_idle() {
            return moved;
        }
        let moved = moved | outgoing.advance(&mut self.mailbox, rank, &mut self.finished);
        self.note_copying(rank);
        moved
    }

    /// Does what can be done with the ranks that have given notice; returns whether that was anything.
    #[inline]
    pub fn look(&mut self) -> bool {
        let mut moved = self.awaits_network() && self.look_at_network();
        moved |= self.awaits_device() && self.look_at_devices();
        for word in 0..self.incoming.len().div_ceil(64) {
            let mut bits = self.mailbox.header(self.me).notices(word);
            while bits != 0 {
                moved |= self.look_at(word * 64 + bits.trailing_zeros() as usize);
                bits &= bits - 1;
            }
        }
        if !self.copying.is_empty() {
            for from in std::mem::take(&mut self.copying) {
                moved |= self.incoming[from].advance(&mut self.mailbox, from, &mut self.finished);
                if self.outgoing[from].is_staging {
                    moved |= self.outgoing[from].advance(&mut self.mailbox, from, &mut self.finished);
                }
                self.note_copying(from);
            }
        }
        moved
    }
}
