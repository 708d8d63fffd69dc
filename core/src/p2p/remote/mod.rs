//! Messages with ranks of other hosts, as [`super::outgoing`] and [`super::incoming`] do it with those of this host.
//!
//! A short message travels with its header. A long one is announced. Once a receive has matched it, the receiver asks
//! for its parts, several at a time, and says when it has all; each answer to a request is a part, or an empty one if
//! the sender gave up. So either end can give up at any time without harm to the other. Short messages that nobody
//! receives are kept: their memory grows with their number; that of long ones does not.
//! Thread rule: used under the lock of the endpoint.

mod header;
mod port;

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

pub use self::header::HEADER_BYTES;
use self::header::{MessageHeader, MessageKind};
pub use self::port::Hosts;
use self::port::{Event, PART_BYTES, Part, Port, SHORT_BYTES};
use super::message::{Spans, Status};
use super::pending::{Finished, Receive, Send};
use crate::error::{Error, Result};
use crate::transport::mailbox::ring::Envelope;
use crate::transport::memory::Aligned;

/// Parts of one message that are on their way.
const WINDOW: usize = 8;
/// Events that are handled before others have their turn.
const BATCH: usize = 64;
/// How long the end waits until the network has taken what is to be sent, and for the last messages of others.
const END: Duration = Duration::from_secs(1);

/// A long message that a receive has matched.
struct Incoming {
    id: u64,
    wanted: usize,
    received: usize,
    status: Status,
    receive: Receive,
}

impl Incoming {
    /// Where the next part to ask for begins, and its length.
    fn next(&self) -> Option<(usize, usize)> {
        let on_their_way = (self.wanted - self.received).div_ceil(PART_BYTES);
        let len = (self.status.bytes - self.wanted).min(PART_BYTES);
        (len > 0 && on_their_way < WINDOW).then_some((self.wanted, len))
    }
}

/// What is under way with one rank.
#[derive(Default)]
struct Peer {
    /// Messages without a credit.
    queue: VecDeque<Send>,
    /// Announced messages.
    longs: Vec<(u64, Send)>,
    /// Parts of them that the receiver wants.
    wants: VecDeque<MessageHeader>,
    incoming: Vec<Incoming>,
}

impl Peer {
    fn is_idle(&self) -> bool {
        self.queue.is_empty() && self.longs.is_empty() && self.wants.is_empty() && self.incoming.is_empty()
    }
}

/// The header of a message.
fn header_of(kind: MessageKind, Envelope { context, total, tag, types, .. }: Envelope) -> MessageHeader {
    MessageHeader { types, context, total, tag, ..MessageHeader::new(kind) }
}

/// A message to be matched, or the end of one.
pub enum Arrival {
    /// A short message; its data is after [`HEADER_BYTES`]. The memory must be given back.
    Data(usize, Envelope, Aligned),
    /// A long message, with its number.
    Long(usize, Envelope, u64),
    /// A long message, of a group and with a number, that no receive has matched: its sender gave up.
    Aborted(usize, u64, u64),
}

/// See the module's documentation.
pub struct Remote {
    port: Port,
    /// The ranks with which something is under way.
    peers: BTreeMap<usize, Peer>,
    last_id: u64,
    /// The failure of the network.
    failure: Option<Error>,
}

impl Remote {
    /// Messages through `hosts`.
    ///
    /// # Errors
    /// A failure of the network.
    pub fn new(hosts: Hosts) -> Result<Remote> {
        Ok(Remote { port: Port::new(hosts)?, peers: BTreeMap::new(), last_id: 0, failure: None })
    }

    /// The failure of the network.
    pub fn failure(&self) -> Option<&Error> {
        self.failure.as_ref()
    }

    /// Whether something is under way.
    pub fn is_open(&self) -> bool {
        self.failure.is_none() && (self.port.has_open_sends() || !self.peers.is_empty())
    }

    /// Whether the network has something to send, which needs nobody's call.
    pub fn has_open_sends(&self) -> bool {
        self.failure.is_none() && self.port.has_open_sends()
    }

    /// How `rank` has ended, if it has.
    pub fn gone(&self, rank: usize) -> Option<String> {
        if self.port.has_departed(rank) {
            return Some("has called finalize".to_owned());
        }
        self.port.lost(rank)
    }

