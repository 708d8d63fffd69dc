//! Messages between ranks of different hosts, for send and receive. Not those of collectives ([`super::HostLink`]).
//!
//! The network owns the memory of what is under way, so a transfer that outlives a failed call never touches memory of
//! the caller: what is open at the end is leaked if the network may still use it.

use super::memory::Aligned;
use crate::error::Result;

/// A send or receive that has ended.
#[derive(Debug)]
pub struct Completed {
    /// What the caller has called it.
    pub token: u64,
    /// Its memory.
    pub buffer: Aligned,
    /// The rank that has sent what was received; no meaning for a send.
    pub source: usize,
    /// The received bytes; of a send, the sent ones.
    pub len: usize,
}

/// Sends and receives bytes, without blocking. Messages of one rank with one tag match the receives with that tag in
/// their order; they may end in another order. Dropping it gives up what is open.
/// Thread rule: used by one thread at a time.
pub trait MessageNetwork: Send {
    /// The largest tag.
    fn max_tag(&self) -> usize;

    /// Starts to send the first `len` bytes of `buffer` to rank `to` of the job.
    ///
    /// # Errors
    /// A failure of the network, which is unusable afterwards.
    fn send(&mut self, to: usize, tag: usize, buffer: Aligned, len: usize, token: u64) -> Result<()>;

    /// Starts to receive into `buffer`, from rank `from` of the job or any.
    ///
    /// # Errors
    /// As for [`MessageNetwork::send`].
    fn receive(&mut self, from: Option<usize>, tag: usize, buffer: Aligned, token: u64) -> Result<()>;

    /// Adds to `done` what has ended.
    ///
    /// # Errors
    /// As for [`MessageNetwork::send`].
    fn poll(&mut self, done: &mut Vec<Completed>) -> Result<()>;
}
