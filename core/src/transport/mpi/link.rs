//! The link of one shard and channel over MPI messages.

use std::mem;
use std::sync::Arc;
use std::time::Instant;

use super::comm::{Comm, Request};
use crate::error::Result;
use crate::timings::WaitTarget;
use crate::transport::memory::Aligned;
use crate::transport::{ExchangeBuffers, HostLink, MAX_EXCHANGES, Message, WaitContext};

/// Exchanges messages with the drivers of the same shard on the other hosts.
pub struct MpiLink {
    comm: Arc<Comm>,
    /// The first of as many tags as there are turns.
    tag: usize,
    owners: Vec<usize>,
    hosts: Vec<String>,
    turns: [Exchange; MAX_EXCHANGES],
    broken: bool,
}

struct Exchange {
    out: Aligned,
    inbox: Aligned,
    /// What is under way, and to or from which host.
    requests: Vec<Request>,
    with: Vec<usize>,
}

// SAFETY: requests are handles (pointers in some MPI libraries) that any thread may use; the link is one thread's at a time.
unsafe impl Send for Exchange {}

impl MpiLink {
    /// A link between the ranks `drivers` (by host), with `capacity` bytes for the messages of an exchange, each way.
    /// `number` tells the links of one communicator apart; `hosts` are the hosts' names in messages.
    pub fn new(comm: Arc<Comm>, number: usize, drivers: Vec<usize>, hosts: Vec<String>, capacity: usize) -> MpiLink {
        let memory = || Aligned::new(capacity);
        let turns =
            [(); MAX_EXCHANGES].map(|()| Exchange { out: memory(), inbox: memory(), requests: vec![], with: vec![] });
        MpiLink { comm, tag: number * MAX_EXCHANGES, owners: drivers, hosts, turns, broken: false }
    }

    fn post(&mut self, turn: usize, sends: &[Message], receives: &[Message]) -> Result<()> {
        let MpiLink { comm, owners: drivers, turns, .. } = self;
        let tag = self.tag + turn;
        let Exchange { out, inbox, requests, with } = &mut turns[turn];
        for Message { host, bytes } in receives {
            let room = &mut inbox.as_mut_slice()[bytes.clone()];
            // SAFETY: the mail is not touched before `wait` returns, and leaked when that fails.
            requests.push(unsafe { comm.receive(room, drivers[*host], tag) }?);
            with.push(*host);
        }
        for Message { host, bytes } in sends {
            // SAFETY: as above.
            requests.push(unsafe { comm.send(&out.as_slice()[bytes.clone()], drivers[*host], tag) }?);
            with.push(*host);
        }
        Ok(())
    }

    fn wait(&mut self, turn: usize, wait_ctx: &WaitContext<'_>) -> Result<()> {
        let MpiLink { comm, hosts, turns, .. } = self;
        let Exchange { requests, with, .. } = &mut turns[turn];
        let mut since = Instant::now();
        let came = |position: usize| {
            let now = Instant::now();
            wait_ctx.log().add_wait(WaitTarget::Host(with[position]), since, now);
            since = now;
        };
        let late = |open: &[bool]| {
            let mut late: Vec<usize> = (0..open.len()).filter(|&place| open[place]).map(|place| with[place]).collect();
            late.sort_unstable();
            late.dedup();
            wait_ctx.log().set_waiting(late.iter().map(|&host| WaitTarget::Host(host)).collect());
            late.iter().map(|&host| hosts[host].as_str()).collect::<Vec<_>>().join(", ")
        };
        comm.wait_each(requests, wait_ctx, came, late)?;
        requests.clear();
        with.clear();
        Ok(())
    }
}

impl HostLink for MpiLink {
    fn buffers(&mut self, turn: usize) -> ExchangeBuffers<'_> {
        let Exchange { out, inbox, .. } = &mut self.turns[turn];
        ExchangeBuffers { send: out.as_mut_slice(), recv: inbox.as_mut_slice() }
    }

    fn start(&mut self, turn: usize, sends: &[Message], receives: &[Message]) -> Result<()> {
        let result = self.post(turn, sends, receives);
        self.broken |= result.is_err();
        result
    }

    fn finish(&mut self, turn: usize, wait_ctx: &WaitContext<'_>) -> Result<()> {
        let result = self.wait(turn, wait_ctx);
        self.broken |= result.is_err();
        result
    }
}

impl Drop for MpiLink {
    fn drop(&mut self) {
        // MPI may still read or write what an aborted call left behind.
        for turn in &mut self.turns {
            if self.broken || !turn.requests.is_empty() {
                mem::forget(mem::replace(&mut turn.out, Aligned::new(0)));
                mem::forget(mem::replace(&mut turn.inbox, Aligned::new(0)));
            }
        }
    }
}
