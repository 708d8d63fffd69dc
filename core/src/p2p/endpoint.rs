//! A process's end of its mailboxes: starts sends and receives, and waits for them.
//!
//! Thread rule: any thread may use an [`Endpoint`].

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::driver::Shared;
use super::incoming::Receive;
use super::matching::Pattern;
use super::message::{Limits, Scope, Spans, Status};
use super::outgoing::{Send, send_short};
use super::progress::{Peers, State};
use super::remote::{Hosts, Remote};
use super::remote_progress::closed;
use super::request::{Request, Then};
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

/// Where a message goes.
#[derive(Clone, Copy)]
enum Route {
    /// To a local rank.
    Local(usize),
    /// To a rank of the job, on another host.
    Far(usize),
}

/// What a send or receive is told, beside its memory.
pub struct Message<'a> {
    /// The group.
    pub scope: &'a Arc<dyn Scope>,
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

impl Message<'_> {
    fn limits(&self) -> Limits {
        Limits {
            scope: Arc::clone(self.scope),
            name: self.name.to_owned(),
            since: Instant::now(),
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

    /// The rank in the job of a rank of the group that this rank can reach.
    fn reach(&self, message: &Message<'_>, rank: usize, what: &str) -> Result<usize> {
        let size = message.scope.size();
        if rank >= size {
            return Err(Error::Invalid(format!("{what} rank {rank} of {}, which has {size}", message.scope.name())));
        }
        let world = message.scope.to_world(rank);
        if self.has_network || self.peers.local(world).is_some() {
            return Ok(world);
        }
        Err(Error::Invalid(format!(
            "{what} rank {rank} of {}, which is on another host; there is no network for messages between hosts",
            message.scope.name()
        )))
    }

    /// Whether a rank of another host may send the message.
    fn awaits_network(&self, message: &Message<'_>, source: Option<usize>) -> bool {
        let (scope, peers) = (message.scope, &self.peers);
        let is_far = |world: usize| peers.local(world).is_none();
        self.has_network
            && match source {
                Some(world) => is_far(world),
                None => scope.size() > peers.world.len() || (0..scope.size()).any(|rank| is_far(scope.to_world(rank))),
            }
    }

    fn check(&self, message: &Message<'_>) -> Result<()> {
        if self.shared.closed.load(Ordering::Relaxed) {
            return Err(closed());
        }
        if signals::checking() {
            return Err(Error::State("the signal check of dl_comm must not send or receive".into()));
        }
        message.scope.failure().map_or(Ok(()), Err)
    }

    /// Where a send goes, and what its cell says.
    fn route(&self, message: &Message<'_>, len: usize) -> Result<(Route, Envelope, Status)> {
        self.check(message)?;
        let (Some(peer), Some(tag)) = (message.peer, message.tag) else {
            return Err(Error::Invalid("a send needs a rank and a tag".into()));
        };
        let world = self.reach(message, peer, "send to")?;
        let to = self.peers.local(world).map_or(Route::Far(world), Route::Local);
        let me = self.peers.world[self.memory.me()];
        let status = Status { source: message.scope.of_world(me).unwrap_or(me), tag, bytes: len };
        Ok((to, Envelope { context: message.scope.context(), total: len as u64, tag, kind: 0 }, status))
    }

    /// Sends a message that needs no waiting: short, with room in the ring or at the other host's rank.
    ///
    /// # Safety
    /// The memory of `from` is valid.
    unsafe fn send_at_once(&self, to: Route, envelope: Envelope, from: &Spans) -> Result<bool> {
        let to = match to {
            Route::Local(to) => to,
            Route::Far(world) => {
                return self.shared.with(0, |state| match &mut state.remote {
                    // SAFETY: guaranteed by the caller.
                    Some(remote) => unsafe { remote.send_short(world, envelope, from) },
                    None => Err(closed()),
                });
            }
        };
        if to == self.memory.me() || from.len() > CELL_BYTES {
            return Ok(false);
        }
        self.shared.with(0, |state| {
            let (outgoing, mailbox) = state.outgoing(to);
            // SAFETY: guaranteed by the caller.
            Ok(!outgoing.has_queue() && unsafe { send_short(mailbox, to, envelope, from) }?)
        })
    }

    /// Starts a send. Does not block.
    ///
    /// # Errors
    /// Invalid arguments; nothing was started then.
    ///
    /// # Safety
    /// The memory of `from` is valid and not written until the send has ended.
    pub unsafe fn send(&self, message: &Message<'_>, from: Spans, then: Option<Then>) -> Result<Arc<Request>> {
        let (to, envelope, status) = self.route(message, from.len())?;
        let request = Arc::new(Request::new(then));
        // SAFETY: guaranteed by the caller.
        if unsafe { self.send_at_once(to, envelope, &from) }? {
            request.finish(Ok(status));
            if self.has_network {
                self.shared.ensure_thread();
            }
            return Ok(request);
        }
        self.start_send(&request, to, envelope, status, message, from);
        self.shared.ensure_thread();
        Ok(request)
    }

    fn start_send(
        &self,
        request: &Arc<Request>,
        to: Route,
        envelope: Envelope,
        status: Status,
        message: &Message<'_>,
        from: Spans,
    ) {
        let send = Send { request: Arc::clone(request), limits: message.limits(), envelope, from, status };
        self.shared.with(1, |state| match to {
            Route::Local(to) => state.send(to, send),
            Route::Far(world) => state.send_far(world, send),
        });
    }

    /// Starts a receive. Does not block.
    ///
    /// # Errors
    /// Invalid arguments; nothing was started then.
    ///
    /// # Safety
    /// The memory of `into` is valid and used by nobody else until the receive has ended.
    pub unsafe fn receive(&self, message: &Message<'_>, into: Spans, then: Option<Then>) -> Result<Arc<Request>> {
        let request = self.start_receive(message, into, then)?;
        if request.result().is_none() {
            self.shared.ensure_thread();
        }
        Ok(request)
    }

    fn start_receive(&self, message: &Message<'_>, into: Spans, then: Option<Then>) -> Result<Arc<Request>> {
        self.check(message)?;
        let source = message.peer.map(|peer| self.reach(message, peer, "receive from")).transpose()?;
        let request = Arc::new(Request::new(then));
        let awaits_network = self.awaits_network(message, source);
        let receive = Receive {
            request: Arc::clone(&request),
            limits: message.limits(),
            into,
            exact: message.exact,
            awaits_network,
        };
        self.shared.with(1, |state| state.receive(Pattern { source, tag: message.tag }, receive));
        Ok(request)
    }

    /// Sends and receives, and waits for both. Either may be missing.
    ///
    /// # Errors
    /// The first error of the two.
    ///
    /// # Safety
    /// As for [`Endpoint::send`] and [`Endpoint::receive`].
    pub unsafe fn exchange(
        &self,
        send: Option<(&Message<'_>, Spans)>,
        receive: Option<(&Message<'_>, Spans)>,
    ) -> Result<Option<Status>> {
        let sent = match &send {
            Some((message, from)) => Some(self.route(message, from.len())?),
            None => None,
        };
        let received = match receive {
            Some((message, into)) => Some(self.start_receive(message, into, None)?),
            None => None,
        };
        let mut waits = Ok(());
        if let (Some((message, from)), Some((to, envelope, status))) = (send, sent) {
            // SAFETY: guaranteed by the caller.
            match unsafe { self.send_at_once(to, envelope, &from) } {
                Ok(true) => {}
                Ok(false) => {
                    let request = Arc::new(Request::default());
                    self.start_send(&request, to, envelope, status, message, from);
                    waits = self.wait(&request, None).map(drop);
                }
                Err(error) => waits = Err(error),
            }
        }
        if self.has_network {
            self.shared.ensure_thread();
        }
        // The receive has a deadline of its own; its memory must not be given back before it has ended.
        let status = received.map(|request| self.wait(&request, None)).transpose();
        waits.and(status)
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
        let since = Instant::now();
        let interrupted = std::cell::Cell::new(false);
        let is_over = || timeout.is_some_and(|timeout| since.elapsed() >= timeout);
        let ended = || request.result().is_some() || interrupted.get();
        let ended_or_over = || ended() || is_over();
        let check = || {
            if signals::interrupted() {
                interrupted.set(true);
            }
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
        let error = Error::State("dl_comm was finalised before the send or receive was complete".into());
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
        // Nobody is left to be told.
        let _result = self.close();
        self.leave_network(false);
    }
}
