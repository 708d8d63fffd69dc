//! The link of one shard and channel over MPI.

use std::mem;
use std::sync::Arc;

use super::comm::{Comm, Request};
use crate::error::Result;
use crate::transport::memory::Aligned;
use crate::transport::{ExchangeBuffers, HostLink, HostMessage, MAX_EXCHANGES};

/// Exchanges messages with the owners of the same shard on the other hosts.
pub struct MpiLink {
    comm: Arc<Comm>,
    /// The first of [`MAX_EXCHANGES`] consecutive tags.
    tag: usize,
    owners: Vec<usize>,
    hosts: Vec<String>,
    exchanges: [Exchange; MAX_EXCHANGES],
    /// Requests in flight; MPI tests them together.
    requests: Vec<Request>,
    /// By request: its exchange and host.
    transfers: Vec<(usize, usize)>,
    /// The requests that the last test has completed.
    done: Vec<usize>,
    broken: bool,
}

struct Exchange {
    send: Aligned,
    recv: Aligned,
    in_flight: usize,
}

// SAFETY: any thread may use a request handle (a pointer in some MPI libraries); one thread at a time uses the link.
unsafe impl Send for MpiLink {}

impl MpiLink {
    /// A link between the ranks `owners` (by host), with `capacity` bytes per exchange and direction. `number`
    /// distinguishes the links of one communicator; `hosts` are display names.
    pub fn new(comm: Arc<Comm>, number: usize, owners: Vec<usize>, hosts: Vec<String>, capacity: usize) -> MpiLink {
        let memory = || Aligned::new(capacity);
        let exchanges = [(); MAX_EXCHANGES].map(|()| Exchange { send: memory(), recv: memory(), in_flight: 0 });
        let (requests, transfers, done) = Default::default();
        let tag = number * MAX_EXCHANGES;
        MpiLink { comm, tag, owners, hosts, exchanges, requests, transfers, done, broken: false }
    }

    fn post(&mut self, exchange: usize, sends: &[HostMessage], receives: &[HostMessage]) -> Result<()> {
        let MpiLink { comm, owners, exchanges, requests, transfers, .. } = self;
        let tag = self.tag + exchange;
        let Exchange { send, recv, in_flight } = &mut exchanges[exchange];
        for HostMessage { host, bytes } in receives {
            let buffer = &mut recv.as_mut_slice()[bytes.clone()];
            // SAFETY: the buffer is not accessed before the request completes, and is leaked if it never does.
            requests.push(unsafe { comm.receive(buffer, owners[*host], tag) }?);
            transfers.push((exchange, *host));
            *in_flight += 1;
        }
        for HostMessage { host, bytes } in sends {
            // SAFETY: as above.
            requests.push(unsafe { comm.send(&send.as_slice()[bytes.clone()], owners[*host], tag) }?);
            transfers.push((exchange, *host));
            *in_flight += 1;
        }
        Ok(())
    }

    fn test(&mut self, completed: &mut dyn FnMut(usize)) -> Result<()> {
        let MpiLink { comm, exchanges, requests, transfers, done, .. } = self;
        if requests.is_empty() {
            return Ok(());
        }
        comm.test_some(requests, done)?;
        // From the end, so that a request that fills a gap is one in flight.
        done.sort_unstable();
        for index in done.drain(..).rev() {
            requests.swap_remove(index);
            let (exchange, host) = transfers.swap_remove(index);
            exchanges[exchange].in_flight -= 1;
            completed(host);
        }
        Ok(())
    }
}

impl HostLink for MpiLink {
    fn buffers(&mut self, exchange: usize) -> ExchangeBuffers<'_> {
        let Exchange { send, recv, .. } = &mut self.exchanges[exchange];
        ExchangeBuffers { send: send.as_mut_slice(), recv: recv.as_mut_slice() }
    }

    fn start(&mut self, exchange: usize, sends: &[HostMessage], receives: &[HostMessage]) -> Result<()> {
        self.post(exchange, sends, receives).inspect_err(|_| self.broken = true)
    }

    fn poll(&mut self, completed: &mut dyn FnMut(usize)) -> Result<()> {
        self.test(completed).inspect_err(|_| self.broken = true)
    }

    fn in_flight(&self, exchange: usize) -> usize {
        self.exchanges[exchange].in_flight
    }

    fn awaited(&self) -> Vec<usize> {
        let mut hosts: Vec<usize> = self.transfers.iter().map(|(_, host)| *host).collect();
        hosts.sort_unstable();
        hosts.dedup();
        hosts
    }

    fn host_name(&self, host: usize) -> String {
        self.hosts[host].clone()
    }
}

impl Drop for MpiLink {
    fn drop(&mut self) {
        // MPI may still access the buffers of an aborted call.
        for exchange in &mut self.exchanges {
            if self.broken || exchange.in_flight > 0 {
                mem::forget(mem::replace(&mut exchange.send, Aligned::new(0)));
                mem::forget(mem::replace(&mut exchange.recv, Aligned::new(0)));
            }
        }
    }
}