    /// Those with which something is under way that have ended, and how.
    pub fn gone_now(&self) -> BTreeMap<usize, String> {
        self.peers.keys().filter_map(|&rank| Some((rank, self.gone(rank)?))).collect()
    }

    /// Keeps a failure of the network.
    fn note<T>(&mut self, result: Result<T>) -> Option<T> {
        match result {
            Ok(value) => Some(value),
            Err(error) => {
                self.failure.get_or_insert(error);
                None
            }
        }
    }

    fn send_header(&mut self, to: usize, header: MessageHeader) {
        if self.failure.is_some() {
            return;
        }
        let sent = self.port.send(to, header, 0, |_| {});
        self.note(sent);
    }

    /// Sends a short message if nothing is before it.
    ///
    /// # Errors
    /// The failure of the network.
    ///
    /// # Safety
    /// The memory of `from` is valid.
    pub unsafe fn send_short(&mut self, to: usize, envelope: Envelope, from: &Spans) -> Result<bool> {
        if let Some(error) = &self.failure {
            return Err(error.clone());
        }
        let has_queue = self.peers.get(&to).is_some_and(|peer| !peer.queue.is_empty());
        if from.len() > SHORT_BYTES || has_queue || self.gone(to).is_some() || !self.port.has_credit(to) {
            return Ok(false);
        }
        let header = header_of(MessageKind::Data, envelope);
        // SAFETY: the memory is valid, and a message has room for it.
        let sent = self.port.send(to, header, from.len(), |data| unsafe { from.read(0, from.len(), data) });
        sent.inspect_err(|error| self.failure = Some(error.clone())).map(|()| true)
    }

    /// Starts a send.
    pub fn send(&mut self, to: usize, send: Send, finished: &mut Finished) {
        self.peers.entry(to).or_default().queue.push_back(send);
        self.advance(to, finished);
    }

    /// Sends to `to` what can be sent.
    fn advance(&mut self, to: usize, finished: &mut Finished) {
        while self.failure.is_none() && self.port.has_credit(to) {
            let Some(send) = self.peers.get_mut(&to).and_then(|peer| peer.queue.pop_front()) else { break };
            if send.from.len() <= SHORT_BYTES {
                let header = header_of(MessageKind::Data, send.envelope);
                let (len, from) = (send.from.len(), &send.from);
                // SAFETY: the caller of the send keeps its memory valid; a message has room for it.
                let sent = self.port.send(to, header, len, |data| unsafe { from.read(0, len, data) });
                finished.push((send.request, sent.clone().map(|()| send.status)));
                self.note(sent);
            } else {
                self.last_id += 1;
                let id = self.last_id;
                self.send_header(to, MessageHeader { id, ..header_of(MessageKind::Long, send.envelope) });
                if let Some(peer) = self.peers.get_mut(&to) {
                    peer.longs.push((id, send));
                }
            }
        }
        self.send_parts(to);
        self.forget_idle(to);
    }

    /// Sends the parts that `to` wants.
    fn send_parts(&mut self, to: usize) {
        while self.failure.is_none() && self.port.has_part_memory() {
            let Some(peer) = self.peers.get_mut(&to) else { return };
            let Some(want) = peer.wants.pop_front() else { return };
            let send = peer.longs.iter().find(|(id, _)| *id == want.id).map(|(_, send)| send);
            let (offset, len) = (want.context as usize, want.total as usize);
            let inside = |send: &&Send| offset.checked_add(len).is_some_and(|end| end <= send.from.len());
            let sent = match send.filter(inside).filter(|_| len <= PART_BYTES) {
                Some(send) => self.port.send_part(to, want.tag, len, |part| {
                    // SAFETY: the caller of the send keeps its memory valid; the part is within it.
                    unsafe { send.from.read(offset, len, part) }
                }),
                None => self.port.send_part(to, want.tag, 0, |_| {}),
            };
            self.note(sent);
        }
    }

