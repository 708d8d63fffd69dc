//! The part of an endpoint's state that concerns ranks of other hosts.
//!
//! Thread rule: used under the lock of the endpoint.

use std::sync::Arc;
use std::time::Instant;

use super::incoming::{Body, Early, Receive};
use super::message::Status;
use super::outgoing::Send;
use super::progress::{State, failure};
use super::remote::{Arrival, HEADER_BYTES, Remote};
use crate::error::Error;

/// The error of who comes after the end.
pub(super) fn closed() -> Error {
    Error::State("dl_comm was finalised and cannot send or receive any more".into())
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
                let (tag, total) = (envelope.tag, envelope.total as usize);
                let data = &buffer.as_slice()[HEADER_BYTES..HEADER_BYTES + total];
                match self.receive_for(envelope.context, from, tag) {
                    Some(receive) => {
                        let result = self.status(&receive, from, tag, total).inspect(|_| {
                            // SAFETY: the caller of the receive keeps its memory valid; the message fits.
                            unsafe { receive.into.write(0, data.as_ptr(), total) };
                        });
                        self.finished.push((receive.request, result));
                    }
                    None => {
                        let early = Early { total, body: Body::Data(data.into()) };
                        self.matching.keep(envelope.context, from, tag, early);
                    }
                }
                if let Some(remote) = &mut self.remote {
                    remote.give_back(buffer);
                }
            }
            Arrival::Long(from, envelope, id) => {
                let (tag, total) = (envelope.tag, envelope.total as usize);
                match self.receive_for(envelope.context, from, tag) {
                    Some(receive) => self.start_remote(receive, from, tag, total, id),
                    None => {
                        let early = Early { total, body: Body::Remote(id) };
                        self.matching.keep(envelope.context, from, tag, early);
                    }
                }
            }
            Arrival::Aborted(from, context, id) => {
                let is_it = |early: &Early| matches!(early.body, Body::Remote(other) if other == id);
                self.matching.forget_message(context, from, is_it);
            }
        }
    }

    /// Gives a long message of another host to a receive.
    pub(super) fn start_remote(&mut self, receive: Receive, from: usize, tag: u32, total: usize, id: u64) {
        let status = self.status(&receive, from, tag, total);
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
