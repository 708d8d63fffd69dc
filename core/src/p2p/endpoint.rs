//! A process's end of its mailboxes: starts sends and receives, and waits for them.
//!
//! Thread rule: any thread may use an [`Endpoint`].

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::driver::Shared;
use super::long_receive::LongReceive;
use super::matching::Pattern;
use super::message::{Limits, Scope, Spans, Status};
use super::pending::{Receive, Send};
use super::progress::{Peers, ShortReceive, State};
use super::remote::{Hosts, Remote};
use super::remote_progress::closed;
use super::request::{Request, Started, Then};
use super::routes::{GroupRoutes, Route};
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::signals;
use crate::transport::mailbox::memory::MailboxMemory;
use crate::transport::mailbox::ring::{CELL_BYTES, Envelope};
use crate::transport::mailbox::{Mailbox, depart, header, process_memory};
use crate::transport::spin::MaxSpins;

/// See the module's documentation. Dropping it ends what is under way with an error.
pub struct Endpoint {
    shared: Arc<Shared>,
    memory: Arc<dyn MailboxMemory>,
    peers: Arc<Peers>,
    /// Whether there is a network to ranks of other hosts.
    has_network: bool,
}

/// What a send or receive is given, beside its memory.
#[derive(Clone, Copy)]
pub struct Message<'a> {
    /// The group, from [`Endpoint::routes`].
    pub group: &'a GroupRoutes,
    /// The other rank, in the group; `None` for any (receives only).
    pub peer: Option<usize>,
    /// The tag; `None` for any (receives only).
    pub tag: Option<u32>,
    /// For error messages; may be empty.
    pub name: &'a str,
    /// The deadline.
    pub deadline: Deadline,
    /// Whether a received message must be as long as the memory for it.
    pub exact: bool,
}

/// A send on its way.
struct Outbound {
    /// Its rank of the group.
    to: usize,
    route: Route,
    envelope: Envelope,
}

impl Outbound {
    fn world(&self, message: &Message<'_>) -> usize {
        message.group.scope().to_world(self.to)
    }

    fn status(&self, message: &Message<'_>) -> Status {
        Status { source: message.group.me(), tag: self.envelope.tag, bytes: self.envelope.total as usize }
    }
}

impl Message<'_> {
    fn limits(&self) -> Limits {
        Limits {
            scope: Arc::clone(self.group.scope()),
            name: self.name.to_owned(),
            since: Cell::default(),
            deadline: self.deadline,
        }
    }
}

impl Endpoint {
    /// The end of the mailboxes in `memory`, whose ranks are `peers`, and of the network to other `hosts`, if there is
    /// one. `max_spins` limits the polls before a wait sleeps.
    ///
    /// # Errors
    /// Errors of [`Mailbox::new`], or a failure of the network.
    pub fn new(
        memory: Arc<dyn MailboxMemory>,
        peers: Peers,
        max_spins: MaxSpins,
        hosts: Option<Hosts>,
    ) -> Result<Endpoint> {
        let (peers, has_network) = (Arc::new(peers), hosts.is_some());
        let mailbox = Mailbox::new(Arc::clone(&memory))?;
        let state = State::new(mailbox, Arc::clone(&peers), hosts.map(Remote::new).transpose()?);
        Ok(Endpoint { shared: Arc::new(Shared::new(state, max_spins)), memory, peers, has_network })
    }

    /// Lets the ranks of the host copy long messages out of this process's memory, if the system allows it. For ranks
    /// that are processes.
    pub fn show_process(&self) {
        process_memory::show(header(&*self.memory, self.memory.me()));
    }

    /// The routes to the ranks of a group.
    pub fn routes(&self, scope: Arc<dyn Scope>) -> GroupRoutes {
        GroupRoutes::new(scope, &self.peers, self.peers.world[self.memory.me()], self.has_network)
    }

    #[inline]
    fn check(&self, message: &Message<'_>) -> Result<()> {
        if self.shared.closed.load(Ordering::Relaxed) {
            return Err(closed());
        }
        if let Some(error) = self.shared.broken() {
            return Err(error.clone());
        }
        if signals::checking() {
            return Err(Error::State("the signal check of dl_comm must not send or receive".into()));
        }
        let scope = message.group.scope();
        if scope.has_failed() { scope.failure().map_or(Ok(()), Err) } else { Ok(()) }
    }

    /// Where a send goes, and what its cell says.
    #[inline]
    fn route(&self, message: &Message<'_>, from: &Spans) -> Result<Outbound> {
        self.check(message)?;
        let (Some(to), Some(tag)) = (message.peer, message.tag) else {
            return Err(Error::Invalid("a send needs a rank and a tag".into()));
        };
        let route = message.group.to(to, "send to")?;
        let (total, types) = (from.len() as u64, from.types().0);
        let envelope = Envelope { context: message.group.context(), total, tag, kind: 0, types };
        Ok(Outbound { to, route, envelope })
    }

