//! The link of one lane and channel over MPI messages.

use std::mem;
use std::sync::Arc;

use super::comm::Comm;
use crate::error::Result;
use crate::transport::memory::Aligned;
use crate::transport::{Link, Out, Patience};

/// Exchanges messages with the drivers of the same lane on the other hosts.
pub struct MpiLink {
    comm: Arc<Comm>,
    tag: usize,
    host: usize,
    drivers: Vec<usize>,
    late: String,
    each: Vec<Aligned>,
    same: Aligned,
    received: Vec<Aligned>,
    broken: bool,
}

impl MpiLink {
    /// A link between the ranks `drivers` (by host), this process being that of host `host`, for messages of up to
    /// `capacity` bytes. `tag` tells the links of one communicator apart; `late` names the drivers in messages.
    pub fn new(
        comm: Arc<Comm>,
        tag: usize,
        host: usize,
        drivers: Vec<usize>,
        late: String,
        capacity: usize,
    ) -> MpiLink {
        let messages = || (0..drivers.len()).map(|_| Aligned::new(capacity)).collect();
        let (each, received) = (messages(), messages());
        MpiLink { comm, tag, host, drivers, late, each, same: Aligned::new(capacity), received, broken: false }
    }

    fn transfer(&mut self, out: Out<'_>, patience: &Patience<'_>) -> Result<()> {
        let mut requests = Vec::with_capacity(2 * self.drivers.len());
        for (host, &driver) in self.drivers.iter().enumerate() {
            if host != self.host {
                // SAFETY: the messages are not touched before `wait` returns, and leaked when it fails.
                requests.push(unsafe { self.comm.receive(self.received[host].as_mut_slice(), driver, self.tag) }?);
            }
        }
        for (host, &driver) in self.drivers.iter().enumerate() {
            if host != self.host {
                let message = match out {
                    Out::Each(lens) => &self.each[host].as_slice()[..lens[host]],
                    Out::Same(len) => &self.same.as_slice()[..len],
                };
                // SAFETY: as above.
                requests.push(unsafe { self.comm.send(message, driver, self.tag) }?);
            }
        }
        self.comm.wait(&mut requests, patience, &self.late)
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