    /// Asks for the parts for which there is room.
    fn want_parts(&mut self, from: usize) {
        let Some(peer) = self.peers.get_mut(&from) else { return };
        let mut result = Ok(());
        for incoming in &mut peer.incoming {
            while result.is_ok()
                && self.port.has_slot()
                && let Some((offset, len)) = incoming.next()
            {
                result = self.port.want(Part { from, id: incoming.id, offset, len });
                incoming.wanted += len;
            }
        }
        self.note(result);
    }

    fn forget_idle(&mut self, rank: usize) {
        if self.peers.get(&rank).is_some_and(Peer::is_idle) {
            self.peers.remove(&rank);
        }
    }

    /// Starts to receive a long message.
    pub fn start_long(&mut self, receive: Receive, from: usize, status: Status, id: u64) {
        let incoming = Incoming { id, wanted: 0, received: 0, status, receive };
        self.peers.entry(from).or_default().incoming.push(incoming);
        self.want_parts(from);
    }

    /// Drops a long message; its send succeeds.
    pub fn drop_long(&mut self, from: usize, id: u64) {
        self.send_header(from, MessageHeader { id, ..MessageHeader::new(MessageKind::Done) });
    }

    /// Looks at the network. Then [`Remote::handle`] finds what has come.
    pub fn poll(&mut self) {
        if self.failure.is_none() {
            let polled = self.port.poll();
            self.note(polled);
        }
    }

    /// Handles what has come; returns whether that was anything, and messages to be matched in `arrivals`.
    pub fn handle(&mut self, arrivals: &mut Vec<Arrival>, finished: &mut Finished) -> bool {
        let mut moved = false;
        for _ in 0..BATCH {
            let Some(event) = self.port.next() else { break };
            moved = true;
            match event {
                Event::Message(from, header, buffer) => {
                    arrivals.extend(self.handle_message(from, header, buffer, finished));
                    self.advance(from, finished);
                }
                Event::Part(part, buffer, len) => {
                    self.handle_part(part, &buffer, len, finished);
                    self.port.give_back_part(buffer);
                    self.forget_idle(part.from);
                    // Another message may have waited for the slot.
                    for from in self.peers.keys().copied().collect::<Vec<_>>() {
                        self.want_parts(from);
                    }
                }
                Event::PartSent => {
                    for to in self.peers.keys().copied().collect::<Vec<_>>() {
                        self.send_parts(to);
                        self.forget_idle(to);
                    }
                }
            }
        }
        moved
    }

    fn handle_message(
        &mut self,
        from: usize,
        header: MessageHeader,
        buffer: Aligned,
        done: &mut Finished,
    ) -> Option<Arrival> {
        let MessageHeader { kind, types, tag, context, total, id, .. } = header;
        let envelope = Envelope { context, total, tag, kind: 0, types };
        if kind == MessageKind::Data {
            return Some(Arrival::Data(from, envelope, buffer));
        }
        self.give_back(buffer);
        match kind {
            MessageKind::Long => return Some(Arrival::Long(from, envelope, id)),
            MessageKind::Want => self.peers.entry(from).or_default().wants.push_back(header),
            MessageKind::Done | MessageKind::Refused => {
                let longs = &mut self.peers.get_mut(&from)?.longs;
                let (_, send) = longs.remove(longs.iter().position(|(other, _)| *other == id)?);
                let result = if kind == MessageKind::Done {
                    Ok(send.status)
                } else {
                    let what = send.limits.describe("send", Some(send.envelope.tag), &format!("to rank {from}"));
                    Err(Error::PeerLost(format!("the receiver gave up: {what}")))
                };
                done.push((send.request, result));
            }
            MessageKind::Aborted => {
                let incoming = self.peers.get_mut(&from).map(|peer| &mut peer.incoming);
                let index = incoming.as_ref().and_then(|list| list.iter().position(|incoming| incoming.id == id));
                let (Some(list), Some(index)) = (incoming, index) else {
                    return Some(Arrival::Aborted(from, context, id));
                };
                let error = Error::PeerLost("the sender gave up before all data was received".into());
                done.push((list.remove(index).receive.request, Err(error)));
            }
            MessageKind::Data | MessageKind::Credit | MessageKind::Departed => {}
        }
        None
    }