    /// Sends a message that needs no waiting: short, with room in the ring or at the other host's rank.
    ///
    /// # Safety
    /// The memory of `from` is valid.
    #[inline]
    unsafe fn send_at_once(&self, message: &Message<'_>, sent: &Outbound, from: &Spans) -> Result<bool> {
        let Outbound { route, envelope, .. } = *sent;
        if from.is_on_device() {
            return Ok(false);
        }
        let Route::Local(to) = route else {
            return self.shared.with(0, |state| match &mut state.remote {
                // It must not overtake one of them.
                Some(_) if !state.held.is_empty() => Ok(false),
                // SAFETY: guaranteed by the caller.
                Some(remote) => unsafe { remote.send_short(sent.world(message), envelope, from) },
                None => Err(closed()),
            });
        };
        let to = to as usize;
        if to == self.memory.me() || from.len() > CELL_BYTES {
            return Ok(false);
        }
        // SAFETY: guaranteed by the caller.
        self.shared.with_state(|state| unsafe { state.send_short(to, envelope, from) })
    }

    /// Starts a send. Does not block.
    ///
    /// # Errors
    /// Invalid arguments; nothing was started then.
    ///
    /// # Safety
    /// The memory of `from` is valid and not written until the send has ended.
    pub unsafe fn send(&self, message: &Message<'_>, from: Spans, then: Option<Then>) -> Result<Started> {
        let sent = self.route(message, &from)?;
        // SAFETY: guaranteed by the caller.
        if unsafe { self.send_at_once(message, &sent, &from) }? {
            if self.has_network {
                self.shared.ensure_thread();
            }
            return Ok(Started::ended(sent.status(message), then));
        }
        let request = Arc::new(Request::new(then));
        self.start_send(&request, &sent, message, from);
        self.shared.ensure_thread();
        Ok(Started::Open(request))
    }

    fn start_send(&self, request: &Arc<Request>, sent: &Outbound, message: &Message<'_>, from: Spans) {
        let (envelope, status) = (sent.envelope, sent.status(message));
        let send = Send { request: Arc::clone(request), limits: message.limits(), envelope, from, status };
        let world = sent.world(message);
        let local = if let Route::Local(to) = sent.route { Some(to as usize) } else { None };
        self.shared.with(1, |state| state.start_send(world, local, send));
    }

    /// Starts a receive. Does not block.
    ///
    /// # Errors
    /// Invalid arguments; nothing was started then.
    ///
    /// # Safety
    /// The memory of `into` is valid and used by nobody else until the receive has ended.
    pub unsafe fn receive(&self, message: &Message<'_>, into: Spans, then: Option<Then>) -> Result<Started> {
        self.check_receive(message)?;
        // SAFETY: guaranteed by the caller.
        if let Some(status) = unsafe { self.receive_short(message, &into, false) } {
            return Ok(Started::ended(status, then));
        }
        let request = self.start_receive(message, into, then);
        if request.result().is_none() {
            self.shared.ensure_thread();
        }
        Ok(Started::Open(request))
    }

    /// Whether a receive can start.
    #[inline]
    fn check_receive(&self, message: &Message<'_>) -> Result<()> {
        self.check(message)?;
        message.peer.map_or(Ok(()), |peer| message.group.to(peer, "receive from").map(drop))
    }

    fn start_receive(&self, message: &Message<'_>, into: Spans, then: Option<Then>) -> Arc<Request> {
        let request = Arc::new(Request::new(then));
        let Message { group, peer, tag, exact, .. } = *message;
        let receive = Receive {
            request: Arc::clone(&request),
            limits: message.limits(),
            into,
            exact,
            awaits_network: group.awaits_network(peer),
        };
        let source = peer.map(|peer| group.scope().to_world(peer));
        self.shared.with(1, |state| state.receive(Pattern { source, tag }, receive));
        request
    }

    /// Receives a short message from a rank of this host that is there or, if `waits`, comes soon.
    ///
    /// # Safety
    /// The memory of `into` is valid.
    #[inline]
    unsafe fn receive_short(&self, message: &Message<'_>, into: &Spans, waits: bool) -> Option<Status> {
        let Message { group, peer, tag, exact, .. } = *message;
        let source = peer?;
        let Ok(Route::Local(from)) = group.to(source, "") else { return None };
        let from = from as usize;
        if into.len() > CELL_BYTES || into.is_on_device() || from == self.memory.me() {
            return None;
        }
        let receive = ShortReceive { context: group.context(), tag, into, exact };
        // SAFETY: guaranteed by the caller.
        let (tag, bytes) = unsafe { self.shared.receive_short(from, &receive, waits) }?;
        Some(Status { source, tag, bytes })
    }

    /// Sends, and waits.
    ///
    /// # Errors
    /// Those of the send.
    ///
    /// # Safety
    /// The memory of `from` is valid.
    pub unsafe fn send_now(&self, message: &Message<'_>, from: Spans) -> Result<()> {
        let sent = self.route(message, &from)?;
        // SAFETY: guaranteed by the caller.
        if !unsafe { self.send_at_once(message, &sent, &from) }? {
            let request = Arc::new(Request::default());
            self.start_send(&request, &sent, message, from);
            self.wait(&request, None)?;
        }
        if self.has_network {
            self.shared.ensure_thread();
        }
        Ok(())
    }

