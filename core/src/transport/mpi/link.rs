//! The link of one lane and channel over MPI messages.

use std::mem;
use std::sync::Arc;
use std::time::Instant;

use super::comm::Comm;
use crate::error::Result;
use crate::trace::Late;
use crate::transport::memory::Aligned;
use crate::transport::{Link, Out, Patience};

/// Exchanges messages with the drivers of the same lane on the other hosts.
pub struct MpiLink {
    comm: Arc<Comm>,
    tag: usize,
    host: usize,
    drivers: Vec<usize>,
    hosts: Vec<String>,
    each: Vec<Aligned>,
    same: Aligned,
    received: Vec<Aligned>,
    broken: bool,
}

impl MpiLink {
    /// A link between the ranks `drivers` (by host), this process being that of host `host`, for messages of up to
    /// `capacity` bytes. `tag` tells the links of one communicator apart; `hosts` are the hosts' names in messages.
    pub fn new(
        comm: Arc<Comm>,
        tag: usize,
        host: usize,
        drivers: Vec<usize>,
        hosts: Vec<String>,
        capacity: usize,
    ) -> MpiLink {
        let messages = || (0..drivers.len()).map(|_| Aligned::new(capacity)).collect();
        let (each, received) = (messages(), messages());
        MpiLink { comm, tag, host, drivers, hosts, each, same: Aligned::new(capacity), received, broken: false }
    }

    fn transfer(&mut self, out: Out<'_>, patience: &Patience<'_>) -> Result<()> {
        let others: Vec<usize> = (0..self.drivers.len()).filter(|&host| host != self.host).collect();
        let mut requests = Vec::with_capacity(2 * others.len());
        for &host in &others {
            // SAFETY: the messages are not touched before `wait_each` returns, and leaked when it fails.
            requests
                .push(unsafe { self.comm.receive(self.received[host].as_mut_slice(), self.drivers[host], self.tag) }?);
        }
        for &host in &others {
            let message = match out {
                Out::Each(lens) => &self.each[host].as_slice()[..lens[host]],
                Out::Same(len) => &self.same.as_slice()[..len],
            };
            // SAFETY: as above.
            requests.push(unsafe { self.comm.send(message, self.drivers[host], self.tag) }?);
        }
        // The first half of the requests are the receptions, the second the sends; both are by host.
        let host_of = |position: usize| others[position % others.len()];
        let mut since = Instant::now();
        let came = |position: usize| {
            let now = Instant::now();
            patience.log().waited_for(Late::Host(host_of(position)), since, now);
            since = now;
        };
        let late = |open: &[bool]| {
            let mut late: Vec<usize> = (0..open.len()).filter(|&place| open[place]).map(host_of).collect();
            late.sort_unstable();
            late.dedup();
            patience.log().waits_for(late.iter().map(|&host| Late::Host(host)).collect());
            late.iter().map(|&host| self.hosts[host].as_str()).collect::<Vec<_>>().join(", ")
        };
        self.comm.wait_each(&mut requests, patience, came, late)
    }
}

impl Link for MpiLink {
    fn message_to(&mut self, host: usize) -> &mut [u8] {
        self.each[host].as_mut_slice()
    }

    fn message_to_all(&mut self) -> &mut [u8] {
        self.same.as_mut_slice()
    }

    fn exchange(&mut self, out: Out<'_>, patience: &Patience<'_>) -> Result<()> {
        let result = self.transfer(out, patience);
        self.broken |= result.is_err();
        result
    }

    fn message_from(&self, host: usize) -> &[u8] {
        self.received[host].as_slice()
    }
}

impl Drop for MpiLink {
    fn drop(&mut self) {
        if self.broken {
            // MPI may still read or write these.
            mem::forget(mem::take(&mut self.each));
            mem::forget(mem::take(&mut self.received));
            mem::forget(mem::replace(&mut self.same, Aligned::new(0)));
        }
    }
}
