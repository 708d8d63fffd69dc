//! The link of one shard and channel over MPI.

use std::mem;
use std::sync::Arc;
use std::time::Instant;

use super::comm::{Comm, Request};
use crate::error::Result;
use crate::timings::WaitTarget;
use crate::transport::memory::Aligned;
use crate::transport::{ExchangeBuffers, HostLink, MAX_EXCHANGES, Message, WaitContext};

/// Exchanges messages with the owners of the same shard on the other hosts.
pub struct MpiLink {
    comm: Arc<Comm>,
    /// The first of [`MAX_EXCHANGES`] consecutive tags.
    tag: usize,
    owners: Vec<usize>,
    hosts: Vec<String>,
    exchanges: [Exchange; MAX_EXCHANGES],
    broken: bool,
}

struct Exchange {
    send: Aligned,
    recv: Aligned,
    /// Requests in flight, and the host of each.
    requests: Vec<Request>,
    peers: Vec<usize>,
}

// SAFETY: any thread may use a request handle (a pointer in some MPI libraries); one thread at a time uses the link.
unsafe impl Send for Exchange {}

impl MpiLink {
    /// A link between the ranks `owners` (by host), with `capacity` bytes per exchange and direction. `number`
    /// distinguishes the links of one communicator; `hosts` are display names.
    pub fn new(comm: Arc<Comm>, number: usize, owners: Vec<usize>, hosts: Vec<String>, capacity: usize) -> MpiLink {
        let memory = || Aligned::new(capacity);
        let exchanges =
            [(); MAX_EXCHANGES].map(|()| Exchange { send: memory(), recv: memory(), requests: vec![], peers: vec![] });
        MpiLink { comm, tag: number * MAX_EXCHANGES, owners, hosts, exchanges, broken: false }
    }

    fn post(&mut self, exchange: usize, sends: &[Message], receives: &[Message]) -> Result<()> {
        let MpiLink { comm, owners, exchanges, .. } = self;
        let tag = self.tag + exchange;
        let Exchange { send, recv, requests, peers } = &mut exchanges[exchange];
        for Message { host, bytes } in receives {
            let buffer = &mut recv.as_mut_slice()[bytes.clone()];
            // SAFETY: the buffer is not accessed before `wait` returns, and is leaked if that fails.
            requests.push(unsafe { comm.receive(buffer, owners[*host], tag) }?);
            peers.push(*host);
        }
        for Message { host, bytes } in sends {
            // SAFETY: as above.
            requests.push(unsafe { comm.send(&send.as_slice()[bytes.clone()], owners[*host], tag) }?);
            peers.push(*host);
        }
        Ok(())
    }

    fn wait(&mut self, exchange: usize, wait_ctx: &WaitContext<'_>) -> Result<()> {
        let MpiLink { comm, hosts, exchanges, .. } = self;
        let Exchange { requests, peers, .. } = &mut exchanges[exchange];
        let mut since = Instant::now();
        let on_complete = |index: usize| {
            let now = Instant::now();
            wait_ctx.log().add_wait(WaitTarget::Host(peers[index]), since, now);
            since = now;
        };
        let pending_hosts = |pending: &[bool]| {
            let mut pending_hosts: Vec<usize> =
                (0..pending.len()).filter(|&index| pending[index]).map(|index| peers[index]).collect();
            pending_hosts.sort_unstable();
            pending_hosts.dedup();
            wait_ctx.log().set_waiting(pending_hosts.iter().map(|&host| WaitTarget::Host(host)).collect());
            pending_hosts.iter().map(|&host| hosts[host].as_str()).collect::<Vec<_>>().join(", ")
        };
        comm.wait_each(requests, wait_ctx, on_complete, pending_hosts)?;
        requests.clear();
        peers.clear();
        Ok(())
    }
}

impl HostLink for MpiLink {
    fn buffers(&mut self, exchange: usize) -> ExchangeBuffers<'_> {
        let Exchange { send, recv, .. } = &mut self.exchanges[exchange];
        ExchangeBuffers { send: send.as_mut_slice(), recv: recv.as_mut_slice() }
    }

    fn start(&mut self, exchange: usize, sends: &[Message], receives: &[Message]) -> Result<()> {
        self.post(exchange, sends, receives).inspect_err(|_| self.broken = true)
    }

    fn finish(&mut self, exchange: usize, wait_ctx: &WaitContext<'_>) -> Result<()> {
        self.wait(exchange, wait_ctx).inspect_err(|_| self.broken = true)
    }
}

impl Drop for MpiLink {
    fn drop(&mut self) {
        // MPI may still access the buffers of an aborted call.
        for exchange in &mut self.exchanges {
            if self.broken || !exchange.requests.is_empty() {
                mem::forget(mem::replace(&mut exchange.send, Aligned::new(0)));
                mem::forget(mem::replace(&mut exchange.recv, Aligned::new(0)));
            }
        }
    }
}
