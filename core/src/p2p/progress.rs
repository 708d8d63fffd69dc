//! The state of an endpoint, and all that can be done without waiting.
//!
//! Thread rule: used under the lock of the endpoint.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::incoming::{Body, Early, IncomingFrom, Receive, change};
use super::matching::{Matching, Pattern};
use super::message::{Limits, Spans, Status, Types};
use super::outgoing::{Finished, Outgoing, Send, send_short};
use super::remote::{Arrival, Remote};
use super::request::Request;
use crate::clock::coarse_now;
use crate::error::{Error, Result};
use crate::transport::mailbox::ring::{Arrived, CELL_BYTES, Envelope, LONG, LongEnvelope, LongState};
use crate::transport::mailbox::{Mailbox, has_departed};
use crate::transport::shm_region::Liveness;

/// Messages that are taken from one rank before others have their turn.
const BATCH: usize = 16;

/// A receive from any rank learns that all have ended if its group is not larger than this; else its deadline ends it.
const MAX_GREETED: usize = 64;

/// After this time a receive makes itself known to the ranks of other hosts that it waits for. Not sooner: if one has just
/// ended, the failure detector should know that first, since the network may not survive the message.
const GREET_AFTER: Duration = Duration::from_secs(1);

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
    outgoing: Vec<Outgoing>,
    incoming: Vec<IncomingFrom>,
    /// Ranks from which something is being copied.
    copying: Vec<usize>,
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
            checked: vec![Duration::ZERO; ranks],
            finished: Vec::new(),
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
        Ok(!self.is_gone(to)
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
    fn gone(&self, rank: usize) -> Option<String> {
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
        let me = self.peers.world[self.me];
        let result = self.status(&receive, me, send.envelope).inspect(|_| {
            // SAFETY: whoever started the two keeps the memory valid; the message fits.
            unsafe { receive.into.copy_from(&send.from) };
        });
        self.finished.push((send.request, Ok(send.status)));
        self.finished.push((receive.request, result));
    }

    /// Starts a receive.
    pub fn receive(&mut self, pattern: Pattern, receive: Receive) {
        let context = receive.limits.scope.context();
        while let Some((from, _, Early { envelope, body })) = self.matching.message_for(context, pattern) {
            match body {
                Body::Data(data) => {
                    let result = self.status(&receive, from, envelope).inspect(|_| {
                        // SAFETY: the caller of the receive keeps its memory valid; the message fits.
                        unsafe { receive.into.write(0, data.as_ptr(), data.len()) };
                    });
                    self.finished.push((receive.request, result));
                }
                Body::Own(send) => self.pass(*send, receive),
                Body::Long(long) => {
                    let Some(local) = self.peers.local(from) else { continue };
                    if self.is_aborted(local, long) {
                        continue;
                    }
                    self.start_long(receive, local, envelope, long);
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
    fn start_long(&mut self, receive: Receive, from: usize, envelope: Envelope, long: LongEnvelope) {
        match self.status(&receive, self.peers.world[from], envelope) {
            Ok(status) => {
                let State { incoming, mailbox, finished, .. } = self;
                incoming[from].start(mailbox, from, long, receive, status, finished);
                if incoming[from].is_copying() && !self.copying.contains(&from) {
                    self.copying.push(from);
                }
            }
            Err(error) => {
                // The send has succeeded, as a short one would have.
                let _told = change(&mut self.mailbox, from, long.slot as usize, LongState::Announced, LongState::Done);
                self.finished.push((receive.request, Err(error)));
            }
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
                Some(long) => Body::Long(long),
                // SAFETY: the cell has these bytes.
                None => Body::Data(unsafe { std::slice::from_raw_parts(message.data, total) }.into()),
            };
            return self.keep(world, Early { envelope, body });
        };
        if let Some(long) = long {
            return self.start_long(receive, from, envelope, long);
        }
        let result = self.status(&receive, world, envelope).inspect(|_| {
            // SAFETY: the cell has these bytes; whoever started the receive keeps its memory valid; the message fits.
            unsafe { receive.into.write(0, message.data, total) };
        });
        self.finished.push((receive.request, result));
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
    fn receive_from(&mut self, from: usize) -> bool {
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
        moved | outgoing.advance(&mut self.mailbox, rank, &mut self.finished)
    }

    /// Does what can be done with the ranks that have given notice; returns whether that was anything.
    #[inline]
    pub fn look(&mut self) -> bool {
        let mut moved = self.awaits_network() && self.look_at_network();
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
                if self.incoming[from].is_copying() && !self.copying.contains(&from) {
                    self.copying.push(from);
                }
            }
        }
        moved
    }

    /// Ends one send or receive with an error.
    pub fn cancel(&mut self, request: &Request, error: &Error) {
        let is_it = |other: &Arc<Request>| std::ptr::eq(&raw const **other, request).then(|| error.clone());
        let State { mailbox, matching, outgoing, incoming, finished, remote, awaiting_network, .. } = self;
        let receives = matching.fail_receives(|_, receive| is_it(&receive.request));
        end_receives(receives, awaiting_network, finished);
        if let Some(remote) = remote {
            remote.fail(|_, send| is_it(&send.request), |_, receive, _| is_it(&receive.request), finished);
        }
        let own = matching.fail_messages(|early| match &early.body {
            Body::Own(send) => is_it(&send.request),
            _ => None,
        });
        for (early, error) in own {
            if let Body::Own(send) = early.body {
                finished.push((send.request, Err(error)));
            }
        }
        for rank in 0..incoming.len() {
            incoming[rank].fail(mailbox, rank, |receive, _, _| is_it(&receive.request), finished);
            outgoing[rank].fail(mailbox, rank, |send| is_it(&send.request), finished);
        }
    }

    /// Ends the sends and receives whose deadline has passed, whose group has failed, or whose peer is gone. With
    /// `closing`, all of them.
    pub fn check(&mut self, now: Instant, closing: Option<&Error>) {
        let ranks = self.incoming.len();
        let gone: Vec<Option<String>> = (0..ranks).map(|rank| self.gone(rank).filter(|_| rank != self.me)).collect();
        // They may have sent messages before.
        for rank in (0..ranks).filter(|&rank| gone[rank].is_some()) {
            while self.receive_from(rank) {}
        }
        self.look_at_network();
        let peers = Arc::clone(&self.peers);
        let State { mailbox, matching, outgoing, incoming, finished, remote, awaiting_network, me, .. } = self;
        let far = remote.as_ref();
        // How a rank of the job has ended.
        let lost = |world: usize| {
            let how = match peers.local(world) {
                Some(local) => gone[local].clone(),
                None => far.and_then(|remote| remote.gone(world)),
            };
            Some(format!("{} {}", peers.name(world), how?))
        };
        let broken = |awaits_network: bool| far.and_then(Remote::failure).filter(|_| awaits_network).cloned();
        let mut awaited = Vec::new();
        let receives = matching.fail_receives(|pattern, receive| {
            let limits = &receive.limits;
            let waited = limits.waited(now);
            if receive.awaits_network && waited >= GREET_AFTER && closing.is_none() {
                match pattern.source {
                    Some(source) => awaited.push(source),
                    None if limits.scope.size() <= MAX_GREETED => {
                        awaited.extend((0..limits.scope.size()).map(|rank| limits.scope.to_world(rank)));
                    }
                    None => {}
                }
            }
            let from = || match pattern.source {
                Some(source) => format!("from {}", peers.name(source)),
                None => "from any rank".to_owned(),
            };
            let describe = || limits.describe("receive", pattern.tag, &from());
            let loss = match pattern.source {
                Some(source) => lost(source),
                None => all_lost(limits, peers.world[*me], &lost),
            };
            closing.cloned().or_else(|| failure(limits, now, broken(receive.awaits_network), loss, describe))
        });
        end_receives(receives, awaiting_network, finished);
        let sends = matching.fail_messages(|early| match &early.body {
            Body::Own(send) => {
                let describe = || send.limits.describe("send", Some(send.envelope.tag), "to itself");
                closing.cloned().or_else(|| failure(&send.limits, now, None, None, describe))
            }
            _ => None,
        });
        for (early, error) in sends {
            if let Body::Own(send) = early.body {
                finished.push((send.request, Err(error)));
            }
        }
        for rank in 0..ranks {
            let (world, name) = (peers.world[rank], peers.name(peers.world[rank]));
            let received = |receive: &Receive, status: Status, is_copying: bool| {
                let describe = || receive.limits.describe("receive", Some(status.tag), &format!("from {name}"));
                // What is copied from shared memory needs nobody.
                let loss = if is_copying { None } else { lost(world) };
                closing.cloned().or_else(|| failure(&receive.limits, now, None, loss, describe))
            };
            incoming[rank].fail(mailbox, rank, received, finished);
            let sent = |send: &Send| {
                let describe = || send.limits.describe("send", Some(send.envelope.tag), &format!("to {name}"));
                closing.cloned().or_else(|| failure(&send.limits, now, None, lost(world), describe))
            };
            if !outgoing[rank].is_idle() {
                outgoing[rank].fail(mailbox, rank, sent, finished);
            }
        }
        if let Some(remote) = &mut self.remote {
            awaited.retain(|&world| peers.local(world).is_none());
            remote.greet(&awaited);
        }
        self.check_network(now, closing);
    }
}

/// Gives receives their errors.
fn end_receives(receives: Vec<(Pattern, Receive, Error)>, awaiting_network: &mut usize, finished: &mut Finished) {
    for (_, receive, error) in receives {
        *awaiting_network -= usize::from(receive.awaits_network);
        finished.push((receive.request, Err(error)));
    }
}

/// The loss of the first rank that could send to a receive from any rank, if all are lost; its group has other ranks.
fn all_lost(limits: &Limits, me: usize, lost: &dyn Fn(usize) -> Option<String>) -> Option<String> {
    let scope = &limits.scope;
    let mut others = (0..scope.size()).map(|rank| scope.to_world(rank)).filter(|&world| world != me);
    let loss = lost(others.next()?)?;
    others.all(|world| lost(world).is_some()).then_some(loss)
}

/// Why a send or receive ends. `broken`: the failure of the network that it needs.
pub(super) fn failure(
    limits: &Limits,
    now: Instant,
    broken: Option<Error>,
    loss: Option<String>,
    describe: impl Fn() -> String,
) -> Option<Error> {
    if let Some(error) = limits.scope.failure() {
        return Some(error);
    }
    if let Some(loss) = loss {
        return Some(Error::PeerLost(format!("{loss}, in the {}", describe())));
    }
    if let Some(error) = broken {
        return Some(Error::Network(format!("{}, in the {}", error.detail(), describe())));
    }
    limits.is_over(now).then(|| {
        let waited = limits.waited(now).as_secs_f64();
        let set_by = limits.deadline.set_by;
        Error::Timeout(format!("the {} was not complete after {waited:.1} s ({set_by})", describe()))
    })
}
