//! Messages between the owners of one shard on all hosts. Definitions.

use std::ops::Range;

use super::memory::Aligned;
use super::window::MAX_WINDOW;
use crate::error::Result;

/// A message of an exchange: a byte range of [`ExchangeBuffers`] to or from `host`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostMessage {
    /// The other host.
    pub host: usize,
    /// The bytes in the buffer. On reception the maximum; a message may be shorter.
    pub bytes: Range<usize>,
}

/// The memory of one exchange: three buffers of one size.
pub struct ExchangeBuffers<'a> {
    /// Messages to send.
    pub send: &'a mut [u8],
    /// Received messages.
    pub recv: &'a mut [u8],
    /// What the host computes meanwhile.
    pub partial: &'a mut [u8],
}

/// Maximum number of overlapping exchanges on a link.
pub const MAX_EXCHANGES: usize = MAX_WINDOW;

/// The memory of the exchanges of a link. An exchange gets the buffers that were released last, which are in the nearest caches:
/// few exchanges of long messages overlap, and the others touch no memory.
pub struct ExchangeMemory {
    used: [Option<[Aligned; 3]>; MAX_EXCHANGES],
    /// The last is the next.
    free: Vec<[Aligned; 3]>,
}

impl ExchangeMemory {
    /// Buffers of `capacity` bytes, aligned to [`crate::wire_layout::ALIGN`].
    pub fn new(capacity: usize) -> ExchangeMemory {
        let buffers = || [(); 3].map(|()| Aligned::new(capacity));
        ExchangeMemory { used: [const { None }; MAX_EXCHANGES], free: (0..MAX_EXCHANGES).map(|_| buffers()).collect() }
    }

    /// The buffers of `exchange`.
    ///
    /// # Panics
    /// If there is no such exchange.
    pub fn of(&mut self, exchange: usize) -> ExchangeBuffers<'_> {
        let used = &mut self.used[exchange];
        // There are as many buffers as exchanges.
        let [send, recv, partial] = used.get_or_insert_with(|| self.free.pop().unwrap_or_else(|| unreachable!()));
        let (send, recv, partial) = (send.as_mut_slice(), recv.as_mut_slice(), partial.as_mut_slice());
        ExchangeBuffers { send, recv, partial }
    }

    /// `exchange` is over, and its next use need not find what is in its buffers.
    pub fn release(&mut self, exchange: usize) {
        self.free.extend(self.used[exchange].take());
    }
}

/// The messages between the owners of one shard on all hosts, which are numbered as in the topology.
/// [`MAX_EXCHANGES`] exchanges may overlap. Messages of one exchange from one host to another arrive in order.
///
/// The link owns the buffers, so a transfer that outlives an aborted call never accesses freed memory. After an error
/// the link is unusable.
/// Thread rule: used by one thread at a time.
pub trait HostLink: Send {
    /// The memory of the exchanges. That of an exchange in flight is not accessed, and not released.
    fn memory(&mut self) -> &mut ExchangeMemory;

    /// The buffers of `exchange`; not accessed while that exchange is in flight.
    fn buffers(&mut self, exchange: usize) -> ExchangeBuffers<'_> {
        self.memory().of(exchange)
    }

    /// Starts to send and to receive messages. Their byte ranges do not overlap.
    ///
    /// # Errors
    /// A failure of the transport.
    fn start(&mut self, exchange: usize, sends: &[HostMessage], receives: &[HostMessage]) -> Result<()>;

    /// Moves the messages of all exchanges along, without waiting. `completed` gets the host of each message that has
    /// completed.
    ///
    /// # Errors
    /// A failure of the transport.
    fn poll(&mut self, completed: &mut dyn FnMut(usize)) -> Result<()>;

    /// The number of messages of `exchange` in flight.
    fn in_flight(&self, exchange: usize) -> usize;

    /// The hosts whose messages are in flight, ascending.
    fn awaited(&self) -> Vec<usize>;

    /// The display name of a host.
    fn host_name(&self, host: usize) -> String;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_buffers_that_were_released_last_are_the_next() {
        let mut memory = ExchangeMemory::new(64);
        let mut address = |exchange: usize, released: Option<usize>| {
            released.into_iter().for_each(|exchange| memory.release(exchange));
            memory.of(exchange).send.as_ptr()
        };
        let (first, second) = (address(0, None), address(1, None));
        assert_ne!(first, second);
        assert_eq!(address(0, None), first, "an exchange keeps its buffers");
        assert_eq!(address(7, Some(0)), first);
        assert_eq!(address(0, Some(1)), second);
        let mut all: Vec<*const u8> = (0..MAX_EXCHANGES).map(|exchange| address(exchange, None)).collect();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), MAX_EXCHANGES);
    }
}
