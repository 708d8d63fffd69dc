//! Messages between hosts over MPI, for send and receive, on a communicator of their own.
//!
//! Thread rule: used by one thread at a time.

use std::mem;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::comm::{Comm, Request};
use crate::error::Result;
use crate::transport::memory::Aligned;
use crate::transport::messages::{Completed, MessageNetwork};

/// How long the end waits for cancelled receives; none of them has a partner, so MPI needs no other rank for that.
const CANCEL_TIMEOUT: Duration = Duration::from_millis(200);

/// See the module's documentation.
pub struct MpiMessages {
    comm: Arc<Comm>,
    max_tag: usize,
    requests: Vec<Request>,
    /// What the requests are, in the same order.
    transfers: Vec<Transfer>,
    has_failed: bool,
}

struct Transfer {
    token: u64,
    buffer: Aligned,
    /// Of a send.
    len: usize,
    is_send: bool,
}

// SAFETY: any thread may use a request handle (a pointer in some MPI libraries); one thread at a time uses them.
unsafe impl Send for MpiMessages {}

impl MpiMessages {
    /// Messages on `comm`, which nobody else uses.
    pub fn new(comm: Arc<Comm>, max_tag: usize) -> MpiMessages {
        MpiMessages { comm, max_tag, requests: Vec::new(), transfers: Vec::new(), has_failed: false }
    }

    fn add(&mut self, request: Result<Request>, transfer: Transfer) -> Result<()> {
        match request {
            Ok(request) => {
                self.requests.push(request);
                self.transfers.push(transfer);
                Ok(())
            }
            Err(error) => {
                self.has_failed = true;
                // Nobody knows what MPI has started.
                mem::forget(transfer.buffer);
                Err(error)
            }
        }
    }
}

impl MessageNetwork for MpiMessages {
    fn max_tag(&self) -> usize {
        self.max_tag
    }

    fn send(&mut self, to: usize, tag: usize, buffer: Aligned, len: usize, token: u64) -> Result<()> {
        // SAFETY: the buffer is kept until the request has completed, else leaked.
        let request = unsafe { self.comm.send(&buffer.as_slice()[..len], to, tag) };
        self.add(request, Transfer { token, buffer, len, is_send: true })
    }

    fn receive(&mut self, from: Option<usize>, tag: usize, mut buffer: Aligned, token: u64) -> Result<()> {
        // SAFETY: as above.
        let request = unsafe {
            match from {
                Some(from) => self.comm.receive(buffer.as_mut_slice(), from, tag),
                None => self.comm.receive_from_any(buffer.as_mut_slice(), tag),
            }
        };
        self.add(request, Transfer { token, buffer, len: 0, is_send: false })
    }

    fn poll(&mut self, done: &mut Vec<Completed>) -> Result<()> {
        if self.requests.is_empty() {
            return Ok(());
        }
        let MpiMessages { comm, requests, transfers, has_failed, .. } = self;
        let mut ended = Vec::new();
        let tested = comm.test_some(requests, |index, source, len| ended.push((index, source, len)));
        tested.inspect_err(|_| *has_failed = true)?;
        // From the back, so that the other indices stay.
        ended.sort_unstable_by_key(|&(index, ..)| std::cmp::Reverse(index));
        for (index, source, received) in ended {
            requests.swap_remove(index);
            let Transfer { token, buffer, len, is_send } = transfers.swap_remove(index);
            done.push(Completed { token, buffer, source, len: if is_send { len } else { received } });
        }
        Ok(())
    }
}

impl Drop for MpiMessages {
    fn drop(&mut self) {
        if !self.has_failed {
            let receives = (0..self.requests.len()).filter(|&index| !self.transfers[index].is_send);
            for index in receives.collect::<Vec<_>>() {
                self.has_failed |= self.comm.cancel(&mut self.requests[index]).is_err();
            }
            let until = Instant::now() + CANCEL_TIMEOUT;
            let mut done = Vec::new();
            while !self.has_failed
                && self.transfers.iter().any(|transfer| !transfer.is_send)
                && Instant::now() < until
                && self.poll(&mut done).is_ok()
            {}
        }
        // MPI may still access the memory of what is open.
        for transfer in mem::take(&mut self.transfers) {
            mem::forget(transfer.buffer);
            self.has_failed = true;
        }
        if self.has_failed {
            // Freeing the communicator could wait for what never ends.
            mem::forget(Arc::clone(&self.comm));
        }
    }
}
