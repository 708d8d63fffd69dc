//! The part of an endpoint's state that concerns ranks of other hosts.
//!
//! Thread rule: used under the lock of the endpoint.

use std::sync::Arc;
use std::time::Instant;

use super::endings::failure;
use super::incoming::{Body, Early};
use super::message::{Spans, Status};
use super::pending::{Receive, Send};
use super::progress::State;
use super::remote::{Arrival, HEADER_BYTES, Remote};
use crate::error::Error;
use crate::transport::mailbox::ring::Envelope;

/// The error of who comes after the end.
pub(super) fn closed() -> Error {
    Error::State("dl_comm was finalized and cannot send or receive any more".into())
}

impl State {
    /// Whether something is under way that only looking at the network can end: it wakes nobody.
    #[inline]
    pub fn awaits_network(&self) -> bool {
        self.remote
            .as_ref()
            .is_some_and(|remote| remote.is_open() || (self.awaiting_network > 0 && remote.failure().is_none()))
    }

    /// Whether the network has something to send for sends that may have ended.
    #[inline]
    pub fn has_open_sends(&self) -> bool {
        self.remote.as_ref().is_some_and(Remote::has_open_sends)
    }

    /// Starts a send to a rank of another host.
    pub fn send_far(&mut self, world: usize, send: Send) {
        if let Some(how) = self.remote.as_ref().and_then(|remote| remote.gone(world)) {
            return self.send_to_gone(world, &how, send);
        }
        match &mut self.remote {
            Some(remote) if remote.failure().is_none() => remote.send(world, send, &mut self.finished),
            remote => {
                let failure = remote.as_ref().and_then(Remote::failure).cloned();
                self.finished.push((send.request, Err(failure.unwrap_or_else(closed))));
            }
        }
    }

    /// Looks at the network; returns whether anything has come.
    pub fn look_at_network(&mut self) -> bool {
        let Some(remote) = &mut self.remote else { return false };
        remote.poll();
        let mut arrivals = std::mem::take(&mut self.arrivals);
        let moved = remote.handle(&mut arrivals, &mut self.finished);
        for arrival in arrivals.drain(..) {
            self.arrived_from_far(arrival);
        }
        self.arrivals = arrivals;
        moved
    }

    fn arrived_from_far(&mut self, arrival: Arrival) {
        match arrival {
            Arrival::Data(from, envelope, buffer) => {
                let total = envelope.total as usize;
                let data = &buffer.as_slice()[HEADER_BYTES..HEADER_BYTES + total];
                match self.receive_for(envelope.context, from, envelope.tag) {
                    Some(receive) => {
                        // SAFETY: the caller of the receive keeps its memory valid; the message fits.
                        let write = |into: &Spans| unsafe { into.write(0, data.as_ptr(), total) };
                        self.take_data(receive, from, envelope, write);
                    }
                    None => {
                        self.keep(from, Early { envelope, body: Body::Data(data.into()) });
                    }
                }
                if let Some(remote) = &mut self.remote {
                    remote.give_back(buffer);
                }
            }
            Arrival::Long(from, envelope, id) => match self.receive_for(envelope.context, from, envelope.tag) {
                Some(receive) => self.start_remote(receive, from, envelope, id),
                None => self.keep(from, Early { envelope, body: Body::Remote(id) }),
            },
            Arrival::Aborted(from, context, id) => {
                let is_it = |early: &Early| matches!(early.body, Body::Remote(other) if other == id);
                self.matching.forget_message(context, from, is_it);
            }
        }
    }

    /// Gives a long message of another host to a receive.
    pub(super) fn start_remote(&mut self, mut receive: Receive, from: usize, envelope: Envelope, id: u64) {
        let status = self.status(&receive, from, envelope);
        let status = status.and_then(|status| receive.into.make_host_memory(status.bytes).map(|()| status));
        let Some(remote) = &mut self.remote else {
            return self.finished.push((receive.request, Err(closed())));
        };
        match status {
            Ok(status) => remote.start_long(receive, from, status, id),
            Err(error) => {
                // The send succeeds, as a short one would.
                remote.drop_long(from, id);
                self.finished.push((receive.request, Err(error)));
            }
        }
    }

    /// As [`State::check`], for what is under way with ranks of other hosts.
    pub(super) fn check_network(&mut self, now: Instant, closing: Option<&Error>) {
        let peers = Arc::clone(&self.peers);
        let Some(remote) = &mut self.remote else { return };
        remote.check();
        let broken = remote.failure().cloned();
        let gone = remote.gone_now();
        let lost = |world: usize| Some(format!("{} {}", peers.name(world), gone.get(&world)?));
        let sends = |world: usize, send: &Send| {
            let to = format!("to {}", peers.name(world));
            let describe = || send.limits.describe("send", Some(send.envelope.tag), &to);
            closing.cloned().or_else(|| failure(&send.limits, now, broken.clone(), lost(world), describe))
        };
        let receives = |world: usize, receive: &Receive, status: Status| {
            let from = format!("from {}", peers.name(world));
            let describe = || receive.limits.describe("receive", Some(status.tag), &from);
            closing.cloned().or_else(|| failure(&receive.limits, now, broken.clone(), lost(world), describe))
        };
        remote.fail(sends, receives, &mut self.finished);
    }
}