    /// Receives, and waits.
    ///
    /// # Errors
    /// Those of the receive.
    ///
    /// # Safety
    /// The memory of `into` is valid and used by nobody else.
    pub unsafe fn receive_now(&self, message: &Message<'_>, into: Spans) -> Result<Status> {
        self.check_receive(message)?;
        // SAFETY: guaranteed by the caller.
        unsafe { self.receive_checked(message, into) }
    }

    /// As [`Endpoint::receive_now`], after its check.
    ///
    /// # Safety
    /// As for [`Endpoint::receive_now`].
    unsafe fn receive_checked(&self, message: &Message<'_>, into: Spans) -> Result<Status> {
        // SAFETY: guaranteed by the caller.
        if let Some(status) = unsafe { self.receive_short(message, &into, true) } {
            return Ok(status);
        }
        self.wait(&self.start_receive(message, into, None), None)
    }

    /// Sends and receives, and waits for both.
    ///
    /// # Errors
    /// The first error of the two.
    ///
    /// # Safety
    /// As for [`Endpoint::send_now`] and [`Endpoint::receive_now`].
    pub unsafe fn exchange(
        &self,
        (message, from): (&Message<'_>, Spans),
        (expected, into): (&Message<'_>, Spans),
    ) -> Result<Status> {
        let sent = self.route(message, &from)?;
        self.check_receive(expected)?;
        // SAFETY: guaranteed by the caller.
        if unsafe { self.send_at_once(message, &sent, &from) }? {
            if self.has_network {
                self.shared.ensure_thread();
            }
            // SAFETY: guaranteed by the caller.
            return unsafe { self.receive_checked(expected, into) };
        }
        // The other rank may take this message only once it has this rank's receive.
        let received = self.start_receive(expected, into, None);
        let request = Arc::new(Request::default());
        self.start_send(&request, &sent, message, from);
        let waited = self.wait(&request, None);
        // The receive has a deadline of its own; its memory must not be given back before it has ended.
        let status = self.wait(&received, None);
        waited.and(status)
    }

    /// The result of a send or receive, if it has ended. Makes progress, and does not block.
    pub fn test(&self, request: &Request) -> Option<Result<Status>> {
        if request.result().is_none() {
            self.shared.test();
        }
        request.result().cloned()
    }

    /// Waits for a send or receive. It goes on if `timeout` passes first; `None` waits until it ends, which its own
    /// deadline bounds.
    ///
    /// # Errors
    /// Its error; [`Error::Timeout`] if `timeout` has passed; [`Error::PeerLost`] if a signal should end the wait.
    pub fn wait(&self, request: &Request, timeout: Option<Duration>) -> Result<Status> {
        if let Some(result) = request.result() {
            return result.clone();
        }
        let limit = timeout.map(|timeout| (Instant::now(), timeout));
        let interrupted = Cell::new(false);
        let is_over = || limit.is_some_and(|(since, timeout)| since.elapsed() >= timeout);
        let ended = || request.result().is_some() || interrupted.get();
        let ended_or_over = || ended() || is_over();
        let long_receive = LongReceive::begin();
        let check = || {
            if signals::interrupted() {
                interrupted.set(true);
            }
            long_receive.look(&self.peers, || self.shared.with_state(|state| state.awaited(request)));
        };
        match timeout {
            None => self.shared.wait(&ended, &check),
            Some(_) => self.shared.wait(&ended_or_over, &check),
        }
        match request.result() {
            Some(result) => result.clone(),
            None if interrupted.get() => {
                let error = Error::PeerLost("a send or receive was interrupted by a signal".into());
                self.shared.with(0, |state| state.cancel(request, &error));
                request.result().cloned().unwrap_or(Err(error))
            }
            None => {
                let seconds = timeout.unwrap_or_default().as_secs_f64();
                Err(Error::Timeout(format!("the call has not ended after {seconds:.1} s; it goes on")))
            }
        }
    }

    /// Ends all sends and receives with an error, and reports to the other ranks that no more messages come. Those that
    /// were sent arrive.
    ///
    /// # Errors
    /// [`Error::Internal`] if the thread panicked.
    pub fn close(&self) -> Result<()> {
        let error = Error::State("dl_comm was finalized before the send or receive was complete".into());
        let result = self.shared.close(&error);
        self.shared.with(0, |state| state.remote.iter_mut().for_each(Remote::close));
        depart(&*self.memory);
        result
    }

    /// After [`Endpoint::close`], while other ranks may still send: drops what comes, and tells them. Does not block.
    pub fn linger(&self) {
        self.shared.with(0, |state| state.remote.iter_mut().for_each(Remote::linger));
    }

    /// Ends the use of the network, after [`Endpoint::close`]. `together`: all ranks have closed, so this one takes their
    /// last messages.
    pub fn leave_network(&self, together: bool) {
        if let Some(mut remote) = self.shared.with(0, |state| state.remote.take())
            && together
        {
            remote.take_departures();
        }
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        // Nobody is left who could hear of it.
        let _result = self.close();
        self.leave_network(false);
    }
}