    fn handle_part(&mut self, part: Part, buffer: &Aligned, len: usize, finished: &mut Finished) {
        let Some(list) = self.peers.get_mut(&part.from).map(|peer| &mut peer.incoming) else { return };
        // None: the receive has ended before.
        let Some(index) = list.iter().position(|incoming| incoming.id == part.id) else { return };
        // An empty part: a message says more.
        if len != part.len {
            return;
        }
        let incoming = &mut list[index];
        // SAFETY: the part has these bytes, and so has the receive, whose memory its starter keeps valid.
        unsafe { incoming.receive.into.write(part.offset, buffer.as_ptr(), len) };
        incoming.received += len;
        if incoming.received == incoming.status.bytes {
            let Incoming { status, receive, .. } = list.remove(index);
            self.drop_long(part.from, part.id);
            finished.received(receive, Ok(status));
        }
    }

    /// Gives the memory of a message back.
    pub fn give_back(&mut self, message: Aligned) {
        let given = self.port.give_back(message);
        self.note(given);
    }

    /// Sends no more to ranks that are lost. They have ended, or their host is out of reach.
    pub fn check(&mut self) {
        for &rank in self.peers.keys() {
            self.port.is_gone(rank);
        }
    }

    /// Ends the sends and receives with ranks of other hosts for which the functions have an error, and tells the other
    /// ranks. The functions get the rank.
    pub fn fail(
        &mut self,
        send_fails: impl Fn(usize, &Send) -> Option<Error>,
        receive_fails: impl Fn(usize, &Receive, Status) -> Option<Error>,
        finished: &mut Finished,
    ) {
        for rank in self.peers.keys().copied().collect::<Vec<_>>() {
            let Some(peer) = self.peers.get_mut(&rank) else { continue };
            let mut answers = Vec::new();
            for send in std::mem::take(&mut peer.queue) {
                match send_fails(rank, &send) {
                    None => peer.queue.push_back(send),
                    Some(error) => finished.push((send.request, Err(error))),
                }
            }
            for (id, send) in std::mem::take(&mut peer.longs) {
                match send_fails(rank, &send) {
                    None => peer.longs.push((id, send)),
                    Some(error) => {
                        let context = send.envelope.context;
                        answers.push(MessageHeader { context, id, ..MessageHeader::new(MessageKind::Aborted) });
                        finished.push((send.request, Err(error)));
                    }
                }
            }
            for incoming in std::mem::take(&mut peer.incoming) {
                match receive_fails(rank, &incoming.receive, incoming.status) {
                    None => peer.incoming.push(incoming),
                    Some(error) => {
                        answers.push(MessageHeader { id: incoming.id, ..MessageHeader::new(MessageKind::Refused) });
                        finished.push((incoming.receive.request, Err(error)));
                    }
                }
            }
            answers.into_iter().for_each(|answer| self.send_header(rank, answer));
            self.advance(rank, finished);
        }
    }

    /// Makes this rank known to `ranks`, for which receives wait: so they tell it when they end.
    pub fn greet(&mut self, ranks: &[usize]) {
        for &rank in ranks {
            if !self.port.knows(rank) {
                self.send_header(rank, MessageHeader::new(MessageKind::Credit));
            }
        }
    }

    /// Tells the ranks with which there were messages that no more come, and waits a moment until the network has taken
    /// what is to be sent. Nothing is under way any more.
    pub fn close(&mut self) {
        self.linger();
        let until = Instant::now() + END;
        while self.has_open_sends() && Instant::now() < until {
            self.linger();
            std::thread::yield_now();
        }
    }

    /// Drops what has come since [`Remote::close`], and tells its senders that this rank has ended.
    pub fn linger(&mut self) {
        self.poll();
        while let Some(event) = self.port.next() {
            if let Event::Message(_, _, buffer) = event {
                self.give_back(buffer);
            }
        }
        if self.failure.is_none() {
            let departed = self.port.send_departure();
            self.note(departed);
        }
    }

    /// Takes the last messages of the other ranks, which have all been closed: some networks complain about messages
    /// that nobody takes.
    pub fn take_departures(&mut self) {
        let until = Instant::now() + END;
        while self.failure.is_none() && !self.port.have_all_departed() && Instant::now() < until {
            self.linger();
            std::thread::yield_now();
        }
    }
}
