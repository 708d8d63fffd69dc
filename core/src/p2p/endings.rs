//! The sends and receives that end with an error: cancelled, past their deadline, of a failed group, or without their peer.
//!
//! Thread rule: used under the lock of the endpoint.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::device_progress::fail_on_devices;
use super::incoming::Body;
use super::matching::Pattern;
use super::message::{Limits, Status};
use super::pending::{Finished, Receive, Send};
use super::progress::State;
use super::remote::Remote;
use super::request::Request;
use crate::error::Error;

/// A receive from any rank learns that all have ended if its group is not larger than this; else its deadline ends it.
const MAX_GREETED: usize = 64;

/// After this time a receive makes itself known to the ranks of other hosts that it waits for. Not sooner: if one has just
/// ended, the failure detector should know that first, since the network may not survive the message.
const GREET_AFTER: Duration = Duration::from_secs(1);

impl State {
    /// Ends one send or receive with an error.
    pub fn cancel(&mut self, request: &Request, error: &Error) {
        let is_it = |other: &Arc<Request>| std::ptr::eq(&raw const **other, request).then(|| error.clone());
        let State { mailbox, matching, outgoing, incoming, finished, held, remote, awaiting_network, .. } = self;
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
        fail_on_devices(held, finished, |_, send| is_it(&send.request), |receive, _| is_it(&receive.request));
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
        let State { mailbox, matching, outgoing, incoming, finished, held, remote, awaiting_network, me, .. } = self;
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
        let send_held = |world: usize, send: &Send| {
            let describe =
                || send.limits.describe("send", Some(send.envelope.tag), &format!("to {}", peers.name(world)));
            let loss = if world == peers.world[*me] { None } else { lost(world) };
            closing.cloned().or_else(|| failure(&send.limits, now, None, loss, describe))
        };
        let delivered = |receive: &Receive, status: Status| {
            let describe = || {
                let from = receive.limits.scope.to_world(status.source);
                receive.limits.describe("receive", Some(status.tag), &format!("from {}", peers.name(from)))
            };
            closing.cloned().or_else(|| failure(&receive.limits, now, None, None, describe))
        };
        fail_on_devices(held, finished, send_held, delivered);
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
