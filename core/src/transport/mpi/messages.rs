//! Messages between hosts over MPI, for send and receive, on a communicator of their own.
//!
//! A receive from any rank waits here, and MPI gets it with the message that it takes: MPICH 5.0 over UCX loses messages
//! to receives from MPI_ANY_SOURCE that are posted before.
//! Thread rule: used by one thread at a time.

use std::collections::VecDeque;
use std::mem;
use std::sync::Arc;

use super::comm::{Comm, Request};
use crate::error::Result;
use crate::transport::memory::Aligned;
use crate::transport::messages::{Completed, MessageNetwork};

/// See the module's documentation.
pub struct MpiMessages {
    comm: Arc<Comm>,
    max_tag: usize,
    requests: Vec<Request>,
    /// What the requests are, in the same order.
    transfers: Vec<Transfer>,
    /// Receives from any rank without a message: tag, token and memory.
    waiting: VecDeque<(usize, u64, Aligned)>,
}

struct Transfer {
    token: u64,
    buffer: Aligned,
    /// Of a send.
    sent: Option<usize>,
}

// SAFETY: any thread may use a request handle (a pointer in some MPI libraries); one thread at a time uses them.
unsafe impl Send for MpiMessages {}

impl MpiMessages {
    /// Messages on `comm`, which nobody else uses.
    pub fn new(comm: Arc<Comm>, max_tag: usize) -> MpiMessages {
        MpiMessages { comm, max_tag, requests: Vec::new(), transfers: Vec::new(), waiting: VecDeque::new() }
    }

    fn add(&mut self, request: Result<Request>, transfer: Transfer) -> Result<()> {
        match request {
            Ok(request) => {
                self.requests.push(request);
                self.transfers.push(transfer);
                Ok(())
            }
            Err(error) => {
                // Nobody knows what MPI has started.
                mem::forget(transfer.buffer);
                Err(error)
            }
        }
    }
}

impl MpiMessages {
    /// Gives the messages that have arrived to the receives from any rank.
    fn take_arrived(&mut self) -> Result<()> {
        let mut index = 0;
        while let Some((tag, _, buffer)) = self.waiting.get_mut(index) {
            // SAFETY: the buffer is kept until the request has completed, else leaked.
            let request = match unsafe { self.comm.receive_arrived(buffer.as_mut_slice(), *tag) } {
                Ok(Some(request)) => Ok(request),
                // No message with this tag, nor for the other receives with it.
                Ok(None) => {
                    let tag = *tag;
                    while self.waiting.get(index).is_some_and(|&(other, ..)| other == tag) {
                        index += 1;
                    }
                    continue;
                }
                Err(error) => Err(error),
            };
            if let Some((_, token, buffer)) = self.waiting.remove(index) {
                self.add(request, Transfer { token, buffer, sent: None })?;
            }
        }
        Ok(())
    }
}

impl MessageNetwork for MpiMessages {
    fn max_tag(&self) -> usize {
        self.max_tag
    }

    fn send(&mut self, to: usize, tag: usize, buffer: Aligned, len: usize, token: u64) -> Result<()> {
        // SAFETY: the buffer is kept until the request has completed, else leaked.
        let request = unsafe { self.comm.send(&buffer.as_slice()[..len], to, tag) };
        self.add(request, Transfer { token, buffer, sent: Some(len) })
    }

    fn receive(&mut self, from: Option<usize>, tag: usize, mut buffer: Aligned, token: u64) -> Result<()> {
        let Some(from) = from else {
            self.waiting.push_back((tag, token, buffer));
            return Ok(());
        };
        // SAFETY: as above.
        let request = unsafe { self.comm.receive(buffer.as_mut_slice(), from, tag) };
        self.add(request, Transfer { token, buffer, sent: None })
    }

    fn poll(&mut self, done: &mut Vec<Completed>) -> Result<()> {
        self.take_arrived()?;
        if self.requests.is_empty() {
            return Ok(());
        }
        let MpiMessages { comm, requests, transfers, .. } = self;
        let mut ended = Vec::new();
        comm.test_messages(requests, |index, source, len| ended.push((index, source, len)))?;
        // From the back, so that the other indices stay.
        ended.sort_unstable_by_key(|&(index, ..)| std::cmp::Reverse(index));
        for (index, source, received) in ended {
            requests.swap_remove(index);
            let Transfer { token, buffer, sent } = transfers.swap_remove(index);
            done.push(Completed { token, buffer, source, len: sent.unwrap_or(received) });
        }
        Ok(())
    }
}

impl Drop for MpiMessages {
    fn drop(&mut self) {
        // MPI may still access the memory of what is open.
        for transfer in mem::take(&mut self.transfers) {
            mem::forget(transfer.buffer);
        }
        // Other ranks may still send: MPI must not give the communicator's number to another one. MPI_Finalize frees it.
        mem::forget(Arc::clone(&self.comm));
    }
}
