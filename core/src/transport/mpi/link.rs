//! The link of one shard and channel over MPI.

use std::mem;
use std::sync::Arc;

use super::comm::{Comm, Request};
use crate::error::Result;
use crate::transport::{ExchangeBuffers, ExchangeMemory, HostLink, HostMessage, MAX_EXCHANGES};

/// Exchanges messages with the owners of the same shard on the other hosts.
pub struct MpiLink {
    comm: Arc<Comm>,
    /// The first of [`MAX_EXCHANGES`] consecutive tags.
    tag: usize,
    owners: Vec<usize>,
    hosts: Vec<String>,
    memory: ExchangeMemory,
    /// By exchange: its messages in flight.
    in_flight: [usize; MAX_EXCHANGES],
    /// Requests in flight; MPI tests them together.
    requests: Vec<Request>,
    /// By request: its exchange and host.
    transfers: Vec<(usize, usize)>,
    /// The requests that the last test has completed.
    done: Vec<usize>,
    broken: bool,
}

// SAFETY: any thread may use a request handle (a pointer in some MPI libraries); one thread at a time uses the link.
unsafe impl Send for MpiLink {}

impl MpiLink {
    /// A link between the ranks `owners` (by host), with `capacity` bytes per exchange and direction. `number`
    /// distinguishes the links of one communicator; `hosts` are display names.
    pub fn new(comm: Arc<Comm>, number: usize, owners: Vec<usize>, hosts: Vec<String>, capacity: usize) -> MpiLink {
        let (memory, in_flight) = (ExchangeMemory::new(capacity), [0; MAX_EXCHANGES]);
        let (requests, transfers, done) = Default::default();
        let tag = number * MAX_EXCHANGES;
        MpiLink { comm, tag, owners, hosts, memory, in_flight, requests, transfers, done, broken: false }
    }

    fn post(&mut self, exchange: usize, sends: &[HostMessage], receives: &[HostMessage]) -> Result<()> {
        let MpiLink { comm, owners, memory, in_flight, requests, transfers, .. } = self;
        let tag = self.tag + exchange;
        let ExchangeBuffers { send, recv, .. } = memory.of(exchange);
        let in_flight = &mut in_flight[exchange];
        for HostMessage { host, bytes } in receives {
            let buffer = &mut recv[bytes.clone()];
            // SAFETY: the buffer is not accessed before the request completes, and is leaked if it never does.
            requests.push(unsafe { comm.receive(buffer, owners[*host], tag) }?);
            transfers.push((exchange, *host));
            *in_flight += 1;
        }
        for HostMessage { host, bytes } in sends {
            // SAFETY: as above.
            requests.push(unsafe { comm.send(&send[bytes.clone()], owners[*host], tag) }?);
            transfers.push((exchange, *host));
            *in_flight += 1;
        }
        Ok(())
    }

    fn test(&mut self, completed: &mut dyn FnMut(usize)) -> Result<()> {
        let MpiLink { comm, in_flight, requests, transfers, done, .. } = self;
        if requests.is_empty() {
            return Ok(());
        }
        comm.test_some(requests, done)?;
        // From the end, so that a request that fills a gap is one in flight.
        done.sort_unstable();
        for index in done.drain(..).rev() {
            requests.swap_remove(index);
            let (exchange, host) = transfers.swap_remove(index);
            in_flight[exchange] -= 1;
            completed(host);
        }
        Ok(())
    }
}

impl HostLink for MpiLink {
    fn memory(&mut self) -> &mut ExchangeMemory {
        &mut self.memory
    }

    fn start(&mut self, exchange: usize, sends: &[HostMessage], receives: &[HostMessage]) -> Result<()> {
        self.post(exchange, sends, receives).inspect_err(|_| self.broken = true)
    }

    fn poll(&mut self, completed: &mut dyn FnMut(usize)) -> Result<()> {
        self.test(completed).inspect_err(|_| self.broken = true)
    }

    fn in_flight(&self, exchange: usize) -> usize {
        self.in_flight[exchange]
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
        if self.broken || !self.requests.is_empty() {
            mem::forget(mem::replace(&mut self.memory, ExchangeMemory::new(0)));
        }
    }
}
